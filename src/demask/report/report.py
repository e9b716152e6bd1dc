"""`report(slim)`: what went, what stayed and why, read off the network's provenance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from demask.errors import BadInput
from demask.failures import public
from demask.graph.provenance import Provenance, Reason
from demask.report.page import write_page
from demask.report.text import EFFECTS, render
from demask.report.values import Decline, ReportValues


@dataclass(frozen=True, slots=True)
class Report(ReportValues):
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

    def __str__(self) -> str:
        return render(self)

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
