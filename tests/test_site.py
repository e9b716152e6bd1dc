"""The site: pages are in the navigation, recipes print what they show, quoted messages exist, and
all public names are in the reference."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import demask
from docs.generate import DOCS, ROOT, blocks

SOURCES = sorted(Path(demask.__file__).parent.rglob("*.py"))
# Recipes of many calls: one of them has its turn.
LONG = {"bert_trainer", "language_model_folder", "torchvision_resnet", "yolo"}
PUBLIC = (
    "demask",
    "demask.ops",
    "demask.sparse",
    "demask.traverse",
    "demask.stride",
    "demask.pilot",
    "demask.prune",
    "demask.report",
    "demask.checkpoint",
)


def need_packages(script: Path) -> None:
    """Skip where a recipe imports what is not installed."""
    text = script.read_text()
    for name in ("onnx", "onnxruntime", "transformers", "accelerate"):
        if re.search(rf"^(import|from) {name}\b", text, re.M):
            pytest.importorskip(name)
    if "torchvision" in text or "transformers" in text:
        register_torchvision()


def register_torchvision() -> None:
    """Register torchvision's ops where they are not compiled."""
    from networks import torchvision

    with contextlib.suppress(ImportError):
        torchvision()


def check_recipe(name: str) -> None:
    script = ROOT / "examples" / f"{name}.py"
    need_packages(script)
    assert blocks.rerun_script(script) == script.read_text(), "run `python -m docs blocks`"


SHORT = [path.stem for path in blocks.scripts() if path.stem not in LONG]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SHORT)
def test_recipes_print_what_they_show(name: str) -> None:
    check_recipe(name)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", sorted(LONG))
def test_long_recipes_print_what_they_show(name: str) -> None:
    check_recipe(name)


@pytest.mark.nightly
def test_an_image_of_20_000_pixels_in_1_gb(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "large_image.py")
    words = [script, "--pixels", "20000", "--memory", "1GB"]
    code = (
        f"import resource, runpy, sys; sys.argv = {words}; runpy.run_path({script!r}); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    *_, shape, peak = run.stdout.splitlines()
    assert shape == "(1, 3, 20000, 20000) uint8"
    assert int(peak) < 10**9 + 6 * 10**8  # the budget, and Python with torch


def test_every_script_is_in_the_table_of_recipes() -> None:
    table = (ROOT / "examples" / "README.md").read_text()
    names = {path.name for path in (ROOT / "examples").rglob("*") if path.suffix in (".py", ".ipynb")}
    assert {name for name in names if f"{name})" not in table} == set()


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    pages = {page.name for page in DOCS.glob("*.md")}
    assert {name for name in pages if f" {name}\n" not in navigation} == set()


# -- messages -------------------------------------------------------------------------------------


@cache
def messages() -> str:
    """The code of the sources without docstrings; strings on several lines are on one, and `…`
    stands where values are put in."""
    text = "\n".join(path.read_text() for path in SOURCES)
    text = re.sub(r'""".*?"""', "", text, flags=re.S)
    text = re.sub(r"""["']\s*\n\s*f?["']""", "", text)
    return re.sub(r"\{[^{}]*\}", "…", text)


def is_message(quoted: str) -> bool:
    """Whether a text with `…` for what differs is a string of the sources, or a part of one."""
    return bool(re.search(".*".join(map(re.escape, quoted.split("…"))), messages()))


QUOTED = re.findall(r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text(), re.M)


@pytest.mark.parametrize("quoted", QUOTED)
def test_messages_in_troubleshooting_exist(quoted: str) -> None:
    assert is_message(quoted)


def test_a_message_that_does_not_exist_is_seen() -> None:
    assert not is_message("no rule for you")
    assert not is_message("The base class of the errors")  # a docstring
    assert len(QUOTED) > 30


# -- reference ------------------------------------------------------------------------------------


def public_names() -> list[str]:
    """The public names, as users write them."""
    names = []
    for module in PUBLIC:
        home = importlib.import_module(module)
        names += [f"{module}.{name}" for name in home.__all__ if not inspect.ismodule(getattr(home, name))]
    return names


def test_every_public_name_is_in_the_reference_once() -> None:
    listed = re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(), re.M)
    assert len(set(listed)) == len(listed)
    of_a_page = {"demask.report.Report", "demask.report.report"}  # demask.Report, demask.report
    assert set(public_names()) - of_a_page <= set(listed)


# -- notebooks ------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore")  # of transformers
@pytest.mark.parametrize("name", ["vision", "language_model"])
def test_notebooks_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All cells of code, in their order; the last line of each prints as a page where it can."""
    path = ROOT / "examples" / "notebooks" / f"{name}.ipynb"
    cells = json.loads(path.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    for package in ("transformers", "onnxruntime"):
        if package in "\n".join(code):
            pytest.importorskip(package)
    register_torchvision()
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, text in enumerate(code):
        tree = ast.parse(text)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"{path.name}, cell {number}", "exec"), names)
        if isinstance(last, ast.Expr):
            shown = eval(compile(ast.Expression(last.value), path.name, "eval"), names)
            if hasattr(shown, "_repr_html_"):
                assert "<" in shown._repr_html_()
