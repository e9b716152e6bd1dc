"""Axes spaced by g, and the rules of convolutions and pools on them.

A strided convolution computed with stride 1 has its valid values at positions 0, s, 2 s, ... of each axis:
calls after it read only these. A `SpacedAxis` lists the valid positions of one axis. Dilation and padding of
windows are multiplied by g:

    conv(x, stride s, dilation d, padding p) == conv(y, 1, d g, p g), whose axes are spaced by g s
    max_pool(x, ...)                         == max_pool(y, ...), likewise
    avg_pool(x)                              == conv(y, ones / divisor, 1, g, p g)

y is x on axes spaced by g. The call reads positions j of x, -p <= j < n + p, and positions j g of
y: these are x[j] for 0 <= j < n, and zeros for j < 0 and for j >= n, since y ends before n g. With
g = 1 this is the strided call itself, computed with stride 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from demask.facts.analysis import Analysis
from demask.graph.editor import GraphEditor
from demask.ops import schema, traits
from demask.ops.schema import fake
from demask.stride.average_pools import (
    PAD,
    AveragePool,
    Pads,
    copy_metadata,
    divisors,
    pad_input,
    per_axis,
    static_sizes,
    sum_windows,
)
from demask.stride.average_pools import multiply as times
from demask.stride.targets import Target

aten = torch.ops.aten

# The fill of invalid positions that does not change a reduction, by its name.
NEUTRAL = {"sum": 0.0, "mean": 0.0, "max": -math.inf, "min": math.inf}


@dataclass(frozen=True, slots=True)
class SpacedAxis:
    """An axis of length `size` whose valid positions are `places`, in ascending order."""

    positions: tuple[int, ...]
    size: int

    @classmethod
    def even(cls, count: int, gap: int, size: int) -> SpacedAxis:
        """An axis with valid positions 0, gap, 2 gap, ..."""
        return cls(tuple(range(0, count * gap, gap)), size)

    @property
    def count(self) -> int:
        """Number of valid positions."""
        return len(self.positions)

    @property
    def gap(self) -> int | None:
        """The distance of valid positions, if they begin at 0, are evenly spaced, and the next one
        would be beyond the axis, where only padding is read. Else None."""
        gap = self.size if self.count == 1 else self.positions[1] - self.positions[0]
        fits = self.positions == tuple(range(0, self.count * gap, gap))
        return gap if fits and self.size <= self.count * gap else None

    @property
    def is_all(self) -> bool:
        """Whether every position is valid."""
        return self.count == self.size

    def valid_mask(self) -> Tensor:
        """Mask of valid positions, bool (size,)."""
        mask = torch.zeros(self.size, dtype=torch.bool)
        mask[list(self.positions)] = True
        return mask

    def nearest(self) -> Tensor:
        """For each position the index k of the last valid one up to it, int64 (size,)."""
        return (self.valid_mask().cumsum(0) - 1).clamp_min(0)


Nodes = Mapping[fx.Node, fx.Node]
SpacedAxes = Mapping[int, SpacedAxis]  # the spaced axes of a value; all others are unchanged


def merge_axes(parts: Sequence[SpacedAxis]) -> SpacedAxis:
    """Axes merged into one, in row-major order."""
    positions = torch.zeros((), dtype=torch.int64)
    for part in parts:
        positions = positions.unsqueeze(-1) * part.size + torch.tensor(part.positions)
    return SpacedAxis(tuple(positions.flatten().tolist()), math.prod(part.size for part in parts))


def only_spaced(axes: Mapping[int, SpacedAxis]) -> SpacedAxes:
    """The axes without those on which every position is valid."""
    return {axis: part for axis, part in axes.items() if not part.is_all}


def mask_of(spacing: SpacedAxes, rank: int) -> Tensor:
    """Mask of the valid positions of a value: bool, broadcastable, of size 1 along axes that are
    not spaced."""
    mask = torch.ones([1] * rank, dtype=torch.bool)
    for axis, part in spacing.items():
        mask = mask & part.valid_mask().reshape([-1 if k == axis else 1 for k in range(rank)])
    return mask


@dataclass(frozen=True, slots=True)
class NotSpaced:
    """Why a call cannot read spaced axes. short: operands that would have to be spaced, too."""

    text: str
    short: tuple[fx.Node, ...] = ()


@dataclass(frozen=True, slots=True)
class SpacedRule:
    """How a call runs on spaced axes.

    outs: the spaced axes of each output. emit: inserts the calls. non_finite: whether invalid
    positions may be Inf or NaN although no value of the network is. broadcast: operands of one
    position, which fits every spacing; strides before them may remain.
    """

    outs: tuple[SpacedAxes, ...]
    emit: Callable[[Emission], fx.Node]
    non_finite: bool = False
    broadcast: tuple[fx.Node, ...] = ()


@dataclass(frozen=True, slots=True)
class SpacedPlan:
    """The calls to rewrite for a target, in order, with their rules."""

    target: Target
    analysis: Analysis
    steps: dict[fx.Node, SpacedRule] = field(default_factory=dict)

    def spacings(self, node: Any) -> tuple[SpacedAxes, ...]:
        """The spaced axes of each output of a node; empty for a node that is not rewritten."""
        step = self.steps.get(node) if isinstance(node, fx.Node) else None
        return () if step is None else step.outs

    def spacing(self, node: Any) -> SpacedAxes:
        """The spaced axes of a node's only output."""
        outs = self.spacings(node)
        return outs[0] if len(outs) == 1 else {}

    def read_by(self, node: fx.Node) -> list[fx.Node]:
        """The operands of a call that have spaced axes."""
        return [n for n in node.all_input_nodes if any(self.spacings(n))]

    def is_finite(self, x: fx.Node) -> bool:
        """Whether no position of a value is Inf or NaN, so that 0 times it is 0."""
        integral = not fake(x).is_floating_point()
        return integral or (self.target.finite and not (x in self.steps and self.steps[x].non_finite))

    def multiplies(self, x: fx.Node) -> bool:
        """Whether a value is masked by multiplication, rather than by a selection."""
        plain = self.target.finite or "select" not in self.target.ops
        return plain and self.is_finite(x) and "multiply" in self.target.ops

    def may_mask(self, x: fx.Node, fill: float = 0, scale: float = 1) -> bool:
        """Whether the target can set invalid positions to `fill` and multiply valid ones by
        `scale`."""
        selects = "select" in self.target.ops and (scale == 1 or "multiply" in self.target.ops)
        return selects or (fill == 0 and self.multiplies(x))


class Emission:
    """Inserts the calls that replace `node`. replacements: of the nodes before it."""

    def __init__(self, editor: GraphEditor, node: fx.Node, replacements: Nodes, plan: SpacedPlan):
        self.editor, self.node, self.plan = editor, node, plan
        self.replacements = replacements

    def read(self, node: fx.Node) -> fx.Node:
        """The replacement of an operand, or the operand itself."""
        return self.replacements.get(node, node)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call inserted before the node, with the node's metadata."""
        call = self.editor.insert(self.node, None, target, *args, **kwargs)
        return copy_metadata(call, self.node)

    def again(self, /, **changed: Any) -> fx.Node:
        """The node's own call on the replacements of its operands, with some arguments changed."""
        arguments = map_arg(schema.arguments(self.node), self.read)
        args, kwargs = schema.bind_arguments(self.node.target, arguments | changed)
        return self.call(self.node.target, *args, **kwargs)

    def constant(self, name: str, tensor: Tensor) -> fx.Node:
        """A new constant, named after the node."""
        return self.editor.add_constant(f"{self.node.name}_{name}", tensor, self.node)

    def longer(self, x: fx.Node, more: Mapping[int, int]) -> fx.Node:
        """`x` with `more[axis]` zeros appended to each axis."""
        rank = fake(x).ndim
        flat = [n for axis in reversed(range(rank)) for n in (0, more.get(axis, 0))]
        return self.call(PAD, x, flat) if any(flat) else x

    def masked(self, x: fx.Node, spacing: SpacedAxes, *, fill: float = 0, scale: float = 1) -> fx.Node:
        """The replacement of `x` at valid positions, `fill` elsewhere. scale: a factor, used if the
        mask is a product (`SpacedPlan.multiplies`)."""
        product, x = fill == 0 and self.plan.multiplies(x), self.read(x)
        value = fake(x)
        keep = mask_of(spacing, value.ndim)
        if product:
            dtype = value.dtype
            return self.call(aten.mul.Tensor, x, self.constant("mask", keep.to(dtype) * scale))
        other = self.constant("fill", torch.tensor(fill, dtype=value.dtype))
        return self.call(aten.where.self, self.constant("mask", keep), x, other)


def mean_correction(over: SpacedAxes, kind: str) -> float:
    """The factor that corrects a reduction of a masked value: a mean counts masked zeros, too."""
    return math.prod(part.size / part.count for part in over.values()) if kind == "mean" else 1


def reduced(x: fx.Node, over: SpacedAxes, outs: tuple[SpacedAxes, ...], kind: str) -> SpacedRule:
    """The rule of a reduction over spaced axes of a masked operand. kind: key of NEUTRAL."""
    share = mean_correction(over, kind)

    def emit(here: Emission) -> fx.Node:
        fill, dtype = NEUTRAL[kind], fake(x).dtype
        if fill and not dtype.is_floating_point:
            fill = torch.iinfo(dtype).min if fill < 0 else torch.iinfo(dtype).max
        first = share if fill == 0 and here.plan.multiplies(x) else 1
        masked = here.masked(x, over, fill=fill, scale=first)
        total = here.again(self=masked)
        return total if first == share else here.call(aten.mul.Tensor, total, share)

    return SpacedRule(outs, emit)


@dataclass(frozen=True, slots=True)
class SpacedReader:
    """A call that reads values with spaced axes, and the plan so far."""

    editor: GraphEditor
    node: fx.Node
    plan: SpacedPlan


WINDOWS = frozenset({*traits.CONVOLUTIONS_ANY_PADDING, *traits.POOLS})
LOWEST = float("-inf")  # padding of a maximum


@dataclass(frozen=True, slots=True)
class SpacedWindow:
    """The windows of a call along one axis. before, after: its padding. count: of windows."""

    kernel: int
    stride: int
    dilation: int
    before: int
    after: int
    count: int

    def on(self, source: SpacedAxis) -> tuple[tuple[int, int], SpacedAxis]:
        """Padding before and after for windows of stride 1 on an axis spaced by g, and the axis of
        their values, spaced by g s."""
        gap = source.gap
        assert gap is not None
        step = gap * self.stride
        before, after = self.before * gap, self.after * gap
        size = source.size + before + after - self.dilation * gap * (self.kernel - 1)
        more = max(0, (self.count - 1) * step + 1 - size)  # windows that ceil_mode adds
        assert size + more <= self.count * step
        return (before, after + more), SpacedAxis.even(self.count, step, size + more)


@dataclass(frozen=True, slots=True)
class _SpacedWindows:
    """The windows of all axes. pads: padding in positions of the spaced axes. gaps, sources: of the
    input's axes. spreads: the output's axes. spacing: those of `spreads` that are spaced."""

    pads: Pads
    gaps: tuple[int, ...]
    sources: tuple[SpacedAxis, ...]
    spreads: tuple[SpacedAxis, ...]
    spacing: SpacedAxes


def is_strided(node: fx.Node) -> bool:
    """Whether a call is a convolution or pool with a stride larger than 1."""
    axes = traits.CONVOLUTIONS_ANY_PADDING | traits.MAX_POOLS | traits.AVERAGE_POOLS
    rank = axes.get(node.target)
    if rank is None:
        return False
    arguments = schema.arguments(node)
    stride = per_axis(arguments["stride"] or arguments["kernel_size"], rank)
    return stride is not None and any(step > 1 for step in stride)


def window_rule(reader: SpacedReader) -> SpacedRule | NotSpaced:
    """The rule of a convolution or pool (`WINDOWS`)."""
    target = reader.node.target
    if target in traits.CONVOLUTIONS_ANY_PADDING:
        return _convolution(reader, traits.CONVOLUTIONS_ANY_PADDING[target])
    if target in traits.MAX_POOLS:
        return _maximum(reader, traits.MAX_POOLS[target])
    if target in traits.AVERAGE_POOLS:
        pool = AveragePool.of(reader.node)
        return NotSpaced("the sizes of a pool are computed") if pool is None else average_rule(reader, pool)
    return _adaptive(reader, traits.ADAPTIVE_AVERAGE_POOLS[target])


def _sources(reader: SpacedReader, x: fx.Node, rank: int) -> list[SpacedAxis] | NotSpaced:
    """The last `rank` axes of a value as spaced axes."""
    spacing, value, axes = reader.plan.spacing(x), fake(x), []
    if any(axis < value.ndim - rank for axis in spacing):
        return NotSpaced("its channels are spaced")
    for axis in range(value.ndim - rank, value.ndim):
        size = value.shape[axis]
        if not isinstance(size, int):
            return NotSpaced("sizes of images are known only at run time")
        part = spacing.get(axis, SpacedAxis.even(size, 1, size))
        if part.gap is None:
            return NotSpaced("positions are not evenly spaced")
        axes.append(part)
    return axes


def _spaced_windows(reader: SpacedReader, x: fx.Node, windows: Sequence[SpacedWindow]) -> _SpacedWindows | NotSpaced:
    """Windows on the spaced axes of a value."""
    sources = _sources(reader, x, len(windows))
    if isinstance(sources, NotSpaced):
        return sources
    placed = [window.on(source) for window, source in zip(windows, sources, strict=True)]
    spreads = tuple(axis for _, axis in placed)
    first = fake(x).ndim - len(windows)
    spacing = only_spaced({first + k: axis for k, axis in enumerate(spreads)})
    gaps = tuple(source.gap or 1 for source in sources)
    return _SpacedWindows(tuple(pads for pads, _ in placed), gaps, tuple(sources), spreads, spacing)


def _windows(node: fx.Node, kernel: Sequence[int], pads: Pads | None) -> list[SpacedWindow] | None:
    """The windows of a call, one per axis; None if an argument is not constant."""
    arguments, rank = schema.arguments(node), len(kernel)
    stride = per_axis(arguments["stride"] or list(kernel), rank)
    dilation = per_axis(arguments.get("dilation", 1), rank)
    counts = fake(node).shape[-rank:]
    if stride is None or dilation is None or pads is None:
        return None
    return [SpacedWindow(kernel[k], stride[k], dilation[k], *pads[k], counts[k]) for k in range(rank)]


def _pads(value: Any, kernel: Sequence[int], dilation: Any) -> Pads | None:
    """Padding before and after each axis; of an odd number, "same" has one more after."""
    if value == "valid":
        return ((0, 0),) * len(kernel)
    if isinstance(value, str):
        gaps = per_axis(dilation, len(kernel))
        if gaps is None:
            return None
        reach = [gap * (size - 1) for gap, size in zip(gaps, kernel, strict=True)]
        return tuple((n // 2, n - n // 2) for n in reach)
    numbers = per_axis(value, len(kernel))
    return None if numbers is None else tuple((n, n) for n in numbers)


def _convolution(reader: SpacedReader, rank: int) -> SpacedRule | NotSpaced:
    """The rule of a convolution."""
    arguments = schema.arguments(reader.node)
    x, weight = arguments["input"], arguments["weight"]
    if any(reader.plan.spacing(arguments[name]) for name in ("weight", "bias")):
        return NotSpaced("its weights are spaced")
    kernel = tuple(fake(weight).shape[2:])
    pads = _pads(arguments["padding"], kernel, arguments["dilation"])
    windows = _windows(reader.node, kernel, pads)
    if windows is None:
        return NotSpaced("the sizes of a convolution are computed")
    placed = _spaced_windows(reader, x, windows)
    if isinstance(placed, NotSpaced):
        return placed

    def emit(here: Emission) -> fx.Node:
        value, inner = pad_input(here.editor, here.node, here.read(x), placed.pads, 0)
        gaps = [w.dilation * gap for w, gap in zip(windows, placed.gaps, strict=True)]
        args = (value, here.read(weight), arguments["bias"], [1] * rank, list(inner), gaps)
        return here.call(traits.CONV_OF_AXES[rank], *args, arguments["groups"])

    return SpacedRule((placed.spacing,), emit)


def _maximum(reader: SpacedReader, rank: int) -> SpacedRule | NotSpaced:
    """The rule of a max pool."""
    arguments = schema.arguments(reader.node)
    x, kernel = arguments["self"], per_axis(arguments["kernel_size"], rank)
    if reader.plan.target.pool_windows != "any" and kernel != (1,) * rank:
        return NotSpaced("windows of the target's pools do not overlap")
    pads = None if kernel is None else _pads(arguments["padding"], kernel, 1)
    windows = None if kernel is None else _windows(reader.node, kernel, pads)
    if windows is None:
        return NotSpaced("the sizes of a pool are computed")
    placed = _spaced_windows(reader, x, windows)
    if isinstance(placed, NotSpaced):
        return placed
    gaps = [w.dilation * gap for w, gap in zip(windows, placed.gaps, strict=True)]
    own = _can_pad_itself(placed.pads, [w.kernel for w in windows])
    spans = [gap * (w.kernel - 1) + 1 for w, gap in zip(windows, gaps, strict=True)]
    if max(spans) > (most := reader.plan.target.pool_size):
        return NotSpaced(f"its windows would cover {spans} positions, the target's at most {most:g}")

    def emit(here: Emission) -> fx.Node:
        value, inner = here.read(x), [before for before, _ in placed.pads]
        if not own:
            dtype = fake(value).dtype
            lowest = LOWEST if dtype.is_floating_point else torch.iinfo(dtype).min
            flat = [n for pair in reversed(placed.pads) for n in pair]
            value, inner = here.call(PAD, value, flat, lowest), [0] * rank
        kernel = [w.kernel for w in windows]
        return here.call(here.node.target, value, kernel, [1] * rank, inner, gaps)

    sizes = [source.size for source in placed.sources]
    empty = zip(windows, sizes, placed.pads, gaps, placed.spreads, strict=True)
    return SpacedRule((placed.spacing,), emit, non_finite=any(_is_empty(*axis) for axis in empty))


def _is_empty(window: SpacedWindow, size: int, pads: tuple[int, int], gap: int, output: SpacedAxis) -> bool:
    """Whether some window reads only padding."""
    reads = [range(k - pads[0], k - pads[0] + gap * window.kernel, gap) for k in range(output.size)]
    return any(all(not 0 <= n < size for n in positions) for positions in reads)


def _can_pad_itself(pads: Pads, kernel: Sequence[int]) -> bool:
    """Whether a pool can pad by itself: symmetrically, by at most half a window."""
    return all(before == after and 2 * before <= n for (before, after), n in zip(pads, kernel, strict=True))


def average_rule(reader: SpacedReader, pool: AveragePool) -> SpacedRule | NotSpaced:
    """The rule of an average pool: a depthwise convolution, and a count map if divisors differ."""
    node, rank = reader.node, len(pool.kernel)
    x = schema.arguments(node)["self"]
    value = fake(x)
    counts = fake(node).shape[-rank:] if node.target in WINDOWS else (1,) * rank
    sizes = static_sizes(x, rank)
    if sizes is None:
        return NotSpaced("sizes of images are known only at run time")
    kernel = pool.taps(sizes)
    windows = [
        SpacedWindow(k, s, 1, *pair, n)
        for k, s, pair, n in zip(kernel, pool.stride, pool.pads(sizes), counts, strict=True)
    ]
    placed = _spaced_windows(reader, x, windows)
    if isinstance(placed, NotSpaced):
        return placed
    fits = max(pool.kernel) <= reader.plan.target.pool_size
    if _stays_a_pool(node, pool, placed) and reader.plan.target.pool_windows == "any" and fits:
        return SpacedRule((placed.spacing,), lambda here: here.again(stride=[1] * rank, ceil_mode=False))
    if not value.is_floating_point():
        return NotSpaced("an average of integers is rounded, unlike a convolution")
    if not isinstance(value.shape[-rank - 1], int):
        return NotSpaced("the number of channels is known only at run time")
    shared = divisors(pool, sizes)
    if shared.ndim and "multiply" not in reader.plan.target.ops:
        return NotSpaced("windows at borders have other divisors, and the target cannot multiply")

    def emit(here: Emission) -> fx.Node:
        weight = 1.0 if shared.ndim else 1 / int(shared)
        sums = sum_windows(
            here.editor,
            here.node,
            here.read(x),
            kernel,
            weight,
            pads=placed.pads,
            stride=[1] * rank,
            dilation=placed.gaps,
        )
        if not shared.ndim:
            return sums
        factor = shared.double().reciprocal()
        for axis, part in enumerate(placed.spreads):
            factor = factor.index_select(axis, part.nearest())
        return times(here.editor, here.node, sums, factor)

    return SpacedRule((placed.spacing,), emit)


def _stays_a_pool(node: fx.Node, pool: AveragePool, placed: _SpacedWindows) -> bool:
    """Whether an average pool of an unspaced value is the same pool with stride 1."""
    own = all(pair == (p, p) for pair, p in zip(placed.pads, pool.padding, strict=True))
    return node.target in traits.AVERAGE_POOLS and own and set(placed.gaps) == {1} and not pool.ceil


def _adaptive(reader: SpacedReader, rank: int) -> SpacedRule | NotSpaced:
    """The rule of an adaptive pool whose windows have one size and do not overlap."""
    pool, x = AveragePool.of(reader.node), schema.arguments(reader.node)["self"]
    if pool is None:
        return NotSpaced("windows of an adaptive pool overlap, or its sizes are dynamic")
    spacing = reader.plan.spacing(x)
    if min(spacing) < fake(x).ndim - rank:
        return NotSpaced("its channels are spaced")
    whole = pool.kernel == tuple(fake(x).shape[-rank:])
    if whole and reader.plan.may_mask(x, 0, mean_correction(spacing, "mean")):
        return reduced(x, spacing, ({},), "mean")
    return average_rule(reader, pool)
