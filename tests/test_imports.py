"""Imports go one way: a part of demask imports only parts above it in the layout. And `import
demask` imports what is asked for alone, by the names that it always had."""

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import FunctionType

import pytest
import torch

import demask
import own_process
from demask.plugins import PUBLIC_MODULES, PUBLIC_NAMES

# Top to bottom; parts of one row do not import each other, but for those named in PEERS.
LAYOUT = (
    ("errors", "installation", "pytree_paths"),
    ("failures", "numerics", "progress", "records", "registry", "text_table"),
    ("compat",),
    ("ops",),
    ("graph",),
    ("judge",),
    ("facts",),
    ("machine",),
    ("rewrites",),
    ("shrink",),
    ("tune",),
    ("files",),
    ("kernels",),
    ("pages",),
    ("report",),
    ("exec",),
    ("sparse", "traverse", "stride", "prune", "pilot", "checkpoint"),
    ("optimize", "verify"),
    ("optimize_onnx",),
    ("cli",),
    ("__main__", "plugins"),
)
RANK = {part: row for row, parts in enumerate(LAYOUT) for part in parts}
PEERS = {
    ("pilot", "traverse"),
    ("traverse", "sparse"),
    ("pilot", "sparse"),
    ("checkpoint", "prune"),
    ("checkpoint", "sparse"),
}
FACADE = "demask/__init__.py"  # hands the public names out; only the command line may use it


def imported(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Every import in a file of `package` as (line, dotted name), relative ones made absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            near = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*near, *filter(None, [node.module])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def allowed(part: str, name: str) -> bool:
    """Whether a file of `part` may import the dotted `name`."""
    root, _, rest = name.partition(".")
    if root != "demask":
        return True
    other = rest.partition(".")[0]
    if other not in RANK:
        return part == "cli"  # the facade, or a name that it exports
    if part in ("machine", "kernels") and other == "ops":
        return rest.startswith("ops.activations.")
    return other == part or RANK[other] < RANK[part] or (part, other) in PEERS


def violations(source: Path) -> list[str]:
    """What breaks the layout in the package under `source`, as "file:line imports name"."""
    found = []
    for path in sorted(source.glob("demask/**/*.py")):
        where = path.relative_to(source)
        part = where.parts[1].removesuffix(".py")
        if where.as_posix() == FACADE:
            continue
        if part not in RANK:
            found.append(f"{where}: {part} is no part of the layout")
            continue
        for line, name in imported(ast.parse(path.read_text()), where.parts[:-1]):
            if not allowed(part, name):
                found.append(f"{where}:{line} imports {name}")
    return found


def test_imports_go_one_way():
    assert violations(Path(demask.__file__).parent.parent) == []


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("ops/a.py", "from demask.shrink.layout import cells", "imports demask.shrink.layout.cells"),
        ("ops/a.py", "import demask.cli.main", "imports demask.cli.main"),
        ("ops/a.py", "def late():\n    from ..facts import known", "imports demask.facts.known"),
        ("facts/deep/a.py", "from ...shrink import x", "imports demask.shrink.x"),
        ("facts/a.py", "from demask import verify", "imports demask.verify"),
        ("facts/a.py", "import demask", "imports demask"),
        ("traverse/a.py", "from demask.pilot import x", "imports demask.pilot.x"),
        ("stride/a.py", "from demask.sparse import x", "imports demask.sparse.x"),
        ("kernels/a.py", "from demask.ops import schema", "imports demask.ops.schema"),
        ("errors.py", "from demask.ops import TABLE", "imports demask.ops.TABLE"),
        ("surprise.py", "", "surprise is no part of the layout"),
    ],
)
def test_a_planted_violation_is_found(tmp_path, file, text, complaint):
    planted = tmp_path / "demask" / file
    planted.parent.mkdir(parents=True)
    planted.write_text(text)
    assert [found for found in violations(tmp_path) if found.endswith(complaint)]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("facts/a.py", "from demask.ops.entry import Table\nimport torch\nfrom . import b"),
        ("kernels/a.py", "from demask.ops.activations import Act"),
        ("pilot/a.py", "from demask.traverse import plan\nfrom demask.errors import BadInput"),
        ("cli/a.py", "import demask\nfrom demask import demask"),
        ("__init__.py", "from demask.cli import main"),
    ],
)
def test_allowed_imports_pass(tmp_path, file, text):
    planted = tmp_path / "demask" / file
    planted.parent.mkdir(parents=True)
    planted.write_text(text)
    assert violations(tmp_path) == []


def run(code: str, *words: str) -> str:
    """What a Python of its own prints; warnings are on stderr."""
    status, out, err = own_process.run(code, *words)
    assert status == 0, err
    return out


ALONE = """
import sys, warnings
from importlib.machinery import PathFinder
import numpy, torch

THERE = {name.partition(".")[0] for name in sys.modules} | sys.stdlib_module_names | {"demask"}
THERE |= {"sympy", "mpmath", "networkx", "jinja2", "markupsafe", "filelock", "fsspec"}  # torch's

class Alone(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return super().find_spec(name, path, target) if path or name in THERE else None

sys.meta_path[:] = [Alone if finder is PathFinder else finder for finder in sys.meta_path]
"""
PRODUCTS = """
import demask.sparse
from torch.nn import functional as F
from demask.sparse import SparseConv2d, SparseLinear, sddmm, spmm

def whole(*shape):
    return torch.randint(-3, 4, shape).float()

def same(found, wanted):
    assert found.dtype == wanted.dtype and torch.equal(found, wanted), (found, wanted)

torch.manual_seed(0)
w, x = whole(6, 9) * (torch.rand(6, 9) < 0.4), whole(9, 5)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        csr = w.to(dtype).to_sparse_csr()
        same(spmm(csr, x.to(dtype)), (w @ x).to(dtype))
        found = sddmm(whole(6, 3).to(dtype), whole(3, 9).to(dtype), csr)
        assert found.dtype == dtype
    linear = torch.nn.Linear(9, 6)
    conv = torch.nn.Conv2d(2, 4, 3, padding=1)
    cases = (linear, SparseLinear, (4, 9)), (conv, SparseConv2d, (2, 2, 5, 5))
    for dense, sparse, given in cases:
        with torch.no_grad():
            dense.weight.copy_(whole(*dense.weight.shape) * (torch.rand(dense.weight.shape) < 0.5))
            dense.bias.copy_(whole(*dense.bias.shape))
        slim, x = sparse.from_dense(dense), whole(*given)
        with torch.no_grad():
            same(slim(x), dense(x))
        slim(x).sum().backward()
        dense(x).sum().backward()
        same(slim.values.grad, dense.weight.grad[dense.weight != 0])
        same(slim.bias.grad, dense.bias.grad)
[once] = [str(w.message) for w in caught if "llvmlite" in str(w.message)]
print(once)
for name in ("optimize", "save", "report", "pilot"):
    try:
        getattr(demask, name)
    except ImportError as error:
        print(error)
"""


def test_sparse_needs_torch_and_numpy_alone():
    warning, *errors = run(ALONE + PRODUCTS).splitlines()
    assert warning.endswith("No module named 'llvmlite'; pip install llvmlite")
    assert errors == [
        f"demask.{name} needs {package}, which is not installed: pip install {package}"
        for name, package in (("optimize", "safetensors"), ("save", "safetensors"), ("pilot", "llvmlite"))
    ]


ORDERS = """
import demask.verify, demask.report.sections
import torch
from torch import nn
net = nn.Sequential(demask.sparse.SparseLinear.from_dense(nn.Linear(3, 2))).eval()
slim = demask.demask(net, (torch.ones(2, 3),), result="graph")
assert "demask.segment" not in str(slim.plain().graph)
from demask import verify, report, optimize
import demask.optimize, demask.stride.targets, sys, types
for name in ("verify", "report", "optimize"):
    function = getattr(sys.modules["demask." + name], name)
    assert isinstance(function, types.FunctionType), name
    assert getattr(demask, name) is vars()[name] is function
assert demask.stride is sys.modules["demask.stride"] and "demask.pilot" not in sys.modules
"""


def test_functions_stand_before_modules_of_their_names():
    run(ORDERS)
    for name in ("optimize", "report", "verify"):
        setattr(demask, name, import_module(f"demask.{name}"))  # as an import does
        assert isinstance(getattr(demask, name), FunctionType)


def test_public_names():
    assert {*PUBLIC_NAMES, *PUBLIC_MODULES} < {*demask.__all__} < {*dir(demask)}
    for name in demask.__all__:
        assert getattr(demask, name) is vars(demask)[name]
    with pytest.raises(AttributeError, match="no attribute 'optimise'"):
        demask.optimise  # noqa: B018
    names = ast.parse(Path(demask.__file__).read_text()).body
    typed, _ = [node for node in names if isinstance(node, ast.If)]
    imports = [alias.name for node in typed.body for alias in node.names]  # type: ignore[attr-defined]
    assert sorted(imports) == sorted([*PUBLIC_NAMES, *PUBLIC_MODULES])


READ = """
import sys, torch
import demask
for net in (demask.load(sys.argv[1]), torch.load(sys.argv[2], weights_only=False)):
    assert "demask.segment" in str(net.graph) and "demask.segment" not in str(net.plain().graph)
    print(net(torch.ones(2, 9)).tolist())
assert not {"demask.pilot", "demask.traverse"} & {*sys.modules}
from demask.files import archive
assert archive._network_class({"kind": "tiled"}).__name__ == "Tiled"
from demask.graph.node_records import Overload, NodeRecord, graph_of
assert "demask.pilot.chains.chain_op" not in sys.modules
graph_of([NodeRecord("call_function", "chain", Overload("demask::chain", "default"), (), {})])
"""


def test_what_reads_graphs_finds_the_ops_in_them(tmp_path):
    """Nothing but the files was asked for: what registers their ops is imported by reading."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(demask.sparse.SparseLinear.from_dense(torch.nn.Linear(9, 4)))
    slim = demask.demask(net.eval(), (torch.ones(2, 9),), result="graph")
    torch.save(slim, tmp_path / "slim.pt")
    demask.save(slim, tmp_path / "slim.demask")
    found = run(READ, str(tmp_path / "slim.demask"), str(tmp_path / "slim.pt")).splitlines()
    assert found == [str(slim(torch.ones(2, 9)).tolist())] * 2
