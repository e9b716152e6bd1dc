"""The fastest exact form of a network on this machine, found by measuring."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from demask.errors import BadInput
from demask.failures import public
from demask.graph.copying import structural_copy
from demask.graph.examples import examples, like
from demask.graph.program import Program, owned
from demask.graph.provenance import GIVEN, WHOLE, Decision, Provenance, Speed
from demask.graph.result import Demasked, build, build_plain
from demask.machine.compare import ALLOWED, PAIRS, lower_bound
from demask.machine.cost import Costs
from demask.machine.describe import machine
from demask.machine.threads import checked_threads, set_threads
from demask.machine.timing import Timing, sampled
from demask.numerics import is_as_exact, readable, to_double, widen
from demask.ops import TABLE, Table
from demask.shrink.check import Inputs, draws_like, in_eval
from demask.shrink.device import CPU, device_of, moved, on_cpu
from demask.shrink.measure import sizes_of
from demask.shrink.pipeline import given as captured
from demask.shrink.pipeline import left, reduced
from demask.shrink.reading import relations_of
from demask.sparse.forms import Sparse
from demask.sparse.segments import layers_of
from demask.tune.asking import Asker
from demask.tune.draft import Example
from demask.tune.epilogues import is_fused, plain
from demask.tune.fast import Optimized
from demask.tune.forms import Form, forms

BACKENDS, PRECISIONS = ("torch", "sparse"), ("bf16", "int8")
LOOKS, ROUNDS, SECONDS = 5, 15, 20.0  # in which forms are compared; the last one for longer
WARMUP = 1  # calls before each of these: all have been called before
FAR = 1.5  # times what the fastest form took: no form that took more is looked at again
AHEAD = 0.7  # of what the layers of dense forms take: a sparse form that takes less has won
DRAWS = 3  # inputs on which lossy storage is judged, beside the example
DEMASKED = "demasked alone"
NAN = "a ReLU that a layer takes along makes 0 of NaN: what is not finite may not show in outputs"
ULPS = 64.0  # of the largest output, in the network's own dtype
Tell = Callable[[str], object]


@public
def optimize(
    model: nn.Module | ExportedProgram,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    threads: int | None = None,
    precision: str | None = None,
    backends: Sequence[str] = BACKENDS,
    cache: str | os.PathLike[str] | Literal[False] | None = None,
    progress: Tell = lambda words: None,
    table: Table | None = None,
) -> Demasked:
    """The network that computes what `model` does in eval mode, as fast as it was measured to get.

    It is demasked, then put into several forms (norms in the weights, layers with what follows them
    in one call, channels last, streams at one width, layers computed by their nonzeros alone), each
    made of the pieces that are fastest on the example's sizes. The fastest whole one is called
    beside `model` in 30 rounds or more. If it may be slower (the lower 95 % bound of the ratio is
    below 0.97), the demasked network is returned, or, where that is slower (its upper 95 % bound is
    below 0.97), the network as it was. `demask.report` tells first what was returned, then why.
    For inference: calls record no gradients. The result has weights of its own.

    args, kwargs: example inputs, of the sizes to be fast for; others are as exact. dynamic_shapes:
    as `demask.demask` takes it. threads: to measure with, None for `torch.get_num_threads()`.
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
    args, named = examples((model,), args, dict(kwargs or {}))
    device = device_of(model, args, named)
    here = on_cpu(model, args, named) if device != CPU else (model, args, named)
    # What is done to graphs are small calls, which two threads do no faster than one, and many
    # times slower where another process has the second processor. Networks run with `count`.
    with set_threads(1):
        progress("capturing")
        program = captured(*here, dynamic_shapes)
        progress("removing what is masked")
        smaller, provenance = reduced(program, TABLE if table is None else table)
        args, named = _own((args, named))
        race = _Race(in_eval(model), program, args, named, device, count)
        wanted = _Wanted("sparse" in backends, precision, cache)
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


def _own(inputs: Any) -> Any:
    """The inputs with tensors of their own."""
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, inputs)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What the caller asks for: sparse forms, how weights are stored, where costs are kept."""

    sparse: bool
    precision: str | None
    cache: Any


@dataclass(slots=True)
class _Race:
    """Networks that are called with one example, in turns, the network as given among them.

    With copies of the caller's inputs: a network may write to what it is given. program: of the
    network as given. exact: what lossy networks come near to. expected: what inputs are, the inputs
    and what the network as given makes of them. wide: its outputs in float64, by the name of the
    inputs, once they are asked for.
    """

    given: nn.Module
    program: Program
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: torch.device
    threads: int
    modules: dict[str, nn.Module] = field(default_factory=dict)
    made_by: dict[str, Form] = field(default_factory=dict)
    exact: dict[str, nn.Module] = field(default_factory=dict)
    seen: dict[str, float] = field(default_factory=dict)
    expected: list[tuple[str, Inputs, list[Any]]] = field(default_factory=list)
    wide: dict[str, list[Any]] = field(default_factory=dict)

    def forms(self) -> dict[str, float]:
        """Median seconds of the forms; those that are far behind are not called for long."""
        whole = self.looked()
        near = [name for name in whole if whole[name] <= FAR * min(whole.values())]
        return whole | self.medians(near, ROUNDS) if len(near) > 1 else whole

    def looked(self) -> dict[str, float]:
        """Median seconds of the forms made so far, each called a few times, once in all."""
        new = [name for name in self.modules if name not in self.seen]
        if new:
            self.seen |= self.medians(new, LOOKS)
        return self.seen

    def medians(self, names: Sequence[str], pairs: int) -> dict[str, float]:
        """Median seconds of some forms."""
        found = self.rounds(names, pairs, SECONDS)
        return {name: median(taken) for name, taken in found.items()}

    def beside(self, name: str) -> dict[str, list[float]]:
        """The seconds of each round of a form and the network as given."""
        return self.rounds([GIVEN, name], PAIRS, float("inf"))

    def rounds(self, names: Sequence[str], pairs: int, seconds: float) -> dict[str, list[float]]:
        everyone = {GIVEN: self.given, **self.modules}
        contenders = {name: self.call(everyone[name]) for name in names}
        with torch.no_grad(), set_threads(self.threads):
            return sampled(contenders, pairs, WARMUP, seconds=seconds)

    def call(self, module: nn.Module) -> Callable[[], object]:
        if self.device.type != "cuda":
            return lambda: module(*self.args, **self.kwargs)

        def synchronised() -> None:
            module(*self.args, **self.kwargs)
            torch.cuda.synchronize(self.device)

        return synchronised

    def outputs(self, module: nn.Module, inputs: Inputs | None = None) -> list[Any]:
        """What a network makes of the example, or of other inputs."""
        args, kwargs = _own((self.args, self.kwargs) if inputs is None else inputs)
        with torch.no_grad(), set_threads(self.threads):
            return pytree.tree_leaves(module(*args, **kwargs))

    def compared_on(self) -> list[tuple[str, Inputs, list[Any]]]:
        """The example and draws like it; of those none that the network as given refuses or makes
        no finite numbers of."""
        for name, inputs in draws_like((self.args, self.kwargs)) if not self.expected else ():
            try:
                outputs = self.outputs(self.given, inputs)
            except Exception:
                if not self.expected:  # the example
                    raise
                continue
            if not self.expected or all(map(_is_finite, outputs)):
                self.expected.append((name, inputs, outputs))
        return self.expected

    def is_rounding(self, name: str, inputs: Inputs, k: int, given: Tensor, made: Tensor) -> bool:
        """Whether an output is about as near to that of float64 as the network as given is: of an
        ill-conditioned one, rounding moves outputs far."""
        if name not in self.wide:
            self.wide[name] = self._widened(inputs)
        wide = self.wide[name]
        exact = wide[k] if k < len(wide) else None
        if not isinstance(exact, Tensor) or exact.shape != given.shape:
            return False
        return is_as_exact(exact, given, made)

    def _widened(self, inputs: Inputs) -> list[Any]:
        try:
            wide = build_plain(self.program).double()
            widen(wide)
            args, kwargs = pytree.tree_map(_double_on_cpu, inputs)
            with torch.no_grad():
                return pytree.tree_leaves(wide(*args, **kwargs))
        except Exception:  # of any kind: then units in the last place decide
            return []


def _is_finite(leaf: Any) -> bool:
    return not isinstance(leaf, Tensor) or bool(torch.isfinite(readable(leaf)).all())


def _double_on_cpu(leaf: Any) -> Any:
    return to_double(leaf).to(CPU) if isinstance(leaf, Tensor) else leaf


def _fastest(race: _Race, program: Program, smaller: Program, provenance: Provenance,
             wanted: _Wanted, progress: Tell) -> Demasked:  # fmt: skip
    """The result: the form that won, or the network as given."""
    notes = [*provenance.notes, *_all(race, program, smaller, provenance, wanted, progress)]
    if not race.modules:
        chosen = (Decision(WHOLE, GIVEN, {}),)
        return _as_it_was(race, program, provenance, (*notes, "no form is as exact"), chosen, None)
    progress("measuring the forms")
    whole = race.forms()
    best = min(race.modules, key=whole.__getitem__)
    progress("measuring beside the network as given")
    speed, slower = _beside(race, best)
    if speed.least < ALLOWED:
        notes.append(f"the fastest form ({best}) may be slower than the network as given (ratio "
                     f"{speed.ratio:.2f}, at least {speed.least:.2f})")  # fmt: skip
        if best != DEMASKED and DEMASKED in race.modules:
            best, (speed, slower) = DEMASKED, _beside(race, DEMASKED)
        if best != DEMASKED or slower:
            best = GIVEN
    whole = {GIVEN: speed.given[0], **whole}
    if best == GIVEN:
        decisions = (Decision(WHOLE, GIVEN, whole),)
        return _as_it_was(race, program, provenance, tuple(notes), decisions, speed)
    form = race.made_by[best]
    decisions = (Decision(WHOLE, best, whole), *form.decisions)
    if any(is_fused(node) for node in form.program.graph.nodes):
        notes.append(NAN)
    if wanted.precision is not None:
        notes.append(_lossy(race, best, wanted.precision))
    made = remembered(form.program, provenance)
    record = replace(made, notes=tuple(notes), decisions=decisions, speed=speed)
    kind = _kind(form)
    race.modules.clear()
    return _built(race, owned(form.program, program.constants.values()), record, kind)


def _beside(race: _Race, name: str) -> tuple[Speed, bool]:
    """How fast a form is beside the network as given, and whether it is certain to be slower (the
    upper 95 % bound of the ratio is too low)."""
    taken = race.beside(name)
    speed = replace(speed_of(taken[GIVEN], taken[name]), threads=race.threads)
    return speed, 1 / lower_bound(taken[name], taken[GIVEN]) < ALLOWED


def _lossy(race: _Race, name: str, precision: str) -> str:
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


def remembered(program: Program, provenance: Provenance) -> Provenance:
    """What is left in a form: its sizes, its cuts, its ops that only keep shapes."""
    whole = plain(program)
    sizes = sizes_of(whole, relations_of(whole.graph, TABLE))
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


def _as_it_was(race: _Race, program: Program, provenance: Provenance, notes: tuple[str, ...],
               decisions: tuple[Decision, ...], speed: Speed | None) -> Demasked:  # fmt: skip
    """The network as given: a copy, if it is an optimized one; else its graph."""
    if isinstance(race.given, Optimized):
        copy = structural_copy(race.given, share=False)
        copy.demasked = replace(copy.demasked, notes=(*copy.demasked.notes, notes[-1]))  # type: ignore
        return copy  # type: ignore[return-value]
    same = replace(unchanged(provenance), notes=notes, decisions=decisions, speed=speed)
    first = build(program, same).eval()
    return moved(first, race.device) if race.device != CPU else first  # type: ignore[return-value]


def _all(race: _Race, program: Program, smaller: Program, provenance: Provenance,
         wanted: _Wanted, progress: Tell) -> Iterator[str]:  # fmt: skip
    """Let the sparse forms take part, then the dense ones; in words which do not, and why."""
    costs = Costs.open(wanted.cache, threads=race.threads, measure=race.device == CPU)
    leaves = pytree.tree_leaves((race.args, race.kwargs))
    asker = Asker(costs, Example.of(smaller.graph, leaves))
    sparse = Sparse(asker, wanted.precision)
    if wanted.sparse and race.device == CPU:
        yield from _entered(race, sparse.forms(smaller, program, progress), provenance, progress)
    dense = _dense(race, smaller, asker, sparse, progress)
    yield from _entered(race, dense, provenance, progress)
    costs.save()


def _entered(race: _Race, found: Iterator[Form], provenance: Provenance,
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


def _dense(race: _Race, smaller: Program, asker: Asker, sparse: Sparse,
           progress: Tell) -> Iterator[Form]:  # fmt: skip
    """The dense forms, unless a sparse one is far ahead."""
    if race.modules and min(race.looked().values()) < AHEAD * sparse.least:
        return  # the layers of a dense form alone take longer
    yield Form(DEMASKED, smaller)
    yield from forms(smaller, asker, progress)


def _enter(race: _Race, form: Form, provenance: Provenance) -> str:
    """Let a form take part; in words why it cannot, if so."""
    kind = _kind(form)
    try:
        exact = _built(race, form.program if form.exact is None else form.exact, provenance, kind)
        difference = _difference(race, exact)
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


def _kind(form: Form) -> type[Demasked]:
    return Demasked if form.name == DEMASKED else Optimized


def _built(race: _Race, program: Program, provenance: Provenance, kind: type[Demasked]) -> Demasked:
    module = build(program, provenance, kind).eval()
    if race.device != CPU:
        moved(module, race.device)
    race.outputs(module)  # the first call is made otherwise than the later ones
    return module


def _difference(race: _Race, network: nn.Module) -> str:
    """How outputs for the example and draws like it differ, in words; none if they are the same up
    to rounding."""
    for name, inputs, given in race.compared_on():
        made = race.outputs(network, inputs)
        for k, (a, b) in enumerate(zip(given, made, strict=True)):
            if text := _gap(a, b, partial(race.is_rounding, name, inputs, k)):
                return f"output {k} {text}, on {name}"
    return ""


def _gap(given: Any, made: Any, is_rounding: Callable[[Tensor, Tensor], bool]) -> str:
    """How an output differs, in words."""
    if not isinstance(given, Tensor) or not isinstance(made, Tensor):
        same = given is made or given == made
        return "" if same else f"is {made!r:.40}, not {given!r:.40}"
    if given.shape != made.shape or given.dtype != made.dtype:
        return f"is {made.dtype} {tuple(made.shape)}, not {given.dtype} {tuple(given.shape)}"
    a, b = readable(given), readable(made)
    finite = torch.isfinite(a)
    if not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        return "has other values that are not finite"
    if not a.is_floating_point() and not torch.equal(a, b):
        return f"({a.dtype}) is not equal"
    a, b = a[finite].double(), b[finite].double()
    if a.numel():
        unit = torch.finfo(given.dtype).eps * float(a.abs().max())
        gap = float((a - b).abs().max())
        if not gap <= ULPS * unit and not is_rounding(given, made):
            return f"by {gap / unit if unit else gap:.3g} units in the last place"
    return ""


def speed_of(given: list[float], result: list[float]) -> Speed:
    timings = [Timing.of(taken) for taken in (given, result)]
    rows = [(t.median, t.low, t.high) for t in timings]
    return Speed(rows[0], rows[1], rows[0][0] / rows[1][0], lower_bound(given, result),
                 len(given), torch.get_num_threads(), machine())  # fmt: skip
