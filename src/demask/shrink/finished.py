"""The module of a program that a pass wrote: nothing of it was cut."""

from __future__ import annotations

from collections.abc import Iterable

from demask.facts.analysis import Analysis
from demask.graph.guards import values_of
from demask.graph.program import Program, owned
from demask.graph.provenance import Cut, Provenance
from demask.graph.result import Demasked, build
from demask.ops import Table
from demask.shrink.measure import sizes_of
from demask.shrink.pipeline import inputs_of


def finished(before: Program, after: Program, notes: Iterable[str], table: Table) -> Demasked:
    """The module of `after`, with tensors of its own, and what it was made from."""
    return shared(before, owned(after), notes, table)


def shared(before: Program, after: Program, notes: Iterable[str], table: Table) -> Demasked:
    """The module of `after`, over the very tensors of the program."""
    whole = {name: Cut(c.name, tuple(c.tensor.shape), (None,) * c.tensor.ndim)
             for name, c in after.constants.items() if name in before.constants}  # fmt: skip
    record = Provenance(
        cuts=whole,
        reasons=(),
        effects={},
        notes=(*before.notes, *notes),
        inputs=inputs_of(before),
        before=sizes_of(before, Analysis(before, table).relations),
        after=sizes_of(after, Analysis(after, table).relations),
        guards=before.guards,
        values=values_of(before.graph),
        interface=before.interface,
    )
    return build(after, record)
