"""The values of a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from demask.graph.provenance import GIVEN, WHOLE, Sizes, Speed, TuneDecision

NOTHING = "nothing left to remove"


@dataclass(frozen=True, slots=True)
class Decline:
    """One reason why slices of zeros (rows or columns of weights) were not removed.

    Attributes:
        text: the reason.
        slices: number of slices that the reason concerns.
        places: names of the modules with these slices; for calls outside of modules, names of graph
            nodes.

    Example:
        >>> import demask, torch
        >>> net = torch.nn.Linear(4, 3).eval()
        >>> net.weight.data[:2], net.bias.data[:2] = 0, 0  # outputs 0 and 1 are always zero
        >>> decline = demask.report(demask.demask(net, (torch.ones(1, 4),))).declined[0]
        >>> decline.text, decline.places
        ("the model's output keeps its shape", ('linear',))
    """

    text: str
    slices: int
    places: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReportValues:
    """The values of a report, which text and page print; `Report` documents them."""

    before: Sizes
    after: Sizes
    removed: Mapping[str, int]
    scatters: Mapping[str, int]
    declined: tuple[Decline, ...]
    notes: tuple[str, ...]
    speed: Speed | None = None
    decisions: tuple[TuneDecision, ...] = ()
    densities: Mapping[str, float] = field(default_factory=dict)
    form: str = "graph"
    graph_reasons: tuple[str, ...] = ()
    zeros: Mapping[str, int] = field(default_factory=dict)

    @property
    def nothing_removed(self) -> bool:
        """Whether the result has at least as many parameters and MACs as the original, a bool."""
        same_work = self.after.macs >= self.before.macs
        return self.after.parameters >= self.before.parameters and same_work

    @property
    def added(self) -> int:
        """Number of parameters of the result that the original does not have, at least 0.

        Examples are packed weights and border maps (the effect of constants near padded borders).
        The sum of `removed` less this number is `before.parameters` - `after.parameters`.
        """
        gone = self.before.parameters - self.after.parameters
        return max(0, sum(self.removed.values()) - gone)

    @property
    def summary(self) -> str:
        """One line of text: the sizes before and after, or why nothing was removed."""
        if any(row.place == WHOLE and row.chosen == GIVEN for row in self.decisions):
            return "nothing removed: the original is returned, no candidate is faster"
        if self.nothing_removed and self.declined:
            slices = sum(decline.slices for decline in self.declined)
            return f"nothing removed: {slices:,} slices, for the reasons named"
        if self.nothing_removed and self.zeros:
            tensors = ", ".join(f"{count:,} of {name}" for name, count in self.zeros.items())
            return f"nothing removed: slices of zeros are left ({tensors}), no reason is known"
        if self.nothing_removed:
            return NOTHING
        parameters = f"{self.before.parameters:,} -> {self.after.parameters:,} parameters"
        return f"{parameters}, {self.before.macs:,} -> {self.after.macs:,} MACs"

    def to_dict(self) -> dict[str, Any]:
        """The report in JSON types: a dict with one key per attribute.

        It has two keys more: `summary` and `nothing_removed`. Times of candidates that did not run
        are None.
        """
        return {
            "summary": self.summary,
            "nothing_removed": self.nothing_removed,
            "before": asdict(self.before),
            "after": asdict(self.after),
            "removed": dict(self.removed),
            "scatters": dict(self.scatters),
            "declined": [asdict(decline) for decline in self.declined],
            "notes": list(self.notes),
            "speed": None if self.speed is None else asdict(self.speed),
            "decisions": [decision.to_dict() for decision in self.decisions],
            "densities": dict(self.densities),
            "form": self.form,
            "graph_reasons": list(self.graph_reasons),
            "zeros": dict(self.zeros),
        }
