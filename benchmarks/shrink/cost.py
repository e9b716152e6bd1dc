"""How long `demask.demask` itself takes: `python -m benchmarks run cost`.

A residual network of 56 layers must be done in 10 s, and a network of twice as many nodes must
take at most 2.4 times as long. Exits with 1 over a limit.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

import demask
from benchmarks.common.catalog import DEV, Benchmark
from benchmarks.common.ledger import Page, Run, Table, save
from benchmarks.shrink.residual import calls_of
from cifar import IMAGE, Block, ResNet, masked
from demask.graph.capture.capture import capture
from demask.machine.describe import load_average
from networks import randomised

BENCHMARK = Benchmark("seconds of demask() itself", "minutes", needs=(DEV,), quick="--runs 1")

LIMIT, RATIO = 10.0, 2.4
SIZES = (200, 400)  # nodes


class Chain(nn.Module):
    """Residual blocks of one width until the graph holds `nodes` calls: 7 per block, 4 around."""

    def __init__(self, nodes: int, width: int = 16):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(*(Block(width, width, 1) for _ in range((nodes - 4) // 7)))

    def forward(self, images: Tensor) -> Tensor:
        return self.blocks(torch.relu(self.norm(self.stem(images)))).mean((2, 3))


def network(make: Callable[[], nn.Module]) -> nn.Module:
    """The network, half of its channels masked, shifts nonzero."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    return masked(randomised(make(), generator), generator, shifts=True)


def seconds(work: Callable[[], object]) -> float:
    gc.collect()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path, help="a page of its own, in place of the ledger")
    options = parser.parse_args()
    torch.set_num_threads(1)
    builders: dict[str, Callable[[], nn.Module]] = {"ResNet-56": lambda: ResNet(56)}
    for size in SIZES:
        builders[f"{size} nodes"] = lambda size=size: Chain(size)
    models = {name: network(build) for name, build in builders.items()}
    images, before = torch.randn(2, *IMAGE), load_average()
    for model in models.values():
        demask.demask(model, (images,))  # a first call imports and compiles
    whole: dict[str, list[float]] = {name: [] for name in models}
    export: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(options.runs):  # in turns, so that a drift of the machine falls on all alike
        for name, model in models.items():
            whole[name].append(seconds(lambda model=model: demask.demask(model, (images,))))
            export[name].append(seconds(lambda model=model: capture(model, (images,))))
    small, large = (f"{size} nodes" for size in SIZES)
    ratio = median(whole[large]) / median(whole[small])
    head = ["network", "calls", "demask(), s", "fastest", "slowest", "of it torch.export, s"]
    lines = [
        [
            name,
            calls_of(model, (images,)),
            median(whole[name]),
            min(whole[name]),
            max(whole[name]),
            median(export[name]),
        ]
        for name, model in models.items()
    ]
    first = median(whole["ResNet-56"])
    summary = f"ResNet-56: {first:.2f} s (limit {LIMIT:g}); {large} / {small}: {ratio:.2f} (limit {RATIO:g})"
    text = f"Medians of {options.runs} runs in turns."
    page = Page("The time that demask() itself takes", [text, Table(head, lines)], summary)
    print(save("cost", page, Run.now("1 thread", before=before), options.output))
    ok = first < LIMIT and ratio <= RATIO
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
