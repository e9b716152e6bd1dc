"""`demask prune`: train, prune by schedule, tune, demask, and go on training the small network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import demask
from demask import prune
from demask.cli.pruning_inputs import ImageData, LabelledImages
from demask.graph.module_copy import structural_copy
from demask.machine.clock import Timing, race
from demask.machine.describe import describe_machine, format_spread
from demask.pages import Curve, Lines, OnPage, Page, PageSource, StepCharts, TextTable
from demask.progress import ProgressStep
from demask.report.report import Report
from demask.report.sections import module_sections
from demask.report.values import share

TEST_BATCH = 256
EVALUATIONS = 12  # per phase, besides those at its ends
MARGIN = 4  # pixels by which augmented images are shifted at most
WARM_UP = 0.1  # of the steps: the learning rate rises
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
EXAMPLE, TIMED, PAIRS, PATIENCE = 2, 64, 15, 4.0  # images; images, rounds and seconds of timing
BEGIN, END = 0.1, 0.5  # of the tuning: the first pruning step, and the last
SCORES = {
    "l1": prune.L1,
    "l2": prune.L2,
    "taylor": prune.Taylor,
    "random": prune.Random,
    "activation": prune.Activation,
    "fluctuation": prune.Fluctuation,
}
GRADIENT = 0.3  # of the rate of training: that of tuning


@dataclass(slots=True)
class Curves:
    """What happened in training: (step, value) and (step, what was done)."""

    losses: list[tuple[int, float]] = field(default_factory=list)
    accuracies: list[tuple[int, float]] = field(default_factory=list)
    events: list[tuple[int, str]] = field(default_factory=list)

    @property
    def step(self) -> int:
        """The number of training steps so far."""
        return self.losses[-1][0] if self.losses else 0

    def to_dict(self) -> dict[str, list[list[object]]]:
        """The curves in JSON types."""
        return {
            "losses": [[step, value] for step, value in self.losses],
            "accuracies": [[step, value] for step, value in self.accuracies],
            "events": [[step, what] for step, what in self.events],
        }

    def charts(self) -> StepCharts:
        """The loss, smoothed, and the accuracy, over steps; events are vertical lines."""
        percent = [(step, 100 * value) for step, value in self.accuracies]
        return StepCharts(
            (Curve("training loss", self.losses), Curve("test accuracy, %", percent, True)),
            self.step,
            self.events,
            "Training",
            "Dashed lines: steps of pruning, and where the masked network was replaced by the small one.",
        )


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """batch: images per step. rate: the highest learning rate. normalize: "data", "imagenet" or
    "none". augment: mirror and shift training images. seed: of the order of images."""

    batch: int = 64
    rate: float = 3e-3
    normalize: str = "data"
    augment: bool = False
    seed: int = 0


class Training:
    """A network in training. `network` may be replaced by a smaller one between steps, when the
    optimizer was carried over."""

    def __init__(self, network: nn.Module, data: ImageData, options: TrainingOptions, progress: ProgressStep):
        self.network, self.data, self.options = network, data, options
        self.curves = Curves()
        self.optimizer: Any = None
        self._schedule: Any = None
        self._progress = progress
        self._every = 1  # steps between evaluations
        self._mean, self._deviation = _channel_statistics(data.train, options.normalize)
        self._random = torch.Generator().manual_seed(options.seed)
        self._order = self._batches()

    def steps(self, epochs: float) -> int:
        """Steps of so many passes over the training images; the last, smaller batch is dropped."""
        return round(epochs * max(len(self.data.train) // self.options.batch, 1))

    def start(self, steps: int, rate: float) -> None:
        """Start a phase of so many steps: AdamW, a rate that rises to `rate` and falls to 0."""
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=rate)
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, rate, total_steps=max(steps, 1), pct_start=WARM_UP
        )
        self._every = max(steps // EVALUATIONS, 1)

    def run(self, steps: int, title: str) -> None:
        """Train so many steps. The network is left in eval mode, with its last gradients."""
        self.network.train()
        for _ in range(steps):
            part = self.data.train.rows(next(self._order))
            loss = F.cross_entropy(self.network(self._normalize(part.images, True)), part.labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self._schedule.step()
            self.curves.losses.append((self.curves.step + 1, loss.item()))
            self._progress(title)
            if self.curves.step % self._every == 0:
                self.evaluate()
                self.network.train()
        self.network.eval()

    def evaluate(self) -> float:
        """The accuracy on the test images, 0 to 1, noted in the curves. Leaves eval mode."""
        accuracy = self.accuracy(self.network.eval())
        self.curves.accuracies.append((self.curves.step, accuracy))
        return accuracy

    def accuracy(self, network: nn.Module) -> float:
        """The share of test images that a network in eval mode classifies right."""
        test = self.data.test
        with torch.no_grad():
            right = sum(
                (network(self._normalize(images, False)).argmax(1) == labels).sum().item()
                for images, labels in zip(test.images.split(TEST_BATCH), test.labels.split(TEST_BATCH), strict=True)
            )
        return right / len(test)

    def example(self, count: int) -> Tensor:
        """The first test images, as the network takes them."""
        return self._normalize(self.data.test.images[:count], False)

    def _batches(self) -> Iterator[Tensor]:
        count, batch = len(self.data.train), self.options.batch
        while True:
            order = torch.randperm(count, generator=self._random)
            parts = [part for part in order.split(batch) if len(part) == batch]
            yield from parts or [order]

    def _normalize(self, images: Tensor, train: bool) -> Tensor:
        x = (images.float() / 255 - self._mean) / self._deviation
        return _mirror_and_shift(x, self._random) if train and self.options.augment else x


def _channel_statistics(images: LabelledImages, normalize: str) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel, (1, channels, 1, 1)."""
    channels = images.images.shape[1]
    if normalize == "imagenet" and channels == 3:
        mean, deviation = map(torch.tensor, IMAGENET)
    elif normalize == "data":
        values = images.images[:10_000].transpose(0, 1).flatten(1).float() / 255
        mean, deviation = values.mean(1), values.std(1).clamp(min=1e-3)
    else:
        mean, deviation = torch.zeros(channels), torch.ones(channels)
    return mean.view(1, -1, 1, 1), deviation.view(1, -1, 1, 1)


def _mirror_and_shift(x: Tensor, random: torch.Generator) -> Tensor:
    """Half of the images mirrored, and all shifted by up to MARGIN pixels, zeros moving in."""
    n, _, height, width = x.shape
    mirrored = torch.rand(n, 1, 1, 1, generator=random) < 0.5
    padded = F.pad(torch.where(mirrored, x.flip(3), x), [MARGIN] * 4)
    down, right = torch.randint(2 * MARGIN + 1, (2, n), generator=random)
    rows = (down.view(-1, 1) + torch.arange(height)).view(n, 1, height, 1)
    columns = (right.view(-1, 1) + torch.arange(width)).view(n, 1, 1, width)
    first, channel = torch.arange(n).view(n, 1, 1, 1), torch.arange(x.shape[1]).view(1, -1, 1, 1)
    return padded[first, channel, rows, columns]


@dataclass(frozen=True, slots=True)
class PruneOptions:
    """How to prune; of `amount`, `macs` and `ms` one is used."""

    epochs: float = 0  # passes over the training images before pruning
    tune: float = 1  # passes from then on
    rounds: int = 4  # pruning steps
    structure: str = "channel"  # as of `Pruner`, as `score`
    score: str = "l1"
    amount: float = 0.5  # the share of slices to remove
    macs: float | None = None  # MACs to keep: a share of all, or a number
    ms: float | None = None  # milliseconds that one image may take


@dataclass(frozen=True, slots=True)
class PruneResult(PageSource):
    """A network before and after `demask prune`."""

    network: nn.Module  # the small one
    report: Report  # MACs are those of EXAMPLE images
    accuracies: dict[str, float]  # by phase
    timings: dict[str, Timing]  # seconds for TIMED images
    verification: Any  # of masked and demasked network
    curves: Curves
    pruned: tuple[str, ...]  # a line for each pruning step

    def to_dict(self) -> dict[str, Any]:
        """The numbers in JSON types; times in seconds."""
        return {
            "before": asdict(self.report.before),
            "after": asdict(self.report.after),
            "accuracies": self.accuracies,
            "seconds": {name: asdict(timing) for name, timing in self.timings.items()},
            "images": TIMED,
            "difference": self.verification.max_abs,
            "curves": self.curves.to_dict(),
        }

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Rows of the table: name, before, after, share."""
        before, after = self.report.before, self.report.after
        pairs = [
            ("parameters", before.parameters, after.parameters),
            ("MACs per image", before.macs // EXAMPLE, after.macs // EXAMPLE),
            ("bytes", before.bytes, after.bytes),
        ]
        rows = [(name, f"{old:,}", f"{new:,}", share(new, old)) for name, old, new in pairs]
        first, last = self.timings["before"], self.timings["after"]
        rows.append(
            (f"ms for {TIMED} images", format_spread(first), format_spread(last), share(last.median, first.median))
        )
        dense, tuned = self.accuracies["dense"], self.accuracies["tuned"]
        rows.append(
            ("test accuracy", f"{100 * dense:.2f} %", f"{100 * tuned:.2f} %", f"{100 * (tuned - dense):+.2f} points")
        )
        return rows

    def page(self) -> Page:
        """What the command prints and writes, as sections."""
        note = f"{describe_machine()}, demask {demask.__version__}."
        return Page(
            "demask prune",
            (
                TextTable(("", "before", "after", ""), self.rows()),
                OnPage([self.curves.charts(), *module_sections(self.report)]),
                Lines([*self.remarks()], "Steps", is_wrapped=True, is_close=True),
                OnPage(self.verification.page().sections),
            ),
            note=note,
        )

    def remarks(self) -> Iterator[str]:
        """What happened, in lines."""
        masked, tuned = self.accuracies["masked"], self.accuracies["tuned"]
        yield from self.pruned
        yield (
            f"With all masks: {100 * masked:.2f} %. Demasked: the same outputs (largest "
            f"difference {self.verification.max_abs:.2g}); the small network then trained on, "
            f"with its optimizer carried over, to {100 * tuned:.2f} %."
        )


def prune_classifier(training: Training, options: PruneOptions) -> PruneResult:
    """Train, prune in steps of the training, demask, train on, and measure.

    Raises BadInput for a budget that cannot be met, Mismatch if demask changed the outputs.
    """
    training.start(training.steps(options.epochs), training.options.rate)
    training.run(training.steps(options.epochs), "training")
    accuracies = {"dense": training.evaluate()}
    example, network = (training.example(EXAMPLE),), training.network
    original = structural_copy(network, share=False)
    total = max(training.steps(options.tune), options.rounds)
    training.start(total, GRADIENT * training.options.rate)
    lines, done = _prune_in_steps(training, options, example, total)
    accuracies["masked"] = training.evaluate()
    slim = demask.demask(network, example)
    verification = demask.verify(network, slim, example)
    training.network = slim
    demask.carry(slim, training.optimizer)
    training.curves.events.append((training.curves.step, "demasked"))
    training.run(total - done, "training the small network")
    accuracies["tuned"] = training.evaluate()
    images, networks = training.example(TIMED), {"before": original.eval(), "after": slim.eval()}
    with torch.inference_mode():
        calls = {name: partial(network, images) for name, network in networks.items()}
        timings = Timing.of_each(race(calls, PAIRS, seconds=PATIENCE))
    return PruneResult(slim, demask.report(slim), accuracies, timings, verification, training.curves, tuple(lines))


def _prune_in_steps(
    training: Training, options: PruneOptions, example: tuple[Any, ...], total: int
) -> tuple[list[str], int]:
    """Prune in rounds, by a cubic schedule, with training in between: a line for each, and the
    training steps done."""
    pruner = _make_pruner(training.network, example, options)
    lines, done = [], 0
    for number in range(options.rounds):
        reach = BEGIN + (END - BEGIN) * number / max(options.rounds - 1, 1)
        until = max(int(reach * total), 1)  # scores may read gradients
        training.run(max(until - done, 0), "tuning")
        done = max(until, done)
        training.evaluate()
        pruned = pruner.step()
        lines.append(_describe_step(training.curves.step, pruned))
        training.curves.events.append((training.curves.step, "pruned"))
        training.evaluate()
    pruner.remove()
    return lines, done


def _make_pruner(network: nn.Module, example: tuple[Any, ...], options: PruneOptions) -> prune.Pruner:
    """A pruner whose steps follow a cubic schedule, to an amount or within a budget."""
    allocation: Any = prune.Uniform()
    if options.macs is not None:
        is_share = options.macs <= 1
        allocation = prune.MACs(options.macs if is_share else int(options.macs) * EXAMPLE)
    if options.ms is not None:
        allocation = prune.Latency(budget_ms=options.ms * EXAMPLE)
    return prune.Pruner(
        network,
        example,
        score=SCORES[options.score](),
        structure=options.structure,
        allocation=allocation,
        schedule=prune.Cubic(0.0, options.amount, options.rounds),
    )


def _describe_step(step: int, pruned: prune.Pruned) -> str:
    gone, all_units = sum(map(len, pruned.removed.values())), sum(pruned.units.values())
    before, after = pruned.before.macs // EXAMPLE, pruned.after.macs // EXAMPLE
    return f"Step {step}: {gone} of {all_units} masked, {before:,} -> {after:,} MACs per image once demasked."
