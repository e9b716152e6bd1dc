"""ResNet-20 within budgets of milliseconds: `python examples/latency_budget.py`.

The trained weights are fine-tuned on the JPEG images. Then `prune.Latency` removes channels for
three budgets, shares of the milliseconds that the optimized dense network takes for one image, and
`prune.Uniform` the same share of every group, for several shares. All score channels by `Taylor`,
are demasked, and train on for the same epochs. Compared are the milliseconds that were predicted
before a network was built with those measured after its training, and the milliseconds of both ways
at equal accuracy. Three seeds, with 95 % intervals; 40 minutes to an hour on 2 cores: a step is
measured first, and the epochs are chosen by it, or by `--epochs`. `--device cuda` trains on a GPU;
milliseconds are of the CPU in any case.

Needs the folder shared/data next to the project, and Pillow. Writes examples/results/
latency_budget.md and .svg (`--quick`: to build/examples).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, cast

import numpy as np
import torch
from cifar_resnet20 import Images, accuracy, normalized, pretrained
from resnet20_cifar import BATCH, QUICK, RESULTS, WHOLE, Run, interval, seconds_per_step
from rich.console import Console
from rich.progress import Progress
from torch import nn
from torch.nn import functional as F

import demask
from demask import prune
from demask.machine.describe import describe_machine, load_average

BUDGETS = (0.8, 0.6, 0.4)  # of the dense network's milliseconds
AMOUNTS = (0.1, 0.25, 0.4, 0.55)  # of the channels of every group
SCORED = 8  # batches whose gradients score the channels
IMAGE = torch.zeros(1, 3, 32, 32)
DENSE, LATENCY, UNIFORM = "dense", "prune.Latency", "prune.Uniform"


@dataclass(frozen=True, slots=True)
class Point:
    """One network. setting: its share of the milliseconds, or of channels that went. predicted: of
    `Latency`, before it was built; measured: after its training, of one image on one thread."""

    way: str
    setting: float
    seed: int
    accuracy: float
    measured_ms: float
    predicted_ms: float = 0.0
    trials: int = 0
    macs: int = 0


@dataclass(frozen=True, slots=True)
class Setting:
    """What is run: budgets and amounts; epochs of fine-tuning, and of training pruned networks."""

    budgets: tuple[float, ...]
    amounts: tuple[float, ...]
    dense: float
    tune: float

    @classmethod
    def within(cls, seconds: float, step: float, images: int, seeds: int) -> Setting:
        """As many epochs as fit. step: seconds of a step of the dense network; pruned ones take
        0.6 of it, about."""
        epoch = step * images / BATCH
        ways = len(BUDGETS) + len(AMOUNTS)
        epochs = seconds / (seeds * epoch * (1 + 0.6 * ways))
        return cls(BUDGETS, AMOUNTS, min(epochs, 2.0), min(epochs, 2.0))


class Training(Run):
    """A run without tests on the way."""

    def evaluate(self) -> float:
        return 0.0

    def finish(self, title: str) -> tuple[nn.Module, float]:
        """The trained network, on the CPU, and its accuracy."""
        self.go(1.0, title)
        right = accuracy(self.model, self.test)
        return self.model.cpu(), right


def measure_ms(model: nn.Module, timer: prune.NetworkTimer) -> float:
    """Milliseconds of one image in the optimized network."""
    fast = demask.optimize(model.eval(), (IMAGE,), threads=1)
    return 1e3 * timer.seconds_of(fast, (IMAGE,), {})


def score_gradients(model: nn.Module, train: Images, seed: int) -> None:
    """Gradients of the loss of some training images, in eval mode, in `parameter.grad`. They are
    computed on the device of the images; the model is on the CPU before and after."""
    model.eval().to(train.pixels.device)
    model.zero_grad()
    random = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(train.labels), generator=random)[: SCORED * BATCH]
    for part in order.to(train.pixels.device).split(BATCH):
        F.cross_entropy(model(normalized(train.pixels[part])), train.labels[part]).backward()
    model.cpu()


@dataclass(frozen=True, slots=True)
class Experiment:
    """What all networks of a seed share."""

    train: Images
    test: Images
    seed: int
    steps: int
    tick: Callable[[str], None]
    timer: prune.NetworkTimer

    def pruned(self, dense: nn.Module, allocation: Any, amount: float) -> tuple[nn.Module, prune.Pruned]:
        """A copy of the dense network without the channels that went, and which went."""
        model = deepcopy(dense)
        score_gradients(model, self.train, self.seed)
        pruner = prune.Pruner(model, IMAGE, score=prune.Taylor(), allocation=allocation, schedule=prune.OneShot(amount))
        pruned = pruner.step()
        model.zero_grad()
        return demask.demask(model, (IMAGE,)), pruned

    def trained(self, slim: nn.Module, title: str) -> tuple[float, float, int]:
        """Accuracy, milliseconds and MACs of a small network after its training."""
        macs = slim.demasked.after.macs
        run = Training(slim, self.train, self.test, self.steps, self.seed + 100, self.tick, crops=WHOLE)
        model, right = run.finish(title)
        return right, measure_ms(model, self.timer), macs

    def points(self, dense: nn.Module, setting: Setting) -> Iterator[Point]:
        """The networks of all budgets and amounts."""
        for share in setting.budgets:
            budget = 1e3 * share * self.timer.seconds
            latency = prune.Latency(budget, threads=1, measure=self.timer)
            slim, pruned = self.pruned(dense, latency, 0.5)
            right, ms, macs = self.trained(slim, f"{LATENCY} {share:g}")
            plan = cast(prune.LatencyPlan, pruned.plan)
            yield Point(LATENCY, share, self.seed, right, ms, plan.chosen.predicted_ms, len(plan.trials), macs)
        for amount in setting.amounts:
            slim, _ = self.pruned(dense, prune.Uniform(), amount)
            right, ms, macs = self.trained(slim, f"{UNIFORM} {amount:g}")
            yield Point(UNIFORM, amount, self.seed, right, ms, macs=macs)


def points(
    seeds: Sequence[int], setting: Setting, train: Images, test: Images, timer: prune.NetworkTimer, bar: Progress
) -> Iterator[Point]:
    """All networks of all seeds, the dense one of each seed first."""
    steps = [max(round(e * len(train.labels) / BATCH), 2) for e in (setting.dense, setting.tune)]
    ways = len(setting.budgets) + len(setting.amounts)
    task = bar.add_task("", total=len(seeds) * (steps[0] + (1 + ways) * steps[1]))

    def tick(title: str) -> None:
        bar.update(task, advance=1, description=title)

    for seed in seeds:
        torch.manual_seed(seed)
        first = Training(pretrained(), train, test, steps[0], seed, tick, crops=WHOLE)
        dense, _ = first.finish("fine-tuning")
        experiment = Experiment(train, test, seed, steps[1], tick, timer)
        run = Training(deepcopy(dense), train, test, steps[1], seed + 100, tick, crops=WHOLE)
        _, right = run.finish(DENSE)
        macs = demask.report(demask.demask(dense, (IMAGE,), check=False)).before.macs
        yield Point(DENSE, 1.0, seed, right, measure_ms(dense, timer), macs=macs)
        yield from experiment.points(dense, setting)


# ----------------------------------------------------------------------------------------- results


def ms_of_uniform(results: Sequence[Point], seed: int, right: float) -> float | None:
    """Milliseconds at which uniform pruning reaches an accuracy, interpolated between its networks
    and the dense one of the seed; None where it is less accurate than all of them.

    At each accuracy the fastest network that is at least as accurate counts, so noise favors it.
    """
    own = [p for p in results if p.seed == seed and p.way in (DENSE, UNIFORM)]
    curve: list[tuple[float, float]] = []  # accuracy rising with milliseconds
    for point in sorted(own, key=lambda p: p.measured_ms):
        if not curve or point.accuracy > curve[-1][0]:
            curve.append((point.accuracy, point.measured_ms))
    if right < curve[0][0]:
        return None
    accuracies, ms = zip(*curve, strict=True)
    return float(np.interp(right, accuracies, ms))


def gains(results: Sequence[Point], share: float) -> list[float]:
    """Per seed, milliseconds of uniform pruning over those of `Latency`, at equal accuracy."""
    own = [p for p in results if p.way == LATENCY and p.setting == share]
    pairs = [(ms_of_uniform(results, p.seed, p.accuracy), p.measured_ms) for p in own]
    return [uniform / ms for uniform, ms in pairs if uniform is not None]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def budget_row(results: Sequence[Point], share: float, whole_ms: float) -> list[str]:
    """The row of a budget."""
    own = [p for p in results if p.way == LATENCY and p.setting == share]
    errors = [100 * (p.predicted_ms / p.measured_ms - 1) for p in own]
    faster = gains(results, share)
    return [
        f"{100 * share:.0f} %",
        f"{share * whole_ms:.3f}",
        interval([p.predicted_ms for p in own], 3),
        interval([p.measured_ms for p in own], 3),
        f"{max(map(abs, errors)):.1f} %",
        interval([p.accuracy for p in own]),
        f"{mean(p.macs for p in own):,.0f}",
        f"{interval(faster)} ({len(faster)} of {len(own)} seeds)" if faster else "less accurate",
    ]


def page(
    results: Sequence[Point], setting: Setting, timer: prune.NetworkTimer, before: str, images: int, device: str
) -> str:
    """The page of results."""
    trained = "the CPU" if device == "cpu" else torch.cuda.get_device_name(device)
    dense = [p for p in results if p.way == DENSE]
    ratios = [1.0, *timer.ratios]
    budgets = table(
        [
            "budget",
            "ms allowed",
            "ms predicted",
            "ms measured",
            "largest error",
            "accuracy, %",
            "MACs",
            "ms of uniform / ms, at equal accuracy",
        ],
        [budget_row(results, share, 1e3 * timer.seconds) for share in setting.budgets],
    )
    rows = [
        [
            DENSE,
            interval([p.measured_ms for p in dense], 3),
            interval([p.accuracy for p in dense]),
            f"{dense[0].macs:,}",
        ]
    ]
    for amount in setting.amounts:
        own = [p for p in results if p.way == UNIFORM and p.setting == amount]
        rows.append(
            [
                f"{100 * amount:.0f} % of each group",
                interval([p.measured_ms for p in own], 3),
                interval([p.accuracy for p in own]),
                f"{mean(p.macs for p in own):,.0f}",
            ]
        )
    uniform = table(["uniform pruning", "ms measured", "accuracy, %", "MACs"], rows)
    return f"""# ResNet-20 on CIFAR-10 within budgets of milliseconds

{images:,} JPEG images; published weights fine-tuned for {setting.dense:.2g} epochs, then
{setting.tune:.2g} epochs for each network, the dense one too. {len(dense)} seeds, 95 % intervals of
Student's t. Trained on {trained}. Milliseconds are of one image on one thread of the CPU, of
`demask.optimize` of the network: the mean of the fastest quarter of all blocks of seven calls
within 3 seconds, predicted before a network is built and measured after its training. A shared
machine changes its speed within minutes, so each network is measured in turns with the dense one of
the first seed, and its milliseconds are those of that one at first
({1e3 * timer.seconds:.3f}) times the ratio of both. In these turns the dense network took
{min(ratios):.2f} to {max(ratios):.2f} times as long as at first.

{budgets}

{uniform}

The last column of the first table is the time of uniform pruning at the accuracy of that row, by
linear interpolation between the networks of the second table, over the time of that row.

![Accuracy by milliseconds](latency_budget.svg)

Made by `{" ".join(["python examples/latency_budget.py", *sys.argv[1:]])}`.
{describe_machine()}, demask {demask.__version__}. Load before and after: {before},
{load_average()}.
"""


def draw(results: Sequence[Point], path: Path) -> None:
    """Accuracy by milliseconds: every network a point, means as lines; budgets as marks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for way, color in ((UNIFORM, "#d1661f"), (LATENCY, "#2a78b5")):
        own = [p for p in results if p.way == way]
        lines = [[p for p in own if p.setting == s] for s in dict.fromkeys(p.setting for p in own)]
        middle = sorted((mean(p.measured_ms for p in line), mean(p.accuracy for p in line)) for line in lines)
        axes.plot(*zip(*middle, strict=True), color=color, linewidth=1.4, label=way)
        axes.plot([p.measured_ms for p in own], [p.accuracy for p in own], "o", color=color, markersize=4, alpha=0.6)
    dense = [p for p in results if p.way == DENSE]
    axes.plot(
        [p.measured_ms for p in dense], [p.accuracy for p in dense], "s", color="#8c8c8c", markersize=4, label=DENSE
    )
    for share in dict.fromkeys(p.setting for p in results if p.way == LATENCY):
        axes.axvline(share * mean(p.measured_ms for p in dense), color="#bbbbbb", linewidth=0.8)
    axes.set_xlabel("ms, one image, one thread (lines: the budgets)")
    axes.set_ylabel("test accuracy, %")
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few steps, to build/examples")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, default=20, help="for all training, about")
    parser.add_argument("--epochs", type=float, help="of each network; default: by --minutes")
    parser.add_argument("--device", default="cpu", help="that trains: cpu (default) or cuda")
    parser.add_argument("--threads", type=int, default=2, help="of the training")
    parser.add_argument("--output", type=Path, help="folder; default: examples/results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    output = options.output or (QUICK if options.quick else RESULTS)
    output.mkdir(parents=True, exist_ok=True)
    before = load_average()
    train, test = (
        Images.read(f"cifar10_{name}_jpeg.zip", most if options.quick else None).to(options.device)
        for name, most in (("train", 1280), ("test", 200))
    )
    seeds, setting = options.seeds[:1], Setting((0.6,), (0.4,), 0.2, 0.2)
    if not options.quick and options.epochs is not None:
        seeds = options.seeds
        setting = Setting(BUDGETS, AMOUNTS, options.epochs, options.epochs)
    elif not options.quick:
        step = seconds_per_step(pretrained(), train)
        seeds = options.seeds
        setting = Setting.within(60 * options.minutes, step, len(train.labels), len(seeds))
    results, timer = [], prune.NetworkTimer(threads=1)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        for point in points(seeds, setting, train, test, timer, bar):
            results.append(point)
            predicted = f", predicted {point.predicted_ms:.3f}" if point.predicted_ms else ""
            print(
                f"seed {point.seed}, {point.way} {point.setting:g}: {point.accuracy:.2f} %, "
                f"{point.measured_ms:.3f} ms{predicted}",
                flush=True,
            )
    draw(results, output / "latency_budget.svg")
    text = page(results, setting, timer, before, len(train.labels), options.device)
    (output / "latency_budget.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
