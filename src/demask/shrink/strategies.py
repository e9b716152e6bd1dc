"""What a network can come back as, in the order in which demask() tries it.

The caller's class always exists, since zeros may stay: it is as small as shapes alone make it.
A graph may have additional ops, such as a scatter, and be smaller.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from demask.errors import CaptureDiffers, DemaskError, Mismatch, NeedsGraph
from demask.failures import Log, described, is_strict, warn_caller
from demask.graph.capture.declared_masks import Masks
from demask.graph.input_domains import Domains
from demask.graph.input_specs import example_batch, input_specs
from demask.graph.program import Program, copy_tensors
from demask.graph.provenance import ALIKE_WOULD, GRAPH_WOULD, Cut, Provenance, Sizes, provenance_of
from demask.graph.result.class_result import record_call
from demask.graph.result.demasked_module import build
from demask.graph.result.restore_modules import originals_of
from demask.ops import Table
from demask.shrink.check import check_result, describe_difference, refuse_failing
from demask.shrink.layout.class_layout import EVERYTHING, FixedSizes
from demask.shrink.own_class.alike import advise, count_saved, explain, find_preserved_shapes
from demask.shrink.own_class.build import changed_numbers, find_branch, find_class, find_number, own_class, resize
from demask.shrink.own_class.numbers import is_below
from demask.shrink.own_class.parametrizations import keep_parametrizations
from demask.shrink.own_class.pretrained import SAVE
from demask.shrink.own_class.proof import ProgramMismatch, Proof
from demask.shrink.own_class.small_graphs import CALLERS, LEAST_OF_MODULE, has_methods, with_small_graphs
from demask.shrink.own_class.uncalled import describe_uncalled, find_uncalled, let_uncalled_follow
from demask.shrink.pipeline import NORMAL_FORMS, compose_cuts, programs_of, shrink_program, smaller_sizes, with_macs_of
from demask.shrink.program_size import measure_module

METHODS = (*CALLERS, SAVE)  # that a network with graphs in it would lose
CLASS_OVERHEAD = 1.05  # size of a class relative to that of a graph, from which a graph is smaller
OBJECTIVES = {"parameters": "parameters", "macs": "MACs"}  # attributes of Sizes, in words


@dataclass(eq=False)
class DemaskCall:
    """A call of demask() for a network that is captured as one program.

    stated: what the caller states of inputs. smaller: demask() itself, for modules of a class
    result. objective: the size by which results are chosen, of `OBJECTIVES`. state: whether the
    network keeps state in Python.
    """

    model: nn.Module | ExportedProgram
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] | None
    shapes: Any
    table: Table
    masks: Masks
    stated: Domains
    check: bool
    smaller: Callable[..., nn.Module]
    objective: str = "parameters"
    state: bool = False
    _captured: list[Program] = field(default_factory=list, init=False)
    _more: Iterator[Program] | None = field(default=None, init=False)

    def programs(self) -> Iterator[Program]:
        """The programs of the model, for most sizes first; each is captured once."""
        if self._more is None:
            self._more = self.programs_of(self.model, self.masks)
        for k in itertools.count():
            if k == len(self._captured):
                program = next(self._more, None)
                if program is None:
                    return
                self._captured.append(program)
            yield self._captured[k]

    def programs_of(self, model: nn.Module | ExportedProgram, masks: Masks) -> Iterator[Program]:
        """The programs of a network that is called like the model."""
        return programs_of(
            model, self.args, self.kwargs, self.shapes, masks, writes=True, stated=self.stated, state=self.state
        )


@dataclass(frozen=True, slots=True)
class SmallerProgram:
    """A captured program, the smallest program that computes the same, and its record. has_side:
    whether a side network was split off. reasons: why strategies before gave nothing."""

    program: Program
    target: Program
    record: Provenance
    has_side: bool
    reasons: tuple[str, ...] = ()


def first_result(call: DemaskCall, result: str) -> nn.Module:
    """What the first strategy for `result` returns that has a result, for the first program that
    can be demasked. Raises NeedsGraph where there is none, CaptureDiffers where no program computes
    what the model does."""
    if call.check and isinstance(call.model, nn.Module):
        refuse_failing(call.model, call.args, call.kwargs)
    differs: CaptureDiffers | None = None
    for candidate in _candidates(call):
        failure = ""
        for strategy in STRATEGIES[result]:
            try:
                return strategy(call, candidate)
            except CaptureDiffers as error:
                differs, failure = differs or error, ""
            except ProgramMismatch as error:
                failure = str(error)  # the error itself refers to what was built
                candidate = replace(candidate, reasons=(*candidate.reasons, failure))
        if failure:
            text = f"this network can only be returned as a graph: {failure}"
            raise NeedsGraph(text, candidate.reasons)
    assert differs is not None  # there is a candidate, or the first program raised
    raise differs


def as_class(call: DemaskCall, candidate: SmallerProgram) -> nn.Module:
    """The caller's class, as small as shapes alone make it: with the tensors of the smallest
    program if they fit it, else with zeros that stay. Raises ProgramMismatch for what has no class,
    and for inputs that are numbers."""
    model, program = find_class(call.model), candidate.program
    if name := find_number(program):
        raise ProgramMismatch(f"input {name} is a number, which may decide what the code does")
    notes, inputs, batch = (), input_specs(program), example_batch(program)
    branching: Program | None = None
    if branch := find_branch(program):
        static = replace(call, shapes={})
        fewer = itertools.chain(((call, p) for p in call.programs()), ((static, p) for p in static.programs()))
        proved = next(((c, p) for c, p in fewer if not find_branch(p)), None)
        if proved is None:
            raise ProgramMismatch(f"its code depends on a size ({branch})")
        branching, (call, program) = program, proved
        notes = (f"its code depends on a size ({branch}): the example's sizes were compared",)
    else:
        target, record = candidate.target, candidate.record
        if candidate.has_side:
            target, record = shrink_program(program, call.table, sides=False)
        with contextlib.suppress(ProgramMismatch):
            return _proved_class(call, model, program, (target, record))
    fixed = FixedSizes()
    while True:
        shrink = partial(shrink_program, program, call.table, fixed=fixed)
        try:
            own = _proved_class(call, model, program, shrink(), branching)
        except ProgramMismatch as error:
            fixed = fixed.widened(error.place, model)
            if fixed is None:
                raise
            continue
        record = provenance_of(own)
        stay = candidate.record.reasons  # what stays in a graph stays here, too
        known = {reason.text for reason in stay}
        more = [reason for reason in record.reasons if reason.text not in known]
        size, least = (getattr(r.after, call.objective) for r in (record, candidate.record))
        if size > CLASS_OVERHEAD * least:
            notes += (_graph_note(call, candidate, size),)
        record = replace(record, reasons=(*stay, *more), notes=(*notes, *record.notes))
        if branching is not None:
            record = replace(record, inputs=inputs, batch=batch)
        record_call(own, record, call.args, call.kwargs)
        return own


def _graph_note(call: DemaskCall, candidate: SmallerProgram, size: int) -> str:
    """What a graph would save of a class of this size, and what would have to be masked alike; ""
    where it would save nothing."""
    least, unit = getattr(candidate.record.after, call.objective), OBJECTIVES[call.objective]
    if size <= least:
        return ""
    advice = advise(find_preserved_shapes(candidate.target))
    return f'{GRAPH_WOULD} {least:,} {unit}, {size - least:,} fewer (result="graph"){advice}'


def _alike_notes(candidate: SmallerProgram) -> tuple[str, ...]:
    """What masks that are alike would save of a graph, as one note; none where that is nothing."""
    shapes = find_preserved_shapes(candidate.target)
    saved, size = count_saved(candidate.target, shapes), candidate.record.after.parameters
    if not saved:
        return ()
    return (f"{ALIKE_WOULD} {size - saved:,} parameters, {saved:,} fewer{advise(shapes)}",)


def as_unchanged_class(call: DemaskCall, candidate: SmallerProgram) -> nn.Module:
    """A copy of the caller's network with its masks applied, of which nothing is removed."""
    model, program = find_class(call.model), candidate.program
    fixed = FixedSizes(modules=frozenset({EVERYTHING}))
    target, record = shrink_program(program, call.table, fixed=fixed)
    own = resize(model, Proof(program, target, record.cuts, (call.args, {}), lambda _: iter(()), ()))
    keep_parametrizations(own, model, {})
    notes = (f"nothing is removed: {candidate.reasons[-1]}", *record.notes)
    record = replace(record, form="class", notes=notes)
    record_call(own, record, call.args, call.kwargs)
    return own


def as_smaller_class(call: DemaskCall, candidate: SmallerProgram) -> nn.Module:
    """The caller's class. Where a graph would be smaller by more than 5 %, the blocks that keep
    most zeros are graphs in it, but not in networks with methods that graphs would lose; a warning
    says what more could be removed. Raises ProgramMismatch, with a warning, where such a class
    would keep all parameters and MACs, of which a graph saves many."""
    own, unit = as_class(call, candidate), OBJECTIVES[call.objective]
    least = getattr(candidate.record.after, call.objective)
    size, uncalled = getattr(provenance_of(own).after, call.objective), 0
    if call.objective == "parameters":  # a graph does not have modules that are not called
        uncalled = measure_module(own).parameters - size
    may_have_graphs = not has_methods(own, METHODS)
    if size > CLASS_OVERHEAD * least and may_have_graphs and call.masks == "zeros":
        own = _with_small_graphs(call, candidate, own)
        size = getattr(measure_module(own, provenance_of(own).after.macs), call.objective) - uncalled
    parts, loss = len(provenance_of(own).graph_reasons), ""
    if may_have_graphs and not parts:
        loss = _describe_loss(provenance_of(own).after, candidate.record, call.objective)
    if not (loss or parts or size > CLASS_OVERHEAD * least):
        return own
    advice = advise(find_preserved_shapes(candidate.target))
    advice += "; demask.prune.align does so (once: it prunes)" if advice else ""
    if loss:
        warn_caller(f'demask() returns a graph, since {loss} (result="class"){advice}')
        raise ProgramMismatch(loss)
    form = f"own class, with {parts} of its modules as graphs" if parts else "own class"
    less = f': {size + uncalled:,} {unit}, where one graph has {least:,} (result="graph"){advice}'
    warn_caller(f"demask() returns the network's {form}{less if size > least else ''}")
    return own


def _describe_loss(own: Sizes, graph: Provenance, objective: str) -> str:
    """What a network of the caller's class keeps, if it keeps all parameters and MACs (by MACs: all
    of these) and a graph saves many; else ""."""
    before, after = graph.before, graph.after
    names = [name for name in OBJECTIVES if objective in ("parameters", name)]
    if any(getattr(own, name) < getattr(before, name) for name in names):
        return ""
    for name in names:
        full, fewer = getattr(before, name), getattr(after, name)
        if full - fewer >= max(1, LEAST_OF_MODULE * full):
            return f"the network's class would keep all {full:,} {OBJECTIVES[name]}, of which it has {fewer:,}"
    return ""


def _with_small_graphs(call: DemaskCall, candidate: SmallerProgram, own: nn.Module) -> nn.Module:
    """A network of the caller's class with small graphs, if it has any and computes the same; else
    as it is."""
    inputs = call.args, dict(call.kwargs or {})
    mixed, graphs = with_small_graphs(own, inputs, call.smaller, call.objective)
    if not graphs:
        return own
    record, shapes = provenance_of(own), find_preserved_shapes(candidate.target)
    parts = {path: provenance_of(graph) for path, graph in graphs.items()}
    effects, removed, modules = Counter[str](), Counter(record.removed), dict(record.modules)
    for path, part in parts.items():
        effects.update(part.effects)
        for name, n in part.removed.items():
            removed[f"{path}.{name}".rstrip(".")] += n
        for name, sizes in part.modules.items():
            inner = f"{path}.{name}".rstrip(".")
            modules[inner] = sizes.since(modules.get(inner))
    saved_macs = sum(part.before.macs - part.after.macs for part in parts.values())
    after = measure_module(mixed, record.after.macs - saved_macs)
    uncalled = measure_module(own).parameters - record.after.parameters
    after_called = replace(after, parameters=after.parameters - uncalled)
    note = _graph_note(call, candidate, getattr(after_called, call.objective))
    notes = [note if old.startswith(GRAPH_WOULD) else old for old in record.notes]
    notes = [note for note in notes if note]
    record = replace(
        record,
        after=after,
        cuts=_cuts_of_parts(record, parts),
        effects=dict(effects),
        removed=dict(removed),
        modules=modules,
        graph_reasons=tuple(f"{path} is a graph: {explain(path, shapes)}" for path in parts),
        notes=(
            *notes,
            *(f"{path}: {note}" for path, part in parts.items() for note in part.notes if note not in record.notes),
        ),
    )
    try:
        wrong = call.check and describe_difference(
            mixed, call.model, call.args, call.kwargs, record=record, stated=call.stated
        )
    except MemoryError:
        raise
    except Exception:  # code around a graph that calls it in another way for other sizes
        return own
    if wrong and is_strict():
        raise Mismatch(f"the network with graphs computes something else: {wrong}")
    if wrong:
        return own
    record_call(mixed, record, call.args, call.kwargs)
    return mixed


def _cuts_of_parts(record: Provenance, parts: Mapping[str, Provenance]) -> dict[str, Cut]:
    """The cuts of a network, those of modules that became graphs cut twice."""
    cuts = {name: cut for name, cut in record.cuts.items() if not is_below(name, parts)}
    for path, part in parts.items():
        earlier = {name.removeprefix(f"{path}."): cut for name, cut in record.cuts.items() if is_below(name, [path])}
        for name, cut in part.cuts.items():
            if (composed := compose_cuts(cut, earlier)) is not None:
                cuts[f"{path}.{name}"] = composed
    return cuts


def as_graph(call: DemaskCall, candidate: SmallerProgram) -> nn.Module:
    """One graph, of the smallest program."""
    record, inputs = candidate.record, (call.args, dict(call.kwargs or {}))
    model, names = call.model, []
    if isinstance(model, nn.Module):
        names = find_uncalled(model, candidate.program, inputs)
    if names:
        note = f"a graph has no modules that are not called in eval mode: {', '.join(names)}"
        record = replace(record, notes=(note, *record.notes))
    notes = (*_alike_notes(candidate), *record.notes)
    record = replace(record, graph_reasons=candidate.reasons, notes=notes)
    originals = originals_of(call.model, candidate.program)
    target = copy_tensors(candidate.target, candidate.program.constants.values())
    slim = build(target, record, originals=originals)
    if call.check:
        slim = check_result(slim, candidate.program, call.model, call.args, call.kwargs, call.stated)
    return slim


STRATEGIES: Mapping[str, tuple[Callable[[DemaskCall, SmallerProgram], nn.Module], ...]] = {
    "class": (as_class, as_unchanged_class),
    "smaller class": (as_class,),  # of networks with state, whose other modules become smaller else
    "auto": (as_smaller_class, as_graph),
    "graph": (as_graph,),
}


def _proved_class(
    call: DemaskCall,
    model: nn.Module,
    program: Program,
    smaller: tuple[Program, Provenance],
    branching: Program | None = None,
) -> nn.Module:
    """The network of the model's class that computes the smaller program; raises ProgramMismatch
    where it is not proved to. branching: as in `describe_difference`."""
    target, record = smaller
    masks: Masks = "zeros" if call.masks == "zeros" else "declared"
    forms = [partial(form, table=call.table) for form in NORMAL_FORMS]
    inputs = call.args, dict(call.kwargs or {})
    capture = partial(call.programs_of, masks=masks)
    proof = Proof(program, target, record.cuts, inputs, capture, forms)
    try:
        own = own_class(model, proof)
        below = keep_parametrizations(own, model, record.cuts)
        wrong = call.check and describe_difference(
            own, model, call.args, call.kwargs, stated=call.stated, branching=branching
        )
        if wrong:
            error = Mismatch if is_strict() and branching is None else ProgramMismatch
            raise error(f"the network computes something else: {wrong}")
    except (MemoryError, ProgramMismatch):
        raise
    except Exception as error:
        if is_strict() and branching is None:
            raise
        raise ProgramMismatch(described(error)) from error
    if proof.own is not None:
        record = with_macs_of(record, proof.own, call.table)
    cuts = {**record.cuts, **below}
    if uncalled := find_uncalled(model, program, inputs):
        more, rest = let_uncalled_follow(
            own,
            model,
            uncalled,
            inputs,
            lambda other: first_result(replace(call, model=other), "smaller class"),
            lambda a, b: describe_difference(a, b, call.args, call.kwargs, stated=call.stated),
        )
        cuts |= more
        record = replace(record, notes=(*describe_uncalled(model, rest, cuts), *record.notes))
    numbers = changed_numbers(model, own)
    record = replace(record, form="class", numbers=numbers, effects={}, cuts=cuts)
    record_call(own, record, call.args, call.kwargs)
    return own


def _candidates(call: DemaskCall) -> Iterator[SmallerProgram]:
    """Programs that can be demasked, and what they become; where none can, the first program
    unchanged."""
    failed: list[SmallerProgram] = []
    programs, reason = call.programs(), ""
    while True:
        try:
            program = next(programs, None)
        except DemaskError:
            if not reason:
                raise
            program = None
        if program is None:
            yield from failed[:1]
            return
        log, program = Log(), smaller_sizes(program, reason) if reason else program
        target, record = shrink_program(program, call.table, log=log)
        reason = reason or "".join(log.notes[:1])
        candidate = SmallerProgram(program, target, record, log.has_side_network)
        if log.gave_up:
            failed.append(candidate)
            continue
        yield candidate
        reason = "the captured graph does not compute what the model does"
