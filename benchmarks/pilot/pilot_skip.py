"""ResNet-56 of which a pilot chooses the channels that are computed, image by image.

Three pilots: the frame before (the same image, one pixel to the left, through the full network), a
calibration set (the mean of other images, the same channels for every image), and the network with
4-bit weights on the image itself. What is not computed is 0. Agreement with the full network and
accuracy come with Clopper-Pearson intervals of 95 %; MACs are those of convolutions and the linear
layer, counted as they run, the pilot's included; times are of one image, in turns with the full
network. Nothing here is exact, and it is expected to lose: the table says where.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import cifar
from benchmarks.common.catalog import DEV, SHARED_DATA, Benchmark
from benchmarks.common.tables import RESULTS, load_average, markdown, provenance
from demask.facts.analysis import Analysis
from demask.graph.result.demasked_module import Demasked
from demask.machine.allocator import fix_allocator
from demask.machine.benchmark import ALLOWED, lower_bound
from demask.machine.threads import set_threads
from demask.machine.timing import sample_seconds
from demask.ops import TABLE
from demask.pilot.conditions.channel_conditions import Skip
from demask.pilot.conditions.conditioned_values import observing, targets_of
from demask.pilot.conditions.indexed_module import Supported
from demask.pilot.rate_bounds import clopper_pearson
from demask.shrink.build_uncut import build_uncut
from demask.shrink.pipeline import canonicalize, capture_program

BENCHMARK = Benchmark(
    "ResNet-56 with channels chosen by a pilot, image by image", "not timed", needs=(DEV, SHARED_DATA), quick="--images 50 --pairs 2",
)  # fmt: skip

KEEPS, LAYERS = (0.9, 0.75, 0.5), ("*", "*.conv1")
IMAGES, CALIBRATION, PAIRS = 1000, 500, 31
HEAD = ("layers", "pilot", "computed", "agrees with the full network", "accuracy", "MACs",
        "ms, 1 image", "time: full / this", "use it")  # fmt: skip
Seen = Callable[[Tensor], list[Tensor]]  # magnitudes by layer, for one image


@dataclass(frozen=True, slots=True)
class Row:
    """One setting. agrees, right: images. macs: as a share of the full network's. seconds: of one
    image, the full network and this; least: the lower bound of their ratio."""

    layers: str
    pilot: str
    keep: float
    agrees: int
    right: int
    count: int
    macs: float
    full: float
    seconds: float
    least: float


def observer(model: nn.Module, x: Tensor, layers: tuple[str, ...]) -> Demasked:
    """The full network, to the magnitudes of these layers."""
    program = canonicalize(capture_program(model, (x,), None, None))
    analysis = Analysis(program, TABLE)
    targets = [t for t in targets_of(analysis)[0] if t.layer in layers]
    return build_uncut(analysis, observing(program, targets), ())


def macs(call: Callable[[], object]) -> float:
    """Of convolutions and matrix products, as they run."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops() / 2


def pilots(module: Supported, watch: Demasked, others: Tensor) -> dict[str, tuple[Seen, bool]]:
    """Each pilot's magnitudes for an image, and whether it runs at every call."""
    fixed = [
        m.mean(0) for m in map(torch.stack, zip(*(watch(x[None]) for x in others), strict=True))
    ]
    assert module.pilot is not None
    return {
        "frame before": (lambda x: list(watch(x.roll(-1, 3))), False),
        "calibration set": (lambda x: fixed, False),
        "4-bit weights": (lambda x: list(module.pilot(x)), True),  # type: ignore[misc]
    }


def rows(
    count: int, keeps: tuple[float, ...], pairs: int, patterns: tuple[str, ...]
) -> Iterator[Row]:
    model = cifar.trained(56)
    x, labels = cifar.images(count + CALIBRATION)
    x, labels, others = x[:count], labels[:count], x[count:]
    answers = torch.cat([model(one).argmax(1) for one in x.split(1)])
    whole = macs(lambda: model(x[:1]))
    for pattern in patterns:
        module = Skip(keeps[0], layers=pattern).applied(model, (x[:2],), None, "bits:4", TABLE)
        watch = observer(model, x[:2], module.chosen.layers)
        for name, (seen, runs) in pilots(module, watch, others).items():
            for keep in keeps:
                module.chosen = replace(module.chosen, keep=keep)
                yield row(
                    module, model, x, labels, answers, whole, pattern, name, seen, runs, pairs
                )


def row(
    module: Supported, model: nn.Module, x: Tensor, labels: Tensor, answers: Tensor, whole: float,
    pattern: str, name: str, seen: Seen, runs: bool, pairs: int,
) -> Row:  # fmt: skip
    """One setting, measured."""
    image_answers = []
    for one in track(x.split(1), f"{name} {module.chosen.keep:g}", transient=True):
        image_answers.append(module.run(module.chosen.indices(seen(one)), (one,)).argmax(1))
    got, first = torch.cat(image_answers), x[:1]
    known = seen(first)

    def live() -> Tensor:
        magnitudes = seen(first) if runs else known
        return module.run(module.chosen.indices(magnitudes), (first,))

    taken = sample_seconds({"full": lambda: model(first), "this": live}, pairs)
    return Row(
        pattern, name, module.chosen.keep or 0, int((got == answers).sum()),
        int((got == labels).sum()), len(x), macs(live) / whole, median(taken["full"]),
        median(taken["this"]), lower_bound(taken["full"], taken["this"]),
    )  # fmt: skip


def share(k: int, n: int) -> str:
    low, high = clopper_pearson(k, n, 0.95)
    return f"{100 * k / n:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def cells(row: Row) -> list[str]:
    return [
        row.layers, row.pilot, f"{row.keep:.0%}", share(row.agrees, row.count),
        share(row.right, row.count), f"{row.macs:.0%}", f"{1000 * row.seconds:.1f}",
        f"{row.full / row.seconds:.2f} (at least {row.least:.2f})",
        "yes" if row.least >= ALLOWED else "no, slower",
    ]  # fmt: skip


def page(rows: list[Row], words: str, right: str) -> str:
    return f"""# ResNet-56, channels chosen by a pilot

{words}

{rows[0].count} test images of CIFAR-10 (JPEG), one at a time, weights and images as they are
published: no draw, no seed. The full network is right on {right}.

{markdown(HEAD, [cells(row) for row in rows])}

"frame before": the image one pixel to the left, through the full network; its cost is not counted,
since a video has run that frame. "4-bit weights": rounded weights are stored as float32, so the
pilot costs as much as the network, and is counted. A share of channels left out on both sides of a
convolution leaves about its square of the MACs, and convolutions of 16 to 64 channels are not
faster by as much: weights are gathered at every call.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--keeps", type=float, nargs="+", default=KEEPS)
    parser.add_argument("--layers", nargs="+", default=LAYERS)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / "pilot_skip.md")
    options = parser.parse_args()
    allocator, before = fix_allocator(), load_average()
    with torch.no_grad(), set_threads(options.threads):
        results = list(
            rows(options.images, tuple(options.keeps), options.pairs, tuple(options.layers))
        )
        x, labels = cifar.images(options.images)
        right = int((cifar.trained(56)(x).argmax(1) == labels).sum())
    words = provenance("pilot_skip", allocator, f"{options.threads} thread(s)", before=before)
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(page(results, words, share(right, options.images)))
    print(options.output.read_text())


if __name__ == "__main__":
    main()
