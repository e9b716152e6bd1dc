"""The module of a rewritten program in which no tensor was cut."""

from __future__ import annotations

from collections.abc import Iterable

from demask.facts.analysis import Analysis
from demask.graph.guards import literal_inputs
from demask.graph.input_specs import example_batch, input_specs
from demask.graph.program import Program, copy_tensors
from demask.graph.provenance import Cut, ModuleSizes, Provenance
from demask.graph.result.demasked_module import Demasked, build
from demask.shrink.program_size import measure_modules, measure_program


def build_uncut(before: Analysis, after: Program, notes: Iterable[str]) -> Demasked:
    """The module of `after`, with its own tensors and a record of `before`."""
    return build_sharing(before, copy_tensors(after), notes)


def build_sharing(before: Analysis, after: Program, notes: Iterable[str]) -> Demasked:
    """The module of `after`, which shares the tensors of the program."""
    program = before.program
    whole = {
        name: Cut(c.name, tuple(c.tensor.shape), (None,) * c.tensor.ndim)
        for name, c in after.constants.items()
        if name in program.constants
    }
    relations = before.again(after).relations
    modules = measure_modules(program, before.relations), measure_modules(after, relations)
    record = Provenance(
        cuts=whole,
        reasons=(),
        effects={},
        notes=(*program.notes, *notes),
        inputs=input_specs(program),
        batch=example_batch(program),
        before=measure_program(program, before.relations),
        after=measure_program(after, relations),
        guards=program.guards,
        values=literal_inputs(program.graph),
        interface=program.interface,
        modules=ModuleSizes.paired(*modules),
    )
    return build(after, record)
