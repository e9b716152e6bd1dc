"""Fully connected layers that run for N inputs at a time: `python -m benchmarks run batch`.

A layer of 1 GiB from a file, within 64 MiB: what is read, how much memory the process takes, how
long it takes with the file in the kernel's cache and not. And the fully connected layers of VGG-16,
in memory. Writes benchmarks/results/batch.md and .json; needs 1.1 GB in a temporary folder.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks import ROOT
from benchmarks.common.catalog import DEV, Benchmark
from benchmarks.common.tables import RESULTS, format_spread, load_average, markdown, provenance
from demask.files.weight_file import WeightFile
from demask.machine.describe import format_threads
from demask.machine.threads import set_threads
from demask.machine.timing import Timing, time_alternately
from demask.traverse.batching.batch import Batched, batch, traffic

BENCHMARK = Benchmark(
    "fully connected layers for N inputs at a time", "minutes", ("batch.md", "batch.json"),
    needs=(DEV, "1.1 GB in a temporary folder"), quick="--pairs 1 --threads 1",
)  # fmt: skip

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


def status(field: str) -> int:
    """Bytes of a field of this process's status in /proc."""
    text = Path("/proc/self/status").read_text()
    match = re.search(rf"{field}:\s+(\d+) kB", text)
    assert match is not None
    return int(match[1]) * 1024


def read_so_far() -> dict[str, int]:
    """Bytes requested by reads, and bytes that came from the disk."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {"requested": int(counters["rchar"]), "disk": int(counters["read_bytes"])}


def child(path: Path, way: str) -> dict[str, int]:
    """Peak memory above what Python and torch take, and bytes read, of sixteen inputs. Run in a
    process of its own; a small network first brings in what is imported late."""
    small = batch(nn.Linear(64, 64), (torch.zeros(2, 64),))
    small(torch.zeros(16, 64))
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    base, before = status("VmRSS"), read_so_far()
    if way == WAYS[2]:
        model = layer()
        model.load_state_dict(load_file(path), assign=True)
        with torch.inference_mode():
            model(x)
    else:
        streamed(path, 16 if way == WAYS[0] else 1)(x)
    after = read_so_far()
    return {"peak": status("VmHWM") - base, **{k: after[k] - before[k] for k in after}}


def measured(path: Path, way: str) -> dict[str, int]:
    """The result of `child`, the file not in the cache."""
    drop(path)
    command = [sys.executable, "-m", __name__, "--child", str(path), way]
    process = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    return json.loads(process.stdout.splitlines()[-1])


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


def file_rows(path: Path, pairs: int) -> list[dict[str, Any]]:
    """A row for each way to run sixteen inputs through the layer of 1 GiB."""
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1))
    seen = {way: measured(path, way) for way in WAYS}
    calls: dict[str, Callable[..., Any]] = {WAYS[0]: streamed(path, 16), WAYS[1]: streamed(path, 1)}
    # Pages that a process maps are not dropped: the file is mapped when this is done.
    late = time_alternately({w: cold(path, lambda c=c: c(x)) for w, c in calls.items()}, 3, 0)
    calls[WAYS[2]] = layer()
    calls[WAYS[2]].load_state_dict(load_file(path), assign=True)
    with torch.inference_mode():
        results = {way: call(x) for way, call in calls.items()}
        warm = time_alternately({w: lambda c=c: c(x) for w, c in calls.items()}, pairs, 1)
    expected = results[WAYS[2]]
    rows = []
    for way in WAYS:
        difference = (results[way] - expected).abs().max() / expected.abs().max()
        rows.append({
            "way": way, **seen[way], "warm": _numbers(warm[way]),
            "cold": _numbers(late[way]) if way in late else None,
            "difference": float(difference), "equal": torch.equal(results[way], expected),
        })  # fmt: skip
    return rows


def head_rows(pairs: int, threads: int) -> list[dict[str, Any]]:
    """A row for each number of inputs."""
    model = head()
    rows = []
    for n in (1, 4, 16, 64):
        x = torch.randn(n, HEAD[1][0], generator=torch.Generator().manual_seed(n))
        module = batch(model, (x[:1],), inputs=n, memory="1GiB")
        times = head_times(model, module, x, pairs)
        predicted = traffic(model, (x[:1],), inputs=n, memory="1GiB")
        with torch.inference_mode():
            equal = torch.equal(module(x), model(x))
        rows.append({"inputs": n, "threads": threads, "read": predicted.weight_bytes_read,
                     "unbatched": predicted.unbatched, "equal": equal,
                     **{way: _numbers(timing) for way, timing in times.items()}})  # fmt: skip
    return rows


def head_times(model: nn.Module, module: nn.Module, x: Tensor, pairs: int) -> dict[str, Timing]:
    """All n inputs: one by one in PyTorch, as one batch in PyTorch, and by `batch()`."""

    def single() -> None:
        for k in range(len(x)):
            model(x[k : k + 1])

    with torch.inference_mode():
        calls = {"single": single, "one_batch": lambda: model(x), "ours": lambda: module(x)}
        return time_alternately(calls, pairs, 1)


def _numbers(timing: Timing) -> dict[str, float]:
    return {"median": timing.median, "low": timing.low, "high": timing.high, "count": timing.count}


# -------------------------------------------------------------------------------------------- page


def cells(results: Mapping[str, Any]) -> tuple[list[list[str]], list[list[str]]]:
    """The lines of both tables."""
    files = [
        [row["way"], f"{row['requested'] / 2**30:.2f}", f"{row['disk'] / 2**30:.2f}",
         f"{row['peak'] / 2**20:,.0f}", _words(row["warm"]),
         _words(row["cold"]) if row["cold"] else "", f"{row['difference']:.0e}",
         "yes" if row["equal"] else "no"]
        for row in results["file"]
    ]  # fmt: skip
    heads = [
        [str(row["inputs"]), str(row["threads"]), f"{row['unbatched'] / 1e6:,.0f}",
         f"{row['read'] / 1e6:,.0f}", *(_words(row[k]) for k in ("single", "one_batch", "ours")),
         f"{row['single']['median'] / row['ours']['median']:.2f}",
         f"{row['one_batch']['median'] / row['ours']['median']:.2f}",
         "yes" if row["equal"] else "no"]
        for row in results["head"]
    ]  # fmt: skip
    return files, heads


def page(results: Mapping[str, Any]) -> str:
    files, heads = cells(results)
    counts = {row["warm"]["count"] for row in results["file"]}
    return f"""# Fully connected layers for N inputs at a time

{results["machine"]}

Milliseconds are the median (10 %–90 % quantile) of alternated calls in one process.

## A layer of 1 GiB in a file, within {MEMORY}

16384 × 16384, float32, sixteen inputs, {format_threads(results["threads"])}; {max(counts)} calls
with the file in the kernel's cache, 3 with its pages dropped before each call. *Read*: bytes
requested by reads (a mapped file is read by page faults, which are no requests), and those that
came from the disk, of one call with no page in the cache. This machine's memory holds the file, so
that only the first of sixteen readings reaches the disk; where it does not, all do. *Peak*:
resident memory above what Python and torch take, of building the network and one call, in a process
of its own.
*Difference*: from PyTorch's result for the batch of sixteen, relative to the largest output;
*equal*: bit by bit.

{markdown(FILE_HEAD, files)}

## The fully connected layers of VGG-16 in memory

{HEAD[0]}, float32, {results["head_bytes"] / 1e6:,.0f} MB of weights. *One by one*: PyTorch, called
for each input; *as one batch*: PyTorch, called once; *batch()*: the same inputs
through `demask.traverse.batch(model, args, inputs=N)`, whose calls are those of the batch: equal
bits, and no faster than PyTorch is when it gets all inputs at once.

{markdown(HEAD_HEAD, heads)}

## Weight traffic of VGG-16

Sixteen images, the convolutions image by image: 15/16 of the traffic of the fully connected layers
is saved, and with nine tenths of the weights there, 84 % of all.

```
{results["traffic"]}
```
"""


FILE_HEAD = [
    "way", "read, GiB", "from disk, GiB", "peak, MiB", "cached, ms", "not cached, ms",
    "difference", "equal",
]  # fmt: skip
HEAD_HEAD = [
    "inputs", "threads", "weights one by one, MB", "weights read, MB", "one by one, ms",
    "as one batch, ms", "batch(), ms", "times one by one", "times one batch", "equal",
]  # fmt: skip


def _words(numbers: Mapping[str, Any]) -> str:
    return format_spread(Timing(**numbers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7, help="alternated calls of each")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--output", type=Path, default=RESULTS / "batch.md")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(Path(options.child[0]), options.child[1])))
        return
    before = load_average()
    results: dict[str, Any] = {"threads": max(options.threads), "head": []}
    results["head_bytes"] = sum(p.nbytes for p in head().parameters() if p.ndim > 1)
    with tempfile.TemporaryDirectory() as folder, set_threads(max(options.threads)):
        path = Path(folder) / "layer.safetensors"
        values = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
        WeightFile.write(path, {"weight": values / WIDTH**0.5})
        del values
        results["file"] = file_rows(path, options.pairs)
    for threads in options.threads:
        with set_threads(threads):
            results["head"] += head_rows(options.pairs, threads)
    images = (torch.zeros(2, 3, 224, 224),)
    results["traffic"] = str(traffic(vgg(), images, at_once=1, memory="1GiB"))
    results["machine"] = provenance("batch", before=before)
    options.output.write_text(page(results))
    options.output.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    print(page(results))


if __name__ == "__main__":
    main()
