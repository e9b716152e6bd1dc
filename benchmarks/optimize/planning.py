"""Seconds of optimize(), of the same call again, and of a saved result until its first output:
`python -m benchmarks run planning`.

Each in a process of its own; the first with an empty cache folder, in which it also compiles all
kernels.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any
from unittest.mock import patch

from rich.progress import Progress

from benchmarks.common.catalog import BENCH, Benchmark
from benchmarks.common.command import command
from benchmarks.common.ledger import Page, Table

BENCHMARK = Benchmark(
    "seconds of optimize(), of the same call again, and until the first output of a saved result",
    "about 1 minute a setting",
    needs=(BENCH,),
    quick="--networks ResNet-18 --threads 1",
)

NETWORKS = ("ResNet-18", "ResNet-50", "MobileNetV2", "EfficientNet-B0")
TARGETS = (20.0, 3.0, 1.0)  # seconds


def optimized(name: str, threads: int, path: str) -> float:
    """Seconds of optimize() of a half masked network, which is saved."""
    import demask
    from benchmarks.optimize.executors import NAMES, classifier

    model, image = classifier(NAMES[name])()
    begin = perf_counter()
    fast = demask.optimize(model, (image,), threads=threads)
    seconds = perf_counter() - begin
    demask.save(fast, path)
    return seconds


# Prints the seconds from the import of torch to the first output of a saved network.
LOADED = """
import sys, time, torch
torch.set_num_threads(int(sys.argv[1]))
image = torch.randn(1, 3, 224, 224)
begin = time.perf_counter()
import demask
demask.load(sys.argv[2])(image)
print(time.perf_counter() - begin)
"""


def loaded(name: str, threads: int, path: str) -> float:
    """Seconds until the first output of the saved network, in a process without demask so far."""
    command = [sys.executable, "-c", LOADED, str(threads), path]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@dataclass(frozen=True, slots=True)
class Row:
    """A network and number of threads, with seconds of the first call, of the second one, and of a
    saved network until its first output."""

    name: str
    threads: int
    seconds: tuple[float, float, float]


def rows(chosen: Sequence[str], threads: Sequence[int], pairs: int, seconds: float, bar: Progress) -> Iterator[Row]:
    step = bar.add_task("", total=3 * len(chosen) * len(threads))
    processes = multiprocessing.get_context("spawn")
    for name in chosen:
        for count in threads:
            taken: list[float] = []
            with TemporaryDirectory() as folder:
                # Compiled Python files are read and written, as of an installed package.
                variables = {"XDG_CACHE_HOME": folder, "PYTHONDONTWRITEBYTECODE": ""}
                path = str(Path(folder, "fast.demask"))
                for words, measure in zip(HEAD[2:], (optimized, optimized, loaded), strict=True):
                    bar.update(step, description=f"{name}, {count} threads: {words}")
                    with patch.dict(os.environ, variables), processes.Pool(1) as pool:
                        taken.append(pool.apply(measure, (name, count, path)))
                    bar.advance(step)
            yield Row(name, count, (taken[0], taken[1], taken[2]))


HEAD = ["network", "threads", "optimize(), s", "again, s", "load and first call, s"]


def page(rows: Sequence[Row]) -> Page:
    text = f"""
Half of the channels masked, one image of 224 x 224, each number one run in a process of its own.
First with an empty cache folder: costs of layers are measured and all kernels compiled. *Again*:
the choice is read, compared with the original and measured against it. *Load and first call*: from
the import of torch to the first output of the saved network. Asked: at most {TARGETS[0]:.0f},
{TARGETS[1]:.0f} and {TARGETS[2]:.0f} seconds."""
    cells = [[row.name, row.threads, *row.seconds] for row in rows]
    return Page("Seconds of optimize()", [text, Table(HEAD, cells, 2, merge=True)], summarize)


def summarize(rows: Sequence[Mapping[str, Any]]) -> str:
    """The seconds of each column, and how many are over their limit."""
    taken = [[row[name] for row in rows] for name in HEAD[2:]]
    spans = [f"{min(one):.1f} to {max(one):.1f} s" for one in taken]
    over = sum(n > most for one, most in zip(taken, TARGETS, strict=True) for n in one)
    return (
        f"{spans[0]}, the same call again {spans[1]}, a saved network {spans[2]} until its "
        f"first output; over the limit in {over} of {3 * len(rows)}"
    )


def main() -> None:
    command("planning", __doc__, rows, page, 0.0, list(NETWORKS))


if __name__ == "__main__":
    main()
