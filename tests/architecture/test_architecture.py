"""The layout of the package: counts of what it forbids, which may only fall."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
from pathlib import Path

import pytest

import demask
from architecture.measures import MEASURES, PRIVATE, WORDS, Source, banned_words, measured, sizes, sources

COUNTS = Path(__file__).with_name("counts.json")
ROOT = Path(__file__).parents[2]
QUOTING = ("nightly.md", "mutants.md")  # quote names and messages of tests
FOLDERS = (".", "docs", "benchmarks", "examples")
PAGES = [page for folder in FOLDERS for page in ROOT.glob(f"{folder}/*.md") if page.name not in QUOTING]
# Choices on command lines and keys of JSON files: others use them, so they stay.
STABLE_WORDS = {"benchmarks.shrink.peers": {"kept"}}
PUBLIC = (
    "demask",
    "demask.ops",
    "demask.sparse",
    "demask.traverse",
    "demask.stride",
    "demask.pilot",
    "demask.prune",
    "demask.report",
)
# Per measure: files that do what it counts, by name in a package of their own.
PLANTED: dict[str, dict[str, str]] = {
    "file_cycles": {"ops/a.py": "from demask.ops import b", "ops/b.py": "import demask.ops.a"},
    "part_cycles": {"ops/a.py": "import demask.graph.b", "graph/b.py": "import demask.ops.c", "ops/c.py": ""},
    "modules_in_strings": {
        "graph/a.py": "import_module('demask.sparse.b')",
        "sparse/b.py": "",
        "plugins.py": "OPS.declare('segment', 'demask.sparse.b')",
    },
    "private_names": {"graph/a.py": "import torch\ntorch._C._nn"},
    "literal_op_sets": {"graph/a.py": "X = {aten.relu.default, aten.gelu.default}"},
    "table_imports": {"graph/a.py": "from demask.ops import TABLE"},
    "repeated_classes": {"graph/a.py": "class Plan: ...", "ops/b.py": "class _Plan: ..."},
    "ignored_types": {"graph/a.py": "x = 1  # type: ignore[assignment]"},
    "banned_names": {"graph/a.py": "found_ops = 1"},
    "banned_sentences": {"graph/a.py": "# the network as given"},
    "module_state": {"graph/a.py": "CACHE: dict[str, int] = {}"},
}


def package(folder: Path, files: dict[str, str]) -> Path:
    """A package of these files."""
    root = folder / "demask"
    for name, text in {"__init__.py": "", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@functools.cache
def package_sources() -> list[Source]:
    """The files of the package, parsed once."""
    return sources(Path(demask.__file__).parent)


@pytest.mark.parametrize("measure", MEASURES)
def test_counts_only_fall(measure: str) -> None:
    limit = json.loads(COUNTS.read_text())[measure]
    assert MEASURES[measure](package_sources()) <= limit, MEASURES[measure].__doc__


@pytest.mark.parametrize("measure", MEASURES)
def test_a_planted_violation_is_counted(measure: str, tmp_path: Path) -> None:
    fine = {"ops/fine.py": "x = torch.__version__", "compat/fine.py": "import torch\ntorch._C"}
    clean = measured(package(tmp_path / "clean", fine))
    assert not any(clean.values())
    assert measured(package(tmp_path / "planted", PLANTED[measure]))[measure] == 1


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({"ops/__init__.py": "from demask.ops.a import A", "ops/a.py": "from demask.ops import B"}, 1),
        ({"ops/__init__.py": "from demask.ops.a import A", "ops/a.py": "from demask.ops import b", "ops/b.py": ""}, 0),
        (
            {
                "ops/__init__.py": "from demask.ops.a import A",
                "graph/b.py": "from demask.ops import A",
                "ops/a.py": "def f():\n    import demask.graph.b",
            },
            1,
        ),
    ],
)
def test_cycles_through_the_file_of_a_package(files: dict[str, str], count: int, tmp_path: Path) -> None:
    assert measured(package(tmp_path, files))["file_cycles"] == count


def test_sizes_are_printed(tmp_path: Path) -> None:
    files = {
        "graph/a.py": "x = 1\n" * 501,
        "ops/b.py": "import demask.graph.a\naten.relu",
        "graph/c.py": "def f():\n" + "    aten.relu()\n" * 41,
    }
    lines = [*sizes(sources(package(tmp_path, files)))]
    assert lines == [
        "544 lines in 4 files; 1 import statements",
        "graph 543, ops 1, __init__ 0",
        "modules with one importer: 1",
        "files outside of ops that name an ATen op: 1",
        "functions of more than 40 lines: 1",
        "    41 graph.c: f",
        "files of more than 500 lines: 1",
        "   501 graph.a",
    ]


CHANGING = "def add(self, x):\n        self.x = x"


@pytest.mark.parametrize(
    ("body", "line", "count"),
    [
        (CHANGING, "CACHE = Cache()", 1),
        (CHANGING, "CACHE: Cache[int] = Cache()", 1),
        (CHANGING, "CACHE = Cache[int]()", 1),
        (CHANGING, "CACHE = a.Cache()", 1),
        (CHANGING, "class Below(Cache): ...\nCACHE = Below()", 1),
        ("def add(self, x):\n        self.x[0] = x", "CACHE = Cache()", 1),
        ("def add(self, x):\n        self._x.append(x)", "CACHE = Cache()", 1),
        ("def __init__(self, x):\n        self._x = {}\n        self._x[0] = x", "CACHE = Cache(2)", 0),
        ("def __init__(self):\n        self.lock, self.x = Lock(), {}", "CACHE = Cache()", 1),
        ("x: list[int] = field(default_factory=list)", "CACHE = Cache()", 1),
        ("def __init__(self, x):\n        self.x = x", "CACHE = Cache(2)", 0),
        ("def sizes(self):\n        x = []\n        return x", "CACHE = Cache()", 0),
        (CHANGING, "def f():\n    return Cache()", 0),
        (CHANGING, "CACHE = other()", 0),
        (CHANGING, "CACHE = threading.local()", 1),
    ],
)
def test_objects_that_hold_state_are_module_state(body: str, line: str, count: int, tmp_path: Path) -> None:
    text = f"class Cache:\n    {body}\n"
    imports = "from demask.ops import a\nfrom demask.ops.a import Cache\n"
    files = {"ops/a.py": text, "graph/b.py": imports + line}
    assert measured(package(tmp_path / "imported", files))["module_state"] == count
    if "a." not in line:
        files = {"ops/a.py": text + line}
        assert measured(package(tmp_path / "own", files))["module_state"] == count


@pytest.mark.parametrize(
    ("file", "value", "count"),
    [
        ("rewrites/separate_heads.py", "rule", 0),
        ("rewrites/separate_heads.py", "lambda x: x", 0),
        ("rewrites/separate_heads.py", "rule(2)", 0),
        ("rewrites/separate_heads.py", "1", 1),
        ("rewrites/separate_heads.py", "aten.add.Tensor", 1),
        ("graph/other.py", "rule", 1),
    ],
)
def test_rule_tables_may_list_ops(file: str, value: str, count: int, tmp_path: Path) -> None:
    text = f"def rule(): ...\nX = {{aten.relu.default: rule, aten.gelu.default: {value}}}"
    assert measured(package(tmp_path, {file: text}))["literal_op_sets"] == count


def test_the_facade_names_no_modules(tmp_path: Path) -> None:
    planted = {"__init__.py": "import_module('demask.ops')", "ops/__init__.py": ""}
    assert measured(package(tmp_path, planted))["modules_in_strings"] == 1


@pytest.mark.parametrize(
    ("text", "private"),
    [
        ("torch._ops.OpOverload", True),
        ("torch.utils._sympy", True),
        ("from torch.fx.graph import CodeGen, _PyTreeInfo", True),
        ("from torch.fx.graph import (\n    CodeGen,\n    _PyTreeInfo,\n)", True),
        ("from torch.onnx._internal.exporter import core", True),
        ("graph._codegen.pytree_info", True),
        ("op._schema", True),
        ("torch.__version__", False),
        ("torch.ops.aten._softmax.default", False),
        ("from torch.utils import _pytree as pytree", False),
        ("from torch.fx.graph import CodeGen\n_LIMIT = 3", False),
        ("def load_schema(): ...", False),
    ],
)
def test_which_names_are_private(text: str, private: bool) -> None:
    assert bool(PRIVATE.search(text)) == private


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_in_plain_words(page: Path) -> None:
    lines = enumerate(page.read_text().splitlines(), 1)
    banned = [f"{number}: {word[0]}" for number, line in lines for word in WORDS.finditer(line)]
    assert not banned


@pytest.mark.parametrize("folder", ["benchmarks", "tests/networks"])
def test_scripts_are_in_plain_words(folder: str) -> None:
    banned = {s.name: banned_words(s) - STABLE_WORDS.get(s.name, set()) for s in sources(ROOT / folder)}
    assert not {name: words for name, words in banned.items() if words}


def test_banned_words_of_a_script_are_seen(tmp_path: Path) -> None:
    text = '''"""As given."""
import x  # type: ignore[import-not-found]  # it goes
made_up = f(kept=1)  # held-out data
'''
    (tmp_path / "script.py").write_text(text)
    (script,) = sources(tmp_path)
    assert banned_words(script) == {"As given.", "made_up", "#   # it goes"}


def public_objects(module: str) -> dict[str, object]:
    """The classes and functions that a module of the package offers."""
    home = importlib.import_module(module)
    values = {name: getattr(home, name) for name in home.__all__}
    return {name: value for name, value in values.items() if callable(value) and not inspect.ismodule(value)}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_have_an_example(module: str) -> None:
    objects = public_objects(module).items()
    assert not [name for name, value in objects if ">>> " not in (inspect.getdoc(value) or "")]
