"""Training in which a part of the units is updated: `python -m benchmarks run pilot_gate`.

ResNet-20, trained on the original CIFAR-10 images, is trained further on their JPEG form (shared/
data next to the project). A quarter of the filters of each layer is updated at each step: those of
the highest priority in a 4-bit pilot, those of the largest norm, or others by chance; or all.
Norms stay as they are. Accuracy on test images against the weights updated so far, over seeds. No
figure depends on the machine.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import Progress, TaskID
from torch import Tensor, nn

import cifar
from benchmarks.common.catalog import DEV, SHARED_DATA, Benchmark
from benchmarks.common.ledger import RESULTS, Page, Run, Table, save
from demask.machine.clock import set_threads
from demask.pilot.data.collect import collect
from demask.pilot.gate import Gate
from demask.pilot.simplifiers.simplify import simplify

BENCHMARK = Benchmark(
    "training that updates a part of the units",
    "not timed",
    needs=(DEV, SHARED_DATA),
    quick="--steps 2 --seeds 1 --train 256 --test 128",
    writes=("pilot_gate.svg",),
    measures=("pilot",),
)

FRACTION, EVERY, BATCH, RATE = 0.25, 20, 128, 0.002
GATES = ("pilot", "magnitude", "random", "all")
COLOURS = ("#0b6e4f", "#e09f3e", "#6a4c93", "#555555")
PILOT, SEEN = "bits:4", 64  # images that the pilot sees
PART = 500  # test images at a time


@dataclass(frozen=True, slots=True)
class Point:
    """Accuracy in % after so many steps, and the weights updated until then."""

    by: str
    seed: int
    step: int
    updated: int
    right: float


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, classes: Tensor) -> float:
    answers = torch.cat([model(batch).argmax(1) for batch in x.split(PART)])
    return 100 * float((answers == classes).float().mean())


def gate(by: str, model: nn.Module, seen: Tensor, seed: int) -> Gate:
    """The gate of a contender; units are chosen anew every `EVERY` steps."""

    def collect_magnitudes() -> Any:
        with torch.no_grad():
            return collect(simplify(model, (seen,), by=PILOT), (seen,))

    if by == "pilot":
        return Gate(model, collect_magnitudes, fraction=FRACTION, every=EVERY, rest=False)
    if by == "all":
        return Gate(model, fraction=1.0, by="magnitude", rest=False)
    kind = "magnitude" if by == "magnitude" else "random"
    return Gate(model, fraction=FRACTION, by=kind, every=EVERY, rest=False, seed=seed)


def tuned(
    by: str,
    seed: int,
    steps: int,
    looks: Sequence[int],
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    tick: Any,
) -> list[Point]:
    """One run: SGD with momentum, batch norms in eval mode."""
    model, draw = cifar.trained(20), torch.Generator().manual_seed(seed)
    x, classes = train
    order = torch.cat([torch.randperm(len(x), generator=draw) for _ in range(-(-steps * BATCH // len(x)))])
    mine = gate(by, model, x[order[:SEEN]], seed)
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
    points = [Point(by, seed, 0, 0, accuracy(model, *test))]
    for step in range(1, steps + 1):
        picked = order[(step - 1) * BATCH : step * BATCH]
        optimizer.zero_grad()
        with mine:
            F.cross_entropy(model(x[picked]), classes[picked]).backward()
        mine.step(optimizer)
        tick()
        if step in looks:
            points.append(Point(by, seed, step, mine.updated, accuracy(model, *test)))
    return points


HEAD = ["updated", "step", "weights updated, millions", "right, %", "deviation"]
Row = tuple[str, int, float, float, float]  # as in HEAD


def rows_of(points: Sequence[Point]) -> list[Row]:
    """Over seeds."""
    seeds: dict[tuple[str, int, float], list[float]] = {}
    for p in points:
        who = p.by if p.by == "all" else f"{p.by}, {FRACTION:.0%}"
        seeds.setdefault((who, p.step, p.updated / 1e6), []).append(p.right)
    return [
        (*key, statistics.mean(right), statistics.stdev(right) if len(right) > 1 else 0.0)
        for key, right in seeds.items()
    ]


def page(rows: Sequence[Row], options: argparse.Namespace) -> Page:
    text = f"""
ResNet-20, trained on CIFAR-10, trained on with {options.train:,} JPEG images: SGD, rate {RATE},
momentum 0.9, batches of {BATCH}; norms stay as they are. {options.test:,} test images; mean and
standard deviation of the accuracy over {options.seeds} seeds, and how many weights were updated
until then. Units are chosen anew every {EVERY} steps; the pilot is {PILOT} on {SEEN} training
images."""
    reached = ", ".join(f"{who} {right:.1f} %" for who, step, _, right, _ in rows if step == options.steps)
    picture = "![accuracy against weights updated](pilot_gate.svg)"
    return Page(
        "Updates of some units",
        [text, Table(HEAD, rows, 2), picture],
        f"right after {options.steps} steps, by what was updated: {reached}",
    )


def picture(rows: Sequence[Row], path: Path) -> None:
    """Accuracy against weights updated."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for who, colour in zip(dict.fromkeys(row[0] for row in rows), COLOURS, strict=True):
        _, _, at, right, deviation = zip(*(row for row in rows if row[0] == who), strict=True)
        axes.errorbar(at, right, deviation, fmt="o-", color=colour, capsize=3, markersize=4, label=who)
    axes.set(xlabel="weights updated so far, millions", ylabel="accuracy on test images, %")
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--train", type=int, default=8000, help="training images")
    parser.add_argument("--test", type=int, default=2000, help="test images")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="a page of its own, in place of the ledger")
    options = parser.parse_args()
    looks = sorted({max(options.steps * k // 4, 1) for k in (1, 2, 3, 4)})
    train, test = cifar.images(options.train, "cifar10_train_jpeg.zip"), cifar.images(options.test)
    points: list[Point] = []
    with set_threads(options.threads), Progress(transient=True) as bar:
        task: TaskID = bar.add_task("steps", total=options.steps * options.seeds * len(GATES))
        for seed in range(options.seeds):
            for by in GATES:
                points += tuned(by, seed, options.steps, looks, train, test, lambda: bar.advance(task))
    rows = rows_of(points)
    print(save("pilot_gate", page(rows, options), Run.now(), options.output))
    picture(rows, (options.output or RESULTS / "pilot_gate.md").with_suffix(".svg"))


if __name__ == "__main__":
    main()
