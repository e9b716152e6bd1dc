"""Seconds of a network as a function of the slices that stay, from layers measured on this machine.

Each layer is measured at `KNOTS` widths of its inputs and outputs, when first needed, and the cost
model stores the answers. Between these widths seconds are interpolated. The sum lacks what happens
between layers; `budgets.Latency` calibrates it with full networks.

`NetworkTimer` measures networks as `demask.optimize` runs them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import mean
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import fx, nn

from demask.graph.provenance import GIVEN
from demask.machine.clock import checked_threads, race, set_threads
from demask.machine.cost import Question
from demask.ops import Relation, schema
from demask.prune.removal_cost import CallExtents, Counts, Extent, Masks, RemovalCost, SizeProduct
from demask.registry import RUNNERS
from demask.shrink.demask import demask
from demask.tune.epilogue import Epilogue
from demask.tune.layer_costs import FUSED, PLAIN, Layer, LayerCosts

# Of the timing of a network: short ones take as long as others, since a shared machine may be slow
# for tenths of seconds.
CALLS, BLOCK, SHORT, SECONDS = 20_000, 7, 0.02, 3.0


@dataclass(frozen=True, slots=True)
class NetworkTime:
    """Seconds of one call of a network.

    Attributes:
        seconds: of the network as `demask.optimize` returns it.
        runners: by what runs its layers, "segment" or "torch", the seconds of the fastest such
            network.

    Example:
        >>> from demask.prune import NetworkTime
        >>> NetworkTime(2e-3, {"torch": 2e-3}).seconds
        0.002
    """

    seconds: float
    runners: Mapping[str, float]


@dataclass(slots=True)
class NetworkTimer:
    """Times networks at the speed that the machine had at the first of them.

    Shared machines become slower and faster within minutes, by up to two times. So every later
    network is timed in turns with the first one, and its seconds are those of the first one times
    the ratio of both.

    Args:
        threads: number of CPU threads; None: `torch.get_num_threads()`.
        cache: of `demask.optimize`.
        clock: returns seconds; None: the time of the process on one thread, else of the wall.

    Attributes:
        first: the first network, ready to call; None before it.
        seconds: of one call of it.
        ratios: for each later network, the seconds of the first one in turns with it, over
            `seconds`: how much slower the machine was.

    Example:
        >>> import torch
        >>> from demask.prune import NetworkTimer
        >>> timer = NetworkTimer(threads=1)
        >>> x = torch.zeros(8, 64)
        >>> first = timer.seconds_of(torch.nn.Linear(64, 64), (x,), {})
        >>> timer.seconds_of(torch.nn.Linear(64, 9), (x,), {}) > 0, first == timer.seconds
        (True, True)
    """

    threads: int | None = None
    cache: Any = None
    clock: Callable[[], float] | None = None
    first: Callable[[], object] | None = None
    seconds: float = 0.0
    ratios: list[float] = field(default_factory=list)

    def __call__(self, network: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NetworkTime:
        """Seconds of a network, demasked and optimized. Those of the slower ways to run it are in
        proportion to what `optimize` measured."""
        slim = demask(network, args, kwargs, check=False, result="graph")
        optimize = RUNNERS.get("optimize")
        fast = optimize(slim, args, kwargs, threads=self.threads, cache=self.cache)
        decision = fast.demasked.decisions[0]
        seconds = self.seconds_of(fast, args, kwargs)
        chosen = runner_of(decision.chosen)
        runners = {chosen: seconds}
        for name, taken in decision.seconds.items():
            runner = runner_of(name)
            if runner != chosen and name != GIVEN:
                slower = seconds * max(taken / decision.seconds[decision.chosen], 1.0)
                runners[runner] = min(slower, runners.get(runner, slower))
        return NetworkTime(seconds, runners)

    def seconds_of(self, network: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
        """Seconds of a call of a network as it is."""
        call = partial(network, *args, **kwargs)
        if self.first is None:
            (self.seconds,) = self._in_turns(call)
            self.first = call
            return self.seconds
        first, own = self._in_turns(self.first, call)
        self.ratios.append(first / self.seconds)
        return self.seconds * own / first

    def _in_turns(self, *calls: Callable[[], object]) -> list[float]:
        """Mean seconds of each call in the fastest quarter of the rounds within `SECONDS`, in each
        of which every call runs `BLOCK` times, long ones once. Other processes only add to it, and
        not to all rounds."""
        threads = checked_threads(self.threads)
        clock = self.clock or clock_of(threads)
        names = {str(number): call for number, call in enumerate(calls)}
        with torch.no_grad(), set_threads(threads):
            once = race(names, 1, 1, clock=clock)
            size = BLOCK if max(seconds[0] for seconds in once.values()) < SHORT else 1
            blocks = {name: partial(_call_repeatedly, call, size) for name, call in names.items()}
            samples = race(blocks, CALLS, 0, seconds=SECONDS, clock=clock)
        rounds = sorted(zip(*samples.values(), strict=True), key=sum)
        fastest = rounds[: max(len(rounds) // 4, 1)]
        return [mean(seconds) / size for seconds in zip(*fastest, strict=True)]


def _call_repeatedly(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


def runner_of(candidate: str) -> str:
    """What runs the layers of a candidate of `optimize`."""
    return SEGMENT if candidate.startswith("segments") else TORCH


def clock_of(threads: int) -> Callable[[], float]:
    """What times calls on so many threads: on one, the time of the processor for this thread, which
    is that of the call without the pauses in which other processes ran."""
    return thread_time if threads == 1 else perf_counter


KNOTS = 8  # measured widths per axis
TIMES, SMALL = 5, 3e-4  # layers of fewer seconds are timed so many times in one segment
SEGMENT, TORCH = "segment", "torch"  # what runs layers
# torch multiplies dense matrices of at least this size faster than a segment
TOKENS, WIDTH = 64, 256


@dataclass(frozen=True, slots=True)
class Width:
    """The size of an axis as a product of extents, linear functions of counts.

    full: the size when everything stays. factors: per extent, the constant and the factors.
    """

    full: int
    factors: tuple[tuple[float, Mapping[str, float]], ...]

    @classmethod
    def of(cls, extents: tuple[Extent, ...]) -> Width:
        """The width of the axis whose letters have these extents."""
        return cls(math.prod(e.masked({}) for e in extents), tuple(e.linear() for e in extents))

    @property
    def groups(self) -> frozenset[str]:
        """The groups that change the width."""
        return frozenset(name for _, factors in self.factors for name in factors)

    def at(self, counts: Counts) -> float:
        """The width for these counts of slices."""
        return math.prod(
            fixed + sum(factor * counts[name] for name, factor in factors.items()) for fixed, factors in self.factors
        )

    def knots(self) -> tuple[int, ...]:
        """The widths to measure: about `KNOTS` multiples of one step, and half a step."""
        if not self.groups:
            return (self.full,)
        step = max(self.full // KNOTS, 1)
        widths = {max(step // 2, 1), *range(step, self.full, step), self.full}
        return tuple(sorted(widths))


@dataclass(slots=True)
class LayerSeconds:
    """The seconds of one layer at all widths; `measure` gives those of a layer."""

    layer: Layer
    inputs: Width
    outputs: Width
    measure: Callable[[Layer], float]
    _known: dict[tuple[int, int], float] = field(default_factory=dict)
    _at: dict[tuple[int, ...], float] = field(default_factory=dict)  # by counts of `_names`
    _names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._names = tuple(sorted(self.inputs.groups | self.outputs.groups))

    def at(self, counts: Counts) -> float:
        """The seconds, interpolated between measured widths."""
        own = tuple(counts[name] for name in self._names)
        if own not in self._at:
            self._at[own] = self._interpolated(counts)
        return self._at[own]

    def _interpolated(self, counts: Counts) -> float:
        lines = [_neighboring_knots(w.knots(), w.at(counts)) for w in (self.inputs, self.outputs)]
        return sum(a * b * self._seconds(m, n) for m, a in lines[0] for n, b in lines[1])

    def _seconds(self, inputs: int, outputs: int) -> float:
        if (inputs, outputs) not in self._known:
            layer = resized(self.layer, inputs, outputs)
            self._known[inputs, outputs] = self.measure(layer)
        return self._known[inputs, outputs]


def _neighboring_knots(knots: tuple[int, ...], width: float) -> list[tuple[int, float]]:
    k = bisect_right(knots, width)
    if k in (0, len(knots)):
        return [(knots[max(k - 1, 0)], 1.0)]
    share = (width - knots[k - 1]) / (knots[k] - knots[k - 1])
    return [(knots[k - 1], 1 - share), (knots[k], share)] if share else [(knots[k - 1], 1.0)]


def resized(layer: Layer, inputs: int, outputs: int) -> Layer:
    """The layer with so many input and output channels; a depthwise one has `outputs` groups."""
    x, geometry = list(layer.x), layer.geometry
    space = len(layer.weight) - 2 if layer.convolves else 0
    x[len(x) - 1 - space] = inputs
    groups = geometry[3] if layer.convolves else 1
    if groups > 1 and layer.weight[1] == 1:
        groups = x[len(x) - 1 - space] = inputs = outputs
        geometry = (*geometry[:3], groups)
    rows, columns = outputs, inputs // groups
    if "transpose" in layer.target:
        rows, columns = inputs, outputs // groups
    weight = (rows, columns, *layer.weight[2:])
    return replace(layer, x=tuple(x), weight=weight, geometry=geometry)


@dataclass(frozen=True, slots=True)
class NetworkSeconds:
    """The seconds of all layers of a network as a function of counts of slices (a `CountedCost`).

    current: by group, how many slices are left, for those without a count. products: of calls without
    a weight, such as queries times keys, by the machine's best rate.
    """

    current: Mapping[str, int]

    layers: tuple[LayerSeconds, ...]
    products: tuple[tuple[Width, float], ...]  # the multiply-adds, seconds of each

    @classmethod
    def of(cls, cost: RemovalCost, left: Masks, asker: LayerCosts, runner: str) -> NetworkSeconds:
        """The seconds of the calls of a network, whose layers `runner` runs. left: by group, the
        slices that are left."""
        measure = partial(layer_seconds, asker, runner)
        layers = {call.relation.node: _layer_of(call, asker, measure) for call in cost.calls if is_layer(call.relation)}
        products = [p for p in cost.products if p.node not in layers]
        current = {name: int(mask.sum()) for name, mask in left.items()}
        return cls(current, tuple(layers.values()), tuple(_product_of(p, asker) for p in products))

    def total(self, counts: Counts) -> float:
        """The seconds of all layers for these counts."""
        counts = {**self.current, **counts}
        products = sum(width.at(counts) * seconds for width, seconds in self.products)
        return products + sum(layer.at(counts) for layer in self.layers)


def is_layer(relation: Relation) -> bool:
    """Whether a call multiplies its input with a constant weight."""
    values = schema.arguments(relation.node)
    weight = values.get("weight")
    is_constant = isinstance(weight, fx.Node) and weight.op == "get_attr"
    return is_constant and "input" in values and relation.entry.fill == "sum"


def _layer_of(call: CallExtents, asker: LayerCosts, measure: Callable[[Layer], float]) -> LayerSeconds:
    """The seconds of a call of a layer."""
    relation = call.relation
    layer = asker.of(relation.node)
    space = len(layer.weight) - 2 if layer.convolves else 0
    axes = (relation.ins[0][len(layer.x) - 1 - space], relation.outs[0][-1 - space])
    inputs, outputs = (Width.of(tuple(e for a in axis for e in call.letters[a])) for axis in axes)
    return LayerSeconds(layer, inputs, outputs, measure)


def _product_of(product: SizeProduct, asker: LayerCosts) -> tuple[Width, float]:
    """The multiply-adds of a product, and seconds of each."""
    width = Width.of(product.extents)
    question = Question("product of values", 2.0 * width.full, 0.0, lambda: lambda: None)
    return width, asker.costs.analytic(question) / max(width.full, 1)


def layer_seconds(asker: LayerCosts, runner: str, layer: Layer) -> float:
    """Predicted or measured seconds of a layer, by what runs it."""
    tokens = math.prod(layer.x[:-1])
    is_large = not layer.convolves and tokens >= TOKENS and min(layer.weight) >= WIDTH
    if runner == SEGMENT and not is_large:
        seconds = segment_seconds(asker, layer)
        if seconds < math.inf:
            return seconds
    names = asker.implementations(layer)
    name = FUSED if FUSED in names else PLAIN
    orders = (False, True) if len(layer.x) == 4 and layer.convolves else (False,)
    return min(asker.seconds(layer, name, last, Epilogue(), other=False) for last in orders)


def segment_seconds(asker: LayerCosts, layer: Layer) -> float:
    """Seconds of a layer inside a segment; inf where none computes it."""
    multiply_adds = math.prod(layer.out) * math.prod(layer.weight[1:])
    moved = 4.0 * (math.prod(layer.x) + math.prod(layer.out) + math.prod(layer.weight))
    run = RUNNERS.get("segment")

    def seconds(times: int) -> float:
        name = f"segment, {times} times; {layer}"
        flops = 2.0 * times * multiply_adds
        make = partial(run, layer, times)
        return asker.costs.seconds(Question(name, flops, moved * times, make))

    one = seconds(1)
    if one > SMALL:
        return one
    return max((seconds(TIMES) - one) / (TIMES - 1), 0.2 * one / TIMES)
