"""A progress bar for long work: on a terminal, on stderr, after two seconds, gone at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

PATIENCE = 2.0  # seconds of work that pass without a bar


class ProgressStep(Protocol):
    """Tells the bar what is being done now and how much was done since the last call."""

    def __call__(self, title: str, done: int = 1) -> None: ...


def no_progress(title: str, done: int = 1) -> None:
    """A `ProgressStep` that shows nothing."""


@contextmanager
def progress(
    title: str,
    total: int | None = None,
    *,
    patience: float = PATIENCE,
    terminal: Console | None = None,
) -> Iterator[ProgressStep]:
    """A bar shown while the block runs; yields a function that moves it.

    total: the steps expected, or None where they cannot be counted (the bar then only pulses).
    terminal: where to draw, stderr by default. Nothing is drawn where it is not a terminal, or
    where the block ends within `patience` seconds.
    """
    console = terminal or Console(stderr=True)
    columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()]
    if total is not None:
        columns += [TextColumn("left:"), TimeRemainingColumn()]
    bar = Progress(
        *columns,
        console=console,
        transient=True,
        refresh_per_second=4,
        speed_estimate_period=600,  # seconds: single steps may take minutes
    )
    task = bar.add_task(title, total=total)

    def step(title: str, done: int = 1) -> None:
        bar.update(task, description=title, advance=done)

    timer = Timer(patience, bar.start)
    timer.daemon = True
    if console.is_terminal:
        timer.start()
    try:
        yield step
    finally:
        timer.cancel()
        if timer.ident is not None:
            timer.join()  # else a bar started just now would outlive the block
        if bar.live.is_started:
            bar.stop()
