"""What the benchmarks share: words for the machine, tables of pipes, where results go."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

import demask
from demask.machine.timing import Timing

RESULTS = Path(__file__).parent / "results"


def machine() -> str:
    """This machine and the versions in words."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = f"{names[0]}, {len(names)} cores" if names else platform.processor() or "unknown CPU"
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    vectors = next((v for v in ("avx512f", "avx2", "asimd") if v in flags), "")
    return (
        f"{cpu}{f' ({vectors})' if vectors else ''}, {platform.system()}; Python "
        f"{platform.python_version()}, torch {torch.__version__}, demask {demask.__version__}"
    )


def load() -> str:
    """How busy the machine is: processes that run or want to, last minute."""
    return f"{os.getloadavg()[0]:.1f}"


def spread(timing: Timing) -> str:
    """Milliseconds: median (10 %-90 %)."""
    low, median, high = (1e3 * t for t in (timing.low, timing.median, timing.high))
    return f"{median:.1f} ({low:.1f}–{high:.1f})"


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table of pipes."""
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(line) + " |" for line in [list(head), rule, *lines])
