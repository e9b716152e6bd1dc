"""The docs are true: the table's page is that of the table, and every example runs as shown."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

import demask
from docs.generate import blocks, texts
from docs.generate.networks import page as page_of_networks

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SOURCES = sorted(Path(demask.__file__).parent.rglob("*.py"))
GENERATED = {
    "table": ("table",),
    "networks": ("networks",),
    "commands": ("commands",),
    "before_after": ("pictures",),
    "strips": ("pictures",),
    "onnx": ("onnx", pytest.mark.nightly),
}


@pytest.mark.parametrize(
    ("name", "command"), [pytest.param(name, c, marks=marks) for name, (c, *marks) in GENERATED.items()]
)
def test_generated_pages_are_up_to_date(name, command):
    if name == "onnx":
        pytest.importorskip("onnx")
    module = importlib.import_module(f"docs.generate.{name}")
    for path, text in texts(module).items():
        assert path.read_text() == text, f"run `python -m docs {command}`"


def test_the_page_of_networks_says_what_was_measured():
    line = {"suite": "transformers", "network": "some", "allowed": 1e-10}
    lines = [
        line | {"mask": "unit", "before": 8, "after": 6, "error": 2e-15},
        line | {"mask": "head", "before": 8, "after": 4, "error": 3e-8, "allowed": 1e-5},
        line | {"mask": "mine", "failed": True},
        line | {"mask": "layer", "note": "it has none"},
        line | {"mask": "unit", "network": "other", "before": 3, "after": 3, "error": 0.0},
    ]
    made = page_of_networks(lines)
    formed = [line | {"form": "class", "graph": 5} if "after" in line else line for line in lines]
    assert "| class | 1 of 2, 20% |" in page_of_networks(formed)
    assert "| network | head | unit | layer | mine | error |" in made
    assert "| some | 50 | 75 | – | fails | 3e-08 † |" in made
    assert "| other |  | 100 |  |  | 0e+00 |" in made
    assert "- some, layer: it has none." in made


def test_pages_name_files_that_exist():
    """Files of the package in code quotes; `configuration_decilm.py` is one of transformers' own."""
    files = {
        path.relative_to(ROOT).as_posix()
        for folder in ("src", "tests", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
    }
    named = [
        (page.name, name)
        for page in DOCS.glob("*.md")
        for name in re.findall(r"`(?:demask/)?([\w/]+\.py)`", page.read_text())
    ]
    assert not [
        (page, name)
        for page, name in named
        if not any(f"/{file}".endswith(f"/{name}") for file in files) and name != "configuration_decilm.py"
    ]


@pytest.mark.parametrize("page", blocks.pages(), ids=lambda page: page.name)
def test_the_examples_of_a_page_print_what_it_shows(page):
    assert blocks.rerun(page) == page.read_text(), "run `python -m docs blocks`"


def test_a_page_that_shows_something_else_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n")
    assert blocks.rerun(page) == page.read_text().replace("3", "2")


def modules_with_examples() -> list[str]:
    """Modules of demask whose docstrings hold examples."""
    root = Path(demask.__file__).parent.parent
    found = [path for path in SOURCES if ">>> " in path.read_text()]
    names = [".".join(path.relative_to(root).with_suffix("").parts) for path in found]
    return [name.removesuffix(".__init__") for name in names]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_of_docstrings_run(name):
    outcome = doctest.testmod(importlib.import_module(name))
    assert outcome.attempted > 0
    assert outcome.failed == 0


def test_the_public_names_with_examples_are_among_them():
    held = set(modules_with_examples())
    public = {"shrink.demask", "shrink.layout.cells", "verify", "ops.entry", "ops.notation"}
    assert {f"demask.{name}" for name in public} <= held


@pytest.mark.parametrize("page", sorted([*DOCS.glob("*.md"), ROOT / "README.md"]), ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page):
    links = [part.partition(")")[0] for part in page.read_text().split("](")[1:]]
    files = [link.partition("#")[0] for link in links if "://" not in link]
    assert [name for name in files if name and not (page.parent / name).exists()] == []
