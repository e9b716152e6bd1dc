"""Two processes with two threads each on the same two cores: `python -m benchmarks run
two_processes`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
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
from benchmarks.common.command import command
from benchmarks.common.inductor import NAME, inductor
from benchmarks.common.ledger import Cell, Page, Table
from benchmarks.optimize.call_cost import as_one_segment
from benchmarks.optimize.runtime import call

BENCHMARK = Benchmark(
    "two processes on the same cores: ours, torch, torch.compile and ONNX Runtime",
    "about 2 minutes a network",
    needs=(DEV, SHARED_DATA),
    quick="--networks ResNet-20 --threads 2 --seconds 2",
    measures=("exec", "sparse/segment", "kernels"),
)

OURS, TORCH, ORT = "segments", "original in PyTorch", "ONNX Runtime, demasked"
COMPILED = f"original in {NAME}"
KINDS = (OURS, TORCH, COMPILED, ORT)


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
    if kind == COMPILED:
        return inductor(model, image)
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


def rows(chosen: Sequence[str], threads: Sequence[int], pairs: int, seconds: float, bar: Progress) -> Iterator[Row]:
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
            stack.enter_context(
                subprocess.Popen(
                    words, cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
            )
            for _ in range(2)
        ]
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
    "network",
    "threads each",
    "contender",
    "alone, ms",
    "alone: 99 %, ms",
    "two, ms",
    "two: 99 %, ms",
    "calls of both, per s",
    "throughput to one alone",
]


def cells(row: Row) -> list[Cell]:
    both = [seconds for taken in row.together for seconds in taken]
    quantiles = [1e3 * float(np.quantile(taken, q)) for taken in (row.alone, both) for q in (0.5, 0.99)]
    rate = sum(len(taken) / sum(taken) for taken in row.together)
    return [row.name, row.threads, row.kind, *quantiles, rate, row.throughput]


def page(rows: Sequence[Row]) -> Page:
    text = """
Each process calls the network again and again, alone and then both at the same time. Half of the
channels are masked; batch 1, float32. *Segments*: the demasked network with all layers in segments.
Threads of ONNX Runtime wait without spinning. Medians and 99 % quantiles. *Throughput*: calls of
both per second over those of one alone; 1 where nothing is lost with as many threads each as there
are cores."""
    rates = {(row.name, row.threads, row.kind): row.throughput for row in rows}
    ours = {setting[:2]: share for setting, share in rates.items() if setting[2] == OURS}
    less = sum(share < rates.get((*setting, TORCH), 0.0) for setting, share in ours.items())
    span = f"{min(ours.values()):.2f} to {max(ours.values()):.2f}" if ours else "not measured"
    summary = (
        f"calls of two processes over those of one alone: {span} in segments, less than "
        f"torch keeps in {less} of {len(ours)}"
    )
    table = Table(HEAD, [*map(cells, rows)], 3)
    return Page("Two processes on the same cores", [text, table], summary)


def main() -> None:
    command("two_processes", __doc__, rows, page, 5.0, ["ResNet-20", "ResNet-18"])


if __name__ == "__main__":
    if len(sys.argv) == 5:
        work(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
    else:
        main()
