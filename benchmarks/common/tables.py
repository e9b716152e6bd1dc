"""Shared by the benchmarks: the machine in words, Markdown tables, the folder of results."""

from __future__ import annotations

import argparse
import datetime
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import demask
from benchmarks import ROOT
from demask.machine import describe
from demask.machine.allocator import fix_allocator
from demask.machine.describe import format_spread, load_average

__all__ = [
    "RESULTS",
    "command",
    "format_spread",
    "load_average",
    "machine",
    "markdown",
    "provenance",
]

RESULTS = Path(__file__).parents[1] / "results"


def machine() -> str:
    """A description of this machine, the versions and the commit."""
    return f"{describe.describe_machine()}, demask {demask.__version__} ({commit()})"


def commit() -> str:
    """The commit of the working tree, with "+dirty" if files are changed."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+dirty", "--exclude=*"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "no commit known"
    return f"commit {done.stdout.strip()}"


def provenance(name: str, *notes: str, before: str = "") -> str:
    """How a page was measured: command, date, machine, versions, commit, notes and load.

    name: of the benchmark. before: the load when it started.
    """
    words = "; ".join([f"{datetime.date.today().isoformat()}. {machine()}", *notes])
    loads = f" Load before and after: {before}, {load_average()}." if before else ""
    return f"Made by `python -m benchmarks run {name}`. {words}.{loads}"


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table of pipes."""
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(line) + " |" for line in [list(head), rule, *lines])


def command(
    about: str | None,
    rows: Callable[..., Iterator[Any]],
    head: Sequence[str],
    cells: Callable[[Any], list[str]],
    page: Callable[[Sequence[Any], str], str],
    output: Path,
    seconds: float,
    networks: Sequence[str] = (),
) -> None:
    """The command line of a benchmark: time its rows, print them as a table, write its page.

    rows: called with threads, pairs, seconds and a progress bar; and first with those of `networks`
    that were chosen, where there are any to choose from.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pairs", type=int, default=31, help="alternated calls of each network")
    parser.add_argument("--seconds", type=float, default=seconds, help="at most, per setting")
    parser.add_argument("--output", type=Path, default=output)
    if networks:
        parser.add_argument("--networks", nargs="+", choices=networks, default=networks)
    options = parser.parse_args()
    first = [options.networks] if networks else []
    allocator, before = fix_allocator(), load_average()
    console = Console()
    options.output.parent.mkdir(exist_ok=True)
    results, words = [], ""
    with Progress(console=console, transient=True) as bar:
        for row in rows(*first, options.threads, options.pairs, options.seconds, bar):
            results.append(row)  # a run that is stopped leaves the rows that it has
            words = provenance(output.stem, allocator, before=before)
            options.output.write_text(page(results, words))
    table = Table(*head, title=words)
    for row in results:
        table.add_row(*cells(row))
    console.print(table)
