"""The pipeline: capture, fold, know, need, place, rewrite, build."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.export import ExportedProgram

from demask.facts.known import Relations
from demask.graph.capture import capture
from demask.graph.fold import folded
from demask.graph.functional import functionalized
from demask.graph.guards import renamed, values_of
from demask.graph.hoist import hoisted
from demask.graph.program import Program, owned
from demask.graph.provenance import Cut, InputSpec, Provenance, Reason, Sizes
from demask.graph.recurrent import layered
from demask.graph.result import Demasked, build
from demask.graph.spell import spelled
from demask.graph.tokens import early
from demask.graph.unmerge import unmerged
from demask.ops import TABLE, Table, schema
from demask.ops.padded import with_padded
from demask.shrink.absorb_pads import pads_absorbed, pads_restored
from demask.shrink.align import aligned
from demask.shrink.condense import condensed
from demask.shrink.device import CPU, device_of, moved, on_cpu
from demask.shrink.groups import grouped
from demask.shrink.measure import removed, sizes_of, traffic
from demask.shrink.names import named
from demask.shrink.place import Placement, place
from demask.shrink.reading import Reading, relations_of
from demask.shrink.rewrite import Rewritten, rewrite
from demask.shrink.side import sided
from demask.shrink.stack import apart, stacked


def demask(
    model: nn.Module | ExportedProgram,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    modules: Sequence[str] | None = None,
    table: Table | None = None,
) -> Demasked:
    """A smaller module that computes what `model` computes in eval mode: same call, same outputs.

    args, kwargs: example inputs; dimension 0 of each is dynamic where torch.export proves it can
    be. dynamic_shapes: goes to torch.export as it is; "all" makes every size dynamic that it
    proves can be (the default for parts). modules: names of submodules to demask alone, in a copy
    of the model. table: the op table to use (`demask.ops.TABLE.extended(...)`).
    Raises NotExportable or BadInput. The model is not changed. Feature rows 000-a to 000-k.

    >>> import torch, demask
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> net[0].weight.data[:5] = 0
    >>> demask.demask(net, (torch.randn(3, 4),)).get_parameter("0.weight").shape
    torch.Size([3, 4])
    """
    if modules is not None:
        from demask.shrink.partial import demask_modules

        return demask_modules(model, args, kwargs, dynamic_shapes, modules, table)  # type: ignore[return-value]
    if (device := device_of(model, args, kwargs)) != CPU:
        copy, examples, kept = on_cpu(model, args, kwargs)
        slim = demask(copy, examples, kept, dynamic_shapes=dynamic_shapes, table=table)
        moved(slim, device)
        return slim
    return shrunk(given(model, args, kwargs, dynamic_shapes), TABLE if table is None else table)


def given(
    model: nn.Module | ExportedProgram,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    dynamic_shapes: Any,
) -> Program:
    """A network as a functional program with its constants folded, before anything is removed."""
    program = folded(apart(functionalized(capture(model, args, kwargs, dynamic_shapes))))
    if isinstance(model, Demasked):
        inherited = renamed(model.demasked.guards, model.demasked.inputs, inputs_of(program))
        program = replace(program, guards=tuple(dict.fromkeys((*program.guards, *inherited))))
    return program


def simplified(program: Program) -> Program:
    """Canonically spelled, constants folded: what the facts are read off."""
    return folded(early(hoisted(unmerged(spelled(program)))))


def shrunk(program: Program, table: Table) -> Demasked:
    """The module of the smallest program that computes the same as a functional, folded one."""
    return build(*reduced(program, table))


def reduced(whole: Program, table: Table, *, borders: bool = True) -> tuple[Program, Provenance]:
    """The smallest program that computes the same as a functional, folded one.

    borders: False computes constants that enter padded windows, instead of the maps they leave.

    Passes are made until one makes nothing smaller: what a pass adds to keep shapes (a border map,
    a vector of constants) may itself hold zeros. So demasking twice is demasking once; and where
    nothing at all became smaller, the program is built as it was given.
    """
    first = step = _measured(whole, table)
    while (smaller := _smaller(step, table, borders)) is not None:
        step = smaller
    if step is first:
        step = replace(first, program=owned(whole), cuts=_uncut(whole))
    program, cuts = named(stacked(step.program), step.cuts)
    return program, _provenance(first, replace(step, cuts=cuts))


@dataclass(frozen=True, slots=True)
class _Step:
    """A program, how it measures, and how its tensors were cut from those of the first."""

    program: Program
    relations: Relations
    sizes: Sizes
    cuts: Mapping[str, Cut]
    reasons: tuple[Reason, ...] = ()

    @property
    def weight(self) -> tuple[int, int, int]:
        """Parameters, MACs, elements written: what has to shrink."""
        return (self.sizes.parameters, self.sizes.macs, traffic(self.program))


def _measured(program: Program, table: Table) -> _Step:
    relations = relations_of(layered(program).graph, table)
    return _Step(program, relations, sizes_of(program, relations), _uncut(program))


def _smaller(step: _Step, table: Table, borders: bool) -> _Step | None:
    """One more pass, if it makes the program smaller in something and no larger in parameters."""
    reading = Reading.of(simplified(step.program), table, borders=borders)
    for attempt in _attempts(reading):
        made = _measured(folded(attempt.program), table)
        less = made.weight[0] < step.weight[0] or (
            made.weight[1:] != step.weight[1:]
            and (made.weight[1] <= step.weight[1] and made.weight[2] <= step.weight[2])
        )
        if made.weight[0] <= step.weight[0] and less:
            composed = {name: _composed(cut, step.cuts) for name, cut in attempt.cuts.items()}
            # What folding made of a cut tensor, under its name, is no cut.
            cuts = {
                name: cut
                for name, cut in composed.items()
                if name in made.cuts and math.prod(left(cut)) == math.prod(made.cuts[name].shape)
            }
            return replace(made, cuts=cuts, reasons=(*step.reasons, *attempt.reasons))
    return None


def _attempts(reading: Reading) -> Iterator[Rewritten]:
    """Ways to rewrite a program, the one that removes most first.

    Other forms of it, in which more can be cut: pads absorbed by windows, complete axes over what
    varies alone, heads in groups, heads re-ordered, side networks split off. Then as it is; with
    weights that several calls read cut alike; and frugal.
    """
    if (made := pads_absorbed(reading)) is not None:
        wide = replace(reading, table=with_padded(reading.table)).again(folded(made))
        for attempt in _attempts(wide):
            yield replace(attempt, program=pads_restored(attempt.program))
    for form in (condensed, grouped, aligned):
        if (made := form(reading)) is not None:
            yield from _attempts(reading.again(folded(made)))
    if reading.borders and (made := sided(reading)) is not None:
        split = reading.again(made)
        yield _rewritten(split, split.placer.placement())
    plain = _rewritten(reading, reading.placer.placement())
    yield plain
    if _cut_apart(plain):
        yield _rewritten(reading, _tied(reading))
    if reading.has_matrices:
        frugal = reading.again(reading.program, frugal=True)
        yield _rewritten(frugal, frugal.placer.placement())


def _uncut(program: Program) -> dict[str, Cut]:
    return {
        name: Cut(c.name, tuple(c.tensor.shape), (None,) * c.tensor.ndim)
        for name, c in program.constants.items()
    }


def left(cut: Cut) -> tuple[int, ...]:
    """The shape of what a cut leaves."""
    return tuple(n if p is None else len(p) for n, p in zip(cut.shape, cut.kept, strict=True))


def _composed(later: Cut, earlier: Mapping[str, Cut]) -> Cut:
    """Where a tensor cut twice came from in the first program."""
    first = earlier.get(later.source)
    if first is None:
        return later
    made = left(first)
    # A norm's scale carries axes of size one behind its own.
    if later.shape != made + (1,) * (len(later.shape) - len(made)):
        return later  # A tensor folded between passes, under the name of one it was folded from.
    kept = tuple(
        b if a is None else a if b is None else tuple(a[p] for p in b)
        for a, b in zip(first.kept, later.kept, strict=False)
    )
    return Cut(first.source, first.shape, kept)


def _rewritten(reading: Reading, placement: Placement) -> Rewritten:
    """The program as a placement lays it out."""
    program, relations = reading.program, reading.relations
    return rewrite(program, relations, reading.facts, reading.needs, placement)


def _cut_apart(made: Rewritten) -> bool:
    """Was one tensor cut in several ways, for several calls that read it?"""
    ways = {(cut.source, cut.kept) for cut in made.cuts.values()}
    return len(ways) > len({source for source, _ in ways})


def _tied(reading: Reading) -> Placement:
    """A placement in which such a tensor stays one."""
    return place(reading.program.graph, reading.relations, reading.facts, tied=True)


def _provenance(first: _Step, last: _Step) -> Provenance:
    marks = [node.meta["effect"] for node in last.program.graph.nodes if "effect" in node.meta]
    return Provenance(
        cuts=last.cuts,
        reasons=last.reasons,
        effects=dict(Counter(marks)),
        notes=first.program.notes,
        inputs=inputs_of(first.program),
        before=first.sizes,
        after=last.sizes,
        removed=removed(first.program, last.program),
        guards=first.program.guards,
        values=values_of(first.program.graph),
        interface=first.program.interface,
    )


def inputs_of(program: Program) -> tuple[InputSpec, ...]:
    specs = []
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, Tensor):
            sizes = tuple(s if isinstance(s, int) else str(s.node.expr) for s in value.shape)
            example = tuple(schema.hint(s) for s in value.shape)
            dtype = str(value.dtype).removeprefix("torch.")
            specs.append(InputSpec(node.name, sizes, dtype, example))
    return tuple(specs)
