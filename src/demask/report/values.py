"""The values of a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from demask.graph.provenance import ALIKE_WOULD, GIVEN, GRAPH_WOULD, WHOLE, Sizes, Speed, TuneDecision
from demask.pages import Timeline
from demask.records import Stored, encode

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
class ModuleRow:
    """The size of a module without its submodules, before and after."""

    name: str
    parameters: tuple[int, int]  # elements
    macs: tuple[int, int]  # of one call on the example inputs
    weight: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # shapes of its largest tensor
    seconds: tuple[float | None, float | None] = (None, None)  # of one call


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
    batch: int = 1
    modules: tuple[ModuleRow, ...] = ()
    timeline: Annotated[
        Timeline | None,
        Stored(lambda timeline: timeline and [[span.name, span.bytes] for span in timeline.spans], lambda _: None),
    ] = None

    @property
    def better(self) -> str:
        """The note on what a graph in place of the network's class would save, or masks that are
        alike; "" if there is none."""
        would = (GRAPH_WOULD, ALIKE_WOULD)
        return next((note for note in self.notes if note.startswith(would)), "")

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
        return max(0, -self._unlisted)

    @property
    def uncalled(self) -> int:
        """Number of parameters of modules that a call does not reach, which a graph does not have,
        at least 0."""
        return max(0, self._unlisted)

    @property
    def _unlisted(self) -> int:
        gone = self.before.parameters - self.after.parameters
        return gone - sum(self.removed.values())

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
        unit, before, after = self.work
        return f"{parameters}, {before:,} -> {after:,} {unit}"

    @property
    def work(self) -> tuple[str, int, int]:
        """The unit of the multiply-adds before and after: of one example where a call has several,
        else of the call on the example inputs."""
        before, after, batch = self.before.macs, self.after.macs, self.batch
        if batch == 0 or before % batch or after % batch:
            return "MACs per call", before, after
        return "MACs per example", before // batch, after // batch

    def to_dict(self) -> dict[str, Any]:
        """The report in JSON types: a dict with one key per attribute.

        It has two keys more: `summary` and `nothing_removed`. Times of candidates that did not run
        are None.
        """
        head = {"summary": self.summary, "nothing_removed": self.nothing_removed}
        return head | encode(ReportValues, self)


def share(part: float, total: float) -> str:
    """`part` of `total` in percent, or a dash where that is 0."""
    return f"{100 * part / total:.1f} %" if total else "–"
