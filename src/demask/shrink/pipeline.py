"""The pipeline: capture, fold constants, analyze, choose layouts, emit.

Tied tensors have all their names, each for the tensor that its module reads.

torch.export reads a tied tensor under one of its names. Cut in two ways, it is two tensors, and the
embedding's rows belong under the embedding's name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from demask.errors import DemaskError, NotExportable
from demask.facts.analysis import Analysis
from demask.facts.known import Relations
from demask.failures import CallFailed, Log, described, is_strict
from demask.graph.capture.declared_masks import Masks, declare_masks
from demask.graph.capture.errors import part_of
from demask.graph.capture.export_guards import find_violated_guard
from demask.graph.capture.fold_constants import fold_constants, plain_name
from demask.graph.capture.functionalize import functionalize
from demask.graph.capture.shared_captures import shared_captures
from demask.graph.guards import literal_inputs
from demask.graph.input_domains import NOTHING, Domain, Domains, domains_of
from demask.graph.input_specs import example_batch, input_specs
from demask.graph.program import Constant, Program, copy_graph, copy_tensors, module_of
from demask.graph.provenance import Cut, ModuleSizes, Provenance, Reason, Sizes, removed_parameters
from demask.graph.queries import ExampleSizes
from demask.graph.result.demasked_module import Demasked, build
from demask.graph.split_recurrent import split_recurrent
from demask.ops import Table
from demask.ops.entries.padded import add_padded_entries
from demask.rewrites.driver import Change, rewrite
from demask.rewrites.normalize import NORMALIZE, NORMALIZE_CLASS
from demask.shrink.emit.class_calls import rewrite_for_class
from demask.shrink.emit.constant_store import is_nested
from demask.shrink.emit.emit_program import Rewritten, emit_program
from demask.shrink.layout.class_layout import FixedSizes
from demask.shrink.layout.layout_analysis import LayoutAnalysis
from demask.shrink.layout.placement import Placement, place
from demask.shrink.program_size import count_elements_written, count_numbers, measure_modules, measure_program, sum_macs
from demask.shrink.rewrites.absorb_pads import absorb_pads, restore_pads
from demask.shrink.rewrites.group_heads import group_heads
from demask.shrink.rewrites.partial_norms import condense_axes
from demask.shrink.rewrites.point_convolutions import carry_positions
from demask.shrink.rewrites.reorder_heads import reorder_heads
from demask.shrink.rewrites.side_network import split_side_network
from demask.shrink.stack_border_maps import SEPARATE, STACKED

Cuts = Mapping[str, Cut]


def name_tied_tensors(program: Program, cuts: Cuts) -> tuple[Program, dict[str, Cut]]:
    """The program with every tied tensor under original names, in the model's order: it is read
    under the first, the one that `named_parameters` of the model lists.

    A name is assigned to the tensor that calls of its module read, else to the one that has it
    already, else to the first cut of the tensor it named. Every name has its cut, whose source is
    the first name in the original.
    """
    groups = _group_tied(program)
    if not groups:
        return program, dict(cuts)
    names: dict[str, tuple[str, ...]] = {key: (key,) for key in program.constants}
    for group in groups.values():
        taken_names = {taken for key in names if key not in group for taken in names[key]}
        names |= _distribute_names(program, group, taken_names)
    graph, _ = copy_graph(program)
    for node in graph.nodes:
        if node.op == "get_attr":
            node.target = names[str(node.target)][0]
    constants: dict[str, Constant] = {}
    named_cuts: dict[str, Cut] = {}
    for key, own in names.items():
        constant, first = program.constants[key], own[0]
        constants[first] = replace(constant, name=first, aliases=own if len(own) > 1 else ())
        if key in cuts:
            named_cuts |= dict.fromkeys(own, _with_first_name(cuts[key], constant))
    return program.with_graph(graph, constants), named_cuts


def _group_tied(program: Program) -> dict[tuple[str, ...], list[str]]:
    """The constants that are cuts of one tied tensor, by the names that it had. A part of one (some
    groups of a convolution) has its own name, and is excluded."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for key, constant in program.constants.items():
        whole = any(re.fullmatch(re.escape(a) + r"(_folded)?(_?\d+)?", key) for a in constant.aliases)
        if whole:
            groups.setdefault(tuple(map(plain_name, constant.aliases)), []).append(key)
    return groups


def _distribute_names(program: Program, group: Sequence[str], taken: set[str]) -> dict[str, tuple[str, ...]]:
    """The names of each tensor of one group: the free ones of those it had, distributed."""
    readers = {key: _modules_reading(program.graph, key) for key in group}
    names: dict[str, list[str]] = {key: [] for key in group}
    for k, alias in enumerate(program.constants[group[0]].aliases):
        module = plain_name(alias).rpartition(".")[0]
        own = next((key for key in group if program.constants[key].aliases[k] == key), group[0])
        key = next((key for key in group if module in readers[key]), own)
        name = program.constants[key].aliases[k]
        if not any(name == other or is_nested(name, other) for other in taken):
            names[key].append(name)
    used = taken | {name for own_names in names.values() for name in own_names}
    for key, own_names in names.items():
        if not own_names:
            own_names.append(_free_name(key, used))
            used.add(own_names[0])
    return {key: tuple(own_names) for key, own_names in names.items()}


def _free_name(name: str, used: set[str]) -> str:
    tries = (f"{name}_{k}" if k else name for k in range(len(used) + 1))
    return next(t for t in tries if not any(t == u or is_nested(t, u) for u in used))


def _modules_reading(graph: fx.Graph, key: str) -> set[str]:
    reads = [node for node in graph.nodes if node.op == "get_attr" and node.target == key]
    calls = [user for read in reads for user in read.users if user.meta.get("nn_module_stack")]
    return {module_of(call).partition("@")[0] for call in calls}


def _with_first_name(cut: Cut, constant: Constant) -> Cut:
    """A cut whose source, if tied, is the first of its names in the original."""
    tied = cut.source in constant.aliases
    return replace(cut, source=constant.aliases[0]) if tied else cut


def smaller_sizes(program: Program, reason: str) -> Program:
    """A program for fewer sizes than were tried first, with a note that says so."""
    sizes = ", ".join(f"{spec.name} ({', '.join(map(str, spec.sizes))})" for spec in input_specs(program))
    note = f"this network only takes inputs of these sizes: {sizes}; with more of them dynamic, "
    return replace(program, notes=(f"{note}{reason}", *program.notes))


def programs_of(
    model: nn.Module | ExportedProgram,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    dynamic_shapes: Any,
    masks: Masks = "zeros",
    *,
    fold_parameters: bool = True,
    writes: bool = False,
    stated: Domains = NOTHING,
    state: bool = False,
) -> Iterator[Program]:
    """Functional programs of a network with folded constants, before anything is removed: the one
    for most sizes first, then, if iterated further, those for fewer.

    fold_parameters: False: what is computed from parameters remains calls. writes: whether a
    program may write to its inputs. state: whether the network may keep state in Python, whose
    program is that of its first call. stated: the domains of inputs that the caller states.

    Raises NotExportable or BadInput where no program can be captured.
    """
    failure: Exception | None = None
    has_program = False
    leaves = pytree.tree_leaves((args, dict(kwargs or {})))
    for captured in shared_captures(model, args, kwargs, dynamic_shapes, state=state):
        try:
            program = _functional(declare_masks(captured, masks), fold_parameters, writes)
        except MemoryError:
            raise
        except Exception as error:
            if is_strict() and not isinstance(error, DemaskError):
                raise
            failure = failure or error
            continue
        if (guard := find_violated_guard(program, args, kwargs)) is not None:
            advice = "demask an example of more rows, or with static sizes"
            failure = failure or NotExportable(f"it is valid for {guard} only", "unknown", advice)
            continue
        if failure is not None:
            program = smaller_sizes(program, f"it could not be captured: {described(failure)}")
        has_program = True
        inputs = [str(node.target) for node in program.graph.find_nodes(op="placeholder")]
        known = domains_of(leaves, stated) if len(leaves) == len(inputs) else []
        domains = {name: domain for name, domain in zip(inputs, known, strict=False) if domain != Domain()}
        example = ExampleSizes.of(program.graph, leaves)
        yield replace(program, example=example, domains=domains)
    if failure is not None and not has_program:
        if isinstance(failure, DemaskError):
            raise failure
        advice = part_of(model)
        raise NotExportable(
            described(failure), "unknown", f"demask only the parts that export, such as {advice}"
        ) from failure


def _functional(captured: Program, fold_parameters: bool, writes: bool) -> Program:
    """A captured program without in-place calls, its constants folded."""
    log = Log()
    program = functionalize(captured, writes=writes)
    program = rewrite(program, SEPARATE, log=log)
    folds = partial(fold_constants, program, parameters=fold_parameters)
    program = log.attempt("the folding of constants", folds, program)
    return replace(program, notes=(*log.notes, *program.notes))


def capture_program(
    model: nn.Module | ExportedProgram, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, dynamic_shapes: Any
) -> Program:
    """The program of a network for most sizes, before anything is removed."""
    return next(programs_of(model, args, kwargs, dynamic_shapes))


def canonicalize(
    program: Program, table: Table, log: Log | None = None, *, fold_parameters: bool = True, views: bool = True
) -> Program:
    """The program in canonical notation with folded constants, from which facts are derived. A pass
    that fails is omitted, and `log` says so. fold_parameters: as in `programs_of`. views: False:
    tokens are selected where the program selects them, not before views."""
    log = Log() if log is None else log
    program = rewrite(program, NORMALIZE if views else NORMALIZE_CLASS, table, log)
    fold = partial(fold_constants, program, parameters=fold_parameters)
    return log.attempt("the folding of constants", fold, program)


def uniform(program: Program, table: Table) -> Program:
    """A smaller program in the notation of one that has just been captured."""
    return canonicalize(fold_constants(rewrite(program, SEPARATE)), table)


def canonical(program: Program, table: Table) -> Program:
    """A program rewritten once, smaller or not: a normal form for comparison."""
    log = Log()
    analysis = LayoutAnalysis.of(uniform(program, table), table)
    ways = _try_layouts(analysis, log)
    return fold_constants(ways[0].program) if ways else program


def fixed_point(program: Program, table: Table) -> Program:
    """A program rewritten until nothing becomes smaller, and once more."""
    return canonical(shrink_program(program, table, sides=False)[0], table)


# Normal forms in which programs are compared, the cheapest first.
NORMAL_FORMS = (uniform, canonical, fixed_point)


def build_shrunk(program: Program, table: Table) -> Demasked:
    """The module of the smallest program that computes the same as a functional, folded one."""
    smaller, record = shrink_program(program, table)
    return build(copy_tensors(smaller, program.constants.values()), record)


def shrink_program(
    whole: Program,
    table: Table,
    *,
    borders: bool = True,
    sides: bool = True,
    fixed: FixedSizes | None = None,
    log: Log | None = None,
) -> tuple[Program, Provenance]:
    """The smallest program that computes the same as a functional, folded one, and its record.

    Args:
        borders: False: constants that enter padded windows are computed, instead of border maps.
        sides: False: values that depend on parameters alone stay among the calls that read inputs.
        fixed: not None: the smallest program that has the same calls, on tensors of other sizes, as
            a network of the caller's class; what keeps its size in it.
        log: collects failed steps. Where all failed, the program is unchanged.

    Passes are repeated until one removes nothing: what a pass adds to preserve shapes (a border
    map, a vector of constants) may itself have zeros. So demasking twice gives the same as
    demasking once. Where nothing became smaller, the result is the original program. Tensors that
    stay whole are shared: `copy_tensors` before they are handed out.
    """
    log = Log() if log is None else log
    first = _measure(whole, table)
    step = log.attempt("demasking", lambda: _shrink_repeatedly(first, table, (borders, sides, fixed), log), first)
    last = rewrite(step.program, STACKED, table, log) if fixed is None else step.program
    cuts = dict(step.cuts)
    names = partial(name_tied_tensors, last, cuts)
    program, cuts = log.attempt("all names of tied tensors", names, (last, cuts))
    return program, _provenance(first, replace(step, program=program, cuts=cuts), log)


@dataclass(frozen=True, slots=True)
class _MeasuredProgram:
    """A program, its sizes, and the cuts of its tensors from those of the first program.

    relations: of its calls, recurrent ones split. weight: parameters, MACs and elements written,
    which have to shrink. They are counted on the captured sizes: with a batch of two, what is
    computed once for all images counts less.
    """

    program: Program
    sizes: Sizes
    weight: tuple[int, int, int]
    cuts: Mapping[str, Cut]
    relations: Relations
    reasons: tuple[Reason, ...] = ()


_Options = tuple[bool, bool, FixedSizes | None]  # borders, sides, fixed, as in `shrink_program`
_Pass = tuple[_MeasuredProgram | None, tuple[Reason, ...]]


def _measure(program: Program, table: Table) -> _MeasuredProgram:
    whole = Log().attempt("the split of recurrent calls", lambda: split_recurrent(program), program)
    relations = Analysis(whole, table).relations
    sizes, captured_macs = measure_program(program, relations), sum_macs(relations, ExampleSizes())
    weight = (count_numbers(program), captured_macs, count_elements_written(program))
    return _MeasuredProgram(program, sizes, weight, _whole_cuts(program), relations)


def with_macs_of(record: Provenance, program: Program, table: Table) -> Provenance:
    """A record with the MACs of this program after, all and by module."""
    measured = _measure(program, table)
    macs = {path: row[1] for path, row in measure_modules(program, measured.relations).items()}
    after = {path: (row.parameters[1], macs.pop(path, 0)) for path, row in record.modules.items()}
    after |= {path: (0, count) for path, count in macs.items() if count}
    before = {path: (row.parameters[0], row.macs[0]) for path, row in record.modules.items()}
    return replace(
        record, after=replace(record.after, macs=measured.sizes.macs), modules=ModuleSizes.paired(before, after)
    )


def _shrink_repeatedly(step: _MeasuredProgram, table: Table, options: _Options, log: Log) -> _MeasuredProgram:
    """The program after passes until one removes nothing. If the first one does not, the result has
    its reasons."""
    first, failed = step, (None, ())
    while True:
        one_more = partial(_shrink_once, step, table, options, log)
        smaller, reasons = log.attempt("a pass", one_more, failed)
        if smaller is None:
            return replace(step, reasons=reasons) if step is first else step
        step = smaller


def _shrink_once(step: _MeasuredProgram, table: Table, options: _Options, log: Log) -> _Pass:
    """The program after one more pass, if something is smaller and it has no more parameters; else
    None, and the reasons of the first attempt."""
    refused: list[tuple[Reason, ...]] = []
    borders, sides, fixed = options
    known = len(log.changes or ())
    program = canonicalize(step.program, table, log, views=fixed is None)
    analysis = LayoutAnalysis.of(program, table, borders=borders, fixed=fixed)
    attempts = _attempts(analysis, log, sides=sides) if fixed is None else _one_call_each(analysis, log)
    for attempt in attempts:
        folds = partial(fold_constants, attempt.program)
        program = log.attempt("the folding of constants", folds, attempt.program)
        measured = _measure(program, table)
        less = measured.weight[0] < step.weight[0] or (
            measured.weight[1:] != step.weight[1:]
            and (measured.weight[1] <= step.weight[1] and measured.weight[2] <= step.weight[2])
        )
        if measured.weight[0] <= step.weight[0] and less:
            log.has_side_network |= attempt.has_side_network
            if log.changes is not None:
                log.changes += _changes(attempt)
            cuts = {
                name: composed
                for name, cut in attempt.cuts.items()
                if _is_unchanged(name, attempt.program, program)
                and (composed := compose_cuts(cut, step.cuts)) is not None
            }
            return replace(measured, cuts=cuts, reasons=(*step.reasons, *attempt.reasons)), ()
        refused.append(attempt.reasons)
    if log.changes is not None:
        del log.changes[known:]
    return None, refused[0] if refused else ()


def _changes(attempt: Rewritten) -> Iterator[Change]:
    """What an attempt cut, by module."""
    reason = ", ".join(("positions that are constant or never read", *attempt.forms))
    cuts: dict[str, list[tuple[str, str]]] = {}
    for name, cut in attempt.cuts.items():
        before, after = cut.shape, sliced_shape(cut)
        if before != after:
            rows = cuts.setdefault(name.rpartition(".")[0], [])
            rows.append((f"{cut.source}: {'x'.join(map(str, before))}", f"{name}: {'x'.join(map(str, after))}"))
    for module, rows in cuts.items():
        before, after = zip(*rows, strict=True)
        yield Change("cut", "smaller tensors", reason, module, before, after)


def _attempts(
    analysis: LayoutAnalysis, log: Log, tried: frozenset[str] = frozenset(), *, sides: bool = True
) -> Iterator[Rewritten]:
    """Rewritten programs, the one with most removed first.

    First come other versions of the program, in which more can be cut: pads absorbed by windows,
    complete axes with known positions condensed, heads in groups, heads reordered, side networks
    split off. Then the program itself, and frugal.
    An attempt that fails is omitted, and `log` says so. tried: the rewrites applied already. None
    is applied twice: one that leaves calls it applies to would never end.
    """
    log.add(analysis.failed)
    absorbed = None if _PADS in tried else log.attempt(_PADS, partial(_with_absorbed_pads, analysis), None)
    for attempt in _attempts(absorbed, log, tried | {_PADS}, sides=sides) if absorbed else ():
        restored = log.attempt(_PADS, partial(restore_pads, attempt.program), None)
        if restored is not None:
            yield replace(attempt, program=restored, forms=(_PADS, *attempt.forms))
    points = None if _POINTS in tried else log.attempt(_POINTS, partial(carry_positions, analysis), None)
    for attempt in _attempts(points, log, tried | {_POINTS}, sides=sides) if points else ():
        yield replace(attempt, forms=(_POINTS, *attempt.forms))
    for form, name in _REWRITES:
        other = None if name in tried else log.attempt(name, partial(_apply_rewrite, form, analysis), None)
        for attempt in _attempts(other, log, tried | {name}, sides=sides) if other else ():
            yield replace(attempt, forms=(name, *attempt.forms))
    if analysis.carried:  # a side network would compute what others carry
        yield from _try_layouts(analysis, log, essential=True)
    side = sides and analysis.borders and log.attempt("a side network", partial(split_side_network, analysis), None)
    if side and (split := log.attempt("a side network", partial(analysis.again, side), None)):
        for smaller in _try_layouts(split, log):
            yield replace(smaller, has_side_network=True, forms=(*smaller.forms, "a side network"))
    if not analysis.carried:
        yield from _try_layouts(analysis, log, essential=True)
    if analysis.has_matrices:
        yield from _try_layouts(analysis.again(analysis.program, frugal=True), log)


def _one_call_each(analysis: LayoutAnalysis, log: Log) -> Iterator[Rewritten]:
    """The program with the same calls on smaller operands. What an attempt cannot express keeps its
    size in the next."""
    log.add(analysis.failed)

    def emit() -> Rewritten:
        nonlocal analysis
        while True:
            program, relations, fixed = analysis.program, analysis.relations, analysis.fixed
            assert fixed is not None
            layouts = analysis.needs, analysis.placer.placement()
            try:
                result, more = rewrite_for_class(program, relations, analysis.known, *layouts, fixed, analysis.carried)
            except CallFailed as failure:
                analysis = analysis.without(failure)
                log.add(analysis.failed)
                continue
            if more == fixed:
                return result
            analysis = analysis.fixing(more)

    rewritten = log.attempt("a rewritten network", emit, None, essential=True)
    if rewritten is not None:
        yield rewritten


_PADS = "the absorption of pads"
_POINTS = "positions through convolutions without a neighborhood"
_Rewrite = Callable[[LayoutAnalysis], Program | None]
_REWRITES: tuple[tuple[_Rewrite, str], ...] = (
    (condense_axes, "condensing complete axes"),
    (group_heads, "heads in groups"),
    (reorder_heads, "heads in another order"),
)


def _with_absorbed_pads(analysis: LayoutAnalysis) -> LayoutAnalysis | None:
    """The analysis of the program with pads absorbed by windows; None where there are none."""
    program = absorb_pads(analysis)
    if program is None:
        return None
    return replace(analysis, table=add_padded_entries(analysis.table)).again(fold_constants(program))


def _apply_rewrite(apply: _Rewrite, analysis: LayoutAnalysis) -> LayoutAnalysis | None:
    """The analysis of the rewritten program; None where the rewrite does not apply."""
    program = apply(analysis)
    return None if program is None else analysis.again(fold_constants(program))


def _try_layouts(analysis: LayoutAnalysis, log: Log, *, essential: bool = False) -> list[Rewritten]:
    """The program in smaller layouts, if that succeeds; and with weights that several calls read cut in one way: first,
    if cutting them in several ways adds more numbers than it saves MACs, each relative to all."""

    def cost(rewritten: Rewritten) -> int:
        numbers, macs, _ = _measure(rewritten.program, analysis.table).weight
        return numbers * macs

    def attempt(tied: bool) -> list[Rewritten]:
        emit = partial(_emit_smaller, analysis, log, tied)
        rewritten = log.attempt("a rewritten network", emit, None, essential=essential and not tied)
        return [] if rewritten is None else [rewritten]

    ways = attempt(tied=False)
    return sorted(ways + attempt(tied=True), key=cost) if ways and _has_split_tensors(ways[0]) else ways


def _whole_cuts(program: Program) -> dict[str, Cut]:
    return {name: Cut(c.name, tuple(c.tensor.shape), (None,) * c.tensor.ndim) for name, c in program.constants.items()}


def sliced_shape(cut: Cut) -> tuple[int, ...]:
    """The shape of a tensor after a cut."""
    return tuple(n if p is None else len(p) for n, p in zip(cut.shape, cut.kept, strict=True))


def _is_unchanged(name: str, before: Program, after: Program) -> bool:
    """Whether a tensor has the values that it had before folding, which may store another under its
    name. Its shape may differ."""
    if name not in before.constants or name not in after.constants:
        return False
    old, new = (program.constants[name].tensor for program in (before, after))
    return old is new or torch.equal(old.reshape(-1), new.reshape(-1))


def compose_cuts(later: Cut, earlier: Mapping[str, Cut]) -> Cut | None:
    """The cut from the first program of a tensor that was cut twice; None if added since."""
    first = earlier.get(later.source)
    if first is None:
        return None
    cut_shape = sliced_shape(first)
    # A norm's scale has axes of size one after its own.
    if later.shape != cut_shape + (1,) * (len(later.shape) - len(cut_shape)):
        return None
    positions = tuple(
        b if a is None else a if b is None else tuple(a[p] for p in b)
        for a, b in zip(first.kept, later.kept, strict=False)
    )
    return Cut(first.source, first.shape, positions)


def _emit_smaller(analysis: LayoutAnalysis, log: Log, tied: bool) -> Rewritten:
    """The program in the layouts of its placement; calls whose rules fail stay as they are."""
    while True:
        placement = _place_tied(analysis) if tied else analysis.placer.placement()
        program, relations = analysis.program, analysis.relations
        try:
            return emit_program(program, relations, analysis.known, analysis.needs, placement, analysis.carried)
        except CallFailed as failure:
            analysis = analysis.without(failure)
            log.add(analysis.failed)


def _has_split_tensors(rewritten: Rewritten) -> bool:
    """Whether one tensor was cut in several ways, for several calls that read it."""
    ways = {(cut.source, cut.kept) for cut in rewritten.cuts.values()}
    return len(ways) > len({source for source, _ in ways})


def _place_tied(analysis: LayoutAnalysis) -> Placement:
    """A placement in which such a tensor stays one."""
    return place(analysis, tied=True)


def _provenance(first: _MeasuredProgram, last: _MeasuredProgram, log: Log) -> Provenance:
    marks = [node.meta["effect"] for node in last.program.graph.nodes if "effect" in node.meta]
    sizes = (measure_modules(one.program, one.relations) for one in (first, last))
    modules = ModuleSizes.paired(*sizes)
    return Provenance(
        cuts=last.cuts,
        reasons=last.reasons,
        effects=dict(Counter(marks)),
        notes=(*log.notes, *first.program.notes),
        inputs=input_specs(first.program),
        batch=example_batch(first.program),
        before=first.sizes,
        after=last.sizes,
        removed=removed_parameters(modules),
        guards=first.program.guards,
        values=literal_inputs(first.program.graph),
        interface=first.program.interface,
        modules=modules,
    )
