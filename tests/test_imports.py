"""Imports go one way: a part of demask imports only parts above it in the layout."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import demask

# Top to bottom; parts of one row do not import each other, but for those named in PEERS.
LAYOUT = (
    ("errors",),
    ("ops",),
    ("graph",),
    ("facts",),
    ("machine",),
    ("shrink",),
    ("tune",),
    ("files",),
    ("kernels",),
    ("sparse", "traverse", "stride", "prune", "pilot"),
    ("optimize", "verify"),
    ("deploy",),
    ("report",),
    ("cli",),
)
RANK = {part: row for row, parts in enumerate(LAYOUT) for part in parts}
PEERS = {("pilot", "traverse"), ("pilot", "sparse")}
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
        ("ops/a.py", "from demask.shrink import cells", "imports demask.shrink.cells"),
        ("ops/a.py", "import demask.cli.app", "imports demask.cli.app"),
        ("ops/a.py", "def late():\n    from ..facts import known", "imports demask.facts.known"),
        ("facts/deep/a.py", "from ...shrink import x", "imports demask.shrink.x"),
        ("facts/a.py", "from demask import verify", "imports demask.verify"),
        ("facts/a.py", "import demask", "imports demask"),
        ("traverse/a.py", "from demask.pilot import x", "imports demask.pilot.x"),
        ("stride/a.py", "from demask.sparse import x", "imports demask.sparse.x"),
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
