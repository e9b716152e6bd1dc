"""Networks with unstructured zeros in demask.optimize, ONNX Runtime, torch, OpenVINO and
DeepSparse, timed in turns: `python -m benchmarks run cpu_sparse`.

DeepSparse 1.8.0 wants packages of its own, so an environment of its own (`make bench` sets it up):

    python3.11 -m venv .venv-deepsparse
    .venv-deepsparse/bin/pip install --only-binary=:all: deepsparse==1.8.0
    python -m benchmarks run cpu_sparse --deepsparse .venv-deepsparse/bin/python

The masks of the pruned ResNet-50 are in shared/data next to the project. Writes
benchmarks/results/cpu_sparse.md and .json. `--quick` is a fast look at four settings, which writes
nothing without `--output`.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import dlmc
import sparse_networks as nets
from benchmarks.common import limits
from benchmarks.common.catalog import BENCH, SHARED_DATA, Benchmark
from benchmarks.common.tables import RESULTS, load_average, provenance
from benchmarks.sparse.cpu_sparse_page import (
    GOAL,
    SHORT,
    Row,
    goal_lines,
    page,
    short_cells,
    stored,
    time_cells,
)
from benchmarks.sparse.sparse_engines import (
    DEEPSPARSE,
    NOT_RUN,
    WHO,
    Entry,
    Setting,
    entered,
    exact,
    export,
)
from demask.machine.allocator import fix_allocator
from demask.machine.describe import format_threads

BENCHMARK = Benchmark(
    "unstructured zeros: optimize(), ONNX Runtime, torch, OpenVINO and DeepSparse", "not timed",
    ("cpu_sparse.md", "cpu_sparse.json", "cpu_sparse_batch16.md", "cpu_sparse_batch16.json"),
    needs=(BENCH, SHARED_DATA, "`.venv-deepsparse` for DeepSparse"), quick="--quick",
)  # fmt: skip

ALLOWED = 1e-4  # relative: float32 stays below 1e-5 here, storage in 16 bits is above 1e-3
ROUNDS, FEW = 21, 5
QUICK = ("ResNet-50, pruned, 90%, batch 1", "Linear 768 to 3072, 90%, tokens")
PACKAGES = ("onnxruntime", "onnx", "openvino", "llvmlite", "torchvision")


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


def rounds(
    entries: Mapping[str, Entry], count: int, game: limits.Compiled
) -> tuple[dict[str, list[float]], list[float]]:
    """The seconds of every contender's turns, forward and backward in alternation, and the latency
    between the cores in each round."""
    engines = {who: entry.engine for who, entry in entries.items() if entry.engine}
    samples: dict[str, list[float]] = {who: [] for who in engines}
    latencies = []
    for turn in range(count):
        latencies.append(limits.latency(game))
        for who in list(engines)[:: -1 if turn % 2 else 1]:
            samples[who].append(engines[who].turn())
    return samples, latencies


@torch.no_grad()
def measured(
    case: nets.Case, threads: int, count: int, deepsparse: str | None, game: limits.Compiled
) -> Row:
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
        samples, latencies = rounds(entries, count, game)
    engines = {who: entry.engine for who, entry in entries.items() if entry.engine}
    return Row(
        case, threads, sum(map(nets.nonzeros, nets.layers(model).values())),
        operations(model, x), {who: replace(e, engine=None) for who, e in entries.items()},
        {who: engine.seconds for who, engine in engines.items()},
        {who: engine.notes for who, engine in engines.items() if engine.notes},
        samples, latencies,
    )  # fmt: skip


def chosen(options: argparse.Namespace) -> list[nets.Case]:
    """The settings that were chosen; SystemExit where their masks are not there."""
    titles = {nets.KEYS[key] for key in options.networks}
    cases = [
        case for case in nets.cases()
        if case.title in titles and (not options.quick or str(case).startswith(QUICK))
        and re.search(options.only, str(case))
    ]  # fmt: skip
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
    game = limits.compiled(limits.PING)
    for case, threads in tasks:
        bar.update(step, description=f"{case}, {format_threads(threads)}")
        row = measured(case, threads, options.rounds, options.deepsparse, game)
        bar.console.log(case.title, *time_cells(row), sep="; ")
        bar.advance(step)
        yield row


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--deepsparse", metavar="PYTHON", help="of an environment that has it")
    parser.add_argument("--networks", nargs="+", choices=nets.KEYS, default=list(nets.KEYS))
    parser.add_argument("--only", default="", metavar="PATTERN", help="settings whose name has it")
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, help=f"{ROUNDS}, or {FEW} where quick")
    parser.add_argument("--quick", action="store_true", help="a few settings, a few rounds")
    parser.add_argument("--output", type=Path, help="the .md file; a .json file is put next to it")
    options = parser.parse_args()
    if options.rounds is None:
        options.rounds = FEW if options.quick else ROUNDS
    if options.deepsparse and shutil.which(options.deepsparse) is None:
        parser.error(f"--deepsparse: expected a Python that can be run, got {options.deepsparse!r}")
    if options.output is None and not options.quick:
        options.output = RESULTS / "cpu_sparse.md"
    return options


def versions() -> str:
    """The peers' versions; SystemExit where one is not installed."""
    try:
        return ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    except PackageNotFoundError as error:
        sys.exit(
            f"{error.name} is not installed: `make bench` installs it, as the bench extra does"
        )


def peaks(threads: Sequence[int]) -> list[limits.Peak]:
    return [limits.peak(count) for count in sorted({1, *threads})]


def show(console: Console, title: str, head: Sequence[str], lines: Iterable[list[str]]) -> None:
    table = Table(*head, title=title)
    for line in lines:
        table.add_row(*line)
    console.print(table)


def main() -> None:
    options, packages = arguments(), versions()
    allocator, before = fix_allocator(), load_average()
    limit = {"before": peaks(options.threads)}
    console = Console()
    with Progress(console=console, transient=True) as bar:
        results = list(rows(options, bar))
    limit["after"] = peaks(options.threads)
    notes = (row.notes.get(DEEPSPARSE, {}).get("version") for row in results)
    deepsparse = next(filter(None, notes), NOT_RUN)
    words = provenance("cpu_sparse", packages, f"DeepSparse {deepsparse}", allocator, before=before)
    show(console, words, SHORT, map(short_cells, results))
    show(console, "goals", GOAL, goal_lines(results))
    if options.output:
        options.output.parent.mkdir(exist_ok=True)
        options.output.write_text(page(results, words, limit, ALLOWED))
        options.output.with_suffix(".json").write_text(stored(results, words, limit))


if __name__ == "__main__":
    main()
