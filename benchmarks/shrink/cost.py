"""How long `demask.demask` itself takes: `python -m benchmarks run cost`.

A residual network of 56 layers must be done in 10 s, and a network of twice as many nodes must
take at most 2.4 times as long. Writes benchmarks/results/cost.md; exits with 1 over a limit.
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
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import demask
from benchmarks.common.catalog import DEV, Benchmark
from benchmarks.common.tables import RESULTS, load_average, markdown, provenance
from benchmarks.shrink.residual import calls_of
from cifar import IMAGE, Block, ResNet, masked
from demask.graph.capture.capture import capture
from networks import randomised

BENCHMARK = Benchmark(
    "seconds of demask() itself", "minutes", ("cost.md",), needs=(DEV,), quick="--runs 1",
)  # fmt: skip

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
    parser.add_argument("--output", type=Path, default=RESULTS / "cost.md")
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
    head = ["network", "calls", "demask(), s", "fastest–slowest", "of it torch.export, s"]
    lines = [
        [name, str(calls_of(model, (images,))), f"{median(whole[name]):.2f}",
         f"{min(whole[name]):.2f}–{max(whole[name]):.2f}", f"{median(export[name]):.2f}"]
        for name, model in models.items()
    ]  # fmt: skip
    ok = median(whole["ResNet-56"]) < LIMIT and ratio <= RATIO
    verdict = (
        f"ResNet-56: {median(whole['ResNet-56']):.2f} s (limit {LIMIT:g}). "
        f"{large} / {small}: {ratio:.2f} (limit {RATIO:g})."
    )
    words = (
        f"{provenance('cost', '1 thread', before=before)} Medians of {options.runs} runs in turns."
    )
    table = Table(*head, title=f"{words}\n{verdict}")
    for line in lines:
        table.add_row(*line)
    Console().print(table)
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(
        "# The time that demask() itself takes\n\n"
        f"{words}\n\n{markdown(head, lines)}\n\n{verdict}\n"
    )
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
