"""Two processes with two threads each on the same two cores: `python -m benchmarks run
two_processes`.

Writes benchmarks/results/two_processes.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from rich.progress import Progress
from torch import Tensor, nn

import cifar
import demask
import networks
from benchmarks import ROOT
from benchmarks.common.catalog import DEV, SHARED_DATA, Benchmark
from benchmarks.common.tables import RESULTS, command, markdown
from benchmarks.optimize.call_cost import as_one_segment
from benchmarks.optimize.runtime import call

BENCHMARK = Benchmark(
    "two processes with two threads each on two cores, ours, torch and ONNX Runtime",
    "about 30 s a network", ("two_processes.md",), needs=(DEV, SHARED_DATA),
    quick="--networks ResNet-20 --threads 2 --seconds 2",
)  # fmt: skip

OURS, TORCH, ORT = "segments", "original in PyTorch", "ONNX Runtime, demasked"
KINDS = (OURS, TORCH, ORT)


def half_masked(name: str) -> tuple[nn.Module, Tensor]:
    """A network with half of its channels masked, and an image."""
    generator = torch.Generator().manual_seed(0)
    if name == "ResNet-20":
        model = cifar.masked(cifar.trained(20), generator, shifts=False)
        return model.eval(), torch.randn(1, 3, 32, 32)
    model = networks.mask(networks.built("resnet18", generator).eval(), generator)
    return model.eval(), torch.randn(1, 3, 224, 224)


def contender(name: str, kind: str, threads: int) -> Callable[[], object]:
    """A call of the network."""
    torch.set_num_threads(threads)
    model, image = half_masked(name)
    if kind == TORCH:
        return lambda: model(image)
    if kind == OURS:
        network = as_one_segment(model, image)
        return lambda: network(image)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "demasked.onnx"
        demask.to_onnx(demask.demask(model, (image,), result="graph"), path, (image,))
        return call(path, (image,), threads)


def work(name: str, kind: str, threads: int, seconds: float) -> None:
    """For each line of standard input, call the network for some seconds and print the seconds of
    each call as one line of JSON. Prints "ready" first."""
    run = contender(name, kind, threads)
    with torch.inference_mode():
        for _ in range(10):
            run()
        print("ready", flush=True)
        for _ in sys.stdin:
            taken, start = [], perf_counter()
            while perf_counter() - start < seconds:
                before = perf_counter()
                run()
                taken.append(perf_counter() - before)
            print(json.dumps(taken), flush=True)


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of the calls of one process alone, and of each of two at the same time."""

    name: str
    kind: str
    threads: int
    alone: Sequence[float]
    together: Sequence[Sequence[float]]

    @property
    def throughput(self) -> float:
        """Calls of both processes in the time of one call of a process that is alone."""
        rates = [len(taken) / sum(taken) for taken in self.together]
        return sum(rates) / (len(self.alone) / sum(self.alone))


def rows(
    chosen: Sequence[str], threads: Sequence[int], pairs: int, seconds: float, bar: Progress
) -> Iterator[Row]:
    step = bar.add_task("", total=len(chosen) * len(threads) * len(KINDS))
    for name in chosen:
        for count in threads:
            for kind in KINDS:
                bar.update(step, description=f"{name}, {kind}")
                yield measured(name, kind, count, seconds)
                bar.advance(step)


def measured(name: str, kind: str, threads: int, seconds: float) -> Row:
    words = [sys.executable, "-m", __spec__.name, name, kind, str(threads), str(seconds)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("OMP_NUM_THREADS", None)
    with ExitStack() as stack:
        workers = [
            stack.enter_context(subprocess.Popen(
                words, cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE))
            for _ in range(2)
        ]  # fmt: skip
        for worker in workers:
            if _line(worker) != "ready":
                raise RuntimeError(f"expected a worker of {kind} that is ready")
        (alone,), together = turn(workers[:1]), turn(workers)
        for worker in workers:
            worker.stdin.close()
    return Row(name, kind, threads, alone, together)


def turn(workers: Sequence[subprocess.Popen[str]]) -> list[list[float]]:
    """The seconds of calls of workers that work at the same time."""
    for worker in workers:
        worker.stdin.write("go\n")
        worker.stdin.flush()
    return [json.loads(_line(worker)) for worker in workers]


def _line(worker: subprocess.Popen[str]) -> str:
    return worker.stdout.readline().strip()


HEAD = [
    "network", "threads each", "contender", "alone: median, ms", "99 %, ms",
    "two: median, ms", "99 %, ms", "calls of both, per s", "throughput to one alone",
]  # fmt: skip


def cells(row: Row) -> list[str]:
    both = [seconds for taken in row.together for seconds in taken]
    quantiles = [1e3 * float(np.quantile(taken, q)) for taken in (row.alone, both)
                 for q in (0.5, 0.99)]  # fmt: skip
    rate = sum(len(taken) / sum(taken) for taken in row.together)
    return [row.name, str(row.threads), row.kind, *(f"{q:.2f}" for q in quantiles), f"{rate:.0f}",
            f"{row.throughput:.2f}"]  # fmt: skip


def verdict(rows: Sequence[Row]) -> str:
    """Where segments lose more than torch does."""
    shares: Mapping[tuple[str, int, str], float] = {
        (row.name, row.threads, row.kind): row.throughput for row in rows
    }
    settings = [(name, count) for name, count, kind in shares
                if kind == OURS and (name, count, TORCH) in shares]  # fmt: skip
    worse = [f"{name}, {count} threads" for name, count in settings
             if shares[name, count, OURS] < shares[name, count, TORCH]]  # fmt: skip
    return ", ".join(worse) or "nowhere"


def page(rows: Sequence[Row], words: str) -> str:
    return f"""# Two processes on the same cores

{words}

Each process calls the network again and again, alone and then both at the same time, with as many
threads each as there are cores. Half of the channels are masked; batch 1, float32. *Segments*: the
demasked network with all layers in segments. Threads of ONNX Runtime wait without spinning.
*Throughput*: calls of both per second over those of one alone; 1 where nothing is lost.

Segments keep less of their throughput than torch: {verdict(rows)}.

{markdown(HEAD, [cells(row) for row in rows])}
"""


def main() -> None:
    command(__doc__, rows, HEAD, cells, page, RESULTS / "two_processes.md", 5.0,
            ["ResNet-20", "ResNet-18"])  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) == 5:
        work(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
    else:
        main()
