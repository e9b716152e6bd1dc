"""All results, in one table: benchmarks/results/ledger.json. Every page of benchmarks/results and
every figure that README.md and docs/losses.md quote is written from it, none by hand.

A script returns a `Page`, whose tables have values as cells; `save` puts them into the ledger, each
row with the run that measured it, and writes the page. `python -m benchmarks pages` writes all
pages again, and `stale` lists the rows that are older than what they measure.
"""

from __future__ import annotations

import datetime
import json
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import demask
from benchmarks import ROOT
from demask.machine.clock import Timing
from demask.machine.describe import describe_machine, format_spread, load_average

RESULTS = ROOT / "benchmarks" / "results"
LEDGER = RESULTS / "ledger.json"
Cell = str | int | float | Timing | None


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a page.

    columns: their names, each once. rows: a cell per column; a `Timing` is shown in milliseconds,
    as median (10 % quantile–90 % quantile). settings: so many leading columns say what was
    measured, the others are figures. merge: rows of other settings that the ledger has stay.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    settings: int = 1
    merge: bool = False


# A text of the rows of a page's first table, by column, with those that are merged into it.
Derived = Callable[[Sequence[Mapping[str, Any]]], str]


@dataclass(frozen=True, slots=True)
class Page:
    """What a benchmark says: a title, its parts (texts in Markdown and tables), and one sentence
    for the list of all results: the best, and how many settings lost."""

    title: str
    parts: Sequence[str | Table | Derived]
    summary: str | Derived = ""


@dataclass(frozen=True, slots=True)
class Run:
    """When, on what, at which commit rows were measured. notes: threads, allocator, load."""

    date: str
    commit: str
    machine: str
    notes: str = ""

    @classmethod
    def now(cls, *notes: str, before: str = "") -> Run:
        """This run, on this machine, of the working tree. before: the load when it started."""
        load = [f"load before and after: {before}, {load_average()}"] if before else []
        return cls(datetime.date.today().isoformat(), commit(), describe(), "; ".join([*notes, *load]))

    def __str__(self) -> str:
        notes = f"; {self.notes}" if self.notes else ""
        return f"{self.date}, commit {self.commit}. {self.machine}{notes}."


def describe() -> str:
    """This machine and the versions that matter everywhere."""
    return f"{describe_machine()}, demask {demask.__version__}"


def commit() -> str:
    """The commit of the working tree, with "+dirty" if files other than results are changed."""
    at = _git("describe", "--always", "--exclude=*") or "unknown"
    return at + "+dirty" * bool(_git("status", "--porcelain", "--", ".", ":!benchmarks/results"))


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    return done.stdout.strip()


@dataclass(slots=True)
class Ledger:
    """The pages by the name of their benchmark. rows: by page and number of the table on it, each
    row's run and cells."""

    pages: dict[str, Page] = field(default_factory=dict)
    rows: dict[tuple[str, int], list[tuple[Run, list[Cell]]]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = LEDGER) -> Ledger:
        """The ledger of a file; an empty one where there is none."""
        ledger = cls()
        if not path.exists():
            return ledger
        stored = json.loads(path.read_text())
        runs = {name: Run(**run) for name, run in stored["runs"].items()}
        for name, page in stored["pages"].items():
            parts = [
                part if isinstance(part, str) else Table(part["columns"], (), part["settings"])
                for part in page["parts"]
            ]
            ledger.pages[name] = Page(page["title"], parts, page["summary"])
            for number, _ in tables(ledger.pages[name]):
                ledger.rows[name, number] = []
        for row in stored["rows"]:
            cells = [Timing(**c) if isinstance(c, dict) else c for c in row["cells"]]
            ledger.rows[row["page"], row["table"]].append((runs[row["run"]], cells))
        return ledger

    def write(self, path: Path = LEDGER) -> None:
        """The ledger as JSON, a line per row."""
        runs: dict[Run, str] = {}
        lines = []
        for (page, number), rows in sorted(self.rows.items()):
            for run, cells in rows:
                of_that_day = sum(other.date == run.date for other in runs)
                name = runs.setdefault(run, f"{run.date} {of_that_day + 1}")
                stored = [asdict(c) if isinstance(c, Timing) else c for c in cells]
                row = {"page": page, "table": number, "run": name, "cells": stored}
                lines.append(json.dumps(row, ensure_ascii=False))
        pages = {
            name: {
                "title": page.title,
                "summary": page.summary,
                "parts": [
                    part if isinstance(part, str) else {"columns": list(part.columns), "settings": part.settings}
                    for part in page.parts
                ],
            }
            for name, page in sorted(self.pages.items())
        }
        head = {"runs": {name: asdict(run) for run, name in runs.items()}, "pages": pages}
        text = json.dumps(head, indent=1, ensure_ascii=False).removesuffix("\n}")
        path.write_text(text + ',\n "rows": [\n' + ",\n".join(lines) + "\n]\n}\n")

    def enter(self, name: str, page: Page, run: Run) -> None:
        """Puts a page in the place of the one of that name, and writes out the texts that are
        derived from its rows."""
        before = dict(tables(self.pages[name])) if name in self.pages else {}
        old = {key[1]: self.rows.pop(key) for key in list(self.rows) if key[0] == name}
        for number, table in tables(page):
            repeated = len(set(table.columns)) < len(table.columns)
            if repeated or any(len(row) != len(table.columns) for row in table.rows):
                raise ValueError(f"{name}: a cell for each of {list(table.columns)}, each named once")
            new = [(run, [*map(_rounded, row)]) for row in table.rows]
            if table.merge and number in before and list(before[number].columns) == list(table.columns):
                by_setting = {_setting(table, row[1]): row for row in [*old.get(number, ()), *new]}
                new = list(by_setting.values())
            self.rows[name, number] = new
        first = next((table for _, table in tables(page)), Table((), ()))
        rows = [dict(zip(first.columns, row, strict=True)) for _, row in self.rows.get((name, 0), ())]
        parts = [part(rows) if callable(part) else part for part in page.parts]
        summary = page.summary(rows) if callable(page.summary) else page.summary
        self.pages[name] = Page(page.title, parts, summary)

    def find(self, page: str, *setting: str, column: str) -> Cell:
        """The cell of a column in the first row of a page whose leading cells are these settings,
        as text; "*" is any.

        Raises LookupError where there is none.
        """
        for number, table in tables(self.pages[page]):
            for _, cells in self.rows[page, number]:
                pairs = zip(setting, map(text_of, cells), strict=False)
                if column in table.columns and all(part in ("*", text) for part, text in pairs):
                    return cells[list(table.columns).index(column)]
        raise LookupError(f"no row of {page} has {setting} and {column!r}")

    def runs(self, page: str) -> list[Run]:
        """The runs of a page's rows, each once, in order of its tables."""
        rows = (row for number, _ in tables(self.pages[page]) for row in self.rows[page, number])
        return list(dict.fromkeys(run for run, _ in rows))

    def render(self, name: str) -> str:
        """A page as Markdown. Its run stands under the title, or over each table where they
        differ."""
        page, runs = self.pages[name], self.runs(name)
        parts = [f"# {page.title}", f"Written by `python -m benchmarks run {name}`."]
        if len(runs) == 1:
            parts[-1] += f" {runs[0]}"
        numbers = iter(tables(page))
        for part in page.parts:
            if isinstance(part, str):
                parts.append(part)
                continue
            number, table = next(numbers)
            rows = self.rows[name, number]
            if not rows:
                continue
            if len(runs) > 1:
                parts.append("\n".join(map(str, dict.fromkeys(run for run, _ in rows))))
            parts.append(markdown(table.columns, [[*map(text_of, cells)] for _, cells in rows]))
        return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _setting(table: Table, cells: Sequence[Cell]) -> tuple[str, ...]:
    return tuple(map(text_of, cells[: table.settings]))


def _rounded(cell: Cell) -> Cell:
    """Figures without the digits that nobody measured."""
    if isinstance(cell, Timing):
        seconds = (float(f"{value:.4g}") for value in (cell.median, cell.low, cell.high))
        return Timing(*seconds, cell.count)
    return float(f"{cell:.6g}") if isinstance(cell, float) else cell


def tables(page: Page) -> Iterator[tuple[int, Table]]:
    """The tables of a page, numbered."""
    return enumerate(part for part in page.parts if isinstance(part, Table))


def text_of(cell: Cell) -> str:
    """A cell as text.

    >>> text_of(None), text_of(25571176), text_of(0.12345), text_of(2e-7), text_of("ONNX")
    ('', '25,571,176', '0.123', '2e-07', 'ONNX')
    """
    if cell is None:
        return ""
    if isinstance(cell, Timing):
        return format_spread(cell)
    if isinstance(cell, int):
        return f"{cell:,}"
    if isinstance(cell, float):
        digits = 2 if abs(cell) >= 1 else 3
        return f"{cell:.0e}" if 0 < abs(cell) < 1e-3 else f"{cell:,.{digits}f}"
    return cell


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table of pipes."""
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(line) + " |" for line in [list(head), rule, *lines])


def save(name: str, page: Page, run: Run, output: Path | None = None) -> str:
    """Enters a page into the ledger and writes it; returns its text.

    output: a file to write the page to, in place of the ledger and benchmarks/results.
    """
    ledger = Ledger.read() if output is None else Ledger()
    ledger.enter(name, page, run)
    text = ledger.render(name)
    if output is None:
        ledger.write()
        output = RESULTS / f"{name}.md"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text)
    return text


@dataclass(frozen=True, slots=True)
class Stale:
    """Rows of a page, of one run, that are older than the last change of what they measure.
    changes: commits since; last: the day of the newest."""

    page: str
    run: Run
    rows: int
    changes: int
    last: str


def find_stale(ledger: Ledger, sources: Mapping[str, Sequence[str]]) -> list[Stale]:
    """Rows that are older than the last change of their sources, the oldest first.

    sources: by page, the files and folders whose speed or memory it shows, from the project's root.
    """
    outdated = []
    for page in ledger.pages:
        for run in ledger.runs(page):
            at = run.commit.removesuffix("+dirty")
            known = _git("cat-file", "-t", at) == "commit"
            since = f"{at}..HEAD" if known else f"--since={run.date}"
            log = _git("log", "--format=%cs", since, "--", *sources[page]).split()
            if log:
                rows = sum(of == run for number, _ in tables(ledger.pages[page]) for of, _ in ledger.rows[page, number])
                outdated.append(Stale(page, run, rows, len(log), log[0]))
    return sorted(outdated, key=lambda old: (old.run.date, old.page))


QUOTE = re.compile(r"\{([^{}|]+)\|([^{}]*)\|([^{}|]+)\}")


def quote(ledger: Ledger, template: str) -> str:
    """A text in which each `{page|setting|setting|column}` is that figure of the ledger: of a
    timing the median, in milliseconds; of a figure written as text its first number.

    >>> quote(Ledger(), "no figure")
    'no figure'
    """

    def figure(match: re.Match[str]) -> str:
        page, settings, column = match.groups()
        cell = ledger.find(page, *settings.split("|"), column=column)
        return text_of(cell).split(" (")[0]

    return QUOTE.sub(figure, template)
