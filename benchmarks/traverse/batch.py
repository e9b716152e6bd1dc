"""Fully connected layers that run for N inputs at a time: `python -m benchmarks run batch`.

A layer of 1 GiB from a file, within 64 MiB: what is read, how much memory the process takes, how
long it takes with the file in the kernel's cache and not. And the fully connected layers of VGG-16,
in memory. Needs 1.1 GB in a temporary folder.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markdown import Markdown
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.common.catalog import DEV, Benchmark
from benchmarks.common.inductor import forget, inductor
from benchmarks.common.ledger import Cell, Page, Run, Table, save
from benchmarks.traverse.traverse_memory import MIB, Failed, fresh, peaked
from demask.files.weight_file import WeightFile
from demask.machine.clock import Timing, race, set_threads
from demask.machine.describe import format_threads, load_average
from demask.traverse.batching.batch import Batched, batch, traffic

BENCHMARK = Benchmark(
    "fully connected layers for N inputs at a time",
    "minutes",
    needs=(DEV, "1.1 GB in a temporary folder"),
    quick="--pairs 1 --threads 1",
)

WIDTH, MEMORY = 16384, "64MiB"
HEAD = ("25088 → 4096 → 4096 → 1000", (25088, 4096, 4096, 1000))
WAYS = ("16 at a time", "one by one", "PyTorch, file mapped")


def layer() -> Any:
    """The layer of 1 GiB without its weights."""
    with torch.device("meta"):
        return nn.Linear(WIDTH, WIDTH, bias=False)


def streamed(path: Path, inputs: int) -> Batched:
    """The layer, its weights in a file."""
    return batch(layer(), (torch.zeros(2, WIDTH),), weights=path, memory=MEMORY, inputs=inputs)


def head() -> nn.Sequential:
    """The fully connected layers of VGG-16, with random weights."""
    sizes = HEAD[1]
    layers = [module for a, b in pairwise(sizes) for module in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1]).eval()


def vgg() -> nn.Module:
    """VGG-16, whose fully connected layers hold nine tenths of its weights."""
    widths = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
    layers: list[nn.Module] = []
    last = 3
    for width in widths:
        layers += [nn.Conv2d(last, width, 3, padding=1), nn.ReLU()] if width else [nn.MaxPool2d(2)]
        last = width or last
    return nn.Sequential(*layers, nn.Flatten(), *head())


# ------------------------------------------------------------------------ memory, in a new process


def read_so_far() -> tuple[int, int]:
    """Bytes requested by reads, and bytes that came from the disk."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["rchar"]), int(counters["read_bytes"])


def child(path: Path, way: str) -> tuple[float, float, float]:
    """GiB requested by reads, GiB that came from the disk, and MiB of peak memory above what Python
    and torch take, of sixteen inputs; a small network first brings in what is imported late."""
    batch(nn.Linear(64, 64), (torch.zeros(2, 64),))(torch.zeros(16, 64))
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1))

    def call() -> None:
        if way == WAYS[2]:
            model = layer()
            model.load_state_dict(load_file(path), assign=True)
            with torch.inference_mode():
                model(x)
        else:
            streamed(path, 16 if way == WAYS[0] else 1)(x)

    before = read_so_far()
    _, peak, _ = peaked(call)
    requested, disk = ((b - a) / 2**30 for a, b in zip(before, read_so_far(), strict=True))
    return requested, disk, peak / MIB


def measured(path: Path, way: str) -> tuple[float, float, float]:
    """The result of `child`, in a process of its own, the file not in the cache."""
    drop(path)
    answer = fresh(child, path, way)
    if isinstance(answer, Failed):
        raise SystemExit(f"{way}: {answer.reason}")
    return answer


def drop(path: Path) -> None:
    """Have the kernel forget the file's pages."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


# ----------------------------------------------------------------------------------------- timings


def cold(path: Path, call: Callable[[], Any]) -> Callable[[], Any]:
    """The call with the file forgotten first (that takes no time worth telling)."""

    def run() -> Any:
        drop(path)
        return call()

    return run


def file_rows(path: Path, pairs: int) -> list[list[Cell]]:
    """A row for each way to run sixteen inputs through the layer of 1 GiB."""
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1))
    seen = {way: measured(path, way) for way in WAYS}
    calls: dict[str, Callable[..., Any]] = {WAYS[0]: streamed(path, 16), WAYS[1]: streamed(path, 1)}
    # Pages that a process maps are not dropped: the file is mapped when this is done.
    late = Timing.of_each(race({w: cold(path, lambda c=c: c(x)) for w, c in calls.items()}, 3, 0))
    calls[WAYS[2]] = layer()
    calls[WAYS[2]].load_state_dict(load_file(path), assign=True)
    with torch.inference_mode():
        results = {way: call(x) for way, call in calls.items()}
        warm = Timing.of_each(race({w: lambda c=c: c(x) for w, c in calls.items()}, pairs, 1))
    expected = results[WAYS[2]]
    rows = []
    for way in WAYS:
        difference = float((results[way] - expected).abs().max() / expected.abs().max())
        equal = "yes" if torch.equal(results[way], expected) else "no"
        rows.append([way, *seen[way], warm[way], late.get(way), difference, equal])
    return rows


def head_rows(pairs: int, threads: int) -> list[list[Cell]]:
    """A row for each number of inputs."""
    model = head()
    rows = []
    for n in (1, 4, 16, 64):
        x = torch.randn(n, HEAD[1][0], generator=torch.Generator().manual_seed(n))
        module = batch(model, (x[:1],), inputs=n, memory="1GiB")
        single, whole, compiled, ours = head_times(model, module, x, pairs)
        predicted = traffic(model, (x[:1],), inputs=n, memory="1GiB")
        with torch.no_grad():
            equal = "yes" if torch.equal(module(x), model(x)) else "no"
        rows.append(
            [
                n,
                threads,
                predicted.unbatched / 1e6,
                predicted.weight_bytes_read / 1e6,
                single,
                whole,
                compiled,
                ours,
                single.median / ours.median,
                whole.median / ours.median,
                equal,
            ]
        )
        forget()
    return rows


def head_times(model: nn.Module, module: nn.Module, x: Tensor, pairs: int) -> list[Timing]:
    """All n inputs: one by one in PyTorch, as one batch in PyTorch, that by torch.compile, and by
    `batch()`."""

    def single() -> None:
        for k in range(len(x)):
            model(x[k : k + 1])

    calls = {"single": single, "one batch": lambda: model(x), "compiled": inductor(model, x), "ours": lambda: module(x)}
    with torch.no_grad():
        return [*Timing.of_each(race(calls, pairs, 1)).values()]


def traffic_rows() -> list[list[Cell]]:
    """The weights of VGG-16 for sixteen images, the convolutions image by image."""
    images = torch.zeros(2, 3, 224, 224)
    every = traffic(vgg(), (images,), at_once=1, memory="1GiB")
    return [
        [name, part.weight_bytes / 1e6, part.unbatched / 1e6, part.weight_bytes_read / 1e6, 100 * part.saved]
        for name, part in (("fully connected", every.connected), ("all", every))
    ]


# -------------------------------------------------------------------------------------------- page

FILE_HEAD = ["way", "read, GiB", "from disk, GiB", "peak, MiB", "cached, ms", "not cached, ms", "difference", "equal"]
HEAD_HEAD = [
    "inputs",
    "threads",
    "weights one by one, MB",
    "weights read, MB",
    "one by one, ms",
    "as one batch, ms",
    "torch.compile, ms",
    "batch(), ms",
    "times one by one",
    "times one batch",
    "equal",
]
TRAFFIC_HEAD = ["layers", "weights, MB", "one by one, MB", "read, MB", "saved, %"]


def page(
    files: Sequence[list[Cell]], heads: Sequence[list[Cell]], saved: Sequence[list[Cell]], threads: int, calls: int
) -> Page:
    """threads, calls: of the first table."""
    file_text = f"""
Milliseconds are the median (10 %–90 % quantile) of alternated calls in one process.

## A layer of 1 GiB in a file, within {MEMORY}

16384 × 16384, float32, sixteen inputs, {format_threads(threads)}; calls with the file in the
kernel's cache: {calls}, with its pages dropped before each call: 3. *Read*: bytes requested by
reads (a mapped file is read by page faults, which are no requests), and those that came from the
disk, of one call with no page in the cache. This machine's memory holds the file, so that only the
first of sixteen readings reaches the disk; where it does not, all do. *Peak*: resident memory above
what Python and torch take, of building the network and one call, in a process of its own.
*Difference*: from PyTorch's result for the batch of sixteen, relative to the largest output;
*equal*: bit by bit."""
    head_text = f"""
## The fully connected layers of VGG-16 in memory

{HEAD[0]}, float32. *One by one*: PyTorch, called for each input; *as one batch*: PyTorch, called
once; *torch.compile*: the same, compiled; *batch()*: the same inputs through
`demask.traverse.batch(model, args, inputs=N)`, whose calls are those of the batch: equal bits, and
no faster than PyTorch is when it gets all inputs at once."""
    traffic_text = """
## Weight traffic of VGG-16

Sixteen images, the convolutions image by image: 15/16 of the traffic of the fully connected layers
is saved, and with nine tenths of the weights there, 84 % of all."""
    ratios = [[x for x in row[-3:-1] if isinstance(x, float)] for row in heads]
    single, whole = zip(*ratios, strict=True)
    summary = (
        f"{min(single):.2f} to {max(single):.2f} times as fast as inputs one by one, "
        f"{min(whole):.2f} to {max(whole):.2f} times as one batch; slower than that in "
        f"{sum(ratio < 1 for ratio in whole)} of {len(whole)}"
    )
    parts = [
        file_text,
        Table(FILE_HEAD, files),
        head_text,
        Table(HEAD_HEAD, heads, 2),
        traffic_text,
        Table(TRAFFIC_HEAD, saved),
    ]
    return Page("Fully connected layers for N inputs at a time", parts, summary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7, help="alternated calls of each")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--output", type=Path, help="a page of its own, in place of the ledger")
    options = parser.parse_args()
    before, most, heads = load_average(), max(options.threads), list[list[Cell]]()
    with tempfile.TemporaryDirectory() as folder, set_threads(most):
        path = Path(folder) / "layer.safetensors"
        values = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
        WeightFile.write(path, {"weight": values / WIDTH**0.5})
        del values
        files = file_rows(path, options.pairs)
    for threads in options.threads:
        with set_threads(threads):
            heads += head_rows(options.pairs, threads)
    entered = page(files, heads, traffic_rows(), most, options.pairs)
    Console().print(Markdown(save("batch", entered, Run.now(before=before), options.output)))


if __name__ == "__main__":
    main()
