"""What a report says, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from demask.graph.provenance import Sizes, Speed, TuneDecision

NOTHING = "nothing left to remove"


@dataclass(frozen=True, slots=True)
class Decline:
    """Slices kept for one reason: how many in all, and at which modules or nodes."""

    text: str
    slices: int
    places: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReportValues:
    """The values of a report, which text and page print: `Report` says what they are."""

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

    @property
    def nothing_removed(self) -> bool:
        """True when the network came out as large and as costly as it went in."""
        same_work = self.after.macs >= self.before.macs
        return self.after.parameters >= self.before.parameters and same_work

    @property
    def summary(self) -> str:
        """One line: what went; else `nothing left to remove`, or how much was kept for reasons."""
        if self.nothing_removed and not self.declined:
            return NOTHING
        if self.nothing_removed:
            kept = sum(decline.slices for decline in self.declined)
            return f"nothing removed: {kept:,} slices kept, for the reasons named"
        parameters = f"{self.before.parameters:,} -> {self.after.parameters:,} parameters"
        return f"{parameters}, {self.before.macs:,} -> {self.after.macs:,} MACs"

    def to_dict(self) -> dict[str, Any]:
        """The report as plain dictionaries, lists, strings and integers, ready for JSON."""
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
        }
