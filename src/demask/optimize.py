"""The fastest exact implementation of a network on this machine, chosen by measurement."""

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

from demask.errors import BadInput, Mismatch
from demask.facts.analysis import Analysis
from demask.failures import is_strict, public
from demask.files.optimized_files import EarlierChoice, OptimizedFile
from demask.graph.example_inputs import draw_examples
from demask.graph.example_runs import copy_in_eval
from demask.graph.input_domains import draw_like, state_domains
from demask.graph.isolation import in_isolation
from demask.graph.module_copy import structural_copy, without_caches
from demask.graph.program import Program, copy_tensors
from demask.graph.provenance import GIVEN, WHOLE, Provenance, Speed, TuneDecision
from demask.graph.result.class_result import record_call
from demask.graph.result.demasked_module import Demasked, build
from demask.machine.benchmark import ALLOWED
from demask.machine.cost import Costs
from demask.machine.threads import checked_threads, set_threads
from demask.ops import TABLE, Table
from demask.registry import RUNNERS
from demask.shrink.demask import demask
from demask.shrink.on_device import CPU, copy_to_cpu, device_of, move_module
from demask.shrink.pipeline import capture_program as captured
from demask.shrink.pipeline import shrink_program, sliced_shape
from demask.shrink.program_size import count_removed, measure_program
from demask.shrink.submodules import merge_records, part_dynamic_shapes, replace_submodules
from demask.sparse.segment.build_segments import layers_of
from demask.sparse.segment.candidates import SegmentCandidates
from demask.tune.candidates import Candidate, generate_candidates
from demask.tune.epilogue import is_fused, unfuse
from demask.tune.layer_costs import LayerCosts
from demask.tune.module.optimized_module import Optimized
from demask.tune.race import CandidateRace, clone_inputs, first_line

BACKENDS, PRECISIONS = ("torch", "sparse"), ("bf16", "int8")
DRAWS = 3  # random inputs on which lossy storage is judged, in addition to the example
DEMASKED, PARTS = "demasked alone", "parts optimized one by one"
NAN = "a ReLU fused into a layer maps NaN to 0: outputs may hide values that are not finite"
ProgressCallback = Callable[[str], object]


@in_isolation
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
    progress: ProgressCallback = lambda words: None,
    table: Table = TABLE,
    inputs: Mapping[str, Any] | None = None,
) -> nn.Module:
    """The fastest network that computes the outputs of `model` in eval mode, chosen by measurement.

    `model` is demasked, then rewritten into candidates: norms folded into weights, layers fused
    with their activations, channels-last memory, channels padded to one width, all layers in one
    call of compiled kernels, sparse layers. A cost model predicts the fastest implementation of
    each layer. The candidates are timed, and the fastest is compared with `model` in 30 rounds
    that alternate the two, or in 10 if it is clearly faster. It is not returned if it may be
    slower: if the lower 95 % bound of the speed ratio (time of `model` / time of the candidate) is
    below 0.97. The demasked network is then returned, or `model` itself where that is slower, too.
    `demask.report` states the choice and all times.

    The result is for inference: rewritten networks and submodules record no gradients. It owns its
    weights; `model` is not changed.

    Args:
        model: an `nn.Module`, in any mode, or a `torch.export.ExportedProgram`.
        args: example inputs by position, a tuple such as (x,). The result is tuned for their sizes,
            and exact for others. Default: (), as for a demasked network or an exported program.
        kwargs: example inputs by name, a mapping. Default: None, for no such inputs.
        dynamic_shapes: sizes that may differ from call to call, as for `demask.demask`.
        modules: submodules to optimize one by one in a copy of the model, as for `demask.demask`.
            The copy is timed against `model`, too. Default: the whole model.
        threads: number of CPU threads of the measurements, from 1 to 64, or to four per CPU where
            that is more. Default: `torch.get_num_threads()`.
        precision: dtype in which sparse layers store weights: "bf16", or "int8" with one scale per
            row. `demask.report` states the effect on outputs. Default: None, for exact weights.
        backends: kernels that may be used: "torch", which is required, and "sparse", compiled ones
            for sparse and dense layers in float32 on the CPU. Default: both.
        cache: path of the file for measured costs; False for no files. Default: demask/costs.json
            in the user's cache folder. The folder with the same name, but ".networks" at the end,
            has the chosen networks: for the same network, example sizes, options, machine and
            versions the choice is read from there, checked, and measured against `model` again.
        progress: function that is called with a short text at each step. Default: does nothing.
        table: the table of ops. Default: `demask.ops.TABLE`.
        inputs: the values that inputs may have, by name of an argument of forward, for the random
            inputs of the check: (low, high), both included, or "mask" (zeros and ones), "one-hot",
            "sorted" or "distinct". Default: None, for what the example shows: integers stay in its
            range, other numbers are normally distributed.

    Returns:
        A graph module; with `modules`, a network of the model's class. `demasked` is its record.

    Raises:
        BadInput: an argument has a wrong type or value, or the model does not run on the inputs.
        NotExportable: torch.export cannot capture the model or a submodule in `modules`.

    Example:
        >>> import torch, demask
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)).eval()
        >>> fast = demask.optimize(net, (torch.randn(1, 3, 8, 8),), cache=False)
        >>> fast(torch.randn(2, 3, 8, 8)).shape
        torch.Size([2, 8, 6, 6])
    """
    _check(precision, backends)
    count = checked_threads(threads)
    if modules is not None:
        if inputs:
            raise BadInput("inputs= is of the network as one, not of modules=: leave one out")
        options = {
            "dynamic_shapes": part_dynamic_shapes(dynamic_shapes), "threads": threads,
            "table": table, "precision": precision, "backends": backends, "cache": cache,
        }  # fmt: skip
        parts = _Parts(model, args, dict(kwargs or {}), modules, options)
        return parts.fastest(count, progress)
    args, named = draw_examples((model,), args, dict(kwargs or {}))
    stated = state_domains(model, args, named, inputs)
    device = device_of(model, args, named)
    here = copy_to_cpu(model, args, named) if device != CPU else (model, args, named)
    # Graph rewrites run small tensor ops: two threads are no faster than one, and many times slower
    # while another process uses the second processor. Networks run with `count` threads.
    with set_threads(1):
        progress("capturing")
        program = captured(*here, dynamic_shapes)
        args, named = clone_inputs((args, named))
        race = CandidateRace(
            copy_in_eval(model), program, args, named, device, count, stated=stated
        )
        costs = Costs.open(cache, threads=count, measure=device == CPU)
        wanted = _Wanted("sparse" in backends, precision, costs, table)
        file = OptimizedFile.of(race, costs, backends) if wanted.is_usual else None
        earlier = EarlierChoice.of(race, file, progress)
        if earlier.network is not None:
            return earlier.network
        progress("removing what is masked")
        smaller, provenance = shrink_program(program, table)
        provenance = replace(provenance, notes=(*provenance.notes, *earlier.notes))
        chosen = _choose(race, program, smaller, provenance, wanted, progress)
        if file is not None:
            file.write(chosen)
        return chosen


RUNNERS.register("optimize", optimize)


def _check(precision: str | None, backends: Sequence[str]) -> None:
    if precision is not None and precision not in PRECISIONS:
        raise BadInput(
            f"expected precision=None or one of {PRECISIONS}, got {precision!r}; for another dtype "
            "convert the model first (model.bfloat16()), then optimize it"
        )
    unknown = [name for name in backends if name not in BACKENDS]
    if unknown or "torch" not in backends:
        raise BadInput(
            f"expected backends of {BACKENDS} with 'torch' among them, got {tuple(backends)}"
        )


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Options of the caller: whether segments are allowed, the precision of their sparse weights,
    the costs of layers, the op table."""

    segments: bool
    precision: str | None
    costs: Costs
    table: Table

    @property
    def is_usual(self) -> bool:
        """Whether choices may be stored: those with exact weights and demask's own table."""
        return self.precision is None and self.table is TABLE


@dataclass(frozen=True, slots=True)
class _Parts:
    """A call of optimize(modules=...). options: keywords of the optimize() call for each part."""

    model: nn.Module | ExportedProgram
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: str | Sequence[str]
    options: Mapping[str, Any]

    def fastest(self, threads: int, progress: ProgressCallback) -> nn.Module:
        """A copy of the model with optimized parts, with demasked parts, or with its own parts."""

        def part(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> nn.Module:
            def tell(words: str) -> object:
                return progress(f"{name}: {words}")

            return optimize(self._module(name), args, named, progress=tell, **self.options)

        fast = replace_submodules(self.model, self.args, self.kwargs, self.names, part)
        args, kwargs = clone_inputs((self.args, self.kwargs))
        device = device_of(self.model, args, kwargs)
        race = CandidateRace(copy_in_eval(self.model), None, args, kwargs, device, threads)
        notes = race.admit(PARTS, copy_in_eval(fast))
        progress("measuring against the original network")
        best, speed = _winner(race, PARTS, notes) if race.modules else (GIVEN, None)
        if best == PARTS:
            notes += _without_cache(race, fast)
            return self._recorded(fast, best, speed, notes)
        slim = self._demasked()
        notes += race.admit(DEMASKED, copy_in_eval(slim))
        if DEMASKED in race.modules:
            best, speed = _winner(race, DEMASKED, notes)
        return self._recorded(slim if best == DEMASKED else self._copy(), best, speed, notes)

    def _module(self, name: str) -> nn.Module:
        """A submodule of the model."""
        return self.model.get_submodule(name)  # type: ignore[union-attr]

    def _demasked(self) -> nn.Module:
        """A copy of the model with demasked parts."""
        shapes, table = self.options["dynamic_shapes"], self.options["table"]

        def part(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> nn.Module:
            return demask(self._module(name), args, named, dynamic_shapes=shapes, table=table)

        return replace_submodules(self.model, self.args, self.kwargs, self.names, part)

    def _copy(self) -> nn.Module:
        """A copy of the model, with its own provenance."""
        assert isinstance(self.model, nn.Module)
        copy = structural_copy(self.model, share=False)
        record = merge_records(self.model, copy, {}, self.args, self.kwargs)
        record_call(copy, record, self.args, self.kwargs)
        return copy

    def _recorded(self, chosen: Any, best: str, speed: Speed | None, notes: list[str]) -> nn.Module:
        """The chosen network, with the measurements in its provenance."""
        record: Provenance = chosen.demasked
        seconds = {GIVEN: speed.given[0], best: speed.result[0]} if speed else {}
        decisions = (TuneDecision(WHOLE, best, seconds), *record.decisions)
        record = replace(record, notes=(*record.notes, *notes), decisions=decisions, speed=speed)
        record_call(chosen, record, self.args, self.kwargs)
        return chosen


def _without_cache(race: CandidateRace, network: nn.Module) -> Iterator[str]:
    """Switch off the cache of a language model whose parts, as graphs, do not accept one."""
    try:
        race.outputs(network)
    except Exception:  # the call without a cache worked before
        without_caches(network)
        if is_strict():
            race.outputs(network)
        yield ("its parts accept no key-value cache, so use_cache is off; to generate text, "
               "optimize parts without one: modules=['*.mlp']")  # fmt: skip


def _choose(
    race: CandidateRace, program: Program, smaller: Program, provenance: Provenance,
    wanted: _Wanted, progress: ProgressCallback,
) -> Demasked:  # fmt: skip
    """The fastest candidate, or the original network."""
    notes = [
        *provenance.notes,
        *_enter_candidates(race, program, smaller, provenance, wanted, progress),
    ]
    if not race.modules:
        chosen = (TuneDecision(WHOLE, GIVEN, {}),)
        return _original(
            race, program, provenance, (*notes, "no candidate is as exact"), chosen, None
        )
    progress("measuring the candidates")
    seconds = race.times()
    best = min(race.modules, key=seconds.__getitem__)
    progress("measuring against the original network")
    best, speed = _winner(race, best, notes)
    seconds = {GIVEN: speed.given[0], **seconds}
    if best == GIVEN:
        decisions = (TuneDecision(WHOLE, GIVEN, seconds),)
        return _original(race, program, provenance, tuple(notes), decisions, speed)
    candidate = race.candidates[best]
    decisions = (TuneDecision(WHOLE, best, seconds), *candidate.decisions)
    if any(is_fused(node) for node in candidate.program.graph.nodes):
        notes.append(NAN)
    if wanted.precision is not None:
        notes.append(_describe_loss(race, best, wanted.precision))
    measured = optimized_provenance(candidate.program, provenance, wanted.table)
    removed = count_removed(program, unfuse(candidate.program))
    record = replace(
        measured, removed=removed, notes=tuple(notes), decisions=decisions, speed=speed
    )
    module_type = _module_type(candidate)
    race.modules.clear()
    return _build_module(
        race, copy_tensors(candidate.program, program.constants.values()), record, module_type
    )


def _winner(race: CandidateRace, best: str, notes: list[str]) -> tuple[str, Speed]:
    """Name of the candidate to return and its speed relative to the original network: `best`, the
    demasked network if `best` may be slower, the original one if that is slower, too."""
    speed, slower = race.speed(best)
    if speed.least < ALLOWED:
        notes.append(f"the fastest candidate ({best}) may be slower than the original network "
                     f"(ratio {speed.ratio:.2f}, at least {speed.least:.2f})")  # fmt: skip
        if best != DEMASKED and DEMASKED in race.modules:
            best, (speed, slower) = DEMASKED, race.speed(DEMASKED)
        if best != DEMASKED or slower:
            best = GIVEN
    return best, speed


def _describe_loss(race: CandidateRace, name: str, precision: str) -> str:
    """Description of how far the outputs of a lossy candidate are from exact ones."""
    if name not in race.exact:
        return f"precision={precision!r} has no effect: the fastest candidate has no sparse layer"
    largest = relative = 0.0
    for seed in range(DRAWS + 1):
        inputs, draw = (race.args, race.kwargs), torch.Generator().manual_seed(seed)
        if seed:
            inputs = pytree.tree_map_only(Tensor, partial(draw_like, draw=draw), inputs)
        exact, lossy = (race.outputs(module, inputs)
                       for module in (race.exact[name], race.modules[name]))  # fmt: skip
        for a, b in zip(exact, lossy, strict=True):
            if isinstance(a, Tensor) and a.is_floating_point() and a.numel():
                gap, size = float((a - b).abs().max()), float(a.abs().max())
                largest, relative = max(largest, gap), max(relative, gap / size if size else gap)
    return (f"weights of sparse layers are stored as {precision}: outputs differ from exact ones "
            f"by {largest:.2g} at most, {relative:.2g} of the largest, on the example and {DRAWS} "
            "random inputs like it")  # fmt: skip


def optimized_provenance(program: Program, provenance: Provenance, table: Table) -> Provenance:
    """The provenance of an optimized program: its sizes, cuts, and ops that only adapt shapes."""
    whole = unfuse(program)
    sizes = measure_program(whole, Analysis(whole, table).relations)
    in_segments = layers_of(whole)
    sizes = replace(sizes, macs=sizes.macs + sum(layer.products for layer in in_segments))
    densities = {
        layer.name: layer.stored / layer.weights
        for layer in in_segments
        if layer.stored < layer.weights
    }
    cuts = {
        name: cut
        for name, cut in provenance.cuts.items()
        if name in program.constants and sliced_shape(cut) == program.constants[name].tensor.shape
    }
    marks = [node.meta["effect"] for node in program.graph.nodes if "effect" in node.meta]
    return replace(provenance, after=sizes, cuts=cuts, effects=dict(Counter(marks)),
                   densities=densities)  # fmt: skip


def unchanged_provenance(provenance: Provenance) -> Provenance:
    """The provenance of a network from which nothing was removed."""
    return replace(provenance, after=provenance.before, removed={}, cuts={}, effects={}, reasons=())


def _original(
    race: CandidateRace, program: Program, provenance: Provenance, notes: tuple[str, ...],
    decisions: tuple[TuneDecision, ...], speed: Speed | None,
) -> Demasked:  # fmt: skip
    """The original network: a copy if it is an optimized one, else its captured graph."""
    if isinstance(race.baseline, Optimized):
        copy = structural_copy(race.baseline, share=False)
        copy.demasked = replace(copy.demasked, notes=(*copy.demasked.notes, notes[-1]))  # type: ignore
        return copy  # type: ignore[return-value]
    same = replace(unchanged_provenance(provenance), notes=notes, decisions=decisions, speed=speed)
    first = build(program, same).eval()
    return move_module(first, race.device) if race.device != CPU else first  # type: ignore[return-value]


def _enter_candidates(
    race: CandidateRace, program: Program, smaller: Program, provenance: Provenance,
    wanted: _Wanted, progress: ProgressCallback,
) -> Iterator[str]:  # fmt: skip
    """Add candidates with segments to the race, then others; yield which fail, and why."""
    asker = LayerCosts(wanted.costs, smaller.example)
    segments = SegmentCandidates(asker, wanted.table, wanted.precision)
    if wanted.segments and race.device == CPU:
        forms = segments.forms(smaller, program, progress)
        yield from _enter_all(race, forms, provenance, progress)
    dense = _dense_candidates(race, smaller, asker, segments, progress)
    yield from _enter_all(race, dense, provenance, progress)
    wanted.costs.save()


def _enter_all(race: CandidateRace, candidates: Iterator[Candidate], provenance: Provenance,
               progress: ProgressCallback) -> Iterator[str]:  # fmt: skip
    """Add all candidates to the race; yield which fail, and why."""
    while True:
        try:
            candidate = next(candidates, None)
        except Exception as error:  # of any type: the earlier candidates are enough
            if is_strict():
                raise
            yield f"no further candidates are built: {first_line(error)}"
            return
        if candidate is None:
            return
        progress(f"building: {candidate.name}")
        failure = _enter(race, candidate, provenance)
        if failure:
            yield f"{candidate.name} is left out: {failure}"


def _dense_candidates(
    race: CandidateRace, smaller: Program, asker: LayerCosts, segments: SegmentCandidates,
    progress: ProgressCallback,
) -> Iterator[Candidate]:  # fmt: skip
    """The candidates without segments, unless one with segments is far faster."""
    if race.modules and segments.are_ahead(min(race.screened().values())):
        return  # the layers of a candidate without segments alone take longer
    few = bool(race.modules)
    yield Candidate(DEMASKED, smaller)
    yield from generate_candidates(smaller, asker, segments.table, progress, few=few)


def _enter(race: CandidateRace, candidate: Candidate, provenance: Provenance) -> str:
    """Add a candidate to the race; the reason if it cannot be added, else ""."""
    module_type = _module_type(candidate)
    try:
        exact = _build_module(
            race,
            candidate.program if candidate.exact is None else candidate.exact,
            provenance,
            module_type,
        )
        difference = race.difference(exact)
        module = exact
        if candidate.exact is not None:
            module = _build_module(race, candidate.program, provenance, module_type)
    except Exception as error:  # of any type: the other candidates are enough
        if is_strict():
            raise
        return f"it fails ({first_line(error)})"
    if difference:
        if is_strict():
            raise Mismatch(f"{candidate.name}: {difference}")
        return f"its outputs differ: {difference}"
    race.modules[candidate.name], race.candidates[candidate.name] = module, candidate
    if candidate.exact is not None:
        race.exact[candidate.name] = exact
    return ""


def _module_type(candidate: Candidate) -> type[Demasked]:
    """The class of a candidate's module."""
    return Demasked if candidate.name == DEMASKED else Optimized


def _build_module(
    race: CandidateRace, program: Program, provenance: Provenance, module_type: type[Demasked]
) -> Demasked:
    module = build(program, provenance, module_type).eval()
    if race.device != CPU:
        move_module(module, race.device)
    race.outputs(module)  # the first call prepares buffers: it must not be timed
    return module
