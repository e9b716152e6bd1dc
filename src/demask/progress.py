"""What long work is doing, on stderr, after two seconds: a bar on a terminal, else lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread, Timer
from time import monotonic
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # it takes longer to import than `demask --help` may
    from rich.console import Console

PATIENCE = 2.0  # seconds of work that pass without a bar, and between lines
SILENCE = 15.0  # seconds after which a line is repeated, with the time


class ProgressStep(Protocol):
    """Tells the bar what is being done now and how much was done since the last call."""

    def __call__(self, title: str, done: int = 1) -> None: ...


def no_progress(title: str, done: int = 1) -> None:
    """A `ProgressStep` that shows nothing."""


@contextmanager
def progress(
    title: str, total: int | None = None, *, patience: float = PATIENCE, terminal: Console | None = None
) -> Iterator[ProgressStep]:
    """A bar, or lines, shown while the block runs; yields a function that moves it.

    total: the steps expected, or None where they cannot be counted (a bar then only pulses).
    terminal: where to draw, stderr by default. Nothing is drawn where the block ends within
    `patience` seconds. Where it is not a terminal, a line is written for each title, at most one in
    `patience` seconds, and one in SILENCE seconds where the title stays.
    """
    from rich.console import Console

    console = terminal or Console(stderr=True)
    shown = _show_bar if console.is_terminal else _write_lines
    with shown(title, total, patience, console) as step:
        yield step


@contextmanager
def _show_bar(title: str, total: int | None, patience: float, console: Console) -> Iterator[ProgressStep]:
    """A bar that is gone at the end."""
    from rich import progress as bars

    columns = [bars.SpinnerColumn(), bars.TextColumn("{task.description}"), bars.BarColumn(), bars.TimeElapsedColumn()]
    if total is not None:
        columns += [bars.TextColumn("left:"), bars.TimeRemainingColumn()]
    bar = bars.Progress(
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
    timer.start()
    try:
        yield step
    finally:
        timer.cancel()
        timer.join()  # else a bar started just now would outlive the block
        if bar.live.is_started:
            bar.stop()


@contextmanager
def _write_lines(title: str, total: int | None, patience: float, console: Console) -> Iterator[ProgressStep]:
    """Lines such as `training, 120 of 480 (14 s)`, by a thread: a step may take minutes."""
    start, current, count, ended = monotonic(), title, 0, Event()

    def step(title: str, done: int = 1) -> None:
        nonlocal current, count
        current, count = title, count + done

    def write() -> None:
        written, then = "", start
        while not ended.wait(patience):
            now = monotonic()
            if current != written or now - then >= SILENCE:
                written, then = current, now
                share = f", {count} of {total}" if total else ""
                line = f"{current}{share} ({now - start:.0f} s)"
                console.print(line, markup=False, highlight=False, soft_wrap=True)

    writer = Thread(target=write, daemon=True)
    writer.start()
    try:
        yield step
    finally:
        ended.set()
        writer.join()
