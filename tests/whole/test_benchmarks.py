"""Every benchmark declares itself, and its committed results can be made again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from benchmarks import ROOT
from benchmarks import __main__ as command_line
from benchmarks.__main__ import app
from benchmarks.common import catalog, pages
from benchmarks.common import ledger as ledger_module
from benchmarks.common.ledger import Ledger, Page, Run, Stale, Table, find_stale, quote
from demask.machine.clock import Timing

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
def test_scripts_declare_what_they_need_and_measure(name, engine, benchmark):
    assert benchmark.shows and benchmark.time and benchmark.needs
    missing = [
        path for path in [*map(ROOT.joinpath, catalog.sources(name)), *catalog.results(name)] if not path.exists()
    ]
    assert not missing, f"{name} declares {missing}"


def test_every_committed_result_is_declared():
    declared = {path for name, _, _ in ALL for path in catalog.results(name)}
    undeclared = {*(catalog.FOLDER / "results").iterdir()} - declared
    assert {path.name for path in undeclared} == {"ledger.json", "networks.json"}


def test_pages_and_quoted_figures_are_those_of_the_ledger():
    for path, text in pages.pages():
        assert path.read_text() == text, f"`python -m benchmarks pages` writes {path.name}"


def run(day: str, commit: str = "abc") -> Run:
    return Run(f"2026-01-{day}", commit, "a machine")


TIMING = Timing(0.0105, 0.01, 0.0112, 30)
HEAD = ["network", "batch", "time, ms", "error"]
TABLE = Table(HEAD, [["a", 1, TIMING, 2e-7], ["a", 64, 0.5, None]], 2)
PAGE = Page("Speed", ["Words.", TABLE])


def test_a_ledger_is_read_as_it_was_written(tmp_path):
    ledger = Ledger()
    ledger.enter("speed", PAGE, run("01"))
    ledger.write(tmp_path / "ledger.json")
    again = Ledger.read(tmp_path / "ledger.json")
    assert again.render("speed") == ledger.render("speed")
    assert "| a | 1 | 10.5 (10.0–11.2) | 2e-07 |" in again.render("speed")
    assert "2026-01-01, commit abc. a machine." in again.render("speed")
    assert quote(again, "{speed|a|1|time, ms} and {speed|*|64|time, ms} ms") == "10.5 and 0.500 ms"
    with pytest.raises(LookupError, match="no row of speed"):
        quote(again, "{speed|b|time, ms}")


def test_rows_of_other_settings_stay_where_a_table_is_merged():
    ledger = Ledger()
    ledger.enter("speed", PAGE, run("01"))
    table = Table(PAGE.parts[1].columns, [["a", 64, 0.25, None], ["b", 1, 1.0, None]], 2, merge=True)
    ledger.enter("speed", Page("Speed", [table, lambda rows: f"{len(rows)} rows"]), run("02"))
    assert ledger.pages["speed"].parts[1] == "3 rows"
    assert [(at.date[-2:], cells[:3]) for at, cells in ledger.rows["speed", 0]] == [
        ("01", ["a", 1, TIMING]),
        ("02", ["a", 64, 0.25]),
        ("02", ["b", 1, 1.0]),
    ]
    other = Table([*HEAD[:-1], "difference"], [["c", 1, 1.0, None]], 2, merge=True)
    ledger.enter("speed", Page("Speed", [other]), run("03"))
    assert len(ledger.rows["speed", 0]) == 1, "rows of other columns are no rows of this table"
    ledger.enter("speed", PAGE, run("03"))
    assert {at.date[-2:] for at, _ in ledger.rows["speed", 0]} == {"03"}


@pytest.mark.parametrize("columns", [["network", "batch"], ["network", "a", "a", "error"]])
def test_tables_whose_cells_have_no_column_are_refused(columns):
    table = Table(columns, TABLE.rows)
    with pytest.raises(ValueError, match="a cell for each"):
        Ledger().enter("speed", Page("Speed", [table]), run("01"))


def test_rows_older_than_what_they_measure_are_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_module, "ROOT", tmp_path)

    def commit(file: str, day: str) -> str:
        (tmp_path / file).write_text(day)
        environment = {f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        environment["GIT_COMMITTER_DATE"] = f"2026-01-{day}T12:00:00Z"
        for words in (["add", "."], ["commit", "-qm", file]):
            subprocess.run(["git", *words], cwd=tmp_path, check=True, env=os.environ | environment)
        return ledger_module.commit()

    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    first = commit("kernel.py", "01")
    ledger = Ledger()
    ledger.enter("speed", PAGE, run("01", first))
    sources = {"speed": ["kernel.py"]}
    commit("README.md", "02")
    assert find_stale(ledger, sources) == []
    commit("kernel.py", "03")
    (old,) = find_stale(ledger, sources)
    assert (old.page, old.rows, old.changes, old.last) == ("speed", 2, 1, "2026-01-03")
    ledger.enter("speed", PAGE, run("02", "a lost commit"))
    assert [old.changes for old in find_stale(ledger, sources)] == [1]


def test_stale_benchmarks_are_run_again_the_oldest_first(monkeypatch):
    olds = [
        Stale(page, run(day), 1, 1, "2026-02-01") for day, page in (("01", "stride"), ("02", "cost"), ("03", "stride"))
    ]
    monkeypatch.setattr(command_line, "find_stale", lambda *_: olds)
    words: list[list[str]] = []

    def record(command: list[str]) -> subprocess.CompletedProcess[str]:
        words.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(command_line.subprocess, "run", record)
    assert CliRunner().invoke(app, ["refresh"]).exit_code == 0
    assert [command[-1] for command in words] == ["stride", "cost"]
    assert CliRunner().invoke(app, ["refresh", "--hours", "-1"]).exit_code == 0 and len(words) == 2


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
    """In a process of its own: scripts set threads and the allocator for the full process."""
    page = tmp_path / f"{name}.md"
    words = [sys.executable, "-m", "benchmarks", "run", name, "--quick", "--output", str(page)]
    source = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(words, cwd=ROOT, env=source, capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr[-2000:]  # 1 alone: a limit is exceeded
    text = page.read_text()
    assert f"python -m benchmarks run {name}" in text and "commit " in text
