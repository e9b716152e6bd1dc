"""Networks that `tile` runs in bands, and in parts on the kernels of segments where it chooses them.

    python -m benchmarks run traverse_parts

Small networks for images, as upscalers and denoisers are; random weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from time import perf_counter

import torch
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import track
from torch import Tensor, nn

from benchmarks.common.catalog import DEV, Benchmark
from benchmarks.common.ledger import Cell, Page, Run, Table, save
from demask.machine.allocator import fix_allocator
from demask.machine.clock import Timing, race, set_threads
from demask.machine.describe import load_average
from demask.traverse import tile
from demask.traverse.execution import stage_parts

BENCHMARK = Benchmark(
    "small networks for images, tiled in bands and in parts", "minutes", needs=(DEV,), quick="--sizes 256 --pairs 2"
)

HEAD = (
    "network", "size", "threads", "budget, MiB", "segments", "bands", "tile()", "untiled torch", "bands / tile()",
    "torch / tile()", "peak, bands, MiB", "peak, MiB", "planned, s", "again, s", "without parts, s", "difference",
)  # fmt: skip
MIB = 2**20


def conv(inner: int, outer: int, size: int = 3, **more: int) -> nn.Conv2d:
    """A convolution that retains rows and columns."""
    return nn.Conv2d(inner, outer, size, padding=size // 2, **more)


class Residual(nn.Module):
    """A block of EDSR (Lim et al. 2017)."""

    def __init__(self, width: int):
        super().__init__()
        self.body = nn.Sequential(conv(width, width), nn.ReLU(), conv(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def fsrcnn() -> nn.Module:
    """FSRCNN(56, 12, 4) (Dong et al. 2016), with pixels shuffled in place of its last deconvolution."""
    middle = [layer for _ in range(4) for layer in (conv(12, 12), nn.PReLU(12))]
    first = (conv(3, 56, 5), nn.PReLU(56), conv(56, 12, 1), nn.PReLU(12))
    return nn.Sequential(*first, *middle, conv(12, 56, 1), nn.PReLU(56), conv(56, 12), nn.PixelShuffle(2))


def separable() -> nn.Module:
    """Four depthwise and pointwise layers of 32 channels."""
    layers = [layer for _ in range(4) for layer in (conv(32, 32, groups=32), nn.ReLU6(), conv(32, 32, 1))]
    return nn.Sequential(conv(3, 32), *layers, conv(32, 3))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "ESPCN": lambda: nn.Sequential(
        conv(3, 64, 5), nn.ReLU(), conv(64, 32), nn.ReLU(), conv(32, 12), nn.PixelShuffle(2)
    ),
    "FSRCNN": fsrcnn,
    "SRCNN": lambda: nn.Sequential(conv(3, 64, 9), nn.ReLU(), conv(64, 32, 5), nn.ReLU(), conv(32, 3, 5)),
    "separable": separable,
    "EDSR, 2 blocks of 32": lambda: nn.Sequential(
        conv(3, 32), Residual(32), Residual(32), conv(32, 12), nn.PixelShuffle(2)
    ),
    "dense, 4 of 32": lambda: nn.Sequential(
        conv(3, 32), *[layer for _ in range(4) for layer in (nn.ReLU(), conv(32, 32))], nn.ReLU(), conv(32, 3)
    ),
    "DnCNN-17": lambda: nn.Sequential(
        conv(3, 64), nn.ReLU(), *[layer for _ in range(15) for layer in (conv(64, 64), nn.ReLU())], conv(64, 3)
    ),
}


def row(name: str, size: int, threads: int, budget: int, pairs: int) -> list[Cell]:
    """One network, with its calls in turns."""
    torch.manual_seed(0)
    model, x = NETWORKS[name]().eval(), torch.rand(1, 3, size, size)
    memory, least, seconds = budget * MIB, stage_parts.LEAST, list[float]()

    def planned(value: float) -> nn.Module:
        stage_parts.LEAST = value  # type: ignore[assignment]
        start = perf_counter()
        module = tile(model, (x,), memory=memory)
        seconds.append(perf_counter() - start)
        return module

    try:
        bands, _ = planned(inf), planned(least)
        ours = planned(least)
    finally:
        stage_parts.LEAST = least
    with torch.no_grad():
        calls = {"bands": lambda: bands(x), "ours": lambda: ours(x), "torch": lambda: model(x)}
        times = Timing.of_each(race(calls, pairs, 1))
        difference = float((ours(x) - model(x)).abs().max() / model(x).abs().max())
    modes = ", ".join(f"{s.mode} of {s.rows}" if s.rows else s.mode for s in ours.plan.segments)
    one, two, three = (times[key] for key in ("bands", "ours", "torch"))
    return [
        name, size, threads, budget, modes, one, two, three, one.median / two.median, three.median / two.median,
        bands.plan.peak / MIB, ours.plan.peak / MIB, seconds[1], seconds[2], seconds[0], difference,
    ]  # fmt: skip


def rows(options: argparse.Namespace) -> Iterator[list[Cell]]:
    settings = [
        (name, size, threads)
        for name in NETWORKS
        if not options.only or name in options.only
        for size in options.sizes
        for threads in options.threads
    ]
    for name, size, threads in track(settings, "networks"):
        with set_threads(threads):
            yield row(name, size, threads, options.memory, options.pairs)


def summary(table: Sequence[Mapping[str, Cell]]) -> str:
    """Where parts are chosen, and what they gain there."""
    ratios = [float(str(one["bands / tile()"])) for one in table if "parts" in str(one["segments"])]
    return (
        f"parts are chosen in {len(ratios)} of {len(table)} settings: "
        f"{min(ratios, default=1):.2f} to {max(ratios, default=1):.2f} times as fast as bands there"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NETWORK")
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--memory", type=int, default=128, help="budget in MiB")
    parser.add_argument("--pairs", type=int, default=9, help="alternated calls of each")
    parser.add_argument("--output", type=Path, help="a page of its own, in place of the ledger")
    options = parser.parse_args()
    before = load_average()
    fix_allocator()
    listed = list(rows(options))
    text = f"""
One image, float32, NCHW; random weights. *Bands*: `tile` without parts; *tile()*: as it chooses, by
the times of a part and of two bands on zeros, in turns. {options.pairs} calls of each in turns, in one process:
milliseconds, the median (10 %–90 % quantile). *Peak*: as planned. *Planned*: seconds of the first
`tile`, whose times were not known unless an earlier run left them, and which compiles; *again*: of the
second; *without parts*: of bands alone. *Difference*: from torch, relative to the largest output."""
    page = Page("Tiled networks in bands and in parts", [text, Table(HEAD, listed, 4, merge=True)], summary)
    Console().print(Markdown(save("traverse_parts", page, Run.now(before=before), options.output)))


if __name__ == "__main__":
    main()
