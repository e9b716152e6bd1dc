"""The fastest exact form of a network on this machine, found by measuring."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from demask.errors import BadInput
from demask.facts.analysis import Analysis
from demask.failures import public
from demask.graph.example_inputs import examples, like
from demask.graph.module_copy import structural_copy, without_caches
from demask.graph.program import Program, owned
from demask.graph.provenance import GIVEN, WHOLE, Provenance, Speed, TuneDecision
from demask.graph.queries import ExampleSizes
from demask.graph.result.class_result import remember
from demask.graph.result.demasked_module import Demasked, build
from demask.machine.benchmark import ALLOWED
from demask.machine.cost import Costs
from demask.machine.threads import checked_threads, set_threads
from demask.ops import TABLE, Table
from demask.shrink.check import in_eval
from demask.shrink.demask import demask
from demask.shrink.on_device import CPU, device_of, moved, on_cpu
from demask.shrink.pipeline import given as captured
from demask.shrink.pipeline import left, reduced
from demask.shrink.program_size import count_removed, sizes_of
from demask.shrink.submodules import merged, sizes_of_parts, with_parts
from demask.sparse.segment.build_segments import layers_of
from demask.sparse.segment.candidates import Sparse
from demask.tune.candidates import Candidate, forms
from demask.tune.epilogue import is_fused, plain
from demask.tune.layer_costs import Asker
from demask.tune.module.optimized_module import Optimized
from demask.tune.race import CandidateRace, own_inputs

BACKENDS, PRECISIONS = ("torch", "sparse"), ("bf16", "int8")
AHEAD = 0.7  # of what the layers of dense forms take: a sparse form that takes less has won
DRAWS = 3  # inputs on which lossy storage is judged, beside the example
DEMASKED, PARTS = "demasked alone", "parts optimized one by one"
NAN = "a ReLU that a layer takes along makes 0 of NaN: what is not finite may not show in outputs"
Tell = Callable[[str], object]


@public
def optimize(
    model: nn.Module | ExportedProgram,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    modules: str | Sequence[str] | None = None,
    threads: int | None = None,
    precision: str | None = None,
    backends: Sequence[str] = BACKENDS,
    cache: str | os.PathLike[str] | Literal[False] | None = None,
    progress: Tell = lambda words: None,
    table: Table = TABLE,
) -> nn.Module:
    """The network that computes what `model` does in eval mode, as fast as it was measured to get.

    It is demasked, then put into several forms (norms in the weights, layers with what follows them
    in one call, channels last, streams at one width, layers computed by their nonzeros alone), each
    made of the pieces that are fastest on the example's sizes. The fastest whole one is called
    beside `model` in 30 rounds or more. If it may be slower (the lower 95 % bound of the ratio is
    below 0.97), the demasked network is returned, or, where that is slower (its upper 95 % bound is
    below 0.97), the network as it was. `demask.report` tells first what was returned, then why.
    For inference: calls record no gradients. The result has weights of its own.

    args, kwargs: example inputs, of the sizes to be fast for; others are as exact. dynamic_shapes:
    as `demask.demask` takes it. modules: submodules to optimize alone, as `demask.demask` takes it.
    Each is made fast by itself in a copy of the model; then the copy is called beside `model`, and
    where it may be slower, one with demasked parts is returned, or a plain copy. Files of it hold a
    graph in plain ops. threads: to measure with, None for `torch.get_num_threads()`.
    precision: None, for exact; "bf16" or "int8" (a scale per row) to store the weights of sparse
    layers with fewer bits: `demasked.notes` tell what that changes. backends: which kernels may be
    used; "sparse" are those of float32 on the CPU. cache: where measurements are kept (None: the
    user's cache folder; False: nowhere). progress: called with a few words at each step.
    table: the op table, as `demask.demask` takes it.
    Raises NotExportable or BadInput. The model is not changed. Feature row 000-k.

    >>> import torch, demask
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)).eval()
    >>> fast = demask.optimize(net, (torch.randn(1, 3, 8, 8),), cache=False)
    >>> fast(torch.randn(2, 3, 8, 8)).shape
    torch.Size([2, 8, 6, 6])
    """
    _check(precision, backends)
    count = checked_threads(threads)
    if modules is not None:
        options = {
            "dynamic_shapes": sizes_of_parts(dynamic_shapes), "threads": threads, "table": table,
            "precision": precision, "backends": backends, "cache": cache,
        }  # fmt: skip
        parts = _Parts(model, args, dict(kwargs or {}), modules, options)
        return parts.fastest(count, progress)
    args, named = examples((model,), args, dict(kwargs or {}))
    device = device_of(model, args, named)
    here = on_cpu(model, args, named) if device != CPU else (model, args, named)
    # What is done to graphs are small calls, which two threads do no faster than one, and many
    # times slower where another process has the second processor. Networks run with `count`.
    with set_threads(1):
        progress("capturing")
        program = captured(*here, dynamic_shapes)
        progress("removing what is masked")
        smaller, provenance = reduced(program, table)
        args, named = own_inputs((args, named))
        race = CandidateRace(in_eval(model), program, args, named, device, count)
        wanted = _Wanted("sparse" in backends, precision, cache, table)
        return _fastest(race, program, smaller, provenance, wanted, progress)


def _check(precision: str | None, backends: Sequence[str]) -> None:
    if precision is not None and precision not in PRECISIONS:
        raise BadInput(
            f"expected precision=None or one of {PRECISIONS}, got {precision!r}; for another dtype "
            "convert the model first (model.bfloat16()), and optimize that"
        )
    unknown = [name for name in backends if name not in BACKENDS]
    if unknown or "torch" not in backends:
        raise BadInput(
            f"expected backends of {BACKENDS} with 'torch' among them, got {tuple(backends)}"
        )


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What the caller asks for: sparse forms, how weights are stored, where costs are kept, the
    table of ops."""

    sparse: bool
    precision: str | None
    cache: Any
    table: Table


@dataclass(frozen=True, slots=True)
class _Parts:
    """A call of optimize(modules=...). options: of the calls for each part."""

    model: nn.Module | ExportedProgram
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: str | Sequence[str]
    options: Mapping[str, Any]

    def fastest(self, threads: int, progress: Tell) -> nn.Module:
        """A copy of the model with optimized parts, with demasked ones, or the copy alone."""

        def part(name: str, given: tuple[Any, ...], named: dict[str, Any]) -> nn.Module:
            def tell(words: str) -> object:
                return progress(f"{name}: {words}")

            return optimize(self._module(name), given, named, progress=tell, **self.options)

        fast = with_parts(self.model, self.args, self.kwargs, self.names, part)
        args, kwargs = own_inputs((self.args, self.kwargs))
        device = device_of(self.model, args, kwargs)
        race = CandidateRace(in_eval(self.model), None, args, kwargs, device, threads)
        notes = list(_entered_whole(race, PARTS, fast))
        progress("measuring beside the network as given")
        best, speed = _winner(race, PARTS, notes) if race.modules else (GIVEN, None)
        if best == PARTS:
            notes += _without_cache(race, fast)
            return self._recorded(fast, best, speed, notes)
        slim = self._demasked()
        notes += _entered_whole(race, DEMASKED, slim)
        if DEMASKED in race.modules:
            best, speed = _winner(race, DEMASKED, notes)
        return self._recorded(slim if best == DEMASKED else self._copy(), best, speed, notes)

    def _module(self, name: str) -> nn.Module:
        return self.model.get_submodule(name)  # type: ignore[union-attr]

    def _demasked(self) -> nn.Module:
        shapes, table = self.options["dynamic_shapes"], self.options["table"]

        def part(name: str, given: tuple[Any, ...], named: dict[str, Any]) -> nn.Module:
            return demask(self._module(name), given, named, dynamic_shapes=shapes, table=table)

        return with_parts(self.model, self.args, self.kwargs, self.names, part)

    def _copy(self) -> nn.Module:
        assert isinstance(self.model, nn.Module)
        copy = structural_copy(self.model, share=False)
        record = merged(self.model, copy, {}, self.args, self.kwargs)
        remember(copy, record, self.args, self.kwargs)
        return copy

    def _recorded(self, chosen: Any, best: str, speed: Speed | None, notes: list[str]) -> nn.Module:
        """The network that is returned, with what was measured."""
        record: Provenance = chosen.demasked
        seconds = {GIVEN: speed.given[0], best: speed.result[0]} if speed else {}
        decisions = (TuneDecision(WHOLE, best, seconds), *record.decisions)
        record = replace(record, notes=(*record.notes, *notes), decisions=decisions, speed=speed)
        remember(chosen, record, self.args, self.kwargs)
        return chosen


def _entered_whole(race: CandidateRace, name: str, network: nn.Module) -> Iterator[str]:
    """Let a network with other parts take part; in words why it cannot, if so."""
    copy = in_eval(network)
    try:
        failure = race.difference(copy)
    except Exception as error:  # of any kind: another one is returned
        failure = f"it fails ({_words(error)})"
    if failure:
        yield f"{name}: left out, {failure}"
    else:
        race.modules[name] = copy


def _without_cache(race: CandidateRace, network: nn.Module) -> Iterator[str]:
    """Turn the cache of a language model off whose parts, as graphs, do not take one."""
    try:
        race.outputs(network)
    except Exception:  # it was called without a cache, and that worked
        without_caches(network)
        yield ("its parts take no cache of keys and values, so use_cache is off; to generate text, "
               "optimize parts that take none: modules=['*.mlp']")  # fmt: skip


def _fastest(race: CandidateRace, program: Program, smaller: Program, provenance: Provenance,
             wanted: _Wanted, progress: Tell) -> Demasked:  # fmt: skip
    """The result: the form that won, or the network as given."""
    notes = [*provenance.notes, *_all(race, program, smaller, provenance, wanted, progress)]
    if not race.modules:
        chosen = (TuneDecision(WHOLE, GIVEN, {}),)
        return _as_it_was(race, program, provenance, (*notes, "no form is as exact"), chosen, None)
    progress("measuring the forms")
    whole = race.forms()
    best = min(race.modules, key=whole.__getitem__)
    progress("measuring beside the network as given")
    best, speed = _winner(race, best, notes)
    whole = {GIVEN: speed.given[0], **whole}
    if best == GIVEN:
        decisions = (TuneDecision(WHOLE, GIVEN, whole),)
        return _as_it_was(race, program, provenance, tuple(notes), decisions, speed)
    form = race.made_by[best]
    decisions = (TuneDecision(WHOLE, best, whole), *form.decisions)
    if any(is_fused(node) for node in form.program.graph.nodes):
        notes.append(NAN)
    if wanted.precision is not None:
        notes.append(_lossy(race, best, wanted.precision))
    made = remembered(form.program, provenance, wanted.table)
    gone = count_removed(program, plain(form.program))
    record = replace(made, removed=gone, notes=tuple(notes), decisions=decisions, speed=speed)
    kind = _kind(form)
    race.modules.clear()
    return _built(race, owned(form.program, program.constants.values()), record, kind)


def _winner(race: CandidateRace, best: str, notes: list[str]) -> tuple[str, Speed]:
    """The form to return, and how fast it was beside the network as given: the one that seems best,
    the demasked network where that one may be slower, the network as given where that is slower."""
    speed, slower = race.speed(best)
    if speed.least < ALLOWED:
        notes.append(f"the fastest form ({best}) may be slower than the network as given (ratio "
                     f"{speed.ratio:.2f}, at least {speed.least:.2f})")  # fmt: skip
        if best != DEMASKED and DEMASKED in race.modules:
            best, (speed, slower) = DEMASKED, race.speed(DEMASKED)
        if best != DEMASKED or slower:
            best = GIVEN
    return best, speed


def _lossy(race: CandidateRace, name: str, precision: str) -> str:
    """How far the outputs of a form are from exact ones, in words."""
    if name not in race.exact:
        return f"precision={precision!r} changes nothing: no layer is sparse in the fastest form"
    largest = relative = 0.0
    for seed in range(DRAWS + 1):
        inputs, draw = (race.args, race.kwargs), torch.Generator().manual_seed(seed)
        if seed:
            inputs = pytree.tree_map_only(Tensor, partial(like, draw=draw), inputs)
        exact, made = (race.outputs(module, inputs)
                       for module in (race.exact[name], race.modules[name]))  # fmt: skip
        for a, b in zip(exact, made, strict=True):
            if isinstance(a, Tensor) and a.is_floating_point() and a.numel():
                gap, size = float((a - b).abs().max()), float(a.abs().max())
                largest, relative = max(largest, gap), max(relative, gap / size if size else gap)
    return (f"weights of sparse layers are stored as {precision}: outputs differ from exact ones "
            f"by {largest:.2g} at most, {relative:.2g} of the largest, on the example and {DRAWS} "
            "draws like it")  # fmt: skip


def remembered(program: Program, provenance: Provenance, table: Table) -> Provenance:
    """What is left in a form: its sizes, its cuts, its ops that only keep shapes."""
    whole = plain(program)
    sizes = sizes_of(whole, Analysis(whole, table).relations)
    sparse = layers_of(whole.graph)
    sizes = replace(sizes, macs=sizes.macs + sum(layer.products for layer in sparse))
    densities = {layer.name: layer.stored / layer.weights for layer in sparse if layer.weights}
    cuts = {
        name: cut
        for name, cut in provenance.cuts.items()
        if name in program.constants and left(cut) == program.constants[name].tensor.shape
    }
    marks = [node.meta["effect"] for node in program.graph.nodes if "effect" in node.meta]
    return replace(provenance, after=sizes, cuts=cuts, effects=dict(Counter(marks)),
                   densities=densities)  # fmt: skip


def unchanged(provenance: Provenance) -> Provenance:
    """The provenance of a network from which nothing was taken."""
    return replace(provenance, after=provenance.before, removed={}, cuts={}, effects={}, reasons=())


def _as_it_was(race: CandidateRace, program: Program, provenance: Provenance, notes: tuple[str, ...],
               decisions: tuple[TuneDecision, ...], speed: Speed | None) -> Demasked:  # fmt: skip
    """The network as given: a copy, if it is an optimized one; else its graph."""
    if isinstance(race.given, Optimized):
        copy = structural_copy(race.given, share=False)
        copy.demasked = replace(copy.demasked, notes=(*copy.demasked.notes, notes[-1]))  # type: ignore
        return copy  # type: ignore[return-value]
    same = replace(unchanged(provenance), notes=notes, decisions=decisions, speed=speed)
    first = build(program, same).eval()
    return moved(first, race.device) if race.device != CPU else first  # type: ignore[return-value]


def _all(race: CandidateRace, program: Program, smaller: Program, provenance: Provenance,
         wanted: _Wanted, progress: Tell) -> Iterator[str]:  # fmt: skip
    """Let the sparse forms take part, then the dense ones; in words which do not, and why."""
    costs = Costs.open(wanted.cache, threads=race.threads, measure=race.device == CPU)
    leaves = pytree.tree_leaves((race.args, race.kwargs))
    asker = Asker(costs, ExampleSizes.of(smaller.graph, leaves))
    sparse = Sparse(asker, wanted.table, wanted.precision)
    if wanted.sparse and race.device == CPU:
        yield from _entered(race, sparse.forms(smaller, program, progress), provenance, progress)
    dense = _dense(race, smaller, asker, sparse, progress)
    yield from _entered(race, dense, provenance, progress)
    costs.save()


def _entered(race: CandidateRace, found: Iterator[Candidate], provenance: Provenance,
             progress: Tell) -> Iterator[str]:  # fmt: skip
    """Let every form take part; in words which do not, and why."""
    while True:
        try:
            form = next(found, None)
        except Exception as error:  # of any kind: the forms made so far will do
            yield f"no further forms are made: {_words(error)}"
            return
        if form is None:
            return
        progress(f"building: {form.name}")
        failure = _enter(race, form, provenance)
        if failure:
            yield f"{form.name} is left out: {failure}"


def _words(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__} {first:.120}".strip()


def _dense(race: CandidateRace, smaller: Program, asker: Asker, sparse: Sparse,
           progress: Tell) -> Iterator[Candidate]:  # fmt: skip
    """The dense forms, unless a sparse one is far ahead."""
    if race.modules and min(race.looked().values()) < AHEAD * sparse.least:
        return  # the layers of a dense form alone take longer
    yield Candidate(DEMASKED, smaller)
    yield from forms(smaller, asker, sparse.table, progress)


def _enter(race: CandidateRace, form: Candidate, provenance: Provenance) -> str:
    """Let a form take part; in words why it cannot, if so."""
    kind = _kind(form)
    try:
        exact = _built(race, form.program if form.exact is None else form.exact, provenance, kind)
        difference = race.difference(exact)
        module = exact
        if form.exact is not None:
            module = _built(race, form.program, provenance, kind)
    except Exception as error:  # of any kind: the network can do without this form
        return f"it fails ({_words(error)})"
    if difference:
        return f"its outputs differ: {difference}"
    race.modules[form.name], race.made_by[form.name] = module, form
    if form.exact is not None:
        race.exact[form.name] = exact
    return ""


def _kind(form: Candidate) -> type[Demasked]:
    return Demasked if form.name == DEMASKED else Optimized


def _built(
    race: CandidateRace, program: Program, provenance: Provenance, kind: type[Demasked]
) -> Demasked:
    module = build(program, provenance, kind).eval()
    if race.device != CPU:
        moved(module, race.device)
    race.outputs(module)  # the first call is made otherwise than the later ones
    return module
