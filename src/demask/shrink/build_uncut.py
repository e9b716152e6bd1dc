"""The module of a rewritten program in which no tensor was cut."""

from __future__ import annotations

from collections.abc import Iterable

from demask.facts.analysis import Analysis
from demask.graph.guards import values_of
from demask.graph.program import Program, owned
from demask.graph.provenance import Cut, Provenance
from demask.graph.result.demasked_module import Demasked, build
from demask.shrink.pipeline import inputs_of
from demask.shrink.program_size import sizes_of


def finished(before: Analysis, after: Program, notes: Iterable[str]) -> Demasked:
    """The module of `after`, with its own tensors and a record of `before`."""
    return shared(before, owned(after), notes)


def shared(before: Analysis, after: Program, notes: Iterable[str]) -> Demasked:
    """The module of `after`, which shares the tensors of the program."""
    program = before.program
    whole = {name: Cut(c.name, tuple(c.tensor.shape), (None,) * c.tensor.ndim)
             for name, c in after.constants.items() if name in program.constants}  # fmt: skip
    record = Provenance(
        cuts=whole,
        reasons=(),
        effects={},
        notes=(*program.notes, *notes),
        inputs=inputs_of(program),
        before=sizes_of(program, before.relations),
        after=sizes_of(after, before.again(after).relations),
        guards=program.guards,
        values=values_of(program.graph),
        interface=program.interface,
    )
    return build(after, record)
