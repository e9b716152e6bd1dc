"""The pipeline: capture, fold, know, need, place, rewrite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from demask.errors import DemaskError, NotExportable
from demask.facts.analysis import Analysis
from demask.failures import CallFailed, Log, described, is_strict
from demask.graph.capture.declared_masks import Masks, declaring
from demask.graph.capture.export_guards import refused_sizes
from demask.graph.capture.fold_constants import folded
from demask.graph.capture.functionalize import functionalized
from demask.graph.capture.shared_captures import shared_captures
from demask.graph.guards import values_of
from demask.graph.normalize.canonical_calls import spelled
from demask.graph.normalize.select_before_view import hoisted
from demask.graph.normalize.select_token_early import early
from demask.graph.normalize.separate_heads import unmerged
from demask.graph.normalize.split_recurrent import layered
from demask.graph.program import Program, owned
from demask.graph.provenance import Cut, InputSpec, Provenance, Reason, Sizes
from demask.graph.result.demasked_module import Demasked, build
from demask.ops import Table, schema
from demask.ops.entries.padded import with_padded
from demask.shrink.emit.rewrite import Rewritten, rewrite
from demask.shrink.layout.layout_analysis import LayoutAnalysis
from demask.shrink.layout.placement import Placement, place
from demask.shrink.program_size import removed, sizes_of, traffic
from demask.shrink.rewrites.absorb_pads import pads_absorbed, pads_restored
from demask.shrink.rewrites.group_heads import grouped
from demask.shrink.rewrites.partial_norms import condensed
from demask.shrink.rewrites.reorder_heads import aligned
from demask.shrink.rewrites.side_network import sided
from demask.shrink.stack_border_maps import apart, stacked
from demask.shrink.tied_names import named


def smaller_sizes(program: Program, reason: str) -> Program:
    """A program for fewer sizes than was tried first, which says so."""
    sizes = ", ".join(f"{spec.name} ({', '.join(map(str, spec.sizes))})"
                      for spec in inputs_of(program))  # fmt: skip
    note = f"this network takes inputs of these sizes alone: {sizes}; with more of them dynamic, "
    return replace(program, notes=(f"{note}{reason}", *program.notes))


def programs_of(
    model: nn.Module | ExportedProgram,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    dynamic_shapes: Any,
    masks: Masks = "zeros",
) -> Iterator[Program]:
    """A network as functional programs with their constants folded, before anything is removed: the
    one for most sizes first, then those for fewer, if they are asked for."""
    failure: Exception | None = None
    done = False
    for captured in shared_captures(model, args, kwargs, dynamic_shapes):
        try:
            program = _functional(declaring(captured, masks))
        except MemoryError:
            raise
        except Exception as error:
            if is_strict() and not isinstance(error, DemaskError):
                raise
            failure = failure or error
            continue
        if (guard := refused_sizes(program, args, kwargs)) is not None:
            advice = "demask an example of more rows, or with static sizes"
            failure = failure or NotExportable(f"it holds for {guard} alone", "unknown", advice)
            continue
        if failure is not None:
            program = smaller_sizes(program, f"it could not be captured: {described(failure)}")
        done = True
        yield program
    if failure is not None and not done:
        if isinstance(failure, DemaskError):
            raise failure
        raise NotExportable(
            described(failure), "unknown", "demask only the parts that export: modules=['backbone']"
        ) from failure


def _functional(captured: Program) -> Program:
    """A captured program without in-place calls, its constants folded."""
    log = Log()
    program = functionalized(captured)
    program = log.attempt("one call per border map", partial(apart, program), program)
    program = log.attempt("the folding of constants", partial(folded, program), program)
    return replace(program, notes=(*log.notes, *program.notes))


def given(
    model: nn.Module | ExportedProgram,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    dynamic_shapes: Any,
) -> Program:
    """The program of a network for most sizes, before anything is removed."""
    return next(programs_of(model, args, kwargs, dynamic_shapes))


def simplified(program: Program, table: Table, log: Log | None = None) -> Program:
    """Canonically spelled, constants folded: what the facts are read off. A pass that fails is left
    out, and `log` says so."""
    log = Log() if log is None else log
    passes: tuple[tuple[str, Callable[[Program], Program]], ...] = (
        ("the canonical notation of calls", lambda p: spelled(p, log)),
        ("the separation of heads from a dynamic batch", lambda p: unmerged(p, table)),
        ("selection before views", hoisted),
        ("the early selection of single tokens", lambda p: early(p, table)),
        ("the folding of constants", folded),
    )
    for name, change in passes:
        program = log.attempt(name, partial(change, program), program)
    return program


def uniform(program: Program, table: Table) -> Program:
    """A smaller program in the notation of one that has just been captured."""
    return simplified(folded(apart(program)), table)


def canonical(program: Program, table: Table) -> Program:
    """A program rewritten once, whether or not that makes it smaller: what two programs that
    compute the same are compared in."""
    log = Log()
    analysis = LayoutAnalysis.of(uniform(program, table), table)
    made = next(_tried(analysis, log), None)
    return program if made is None else folded(made.program)


def fixed_point(program: Program, table: Table) -> Program:
    """A program rewritten until nothing becomes smaller, and once more."""
    return canonical(reduced(program, table, sides=False)[0], table)


# How programs are spelled to be compared, the cheapest first.
FORMS = (uniform, canonical, fixed_point)


def shrunk(program: Program, table: Table) -> Demasked:
    """The module of the smallest program that computes the same as a functional, folded one."""
    return build(*reduced(program, table))


def reduced(
    whole: Program,
    table: Table,
    *,
    borders: bool = True,
    sides: bool = True,
    log: Log | None = None,
) -> tuple[Program, Provenance]:
    """The smallest program that computes the same as a functional, folded one.

    borders: False computes constants that enter padded windows, instead of the maps they leave.
    sides: False leaves what parameters alone decide among the calls that read inputs.
    log: collects what failed on the way; where all did, the program is what it was.

    Passes are made until one makes nothing smaller: what a pass adds to keep shapes (a border map,
    a vector of constants) may itself hold zeros. So demasking twice is demasking once; and where
    nothing at all became smaller, the program is built as it was given.
    """
    log = Log() if log is None else log
    first = _measured(whole, table)
    plain = replace(first, program=owned(whole), cuts=_uncut(whole))
    step = log.attempt("demasking", lambda: _smallest(first, table, (borders, sides), log), plain)
    if step.program is whole:
        step = replace(plain, reasons=step.reasons)
    program = log.attempt("one call for several border maps", lambda: stacked(step.program), None)
    last, cuts = program or step.program, dict(step.cuts)
    names = partial(named, last, cuts)
    program, cuts = log.attempt("all names of tied tensors", names, (last, cuts))
    return program, _provenance(first, replace(step, program=program, cuts=cuts), log)


@dataclass(frozen=True, slots=True)
class _MeasuredProgram:
    """A program, how it measures, and how its tensors were cut from those of the first."""

    program: Program
    sizes: Sizes
    cuts: Mapping[str, Cut]
    reasons: tuple[Reason, ...] = ()

    @property
    def weight(self) -> tuple[int, int, int]:
        """Parameters, MACs, elements written: what has to shrink."""
        return (self.sizes.parameters, self.sizes.macs, traffic(self.program))


_Pass = tuple[_MeasuredProgram | None, tuple[Reason, ...]]


def _measured(program: Program, table: Table) -> _MeasuredProgram:
    whole = Log().attempt("the split of recurrent calls", lambda: layered(program), program)
    sizes = sizes_of(program, Analysis(whole, table).relations)
    return _MeasuredProgram(program, sizes, _uncut(program))


def _smallest(
    step: _MeasuredProgram, table: Table, options: tuple[bool, bool], log: Log
) -> _MeasuredProgram:
    """What passes leave of a program, made until one makes nothing smaller. Where the first does
    not, its reasons are those of the program."""
    first, failed = step, (None, ())
    while True:
        one_more = partial(_smaller, step, table, options, log)
        smaller, reasons = log.attempt("a pass", one_more, failed)
        if smaller is None:
            return replace(step, reasons=reasons) if step is first else step
        step = smaller


def _smaller(step: _MeasuredProgram, table: Table, options: tuple[bool, bool], log: Log) -> _Pass:
    """One more pass, if it makes the program smaller in something and no larger in parameters;
    else what was kept in the first attempt, and why."""
    refused: list[tuple[Reason, ...]] = []
    borders, sides = options
    analysis = LayoutAnalysis.of(simplified(step.program, table, log), table, borders=borders)
    for attempt in _attempts(analysis, log, sides=sides):
        folds = partial(folded, attempt.program)
        program = log.attempt("the folding of constants", folds, attempt.program)
        made = _measured(program, table)
        less = made.weight[0] < step.weight[0] or (
            made.weight[1:] != step.weight[1:]
            and (made.weight[1] <= step.weight[1] and made.weight[2] <= step.weight[2])
        )
        if made.weight[0] <= step.weight[0] and less:
            log.apart |= attempt.apart
            cuts = {
                name: composed
                for name, cut in attempt.cuts.items()
                if _is_kept(name, attempt.program, program)
                and (composed := _composed(cut, step.cuts)) is not None
            }
            return replace(made, cuts=cuts, reasons=(*step.reasons, *attempt.reasons)), ()
        refused.append(attempt.reasons)
    return None, refused[0] if refused else ()


def _attempts(
    analysis: LayoutAnalysis, log: Log, tried: frozenset[str] = frozenset(), *, sides: bool = True
) -> Iterator[Rewritten]:
    """Ways to rewrite a program, the one that removes most first.

    Other forms of it, in which more can be cut: pads absorbed by windows, complete axes over what
    varies alone, heads in groups, heads re-ordered, side networks split off. Then as it is; with
    weights that several calls read cut alike; and frugal. What fails is left out, and `log` says
    so. tried: the forms applied already. None is applied twice: one that leaves calls it applies to
    would never end.
    """
    log.add(analysis.failed)
    absorbed = None if _PADS in tried else log.attempt(_PADS, partial(_padded, analysis), None)
    for attempt in _attempts(absorbed, log, tried | {_PADS}, sides=sides) if absorbed else ():
        restored = log.attempt(_PADS, partial(pads_restored, attempt.program), None)
        if restored is not None:
            yield replace(attempt, program=restored)
    for form, name in _FORMS:
        other = None if name in tried else log.attempt(name, partial(_formed, form, analysis), None)
        if other:
            yield from _attempts(other, log, tried | {name}, sides=sides)
    side = (
        sides and analysis.borders and log.attempt("a side network", partial(sided, analysis), None)
    )
    if side and (split := log.attempt("a side network", partial(analysis.again, side), None)):
        yield from (replace(made, apart=True) for made in _tried(split, log))
    plain = list(_tried(analysis, log, essential=True))
    yield from plain
    if plain and _cut_apart(plain[0]):
        yield from _tried(analysis, log, tied=True)
    if analysis.has_matrices:
        yield from _tried(analysis.again(analysis.program, frugal=True), log)


_PADS = "the absorption of pads"
_Form = Callable[[LayoutAnalysis], Program | None]
_FORMS: tuple[tuple[_Form, str], ...] = (
    (condensed, "complete axes over what varies alone"),
    (grouped, "heads in groups"),
    (aligned, "heads in another order"),
)


def _padded(analysis: LayoutAnalysis) -> LayoutAnalysis | None:
    """The analysis of the program with pads absorbed by windows; None where there are none."""
    made = pads_absorbed(analysis)
    if made is None:
        return None
    return replace(analysis, table=with_padded(analysis.table)).again(folded(made))


def _formed(form: _Form, analysis: LayoutAnalysis) -> LayoutAnalysis | None:
    """The analysis of another form of the program; None where it has none."""
    made = form(analysis)
    return None if made is None else analysis.again(folded(made))


def _tried(
    analysis: LayoutAnalysis, log: Log, *, tied: bool = False, essential: bool = False
) -> Iterator[Rewritten]:
    """The program rewritten, if that works out."""
    attempt = partial(_rewritten, analysis, log, tied)
    made = log.attempt("a rewritten network", attempt, None, essential=essential)
    if made is not None:
        yield made


def _uncut(program: Program) -> dict[str, Cut]:
    return {
        name: Cut(c.name, tuple(c.tensor.shape), (None,) * c.tensor.ndim)
        for name, c in program.constants.items()
    }


def left(cut: Cut) -> tuple[int, ...]:
    """The shape of what a cut leaves."""
    return tuple(n if p is None else len(p) for n, p in zip(cut.shape, cut.kept, strict=True))


def _is_kept(name: str, before: Program, after: Program) -> bool:
    """Has a tensor the numbers that it had before folding, which may make another under its name?
    It may have another shape."""
    if name not in before.constants or name not in after.constants:
        return False
    old, new = (program.constants[name].tensor for program in (before, after))
    return old is new or torch.equal(old.reshape(-1), new.reshape(-1))


def _composed(later: Cut, earlier: Mapping[str, Cut]) -> Cut | None:
    """Where a tensor cut twice came from in the first program; None if it was made since."""
    first = earlier.get(later.source)
    if first is None:
        return None
    made = left(first)
    # A norm's scale carries axes of size one behind its own.
    if later.shape != made + (1,) * (len(later.shape) - len(made)):
        return None
    kept = tuple(
        b if a is None else a if b is None else tuple(a[p] for p in b)
        for a, b in zip(first.kept, later.kept, strict=False)
    )
    return Cut(first.source, first.shape, kept)


def _rewritten(analysis: LayoutAnalysis, log: Log, tied: bool) -> Rewritten:
    """The program as its placement lays it out; calls whose rules fail stay as they are."""
    while True:
        placement = _tied(analysis) if tied else analysis.placer.placement()
        program, relations = analysis.program, analysis.relations
        try:
            return rewrite(program, relations, analysis.known, analysis.needs, placement)
        except CallFailed as failure:
            analysis = analysis.without(failure)
            log.add(analysis.failed)


def _cut_apart(made: Rewritten) -> bool:
    """Was one tensor cut in several ways, for several calls that read it?"""
    ways = {(cut.source, cut.kept) for cut in made.cuts.values()}
    return len(ways) > len({source for source, _ in ways})


def _tied(analysis: LayoutAnalysis) -> Placement:
    """A placement in which such a tensor stays one."""
    return place(analysis, tied=True)


def _provenance(first: _MeasuredProgram, last: _MeasuredProgram, log: Log) -> Provenance:
    marks = [node.meta["effect"] for node in last.program.graph.nodes if "effect" in node.meta]
    return Provenance(
        cuts=last.cuts,
        reasons=last.reasons,
        effects=dict(Counter(marks)),
        notes=(*log.notes, *first.program.notes),
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
