"""`report(slim)`: what went, what stayed and why, read off the network's provenance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from demask.errors import BadInput
from demask.failures import public
from demask.graph.provenance import Decision, Provenance, Reason, Sizes, Speed
from demask.report.page import write_page
from demask.report.text import EFFECTS, render

NOTHING = "nothing left to remove"


@dataclass(frozen=True, slots=True)
class Decline:
    """Slices kept for one reason: how many in all, and at which modules or nodes."""

    text: str
    slices: int
    places: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What demasking did to one network.

    before, after: parameters, MACs of one call on the example inputs, bytes. removed: parameters
    gone, per module, most first. scatters: ops that only keep shapes, counted by effect (every
    effect is present, also at 0). declined: what was kept and why, most slices first. notes: what
    else to know (dynamic dimensions, licences used). speed, decisions: of `demask.optimize` alone:
    how fast beside the network as given, and what was chosen for each piece, with the seconds of
    every form it could take. densities: of the layers that are computed by their nonzeros alone,
    the share of weights that are stored. form: "class" where the network came back in its own class
    with smaller modules, else "graph"; graph_reasons: where more than shapes changed.
    """

    before: Sizes
    after: Sizes
    removed: Mapping[str, int]
    scatters: Mapping[str, int]
    declined: tuple[Decline, ...]
    notes: tuple[str, ...]
    speed: Speed | None = None
    decisions: tuple[Decision, ...] = ()
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

    def __str__(self) -> str:
        return render(self)

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

    def to_html(self, path: str | Path) -> None:
        """Write the report to `path` as one page that needs no other file; whole or not at all."""
        write_page(self, Path(path))


@public
def report(slim: nn.Module) -> Report:
    """What `demask.demask` did to `slim`, a network that it returned.

    Raises BadInput for any other module.

        slim = demask.demask(model, (images,))
        print(demask.report(slim))
    """
    provenance = getattr(slim, "demasked", None)
    if not isinstance(provenance, Provenance):
        raise BadInput(
            f"expected a network made by demask.demask, got a {type(slim).__name__} without its "
            "`demasked` record; call demask.demask(model, args) and report what it returns"
        )
    return Report(
        before=provenance.before,
        after=provenance.after,
        removed=_largest_first(provenance.removed),
        scatters=dict.fromkeys(EFFECTS, 0) | dict(provenance.effects),
        declined=_grouped(provenance.reasons),
        notes=provenance.notes,
        speed=provenance.speed,
        decisions=provenance.decisions,
        densities=provenance.densities,
        form=provenance.form,
        graph_reasons=provenance.graph_reasons,
    )


def _largest_first(removed: Mapping[str, int]) -> dict[str, int]:
    gone = [(module, count) for module, count in removed.items() if count]
    return dict(sorted(gone, key=lambda row: (-row[1], row[0])))


def _grouped(reasons: tuple[Reason, ...]) -> tuple[Decline, ...]:
    """One decline per text: the slices summed, the places in the order met, each once. An op that
    has no rule but that nothing masked reaches kept no slice, and is none."""
    by_text: dict[str, list[Reason]] = {}
    for reason in (reason for reason in reasons if reason.count):
        by_text.setdefault(reason.text, []).append(reason)
    declines = [
        Decline(
            text,
            sum(reason.count for reason in group),
            tuple(dict.fromkeys(reason.module or reason.node for reason in group)),
        )
        for text, group in by_text.items()
    ]
    return tuple(sorted(declines, key=lambda decline: (-decline.slices, decline.text)))
