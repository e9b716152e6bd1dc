"""Every benchmark declares itself, and its committed results can be made again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from benchmarks import ROOT
from benchmarks.__main__ import app
from benchmarks.common import catalog

ALL = [(name, *declared) for name, declared in catalog.scripts().items()]


def test_the_list_names_every_script():
    outcome = CliRunner().invoke(app, ["list"], env={"COLUMNS": "200"})
    assert outcome.exit_code == 0
    assert all(name in outcome.stdout for name in catalog.scripts())
    scripts = [p for p in catalog.FOLDER.glob("*/*.py") if "def main() -> None" in p.read_text()]
    libraries = {"deepsparse_server", "trained_networks"}
    assert {path.stem for path in scripts} - libraries == set(catalog.scripts())


def test_the_page_is_the_list():
    assert catalog.markdown_list() in (catalog.FOLDER / "README.md").read_text(), (
        "put the output of `python -m benchmarks list --markdown` into benchmarks/README.md"
    )


@pytest.mark.parametrize(("name", "engine", "benchmark"), ALL, ids=[name for name, _, _ in ALL])
def test_results_name_their_commit_and_command(name, engine, benchmark):
    assert benchmark.shows and benchmark.time and benchmark.needs
    for result in map(catalog.result_path, benchmark.results):
        assert result.exists(), f"{name} declares {result}"
        if result.suffix == ".md" and result.parent.name == "results":
            text = result.read_text()
            assert "commit " in text and f"python -m benchmarks run {name}" in text


def test_every_committed_result_is_declared():
    declared = {catalog.result_path(r) for _, _, b in ALL for r in b.results}
    undeclared = {*(catalog.FOLDER / "results").iterdir()} - declared
    assert {path.name for path in undeclared} <= {"networks.json"}  # of docs/networks.md


def test_a_wrong_name_is_answered_with_near_ones():
    outcome = CliRunner().invoke(app, ["run", "residuals"])
    assert outcome.exit_code == 2 and "residual" in outcome.output


QUICK = [
    name
    for name, _, benchmark in ALL
    if benchmark.quick is not None and set(benchmark.needs) <= {catalog.DEV, catalog.SHARED_DATA}
]


@pytest.mark.nightly
@pytest.mark.parametrize("name", QUICK)
def test_a_quick_run_writes_its_page(name, tmp_path):
    """In a process of its own: scripts set threads and the allocator for the whole process."""
    page = tmp_path / f"{name}.md"
    words = [sys.executable, "-m", "benchmarks", "run", name, "--quick", "--output", str(page)]
    source = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(words, cwd=ROOT, env=source, capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr[-2000:]  # 1 alone: a limit is exceeded
    text = page.read_text()
    assert f"python -m benchmarks run {name}" in text and "commit " in text
