"""Convolutions that are subsampled afterwards, and the same with their strides restored, timed in
turns: `python -m benchmarks run stride`.

Layers of ResNets and of a stem, each followed by a batch norm and a ReLU, written for hardware
without strides in one of the ways of docs/stride.md; and whole networks lowered for each target
and raised again. Writes benchmarks/results/stride.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor, nn

import demask
from benchmarks.common.catalog import DEV, Benchmark
from benchmarks.common.command import command
from benchmarks.common.inductor import NAME, inductor
from benchmarks.common.ledger import Cell, Page, Table
from demask.machine.clock import Timing, race

BENCHMARK = Benchmark(
    "convolutions that are subsampled afterwards, and the same with strides restored",
    "at most 20 s a setting",
    needs=(DEV,),
    quick="--threads 1 --pairs 3 --seconds 1",
)

LAYERS = {
    "3x3, 64 to 128, 56²": (64, 128, 3, 2, 56),
    "3x3, 128 to 256, 28²": (128, 256, 3, 2, 28),
    "1x1, 64 to 128, 56²": (64, 128, 1, 2, 56),
    "7x7, 3 to 64, 224²": (3, 64, 7, 2, 224),
    "3x3, stride 3, 32 to 64, 96²": (32, 64, 3, 3, 96),
}


def masked(y: Tensor, s: int) -> Tensor:
    mask = torch.zeros(1, 1, *y.shape[2:])
    mask[..., ::s, ::s] = 1
    return F.max_pool2d(y * mask, s, s, ceil_mode=True)


WAYS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "mask and max pool": masked,
    "1x1 max pool": lambda y, s: F.max_pool2d(y, 1, s),
    "slice": lambda y, s: y[:, :, ::s, ::s],
}


#: how the raised layer is run: in NCHW, with channels last, after optimize()
RAISED = ("raised", "channels last", "optimize")
COMPILED = f"raised, {NAME}"


class Sampled(nn.Module):
    """A convolution of stride 1, a norm, a ReLU, and every s-th position of that."""

    def __init__(self, inner: int, outer: int, kernel: int, s: int, way: str):
        super().__init__()
        self.conv = nn.Conv2d(inner, outer, kernel, padding=kernel // 2, bias=False)
        self.norm, self.s, self.way = nn.BatchNorm2d(outer), s, WAYS[way]

    def forward(self, x: Tensor) -> Tensor:
        return self.way(F.relu(self.norm(self.conv(x))), self.s)


@dataclass(frozen=True, slots=True)
class Row:
    """One layer in one setting. macs: left, a share of the original's. times: by contender."""

    layer: str
    way: str
    threads: int
    macs: float
    times: dict[str, Timing]
    difference: float

    def speed(self, contender: str) -> float:
        return self.times["original"].median / self.times[contender].median

    @property
    def best(self) -> float:
        return max(self.speed(name) for name in RAISED)


def rows(threads: Sequence[int], pairs: int, seconds: float, bar: Progress) -> Iterator[Row]:
    step = bar.add_task("", total=len(LAYERS) * len(WAYS) * len(threads))
    for name, (inner, outer, kernel, s, size) in LAYERS.items():
        for way in WAYS:
            torch.manual_seed(0)
            model = Sampled(inner, outer, kernel, s, way).eval()
            x = torch.randn(1, inner, size, size)
            raised = demask.stride.raise_strides(model, (x,))
            before, after = raised.demasked.before.macs, raised.demasked.after.macs
            last = demask.stride.raise_strides(model, (x,)).to(memory_format=torch.channels_last)
            wide = x.to(memory_format=torch.channels_last)
            for count in threads:
                bar.update(step, description=f"{name}, {way}, {count} threads")
                torch.set_num_threads(count)
                fast = demask.optimize(raised, (x,), threads=count, cache=False)
                calls: dict[str, Callable[[], object]] = {
                    "original": lambda m=model, x=x: m(x),
                    "raised": lambda m=raised, x=x: m(x),
                    "channels last": lambda m=last, x=wide: m(x),
                    "optimize": lambda m=fast, x=x: m(x),
                    COMPILED: inductor(raised, x),
                }
                with torch.no_grad():
                    times = Timing.of_each(race(calls, pairs, seconds=seconds))
                    expected = model(x)
                    gap = max(
                        float((expected - output).abs().max() / expected.abs().max())
                        for output in (raised(x), last(wide), fast(x))
                    )
                yield Row(name, way, count, after / before, times, gap)
                bar.advance(step)


HEAD = [
    "layer",
    "subsampled by",
    "threads",
    "MACs left",
    "original, ms",
    *(column for name in (*RAISED, COMPILED) for column in (f"{name}, ms", f"{name}, times")),
    "best",
    "difference",
]


def cells(row: Row) -> list[Cell]:
    speeds = [cell for name in (*RAISED, COMPILED) for cell in (row.times[name], row.speed(name))]
    return [row.layer, row.way, row.threads, row.macs, row.times["original"], *speeds, row.best, row.difference]


def page(rows: Sequence[Row]) -> Page:
    slow = {name: sum(row.speed(name) < 3 for row in rows) for name in RAISED}
    words_slow = ", ".join(f"{count} {name}" for name, count in slow.items())
    best = sum(row.best < 3 for row in rows)
    text = f"""
A convolution of stride 1, a batch norm and a ReLU, of which every s-th position is read; *raised*:
after `demask.stride.raise_strides`; *channels last*: the same, weights and input so laid out;
*optimize*: after `demask.optimize` in addition; *torch.compile*: the raised layer. Batch 1,
float32, the original layer in NCHW. Milliseconds are the median (10 %–90 % quantile) of calls in
turns, in one process; *times*: the original's median over this one. *Difference*: the largest of
the three, relative to the largest output. Less than 3 times as fast, of {len(rows)}: {words_slow};
{best} by the best of them."""
    bests = [row.best for row in rows]
    slower = sum(best < 1 for best in bests)
    summary = f"{min(bests):.2f} to {max(bests):.2f} times as fast; slower in {slower} of {len(rows)}"
    return Page("Strides restored", [text, Table(HEAD, [*map(cells, rows)], 3)], summary)


def main() -> None:
    command("stride", __doc__, rows, page, seconds=4.0)


if __name__ == "__main__":
    main()
