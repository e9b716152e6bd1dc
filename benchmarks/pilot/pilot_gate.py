"""Training in which a part of the units is updated: `python -m benchmarks run pilot_gate`.

ResNet-20, trained on the original CIFAR-10 images, is trained further on their JPEG form (shared/
data next to the project). A quarter of the filters of each layer is updated at each step: those of
the highest priority in a 4-bit pilot, those of the largest norm, or others by chance; or all.
Norms stay as they are. Accuracy on test images against the weights updated so far, over seeds.
Writes benchmarks/results/pilot_gate.md and .svg; no figure depends on the machine.
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
from benchmarks.common.tables import RESULTS, markdown, provenance
from demask.machine.threads import set_threads
from demask.pilot.data.collect import collect
from demask.pilot.gate import Gate
from demask.pilot.simplifiers.simplify import simplify

BENCHMARK = Benchmark(
    "training that updates a part of the units", "not timed", ("pilot_gate.md", "pilot_gate.svg"),
    needs=(DEV, SHARED_DATA),
    quick="--steps 2 --seeds 1 --train 256 --test 128",
)  # fmt: skip

FRACTION, EVERY, BATCH, RATE = 0.25, 20, 128, 0.002
GATES = ("pilot", "magnitude", "random", "all")
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
    by: str, seed: int, steps: int, looks: Sequence[int], train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor], tick: Any,
) -> list[Point]:  # fmt: skip
    """One run: SGD with momentum, batch norms in eval mode."""
    model, draw = cifar.trained(20), torch.Generator().manual_seed(seed)
    x, classes = train
    order = torch.cat([torch.randperm(len(x), generator=draw) for _ in range(
        -(-steps * BATCH // len(x)))])  # fmt: skip
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


def table(points: Sequence[Point], looks: Sequence[int]) -> str:
    """Mean ± deviation of the accuracy, and millions of weights updated."""
    lines = []
    for by in GATES:
        line = [f"{by}, {100 * FRACTION:.0f} %" if by != "all" else by]
        for step in (0, *looks):
            here = [p for p in points if (p.by, p.step) == (by, step)]
            right = [p.right for p in here]
            spread = statistics.stdev(right) if len(right) > 1 else 0.0
            line.append(
                f"{statistics.mean(right):.2f} ± {spread:.2f} ({here[0].updated / 1e6:.2f} M)"
            )
        lines.append(line)
    return markdown(["updated", *[f"step {step}" for step in (0, *looks)]], lines)


def picture(points: Sequence[Point], path: Path) -> None:
    """Accuracy against weights updated."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    colours = dict(zip(GATES, ("#0b6e4f", "#e09f3e", "#6a4c93", "#555555"), strict=True))
    for by in GATES:
        mine = [p for p in points if p.by == by]
        steps = sorted({p.step for p in mine})
        groups = [[p for p in mine if p.step == step] for step in steps]
        at = [g[0].updated / 1e6 for g in groups]
        mean = [statistics.mean(p.right for p in g) for g in groups]
        spread = [statistics.stdev([p.right for p in g]) if len(g) > 1 else 0.0 for g in groups]
        axes.errorbar(at, mean, spread, fmt="o-", color=colours[by], capsize=3, markersize=4,
                      label=by if by == "all" else f"{by}, {100 * FRACTION:.0f} %")  # fmt: skip
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
    parser.add_argument("--output", type=Path, default=RESULTS / "pilot_gate.md")
    options = parser.parse_args()
    looks = sorted({max(options.steps * k // 4, 1) for k in (1, 2, 3, 4)})
    train, test = cifar.images(options.train, "cifar10_train_jpeg.zip"), cifar.images(options.test)
    points: list[Point] = []
    with set_threads(options.threads), Progress(transient=True) as bar:
        task: TaskID = bar.add_task("steps", total=options.steps * options.seeds * len(GATES))
        for seed in range(options.seeds):
            for by in GATES:
                points += tuned(
                    by, seed, options.steps, looks, train, test, lambda: bar.advance(task)
                )
    text = f"""# Updates of some units

{provenance("pilot_gate")}

ResNet-20, trained on CIFAR-10, trained on with {options.train} JPEG images: SGD, rate {RATE},
momentum 0.9, batches of {BATCH}; norms stay as they are. {options.test} test images,
{options.seeds} seeds, mean ± standard deviation of the accuracy in %, and how many weights were
updated until then. Units are chosen anew every {EVERY} steps; the pilot is {PILOT} on {SEEN}
training images.

{table(points, looks)}

![accuracy against weights updated](pilot_gate.svg)
"""
    options.output.write_text(text)
    picture(points, options.output.with_suffix(".svg"))
    print(text)


if __name__ == "__main__":
    main()
