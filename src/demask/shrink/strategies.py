"""What a network can come back as, in the order in which demask() tries it.

The caller's class always exists, since zeros may stay: it is as small as shapes alone make it.
A graph may have additional ops, such as a scatter, and be smaller.

The tensors below a parametrized weight are cut where that commutes with the parametrization, so that training
continues as it would have. Modules that are not called in eval mode, such as auxiliary classifiers, follow what
is cut of their inputs, or are named.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from demask.errors import CaptureDiffers, DemaskError, Mismatch, NeedsGraph
from demask.failures import Log, described, is_strict, warn_caller
from demask.graph.capture.declared_masks import Masks
from demask.graph.capture.fold_constants import plain_name
from demask.graph.example_runs import Inputs, copy_in_eval, run_seeded
from demask.graph.input_domains import Domains
from demask.graph.input_specs import example_batch, input_specs
from demask.graph.module_copy import structural_copy
from demask.graph.program import Program, copy_tensors
from demask.graph.provenance import ALIKE_WOULD, GRAPH_WOULD, Cut, Positions, Provenance, Sizes, provenance_of
from demask.graph.result.class_result import record_call
from demask.graph.result.computed_tensors import ComputedTensor, computed_tensors, remove_parametrizations
from demask.graph.result.demasked_module import build
from demask.graph.result.resize import module_at, put_module
from demask.graph.result.restore_modules import originals_of
from demask.judge import Pair
from demask.ops import Table
from demask.shrink.check import check_result, describe_difference, refuse_failing
from demask.shrink.emit.constant_store import cut
from demask.shrink.layout.class_layout import EVERYTHING, FixedSizes
from demask.shrink.own_class.alike import advise, count_saved, explain, find_preserved_shapes
from demask.shrink.own_class.build import changed_numbers, find_branch, find_class, find_number, own_class, resize
from demask.shrink.own_class.numbers import is_below
from demask.shrink.own_class.pretrained import SAVE
from demask.shrink.own_class.proof import ProgramMismatch, Proof
from demask.shrink.own_class.small_graphs import CALLERS, LEAST_OF_MODULE, has_methods, with_small_graphs
from demask.shrink.pipeline import NORMAL_FORMS, compose_cuts, programs_of, shrink_program, smaller_sizes, with_macs_of
from demask.shrink.program_size import measure_module


def find_uncalled(model: nn.Module, program: Program, inputs: Inputs) -> list[str]:
    """The outermost modules with parameters that a network does not call in eval mode, and of
    which its program reads none."""
    graphs = [path for path, module in model.named_modules() if isinstance(module, GraphModule)]
    if "" in graphs:
        return []
    read = {plain_name(alias) for name, c in program.constants.items() for alias in c.aliases or (name,)}
    plain = structural_copy(model, share=True)
    remove_parametrizations(plain)
    paths: list[str] = []
    for path, module in plain.named_modules():
        names = [f"{path}.{name}" for name, _ in module.named_parameters(remove_duplicate=False)]
        if path and names and read.isdisjoint(names) and not is_below(path, [*paths, *graphs]):
            paths.append(path)
    called = _find_called(copy_in_eval(plain), inputs, paths) if paths else set()
    return [path for path in paths if path not in called]


def in_train_mode(model: nn.Module, paths: Sequence[str]) -> nn.Module | None:
    """A copy of a network in which the modules around `paths` are in train mode for ever, and all
    others in eval mode, so that code calls what it calls in train mode alone and computes what does
    not depend on chance. None where that is the network already."""
    copy = copy_in_eval(model)
    around = [
        module for path, module in copy.named_modules() if not path or any(p.startswith(f"{path}.") for p in paths)
    ]
    if copy.training or any(map(parametrize.is_parametrized, around)):
        return None
    for module in around:
        kind: Any = type(module)
        module.__class__ = type(kind.__name__, (kind,), {"training": _ALWAYS})
    return copy


class _WithoutDropout(TorchFunctionMode):
    """Functions of dropout return their input."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "dropout" in getattr(func, "__name__", ""):
            return args[0] if args else kwargs["input"]
        return func(*args, **(kwargs or {}))


_ALWAYS = property(lambda _: True, lambda *_: None)


def let_uncalled_follow(
    own: nn.Module,
    model: nn.Module,
    uncalled: Sequence[str],
    inputs: Inputs,
    smaller: Callable[[nn.Module], nn.Module],
    differ: Callable[[nn.Module, nn.Module], str],
) -> tuple[dict[str, Cut], list[str]]:
    """Put modules that are called in train mode alone into a smaller network as they are in the
    result for train mode, in place, where the network then computes the same in that mode; returns
    the cuts of their tensors, and the modules that do not fit or are not called there either.

    own: a network of the model's class. smaller: what demask() returns in the class of a network.
    differ: how two networks differ for the same inputs; "" if they do not.
    """
    with _WithoutDropout(), contextlib.suppress(Exception):  # it may have no class, or no export
        original = in_train_mode(model, uncalled)
        called = set[str]() if original is None else _find_called(original, inputs, uncalled)
        others = [path for path in uncalled if path not in called]
        if original is None or not called or not _differ(own, original, uncalled, differ):
            return {}, others
        other = smaller(original)
        before = {path: own.get_submodule(path) for path in called}
        after = {path: _with_modes(other.get_submodule(path), m) for path, m in before.items()}
        for path, module in after.items():
            put_module(own, path, module)
        if not _differ(own, original, uncalled, differ):
            cuts = provenance_of(other).cuts
            return {name: how for name, how in cuts.items() if is_below(name, called)}, others
        for path, module in before.items():
            put_module(own, path, module)
    return {}, list(uncalled)


def describe_uncalled(model: nn.Module, paths: Sequence[str], cuts: Mapping[str, Cut]) -> tuple[str, ...]:
    """Notes on modules that keep their sizes, where they may read an axis that was cut."""
    axes = (axis for how in cuts.values() for axis in zip(how.shape, how.kept, strict=True))
    sizes = {size for size, remain in axes if remain is not None and len(remain) < size}
    notes = []
    for path in paths:
        shapes = {n for p in model.get_submodule(path).parameters() for n in p.shape}
        if read := sorted(shapes & sizes):
            numbers = " or ".join(map(str, read))
            notes.append(
                f"{path} is not called for these inputs in eval mode and keeps its sizes: "
                f"what it reads of {numbers} channels may have fewer now"
            )
    return tuple(notes)


def _find_called(network: nn.Module, inputs: Inputs, paths: Sequence[str]) -> set[str]:
    """Which of some modules a call of a network calls, or a module inside of. network: a copy."""
    called: set[str] = set()
    for path in paths:
        for module in network.get_submodule(path).modules():
            module.register_forward_pre_hook(lambda *_, path=path: called.add(path))
    with contextlib.suppress(Exception):  # what a network raises in train mode
        run_seeded(network, inputs)
    return called


def _differ(
    own: nn.Module, original: nn.Module, uncalled: Sequence[str], differ: Callable[[nn.Module, nn.Module], str]
) -> bool:
    """Whether a smaller network differs from `original` in the same mode, or fails there."""
    try:
        smaller: Any = in_train_mode(own, uncalled)
        return bool(differ(smaller, original))
    except Exception:  # layers that do not fit each other
        return True


def _with_modes(module: nn.Module, like: nn.Module) -> nn.Module:
    """A module with another's modules in train or eval mode."""
    for path, part in module.named_modules():
        twin = module_at(like, path)
        part.training = like.training if twin is None else twin.training
    return module


Axes = tuple[Positions, ...]  # the positions that remain of each axis of a tensor
DRAWS = 2  # of other weights, for which the parametrization must commute with the cut, too


def keep_parametrizations(own: nn.Module, model: nn.Module, cuts: Mapping[str, Cut]) -> dict[str, Cut]:
    """Let the layers of a smaller network compute their weights as those of `model` do, in place,
    where a cut of what they compute them from is the cut of the weights; returns these cuts.

    own: a network of the model's class with plain weights. cuts: of these. Masks stay plain.
    """
    reference = structural_copy(model, share=True)
    remove_parametrizations(reference, ComputedTensor.is_mask)
    readers, below = _count_readers(reference), {}
    for computed in computed_tensors(reference):
        module = module_at(own, computed.path)
        plain = None if module is None else module._parameters.get(computed.leaf)
        is_tied = any(readers[p] > n for p, n in _count_readers(computed.part).items())
        if module is None or plain is None or is_tied:
            continue
        how = cuts.get(computed.name)
        axes = (None,) * plain.ndim if how is None else tuple(map(_ascending, how.kept))
        choice = find_source_cuts(computed, axes, plain.detach())
        if choice is None:
            continue
        sources = computed.sources()
        computed.with_sources(_cut_sources(sources, choice)).attach(module)
        for name, source in sources.items():
            if any(axis is not None for axis in choice[name]):
                path = computed.source_name(name)
                below[path] = Cut(path, tuple(source.shape), choice[name])
    return below


def find_source_cuts(computed: ComputedTensor, axes: Axes, value: Tensor) -> Mapping[str, Axes] | None:
    """By name in `computed.part`, how to cut what a tensor is computed from, such that the result
    is the tensor cut to `axes`, which has this `value`; None where that is not so.

    It is so in eval and in train mode, for drawn values of all that remains, and the gradient of
    what is removed is zero, so that training would leave it what it is: a removed column of zeros
    adds nothing to the norm of a row, one of other numbers does.
    """
    uncut: dict[str, Axes] = {n: (None,) * t.ndim for n, t in computed.sources().items()}
    if all(axis is None for axis in axes):
        return uncut if Pair("", computed.value(), value).is_same else None
    try:
        with torch.random.fork_rng(devices=()):
            choice = _choose(computed, axes)
            return choice if _commutes(computed, choice, axes, value) else None
    except Exception:  # code for other sizes, or not for float64
        return None


def _count_readers(network: nn.Module) -> Counter[int]:
    """By identity of a parameter, in how many places it is stored."""
    stored = (p for module in network.modules() for p in module._parameters.values())
    return Counter(id(parameter) for parameter in stored if parameter is not None)


def _choose(computed: ComputedTensor, axes: Axes) -> dict[str, Axes]:
    """The cut of each source that removes most of what has no effect on the cut tensor. Only these
    are tried, as some kernels of torch write outside of their memory for sizes that do not fit."""
    sources, shape = computed.sources(), tuple(computed.value().shape)
    choice: dict[str, Axes] = {}
    for name in sorted(sources, key=lambda name: not isinstance(sources[name], nn.Parameter)):
        each = [_axis_options(size, shape, axes) for size in sources[name].shape]
        cuts = sorted(itertools.product(*each), key=lambda c: cut(sources[name], c).numel())
        choice[name] = next(c for c in cuts if _is_safe(computed, choice | {name: c}, axes))
    return choice


def _axis_options(size: int, shape: Sequence[int], axes: Axes) -> list[Positions]:
    """What may remain of an axis of a source: all, or what remains of the axes of the tensor that
    are one axis here."""
    options: list[Positions] = [None]
    for count in range(1, len(shape) + 1):
        for group in itertools.combinations(range(len(shape)), count):
            sizes = [shape[axis] for axis in group]
            if math.prod(sizes) == size and any(axes[axis] is not None for axis in group):
                numbers = torch.arange(size).reshape(sizes)
                numbers = cut(numbers, tuple(axes[axis] for axis in group))
                options.append(tuple(numbers.flatten().tolist()))
    return list(dict.fromkeys(options))


def _is_safe(computed: ComputedTensor, choice: Mapping[str, Axes], axes: Axes) -> bool:
    """Whether what is removed of the last source in `choice` has no effect on the cut tensor: in
    training, where it has a gradient, and in eval mode, where it is a buffer."""
    sources, name = computed.sources(), list(choice)[-1]
    removed = ~_remaining(sources[name], choice[name])
    if not removed.any():
        return True
    drawn = {n: _draw(source, choice.get(n), 1) for n, source in sources.items()}
    if not isinstance(sources[name], nn.Parameter):
        before = cut(computed.with_sources(drawn).value(), axes)
        drawn[name] = torch.where(removed, _other_values(drawn[name]), drawn[name])
        return torch.equal(cut(computed.with_sources(drawn).value(), axes), before)
    with torch.enable_grad():
        value = cut(computed.with_sources(drawn).value(training=True), axes)
        factors = torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value)
        (grad,) = torch.autograd.grad(value, drawn[name], factors, allow_unused=True)
    return grad is None or not grad[removed].any()


def _other_values(buffer: Tensor) -> Tensor:
    return ~buffer if buffer.dtype == torch.bool else buffer + 1


def _commutes(computed: ComputedTensor, choice: Mapping[str, Axes], axes: Axes, value: Tensor) -> bool:
    """Whether cut sources compute the cut tensor, of this value."""
    sources = computed.sources()
    for training, k in itertools.product((False, True), range(DRAWS + 1)):
        drawn = {name: _draw(source, choice[name], k) for name, source in sources.items()}
        uncut = computed.with_sources(drawn)
        part = computed.with_sources(_cut_sources(drawn, choice))
        with torch.no_grad():
            expected = cut(uncut.value(training=training), axes)
            actual = part.value(training=training)
        after = _cut_sources(uncut.sources(), choice)  # buffers may have changed
        pairs = [(expected, actual), *((after[n], t) for n, t in part.sources().items())]
        if (training, k) == (False, 0):
            pairs.append((expected.to(value.dtype), value))
        if not all(Pair("", a, b).is_same for a, b in pairs):
            return False
    return True


def _draw(source: Tensor, cuts: Axes | None, k: int) -> Tensor:
    """A tensor in float64. For k > 0 a parameter has other numbers where it remains: of the same
    signs, and none is zero."""
    dtype = torch.float64 if source.is_floating_point() else source.dtype
    exact = source.detach().to(dtype, copy=True)  # train mode changes buffers in place
    if not isinstance(source, nn.Parameter):
        return exact
    draw = torch.rand(source.shape, generator=torch.Generator().manual_seed(k)).to(exact)
    typical = exact.square().mean().sqrt() or 1.0
    other = torch.where(exact == 0, (draw - 0.5) * typical, exact * (0.5 + draw))
    drawn = other if cuts is None else torch.where(_remaining(source, cuts), other, exact)
    return nn.Parameter(drawn if k else exact)


def _remaining(source: Tensor, cuts: Axes) -> Tensor:
    """Which elements of a tensor remain."""
    inside = torch.zeros(source.shape, dtype=torch.bool, device=source.device)
    index = [
        torch.arange(n) if p is None else torch.tensor(p, dtype=torch.long)
        for n, p in zip(source.shape, cuts, strict=True)
    ]
    inside[torch.meshgrid(*index, indexing="ij") if index else ()] = True
    return inside


def _cut_sources(sources: Mapping[str, Tensor], choice: Mapping[str, Axes]) -> dict[str, Tensor]:
    parts = {name: cut(source.detach(), choice[name]) for name, source in sources.items()}
    return {
        name: nn.Parameter(part, sources[name].requires_grad) if isinstance(sources[name], nn.Parameter) else part
        for name, part in parts.items()
    }


def _ascending(positions: Positions) -> Positions:
    """Positions in the order in which a network of the model's class has them."""
    return None if positions is None else tuple(sorted(positions))


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
    return (f"{ALIKE_WOULD} {size - saved:,} parameters, {saved:,} fewer at best{advise(shapes)}",)


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
    """The caller's class. Where a graph would be smaller by more than 5 %, the blocks that are larger
    than their part of it are graphs, but not in networks with methods that graphs would lose; a
    warning says what more could be removed. Raises ProgramMismatch, with a warning, where such a
    class would keep all parameters and MACs, of which a graph saves many."""
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
    advice += "; demask.prune.align does so where each has masked ones (once: it prunes)" if advice else ""
    if loss:
        warn_caller(f'demask() returns a graph, since {loss}; result="class" returns the class all the same{advice}')
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
            return f"the network's class would keep all {full:,} {OBJECTIVES[name]}, of which the graph has {fewer:,}"
    return ""


def _with_small_graphs(call: DemaskCall, candidate: SmallerProgram, own: nn.Module) -> nn.Module:
    """A network of the caller's class with small graphs, if it has any and computes the same; else
    as it is."""
    inputs = call.args, dict(call.kwargs or {})
    mixed, graphs = with_small_graphs(own, inputs, call.smaller, candidate.record, call.objective)
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
    cuts = {name: rows for name, rows in record.cuts.items() if not is_below(name, parts)}
    for path, part in parts.items():
        earlier = {name.removeprefix(f"{path}."): rows for name, rows in record.cuts.items() if is_below(name, [path])}
        for name, rows in part.cuts.items():
            if (composed := compose_cuts(rows, earlier)) is not None:
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
        slim = check_result(slim, candidate.program, call.model, call.args, call.kwargs, call.stated, call.table)
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
