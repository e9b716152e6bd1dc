"""ResNet-56 of which a pilot chooses the channels that are computed, image by image.

Four pilots: the frame before (the same image, one pixel to the left, through the full network), a
calibration set (the mean of other images, the same channels for every image), by magnitude or by
contribution to the outputs, and the network with 4-bit weights on the image itself. What is not
computed is 0. MACs are those of convolutions and the linear layer, counted as they run, the
pilot's included. Nothing here is exact, and it is expected to lose: the table says where.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import cifar
from benchmarks.common.catalog import DEV, SHARED_DATA, Benchmark
from benchmarks.common.inductor import inductor
from benchmarks.common.ledger import Page, Run, Table, save
from demask.facts.analysis import Analysis
from demask.graph.result.demasked_module import Demasked
from demask.machine.allocator import fix_allocator
from demask.machine.clock import ALLOWED, Timing, lower_bound, race, set_threads
from demask.machine.describe import format_threads, load_average
from demask.ops import TABLE
from demask.pilot import ExecutionData, collect
from demask.pilot.conditions.channel_conditions import Skip, Supported, observing, targets_of
from demask.pilot.guarantee import clopper_pearson
from demask.shrink.build_uncut import build_uncut
from demask.shrink.pipeline import canonicalize, capture_program

BENCHMARK = Benchmark(
    "ResNet-56 with channels chosen by a pilot, image by image",
    "about 12 minutes",
    needs=(DEV, SHARED_DATA),
    quick="--images 50 --pairs 2",
)

KEEPS, LAYERS = (0.9, 0.75, 0.5), ("*", "*.conv1")
IMAGES, CALIBRATION, PAIRS = 1000, 500, 31
Seen = Callable[[Tensor], list[Tensor]]  # magnitudes by layer, for one image


@dataclass(frozen=True, slots=True)
class Row:
    """One setting. agrees, right: of `count` images. known: the share on which the full network is
    right. macs: as a share of the full network's. full, compiled, this: of one image. least: the
    lower bound of the ratio of times."""

    layers: str
    pilot: str
    keep: float
    count: int
    agrees: int
    right: int
    known: float
    macs: float
    full: Timing
    compiled: Timing
    this: Timing
    least: float

    @property
    def speed(self) -> float:
        return self.full.median / self.this.median


def observer(model: nn.Module, x: Tensor, layers: tuple[str, ...]) -> Demasked:
    """The full network, to the magnitudes of these layers."""
    program = canonicalize(capture_program(model, (x,), None, None), TABLE)
    analysis = Analysis(program, TABLE)
    targets = [t for t in targets_of(analysis)[0] if t.layer in layers]
    return build_uncut(analysis, observing(program, targets), ())


def macs(call: Callable[[], object]) -> float:
    """Of convolutions and matrix products, as they run."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops() / 2


def pilots(module: Supported, watch: Demasked, others: Tensor, data: ExecutionData) -> dict[str, tuple[Seen, bool]]:
    """Each pilot's magnitudes for an image, and whether it runs at every call. data: contributions."""
    by_contribution = [data.priorities(name) for name in module.chosen.layers]
    fixed = [m.mean(0) for m in map(torch.stack, zip(*(watch(x[None]) for x in others), strict=True))]
    assert module.pilot is not None
    return {
        "frame before": (lambda x: list(watch(x.roll(-1, 3))), False),
        "calibration set": (lambda x: fixed, False),
        "calibration set, by contribution": (lambda x: by_contribution, False),
        "4-bit weights": (lambda x: list(module.pilot(x)), True),  # type: ignore[misc]
    }


def rows(count: int, keeps: Sequence[float], pairs: int, patterns: Sequence[str]) -> Iterator[Row]:
    """Every setting, measured."""
    model = cifar.trained(56)
    x, labels = cifar.images(count + CALIBRATION)
    x, labels, others = x[:count], labels[:count], x[count:]
    first, images = x[:1], x.split(1)
    answers = torch.cat([model(one).argmax(1) for one in images])
    known = float((answers == labels).double().mean())
    data = collect(model, (others[:100],), measure="contribution")
    whole, compiled = macs(lambda: model(first)), inductor(model, first)
    for pattern in patterns:
        module = Skip(keeps[0], layers=pattern).applied(model, (x[:2],), None, "bits:4", TABLE)
        watch = observer(model, x[:2], module.chosen.layers)

        def chosen(magnitudes: list[Tensor], image: Tensor, module: Any = module) -> Tensor:
            return module.run(module.chosen.indices(magnitudes), (image,))

        for name, (seen, runs) in pilots(module, watch, others, data).items():
            live = seen if runs else partial(lambda before, _: before, seen(first))
            for keep in keeps:
                module.chosen = replace(module.chosen, keep=keep)
                every = track(images, f"{name} {keep:g}", transient=True)
                got = torch.cat([chosen(seen(one), one).argmax(1) for one in every])
                calls = {
                    "full": lambda: model(first),
                    "compiled": compiled,
                    "this": lambda live=live, chosen=chosen: chosen(live(first), first),
                }
                taken = race(calls, pairs)
                times = {who: Timing.of(seconds) for who, seconds in taken.items()}
                yield Row(
                    pattern,
                    name,
                    keep,
                    count,
                    int((got == answers).sum()),
                    int((got == labels).sum()),
                    known,
                    macs(calls["this"]) / whole,
                    **times,
                    least=lower_bound(taken["full"], taken["this"]),
                )


def share(k: int, n: int) -> tuple[float, str]:
    """In percent, and its interval of 95 %."""
    low, high = clopper_pearson(k, n, 0.95)
    return 100 * k / n, f"{100 * low:.1f}–{100 * high:.1f}"


HEAD = [
    "layers",
    "pilot",
    "computed, %",
    "agrees with the full network, %",
    "interval",
    "right, %",
    "interval of that",
    "MACs, %",
    "full, ms",
    "torch.compile, ms",
    "this, ms",
    "times as fast",
    "at least",
]


def page(rows: Sequence[Row]) -> Page:
    count = rows[0].count
    text = f"""
{count:,} test images of CIFAR-10 (JPEG), one at a time, weights and images as they are published:
no draw, no seed. The full network is right on {rows[0].known:.1%}. Intervals are Clopper-Pearson's
of 95 %; times are of one image, all in turns. *torch.compile*: the full network. *Times as fast*:
as the full network in torch, and a lower bound of that.

*Frame before*: the image one pixel to the left, through the full network; its cost is not counted,
since a video has run that frame. *4-bit weights*: rounded weights are stored as float32, so the
pilot costs as much as the network, and is counted. *By contribution*: to the outputs, to first
order, of 100 images. A share of channels left out on both sides of a
convolution leaves about its square of the MACs, and convolutions of 16 to 64 channels are not
faster by as much: weights are gathered at every call."""
    cells = [
        [
            row.layers,
            row.pilot,
            100 * row.keep,
            *share(row.agrees, count),
            *share(row.right, count),
            100 * row.macs,
            row.full,
            row.compiled,
            row.this,
            row.speed,
            row.least,
        ]
        for row in rows
    ]
    speeds, slower = [row.speed for row in rows], sum(row.least < ALLOWED for row in rows)
    agrees = [100 * row.agrees / count for row in rows]
    summary = (
        f"{min(speeds):.2f} to {max(speeds):.2f} times as fast as the full network, not to "
        f"be used in {slower} of {len(rows)}; the same answer for {min(agrees):.0f} to "
        f"{max(agrees):.0f} % of images"
    )
    return Page("ResNet-56, channels chosen by a pilot", [text, Table(HEAD, cells, 3)], summary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--keeps", type=float, nargs="+", default=KEEPS)
    parser.add_argument("--layers", nargs="+", default=LAYERS)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="a page of its own, in place of the ledger")
    options = parser.parse_args()
    allocator, before = fix_allocator(), load_average()
    results, text = [], ""
    with torch.no_grad(), set_threads(options.threads):
        for one in rows(options.images, options.keeps, options.pairs, options.layers):
            results.append(one)
            run = Run.now(format_threads(options.threads), allocator, before=before)
            text = save("pilot_skip", page(results), run, options.output)
    print(text)


if __name__ == "__main__":
    main()
