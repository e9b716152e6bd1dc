"""What happened in training, by step, for the page of `demask prune`."""

from __future__ import annotations

from dataclasses import dataclass, field

from demask.pages import Curve, StepCharts


@dataclass(slots=True)
class Curves:
    """What happened in training, by step.

    losses, accuracies: (step, value). events: (step, what was done).
    """

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
