"""Networks with unstructured zeros in demask.optimize, ONNX Runtime, torch, torch.compile, OpenVINO
and DeepSparse, timed in turns: `python -m benchmarks run cpu_sparse`.

DeepSparse 1.8.0 wants packages of its own, so an environment of its own (`make bench` sets it up):

    python3.11 -m venv .venv-deepsparse
    .venv-deepsparse/bin/pip install --only-binary=:all: deepsparse==1.8.0
    python -m benchmarks run cpu_sparse

The masks of the pruned ResNet-50 are in shared/data next to the project. A run replaces the rows
that it measures.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from math import isnan, nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import Progress
from torch import Tensor, nn

import dlmc
import sparse_networks as nets
from benchmarks import ROOT
from benchmarks.common.catalog import BENCH, SHARED_DATA, Benchmark
from benchmarks.common.inductor import forget
from benchmarks.common.ledger import Cell, Page, Run, Table, save
from benchmarks.sparse.sparse_engines import (
    CALLED,
    COMPILED,
    DEEPSPARSE,
    EAGER,
    FROZEN,
    LEAST,
    NOT_RUN,
    OPENVINO,
    OURS,
    RUNTIME,
    SPINNING,
    WHO,
    Entry,
    Setting,
    entered,
    exact,
    export,
)
from demask.machine.allocator import fix_allocator
from demask.machine.clock import Timing
from demask.machine.describe import format_threads, load_average

BENCHMARK = Benchmark(
    "unstructured zeros: optimize(), ONNX Runtime, torch, OpenVINO and DeepSparse",
    "an hour",
    needs=(BENCH, SHARED_DATA, "`.venv-deepsparse` for DeepSparse"),
    quick="--networks linear --only 90%.*128 --rounds 5",
)

ALLOWED = 1e-4  # relative: float32 stays below 1e-5 here, storage in 16 bits is above 1e-3
PYTHON = ROOT / ".venv-deepsparse" / "bin" / "python"
PACKAGES = ("onnxruntime", "onnx", "openvino", "llvmlite", "torchvision")
# A peer may have several forms: the fastest one counts.
PEERS = {
    "ONNX Runtime": (RUNTIME, SPINNING),
    "torch": (FROZEN, EAGER),
    COMPILED: (COMPILED,),
    "OpenVINO": (OPENVINO,),
    DEEPSPARSE: (DEEPSPARSE,),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One setting. entries: without their engines. operations: two for each time that a weight that
    is not zero is used in a call. notes: what contenders report of themselves. timings: of those
    that were timed."""

    case: nets.Case
    threads: int
    operations: int
    entries: Mapping[str, Entry]
    prepared: Mapping[str, float]
    notes: Mapping[str, Mapping[str, Any]]
    timings: Mapping[str, Timing]

    def __str__(self) -> str:
        return f"{self.case}, {format_threads(self.threads)}"

    def speed(self, peer: str) -> float:
        """How many times as fast as a peer in its fastest form demask is; NaN if it did not run."""
        medians = [self.timings[who].median for who in PEERS[peer] if who in self.timings]
        return min(medians, default=nan) / self.timings[OURS].median


def operations(model: nn.Module, x: Tensor) -> int:
    """Two for each multiplication by a weight that is not zero, in a call."""
    counts = []

    def count(layer: nets.Layer, _: object, output: Tensor) -> None:
        uses = output.numel() // len(layer.weight)  # of each weight
        counts.append(2 * nets.nonzeros(layer) * uses)

    hooks = [layer.register_forward_hook(count) for layer in nets.layers(model).values()]
    model(x)
    for hook in hooks:
        hook.remove()
    return sum(counts)


def rounds(entries: Mapping[str, Entry], count: int) -> dict[str, Timing]:
    """Every contender's turns, forward and backward in alternation."""
    engines = {who: entry.engine for who, entry in entries.items() if entry.engine}
    samples: dict[str, list[float]] = {who: [] for who in engines}
    for turn in range(count):
        for who in list(engines)[:: -1 if turn % 2 else 1]:
            samples[who].append(engines[who].turn())
    return {who: Timing.of(taken) for who, taken in samples.items()}


@torch.no_grad()
def measured(case: nets.Case, threads: int, count: int, deepsparse: str | None) -> Row:
    """One setting: every contender prepared, checked, and timed in turns."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    model = case.make(generator)
    x = case.inputs(case.rows, generator)
    with TemporaryDirectory() as folder, ExitStack() as stack:
        file = Path(folder, "network.onnx")
        export(model, x, file)
        setting, expected = Setting(model, x, file, threads, deepsparse), exact(model, x)
        entries = {who: entered(who, setting, expected, stack, ALLOWED) for who in WHO}
        timings = rounds(entries, count)
    engines = {who: entry.engine for who, entry in entries.items() if entry.engine}
    return Row(
        case,
        threads,
        operations(model, x),
        {who: replace(e, engine=None) for who, e in entries.items()},
        {who: engine.seconds for who, engine in engines.items()},
        {who: engine.notes for who, engine in engines.items() if engine.notes},
        timings,
    )


def chosen(options: argparse.Namespace) -> list[nets.Case]:
    """The settings that were chosen; SystemExit where their masks are not there."""
    titles = {nets.KEYS[key] for key in options.networks}
    cases = [case for case in nets.cases() if case.title in titles and re.search(options.only, str(case))]
    if any(case.title == nets.RESNET for case in cases) and not dlmc.DATA.exists():
        sys.exit(
            f"expected the masks of {nets.RESNET} in shared/data next to the project; the others "
            "run with --networks " + " ".join(k for k, v in nets.KEYS.items() if v != nets.RESNET)
        )
    return cases


def rows(options: argparse.Namespace, bar: Progress) -> Iterator[Row]:
    """Every setting that was chosen."""
    tasks = [(case, threads) for case in chosen(options) for threads in options.threads]
    step = bar.add_task("", total=len(tasks))
    for case, threads in tasks:
        bar.update(step, description=f"{case}, {format_threads(threads)}")
        yield measured(case, threads, options.rounds, options.deepsparse)
        bar.advance(step)


HEAD = [
    "network",
    "zeros",
    "rows",
    "threads",
    *(f"{who}, ms" for who in WHO),
    *(f"/ {peer}" for peer in PEERS),
    "1 / density",
    "GFLOP/s",
    "error",
    "optimize(), s",
    "again, s",
]
TEXT = f"""
All is float32. The masks of *{nets.RESNET}* are those of a network that was pruned by magnitude and
trained (Deep Learning Matrix Collection, Gale et al. 2020: 54 weights, zeros where theirs are),
with random values; *{nets.RANDOM}* and all others have zeros at random positions. Norms are set so
that activations are of order one. MobileNetV1: its 1x1 convolutions are sparse. The others compute
with the zeros, except DeepSparse, which is built for them. *Rows*: images of a batch, or tokens.

Milliseconds: the median (10 %–90 % quantile) of turns of each contender, in rounds that run forward
and backward. A turn: every process at rest, the contender called untimed, then timed, each for
{1e3 * LEAST:g} ms or one call. Every contender's outputs were first compared with torch's in
float64: beyond {ALLOWED:g} of the largest, it is not timed.

*/ x*: how many times as fast as x demask is, x in its fastest form: ONNX Runtime with threads that
spin or wait, torch frozen or eager. *1 / density*: what leaving out the zeros could gain.
*GFLOP/s*: of demask, two operations for each use of a weight that is not zero. *Error*: of demask.
*Again*: optimize() with what it measured the first time."""


def cells(row: Row) -> list[Cell]:
    entry, case = row.entries[OURS], row.case
    speeds = (None if isnan(speed) else speed for speed in map(row.speed, PEERS))
    return [
        case.title,
        f"{case.sparsity:.0%}",
        case.rows,
        row.threads,
        *map(row.timings.get, WHO),
        *speeds,
        1 / (1 - case.sparsity),
        1e-9 * row.operations / row.timings[OURS].median,
        entry.error,
        row.prepared[OURS],
        row.notes[OURS]["again"],
    ]


def list_losses(rows: Sequence[Mapping[str, Any]]) -> str:
    """Per peer the settings in which it was faster, of all in which it ran."""
    lines = ["## Where something was faster than demask", ""]
    for peer in PEERS:
        run = [row for row in rows if row[f"/ {peer}"] is not None]
        losses = [
            f"{r['network']}, {r['zeros']}, {r['rows']} rows, {r['threads']} threads "
            f"({1 / r[f'/ {peer}']:.2f} times as fast)"
            for r in run
            if round(r[f"/ {peer}"], 2) < 1
        ]
        words = f": {'; '.join(losses)}." if losses else "."
        lines.append(f"- {peer}: in {len(losses)} of {len(run)}{words}")
    return "\n".join(lines)


def summarize(rows: Sequence[Mapping[str, Any]]) -> str:
    """In how many settings something is faster."""
    speeds = [[row[f"/ {peer}"] for peer in PEERS] for row in rows]
    lost = sum(any(speed is not None and round(speed, 2) < 1 for speed in row) for row in speeds)
    return f"something is faster than demask in {lost} of {len(rows)} settings"


def page(rows: Sequence[Row]) -> Page:
    failed = [
        f"- **{who}** fails in {row}: {row.entries[who].failure}."
        for row in rows
        for who in WHO
        if row.entries[who].failure not in ("", NOT_RUN)
    ]
    called = "\n".join([*(f"- **{who}**: {text}" for who, text in CALLED.items()), *failed])
    table = Table(HEAD, [*map(cells, rows)], 4, merge=True)
    return Page(
        "Sparse networks on the CPU, in demask and other runtimes",
        [TEXT, table, list_losses, f"## How each was called\n\n{called}"],
        summarize,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = str(PYTHON) if PYTHON.exists() else None
    parser.add_argument("--deepsparse", metavar="PYTHON", default=usual, help="of an environment that has it")
    parser.add_argument("--networks", nargs="+", choices=nets.KEYS, default=list(nets.KEYS))
    parser.add_argument("--only", default="", metavar="PATTERN", help="settings whose name has it")
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--output", type=Path, help="a page of its own, in place of the ledger")
    options = parser.parse_args()
    if options.deepsparse and shutil.which(options.deepsparse) is None:
        parser.error(f"--deepsparse: expected a Python that can be run, got {options.deepsparse!r}")
    try:
        packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    except PackageNotFoundError as error:
        sys.exit(f"{error.name} is not installed: `make bench` installs the bench extra")
    allocator, before, results = fix_allocator(), load_average(), []
    console, text = Console(), ""
    with Progress(console=console, transient=True) as bar:
        for row in rows(options, bar):
            results.append(row)
            deepsparse = row.notes.get(DEEPSPARSE, {}).get("version", NOT_RUN)
            run = Run.now(packages, f"DeepSparse {deepsparse}", allocator, before=before)
            text = save("cpu_sparse", page(results), run, options.output)
            forget()
    console.print(Markdown(text))


if __name__ == "__main__":
    main()
