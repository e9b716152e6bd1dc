"""The command line that benchmarks of rows by network and number of threads share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.progress import Progress

from benchmarks.common.inductor import forget
from benchmarks.common.ledger import Page, Run, save
from demask.machine.allocator import fix_allocator
from demask.machine.describe import load_average


def command(
    name: str,
    about: str | None,
    rows: Callable[..., Iterator[Any]],
    page: Callable[[Sequence[Any]], Page],
    seconds: float,
    networks: Sequence[str] = (),
) -> None:
    """Measures rows and enters their page into the ledger after each of them, so that a run that is
    stopped leaves what it has.

    rows: called with threads, pairs, seconds and a progress bar; and first with those of `networks`
    that were chosen, where there are any to choose from. seconds: at most, per setting.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pairs", type=int, default=31, help="alternated calls of each network")
    parser.add_argument("--seconds", type=float, default=seconds, help="at most, per setting")
    parser.add_argument("--output", type=Path, help="a page of its own, in place of the ledger")
    if networks:
        parser.add_argument("--networks", nargs="+", choices=networks, default=networks)
    options = parser.parse_args()
    first = [options.networks] if networks else []
    allocator, before = fix_allocator(), load_average()
    console, results, text = Console(), [], ""
    with Progress(console=console, transient=True) as bar:
        for row in rows(*first, options.threads, options.pairs, options.seconds, bar):
            results.append(row)
            text = save(name, page(results), Run.now(allocator, before=before), options.output)
            forget()
    console.print(Markdown(text))
