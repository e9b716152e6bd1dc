"""`demask prune`: train, prune by schedule, tune, demask, and go on training the small network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

import demask
from demask import prune
from demask.cli.pruning.curves import Curves
from demask.cli.pruning.training import Training
from demask.graph.module_copy import structural_copy
from demask.machine.clock import Timing, race
from demask.machine.describe import describe_machine, format_spread
from demask.pages import Lines, OnPage, Page, PageSource, TextTable
from demask.report.module_sections import module_sections
from demask.report.report import Report
from demask.report.values import share

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


@dataclass(frozen=True, slots=True)
class PruneOptions:
    """How to prune; of `amount`, `macs` and `ms` one is used.

    epochs, tune: passes over the training images before pruning, and from then on. rounds: pruning
    steps. structure, score: as of `Pruner`. amount: the share of slices to remove. macs: the MACs
    to keep, a share of all or a number; ms: the milliseconds that one image may take.
    """

    epochs: float = 0
    tune: float = 1
    rounds: int = 4
    structure: str = "channel"
    score: str = "l1"
    amount: float = 0.5
    macs: float | None = None
    ms: float | None = None


@dataclass(frozen=True, slots=True)
class PruneResult(PageSource):
    """A network before and after `demask prune`.

    network: the small network. report: of it; MACs are those of EXAMPLE images. accuracies: by
    phase. timings: seconds for TIMED images. verification: of masked and demasked network.
    pruned: a line for each pruning step.
    """

    network: nn.Module
    report: Report
    accuracies: dict[str, float]
    timings: dict[str, Timing]
    verification: Any
    curves: Curves
    pruned: tuple[str, ...]

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
    images = training.example(TIMED)
    timings = _timed({"before": original.eval(), "after": slim.eval()}, images)
    return PruneResult(slim, demask.report(slim), accuracies, timings, verification, training.curves, tuple(lines))


def _prune_in_steps(
    training: Training, options: PruneOptions, example: tuple[Any, ...], total: int
) -> tuple[list[str], int]:
    """Prune in rounds, by a cubic schedule, with training in between: a line for each, and the
    training steps done."""
    pruner = _pruner(training.network, example, options)
    lines, done = [], 0
    for number in range(options.rounds):
        reach = BEGIN + (END - BEGIN) * number / max(options.rounds - 1, 1)
        until = max(int(reach * total), 1)  # scores may read gradients
        training.run(max(until - done, 0), "tuning")
        done = max(until, done)
        training.evaluate()
        pruned = pruner.step()
        lines.append(_line(training.curves.step, pruned))
        training.curves.events.append((training.curves.step, "pruned"))
        training.evaluate()
    pruner.remove()
    return lines, done


def _pruner(network: nn.Module, example: tuple[Any, ...], options: PruneOptions) -> prune.Pruner:
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


def _line(step: int, pruned: prune.Pruned) -> str:
    """A pruning step in words."""
    gone, all_units = sum(map(len, pruned.removed.values())), sum(pruned.units.values())
    before, after = pruned.before.macs // EXAMPLE, pruned.after.macs // EXAMPLE
    return f"Step {step}: {gone} of {all_units} masked, {before:,} -> {after:,} MACs per image once demasked."


def _timed(networks: dict[str, nn.Module], images: torch.Tensor) -> dict[str, Timing]:
    with torch.inference_mode():
        calls = {name: lambda net=net: net(images) for name, net in networks.items()}
        return Timing.of_each(race(calls, PAIRS, seconds=PATIENCE))
