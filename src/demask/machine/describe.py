"""The conditions of a measurement, in words: machine, load, spread of timings."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from pathlib import Path

import torch

from demask.machine.clock import Timing

BUSY = "Something else was running: times spread wide. Run again for clean numbers."


def describe_machine() -> str:
    """The processor, its cores, the operating system, and the versions of Python and torch.

    >>> "Python" in describe_machine()
    True
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = f"{names[0]}, {len(names)} cores" if names else platform.processor() or "unknown CPU"
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    vectors = next((v for v in ("avx512f", "avx2", "asimd") if v in flags), "")
    return (
        f"{cpu}{f' ({vectors})' if vectors else ''}, {platform.system()}; Python "
        f"{platform.python_version()}, torch {torch.__version__}"
    )


def load_average() -> str:
    """The load average of the last minute: processes that run or wait to run."""
    return f"{os.getloadavg()[0]:.1f}"


def format_threads(count: int) -> str:
    """A number of threads in words: "1 thread", "2 threads"."""
    return f"{count} thread{'s' if count > 1 else ''}"


def format_milliseconds(seconds: float) -> str:
    """Seconds as text in milliseconds, with one decimal; with three below a millisecond.

    >>> format_milliseconds(0.0105), format_milliseconds(0.0001054)
    ('10.5', '0.105')
    """
    return f"{1e3 * seconds:.{1 if seconds >= 1e-3 else 3}f}"


def format_spread(timing: Timing) -> str:
    """A timing as text in milliseconds: median (10 % quantile–90 % quantile).

    >>> format_spread(Timing(median=0.0105, low=0.01, high=0.0112, count=30))
    '10.5 (10.0–11.2)'
    """
    median, low, high = map(format_milliseconds, (timing.median, timing.low, timing.high))
    return f"{median} ({low}–{high})"


def format_counts(timings: Iterable[Timing]) -> str:
    """The number of calls per timing, as text: "30", or "12–30" if the numbers differ."""
    counts = sorted({timing.count for timing in timings})
    return "–".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))


def has_wide_spread(timings: Iterable[Timing]) -> bool:
    """Whether a 90 % quantile exceeds twice the 10 % quantile: something else was running."""
    return any(timing.high > 2 * timing.low for timing in timings)
