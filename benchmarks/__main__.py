"""The command line of the benchmarks."""

from __future__ import annotations

import difflib
import math
import subprocess
import sys
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.common.catalog import QUICK, main_of, markdown_list, results, scripts, sources
from benchmarks.common.ledger import Ledger, find_stale
from benchmarks.common.pages import write_pages

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def start() -> None:
    """Measure demask against its peers.

    \b
    Examples:
      python -m benchmarks list
      python -m benchmarks run residual --quick
      python -m benchmarks run residual --threads 1
      python -m benchmarks stale
    """


@app.command("list")
def list_all(markdown: Annotated[bool, typer.Option(help="As the table of benchmarks/README.md.")] = False) -> None:
    """Print what each benchmark shows, how long it takes, what it needs and what it writes."""
    if markdown:
        print(markdown_list())
        return
    table = Table("name", "shows", "takes", "needs", "writes")
    for name, (engine, benchmark) in scripts().items():
        files = ", ".join(path.name for path in results(name))
        table.add_row(f"{name} ({engine})", benchmark.shows, benchmark.time, "; ".join(benchmark.needs), files)
    Console().print(table)


@app.command()
def pages() -> None:
    """Write every page and every quoted figure again, from benchmarks/results/ledger.json."""
    for path in write_pages():
        print(path)


@app.command()
def stale() -> None:
    """List rows that are older than the last change of what they measure, the oldest first."""
    table = Table("page", "rows", "measured", "on", "commits since", "the last")
    ledger = Ledger.read()
    for old in find_stale(ledger, {name: sources(name) for name in ledger.pages}):
        machine = old.run.machine.partition(",")[0]
        table.add_row(old.page, str(old.rows), old.run.date, machine, str(old.changes), old.last)
    Console().print(table)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="One of `python -m benchmarks list`.")],
    quick: Annotated[bool, typer.Option("--quick", help="A short run, written to build/benchmarks.")] = False,
) -> None:
    """Run one benchmark; further options are those of its script (`run NAME -- --help`)."""
    known = scripts()
    if name not in known:
        near = ", ".join(difflib.get_close_matches(name, known, cutoff=0.4)) or ", ".join(known)
        raise typer.BadParameter(f"no benchmark {name!r}; did you mean: {near}?")
    arguments: list[str] = []
    if quick:
        short = known[name][1].quick
        if short is None:
            raise typer.BadParameter(f"{name} has no quick run")
        QUICK.mkdir(parents=True, exist_ok=True)
        arguments = [*short.split(), "--output", str(QUICK / f"{name}.md")]
    sys.argv = [f"python -m benchmarks run {name}", *arguments, *context.args]
    main_of(name)()


@app.command()
def refresh(hours: Annotated[float, typer.Option(help="Start no further one after this time.")] = math.inf) -> None:
    """Run each benchmark that has stale rows, the oldest first, in a process of its own."""
    ledger, end = Ledger.read(), time.monotonic() + 3600 * hours
    olds = find_stale(ledger, {name: sources(name) for name in ledger.pages})
    for name in dict.fromkeys(old.page for old in olds):
        if time.monotonic() > end:
            break
        print(f"{name}: {scripts()[name][1].time}", flush=True)
        done = subprocess.run([sys.executable, "-W", "ignore", "-m", "benchmarks", "run", name])
        print(f"{name}: exit status {done.returncode}", flush=True)


if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
