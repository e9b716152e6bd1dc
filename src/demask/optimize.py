"""The fastest exact implementation of a network on this machine, chosen by measurement."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from demask.errors import BadInput, Mismatch, NeedsGraph, NotExportable
from demask.facts.analysis import Analysis
from demask.failures import Log, is_strict, public
from demask.files.optimized_files import EarlierChoice, OptimizedFile
from demask.graph.capture.shared_captures import share_captures
from demask.graph.example_inputs import draw_examples
from demask.graph.example_runs import copy_in_eval
from demask.graph.input_domains import draw_like, state_domains
from demask.graph.isolation import in_isolation
from demask.graph.module_copy import structural_copy
from demask.graph.program import Program, copy_tensors
from demask.graph.provenance import (
    GIVEN,
    WHOLE,
    ModuleSizes,
    Provenance,
    Speed,
    TuneDecision,
    provenance_of,
    removed_parameters,
)
from demask.graph.result.class_result import record_call
from demask.graph.result.demasked_module import Demasked, build
from demask.judge import Verdict, pair_up
from demask.machine.clock import checked_threads, is_faster, set_threads
from demask.machine.cost import Costs
from demask.ops import TABLE, Table
from demask.registry import RUNNERS
from demask.shrink.demask import demask
from demask.shrink.on_device import CPU, copy_to_cpu, device_of, move_module
from demask.shrink.own_class.small_graphs import has_methods
from demask.shrink.pipeline import capture_program as captured
from demask.shrink.pipeline import shrink_program, sliced_shape
from demask.shrink.program_size import measure_modules, measure_program
from demask.shrink.submodules import merge_records, part_dynamic_shapes
from demask.sparse.packed_candidates import packed_candidates, packed_layers_of
from demask.sparse.segment.build_segments import StoredLayer, layers_of
from demask.sparse.segment.candidates import SegmentCandidates
from demask.tune.candidates import Candidate, generate_candidates
from demask.tune.epilogue import is_fused, unfuse
from demask.tune.layer_costs import LayerCosts
from demask.tune.optimized_module import Optimized
from demask.tune.parts import Generation, generates, parts_of, put_graph, record_calls
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

    Of a model with methods that call its modules in other ways (`generate`), submodules are
    optimized in a copy of its class, never the model as one call: a graph computes the calls of a
    submodule that it takes, its own code all others (with a cache, new sizes the first times, in
    train mode, after its weights changed), and `generate` is timed and compared, too. A submodule
    keeps its weights for that, next to those of its graph.

    The result is for inference: rewritten networks and submodules record no gradients. It owns its
    weights; `model` is not changed.

    Args:
        model: an `nn.Module`, in any mode, or a `torch.export.ExportedProgram`.
        args: example inputs by position, a tuple such as (x,). The result is tuned for their sizes,
            and exact for others. Default: (), as for a demasked network or an exported program.
        kwargs: example inputs by name, a mapping. Default: None, for no such inputs.
        dynamic_shapes: sizes that may differ from call to call, as for `demask.demask`.
        modules: submodules to optimize one by one in a copy of the model: names and globs, or
            "auto": of repeated blocks, or else of the model, the largest submodules that are called
            with tensors and plain values alone. The copy is timed against `model`, too. Default:
            None, for the full model as one graph; for a model with `generate`, "auto".
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
        A graph module; with `modules`, and of a model with `generate`, a network of the model's
        class. `demasked` is its record.

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
    if modules is not None and inputs:
        raise BadInput("inputs= is of the network as one, not of modules=: leave one out")
    args, named = draw_examples((model,), args, dict(kwargs or {}))
    methods = isinstance(model, nn.Module) and has_methods(model)
    if modules is not None or methods:
        options = {
            "dynamic_shapes": part_dynamic_shapes(dynamic_shapes),
            "threads": threads,
            "table": table,
            "precision": precision,
            "backends": backends,
            "cache": cache,
        }
        names = "auto" if modules is None else modules
        parts = _Parts(model, args, named, names, methods, options, inputs)
        return parts.fastest(count, progress)
    stated = state_domains(model, args, named, inputs)
    device = device_of(model, args, named)
    here = copy_to_cpu(model, args, named) if device != CPU else (model, args, named)
    # Graph rewrites run small tensor ops: two threads are no faster than one, and many times slower
    # while another process uses the second processor. Networks run with `count` threads.
    with set_threads(1):
        progress("capturing")
        program = captured(*here, dynamic_shapes)
        args, named = clone_inputs((args, named))
        race = CandidateRace(copy_in_eval(model), program, args, named, device, count, stated=stated)
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
        raise BadInput(f"expected backends of {BACKENDS} with 'torch' among them, got {tuple(backends)}")


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
    """A call of optimize() for parts of a network, in a copy of its class.

    names: of the parts, or "auto". methods: whether methods such as `generate` call the network.
    options: keywords of the optimize() call for each part. inputs: what the caller states of them.
    """

    model: nn.Module | ExportedProgram
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: str | Sequence[str]
    methods: bool
    options: Mapping[str, Any]
    inputs: Mapping[str, Any] | None

    def fastest(self, threads: int, progress: ProgressCallback) -> nn.Module:
        """A copy of the model with optimized parts, with demasked parts, or with its own parts."""
        slim, notes = self._demasked(), list[str]()
        assert isinstance(self.model, nn.Module)  # demask() refuses others
        networks = {DEMASKED: slim}
        if (fast := self._with_fast_parts(slim, threads, progress)) is not None:
            networks = {PARTS: fast, **networks}
        else:
            notes.append("no part is faster as a graph than in the network's own code")
        progress("measuring against the original network")
        races, best, speed = self._races(self.model, threads), GIVEN, None
        for name, network in networks.items():
            best, speed = _winner_of_races(races, name, network, notes)
            if best == name:
                return self._recorded(network, best, speed, notes)
        copy = structural_copy(self.model, share=False)
        record = merge_records(self.model, copy, {}, self.args, self.kwargs)
        record_call(copy, record, self.args, self.kwargs)
        return self._recorded(copy, best, speed, notes)

    def _demasked(self) -> nn.Module:
        """A copy of the model with demasked parts, in eval mode: demasked as one where methods call
        it and it can be captured. Raises what demask() does."""
        slim = partial(
            demask,
            self.model,
            self.args,
            self.kwargs,
            table=self.options["table"],
            dynamic_shapes=self.options["dynamic_shapes"],
            result="class" if self.methods else "auto",
        )
        if self.methods and self.names == "auto":
            with suppress(NotExportable, NeedsGraph):
                return slim(inputs=self.inputs).eval()
        return slim(modules=self.names).eval()

    def _with_fast_parts(self, slim: nn.Module, threads: int, progress: ProgressCallback) -> nn.Module | None:
        """A copy of a demasked network in which graphs compute parts that they are faster for; None
        if there are none."""
        fast, graphs = structural_copy(slim, share=True), dict[str, Optimized]()
        calls = record_calls(slim, (self.args, self.kwargs), by_methods=self.methods)
        with share_captures():
            for name, inputs in parts_of(slim, self.names, calls):

                def tell(words: str, name: str = name) -> object:
                    return progress(f"{name}: {words}")

                try:
                    graph = optimize(slim.get_submodule(name), *inputs[0], progress=tell, **self.options)
                except NotExportable:
                    if self.names != "auto":
                        raise
                    continue
                if isinstance(graph, Optimized) and put_graph(fast, name, graph, inputs, threads):
                    graphs[name] = graph
        if not graphs:
            return None
        parts = {name: graph.demasked for name, graph in graphs.items()}
        more, record = merge_records(slim, fast, parts, (), {}), provenance_of(slim)
        notes = tuple(dict.fromkeys((*record.notes, *more.notes)))
        record = replace(record, decisions=more.decisions, densities=more.densities, notes=notes)
        record_call(fast, record, self.args, self.kwargs)
        return fast

    def _races(self, model: nn.Module, threads: int) -> list[CandidateRace]:
        """The race of calls of the network, and that of `generate`, if it takes the example."""
        args, kwargs = clone_inputs((self.args, self.kwargs))
        device = device_of(model, args, kwargs)
        baselines = [copy_in_eval(model)]
        if self.methods and generates(model, (args, kwargs)):
            baselines.append(Generation(copy_in_eval(model, caches=True)))
        stated = state_domains(model, args, kwargs, self.inputs)
        return [CandidateRace(baseline, None, args, kwargs, device, threads, stated=stated) for baseline in baselines]

    def _recorded(self, chosen: Any, best: str, speed: Speed | None, notes: list[str]) -> nn.Module:
        """The chosen network, with the measurements in its provenance."""
        record: Provenance = chosen.demasked
        seconds = {GIVEN: speed.given[0], best: speed.result[0]} if speed else {}
        decisions = (TuneDecision(WHOLE, best, seconds), *record.decisions)
        record = replace(record, notes=(*record.notes, *notes), decisions=decisions, speed=speed)
        record_call(chosen, record, self.args, self.kwargs)
        return chosen


def _winner_of_races(
    races: Sequence[CandidateRace], name: str, network: nn.Module, notes: list[str]
) -> tuple[str, Speed | None]:
    """A network's name, if it computes what the original one does and is not slower in any race,
    and its speed in the first; else GIVEN."""
    first: Speed | None = None
    for race in races:
        is_generation = isinstance(race.baseline, Generation)
        copy = copy_in_eval(network, caches=is_generation)
        notes += race.admit(name, Generation(copy) if is_generation else copy)
        if name not in race.modules:
            return GIVEN, first
        best, speed = _winner(race, name, notes)
        first = first or speed
        if best != name:
            return GIVEN, first
    return name, first


def _choose(
    race: CandidateRace,
    program: Program,
    smaller: Program,
    provenance: Provenance,
    wanted: _Wanted,
    progress: ProgressCallback,
) -> Demasked:
    """The fastest candidate, or the original network."""
    notes = [*provenance.notes, *_enter_candidates(race, program, smaller, provenance, wanted, progress)]
    if not race.modules:
        chosen = (TuneDecision(WHOLE, GIVEN, {}),)
        return _original(race, program, provenance, (*notes, "no candidate is as exact"), chosen, None)
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
    record = replace(measured, notes=tuple(notes), decisions=decisions, speed=speed)
    module_type = _module_type(candidate)
    race.modules.clear()
    return _build_module(race, copy_tensors(candidate.program, program.constants.values()), record, module_type)


def _winner(race: CandidateRace, best: str, notes: list[str]) -> tuple[str, Speed]:
    """Name of the candidate to return and its speed relative to the original network: `best`, the
    demasked network if `best` may be slower, the original one if that is slower, too."""
    speed, slower = race.speed(best)
    if not is_faster(speed.least):
        notes.append(
            f"the fastest candidate ({best}) may be slower than the original network "
            f"(ratio {speed.ratio:.2f}, at least {speed.least:.2f})"
        )
        if best != DEMASKED and DEMASKED in race.modules:
            best, (speed, slower) = DEMASKED, race.speed(DEMASKED)
        if best != DEMASKED or slower:
            best = GIVEN
    return best, speed


def _describe_loss(race: CandidateRace, name: str, precision: str) -> str:
    """Description of how far the outputs of a lossy candidate are from exact ones."""
    if name not in race.exact:
        return f"precision={precision!r} has no effect: the fastest candidate has no sparse layer"
    verdict = Verdict()
    for seed in range(DRAWS + 1):
        inputs, draw = (race.args, race.kwargs), torch.Generator().manual_seed(seed)
        if seed:
            inputs = pytree.tree_map_only(Tensor, partial(draw_like, draw=draw), inputs)
        exact, lossy = (race.outputs(module, inputs) for module in (race.exact[name], race.modules[name]))
        verdict += Verdict.of(pair_up(exact, lossy), "")
    return (
        f"weights of sparse layers are stored as {precision}: outputs differ from exact ones "
        f"by {verdict.gap:.2g} at most, {verdict.relative:.2g} of the largest, on the example and {DRAWS} "
        "random inputs like it"
    )


def optimized_provenance(program: Program, provenance: Provenance, table: Table) -> Provenance:
    """The provenance of an optimized program: its sizes, cuts, and ops that only adapt shapes."""
    whole = unfuse(program)
    relations = Analysis(whole, table).relations
    sizes, modules = measure_program(whole, relations), measure_modules(whole, relations)
    in_segments, packed = layers_of(whole), packed_layers_of(whole)
    stored = [*in_segments, *packed]
    sizes = replace(sizes, macs=sizes.macs + sum(layer.products for layer in stored))
    before = {path: (row.parameters[0], row.macs[0]) for path, row in provenance.modules.items()}
    _split_segments(modules, in_segments, before)
    for layer in packed:
        parameters, macs = modules.get(layer.name, (0, 0))
        modules[layer.name] = parameters, macs + layer.products
    sizes_by_module = ModuleSizes.paired(before, modules)
    densities = {layer.name: layer.stored / layer.weights for layer in stored if layer.stored < layer.weights}
    cuts = {
        name: cut
        for name, cut in provenance.cuts.items()
        if name in program.constants and sliced_shape(cut) == program.constants[name].tensor.shape
    }
    marks = [node.meta["effect"] for node in program.graph.nodes if "effect" in node.meta]
    return replace(
        provenance,
        after=sizes,
        cuts=cuts,
        effects=dict(Counter(marks)),
        densities=densities,
        modules=sizes_by_module,
        removed=removed_parameters(sizes_by_module),
    )


def _split_segments(
    modules: dict[str, tuple[int, int]], layers: Sequence[StoredLayer], before: Mapping[str, tuple[int, int]]
) -> None:
    """Move the stored weights and biases of layers, in place, from their segments, which are modules that the
    network did not have before, to the modules that they were."""
    moved = sum(layer.stored + layer.bias for layer in layers)
    for path in [path for path in modules if path not in before]:
        parameters, macs = modules[path]
        modules[path] = max(parameters - moved, 0), macs
        moved = max(moved - parameters, 0)
    for layer in layers:
        holder = layer.name.rpartition(".")[0]  # of the parts of a recurrent layer
        path = holder if layer.name not in before and holder in before else layer.name
        parameters, macs = modules.get(path, (0, 0))
        modules[path] = parameters + layer.stored + layer.bias, macs + layer.products


def unchanged_provenance(provenance: Provenance) -> Provenance:
    """The provenance of a network from which nothing was removed."""
    before = {path: (row.parameters[0], row.macs[0]) for path, row in provenance.modules.items()}
    same = ModuleSizes.paired(before, before)
    return replace(provenance, after=provenance.before, removed={}, cuts={}, effects={}, reasons=(), modules=same)


def _original(
    race: CandidateRace,
    program: Program,
    provenance: Provenance,
    notes: tuple[str, ...],
    decisions: tuple[TuneDecision, ...],
    speed: Speed | None,
) -> Demasked:
    """The original network: a copy if it is an optimized one, else its captured graph."""
    if isinstance(race.baseline, Optimized):
        copy: Any = structural_copy(race.baseline, share=False)
        copy.demasked = replace(copy.demasked, notes=(*copy.demasked.notes, notes[-1]))
        return copy
    same = replace(unchanged_provenance(provenance), notes=notes, decisions=decisions, speed=speed)
    first: Any = build(program, same).eval()
    return first if race.device == CPU else cast(Demasked, move_module(first, race.device))


def _enter_candidates(
    race: CandidateRace,
    program: Program,
    smaller: Program,
    provenance: Provenance,
    wanted: _Wanted,
    progress: ProgressCallback,
) -> Iterator[str]:
    """Add candidates with segments to the race, then others; yield which fail, and why."""
    asker = LayerCosts(wanted.costs, smaller.example)
    segments = SegmentCandidates(asker, wanted.table, wanted.precision, Log())
    if wanted.segments and race.device == CPU:
        forms = segments.forms(smaller, program, progress)
        yield from _enter_all(race, forms, provenance, progress)
        packed = packed_candidates(smaller, asker, wanted.table, progress)
        yield from _enter_all(race, packed, provenance, progress)
    dense = _dense_candidates(race, smaller, asker, segments, progress)
    yield from _enter_all(race, dense, provenance, progress)
    yield from segments.log.notes
    wanted.costs.save()


def _enter_all(
    race: CandidateRace, candidates: Iterator[Candidate], provenance: Provenance, progress: ProgressCallback
) -> Iterator[str]:
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
    race: CandidateRace, smaller: Program, asker: LayerCosts, segments: SegmentCandidates, progress: ProgressCallback
) -> Iterator[Candidate]:
    """The candidates without segments, unless one with segments is far faster."""
    if race.modules and segments.are_ahead(min(race.screened().values())):
        return  # the layers of a candidate without segments alone take longer
    few = bool(race.modules)
    yield Candidate(DEMASKED, smaller)
    yield from generate_candidates(smaller, asker, segments.table, progress, few=few, log=segments.log)


def _enter(race: CandidateRace, candidate: Candidate, provenance: Provenance) -> str:
    """Add a candidate to the race; the reason if it cannot be added, else ""."""
    module_type = _module_type(candidate)
    try:
        exact = _build_module(
            race, candidate.program if candidate.exact is None else candidate.exact, provenance, module_type
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
