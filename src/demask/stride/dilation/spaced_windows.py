"""Convolutions and pools of values that stand on a grid of gap g: dilation and padding times g.

    conv(x, stride s, dilation d, padding p) on grid g == conv(y, 1, d g, p g) on grid g s
    max_pool(x, ...)                                   == max_pool(y, ...), alike
    avg_pool(x)                                        == conv(y, ones / divisor, 1, g, p g)

Of x the call reads positions j, -p <= j < n + p. Of y it reads j g: what x has at j where
0 <= j < n; zeros where j < 0, and where j >= n, since y ends before n g. With a gap of 1 these are
strided calls themselves, computed with stride 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from demask.ops import schema, traits
from demask.stride.average_pools import (
    PAD,
    AveragePool,
    Pads,
    divisors,
    padded,
    spread,
    static_sizes,
    summed,
)
from demask.stride.average_pools import scaled as times
from demask.stride.dilation.spaced_axes import (
    Emission,
    Grid,
    NotSpaced,
    SpacedReader,
    SpacedRule,
    Spread,
    kept,
    reduced,
    share_of,
)

aten = torch.ops.aten
WINDOWS = frozenset({*traits.CONVOLUTIONS_ANY_PADDING, *traits.POOLS})
LOWEST = float("-inf")  # what a maximum is padded with


@dataclass(frozen=True, slots=True)
class SpacedWindow:
    """The window of a call along one axis, and how many there are: of `count` positions."""

    kernel: int
    stride: int
    dilation: int
    front: int
    behind: int
    count: int

    def on(self, source: Spread) -> tuple[tuple[int, int], Spread]:
        """Padding in front and behind for a window of stride 1 on a grid, and where its values
        stand: 0, g s, 2 g s, ..."""
        gap = source.gap
        assert gap is not None
        step = gap * self.stride
        front, behind = self.front * gap, self.behind * gap
        made = source.size + front + behind - self.dilation * gap * (self.kernel - 1)
        more = max(0, (self.count - 1) * step + 1 - made)  # windows that ceil_mode adds
        assert made + more <= self.count * step
        return (front, behind + more), Spread.even(self.count, step, made + more)


@dataclass(frozen=True, slots=True)
class _SpacedWindows:
    """Windows of all axes, on their grids."""

    pads: Pads
    gaps: tuple[int, ...]
    sources: tuple[Spread, ...]
    spreads: tuple[Spread, ...]
    grid: Grid


def is_strided(node: fx.Node) -> bool:
    """Is a call a convolution or a pool of stride larger than 1?"""
    axes = traits.CONVOLUTIONS_ANY_PADDING | traits.MAX_POOLS | traits.AVERAGE_POOLS
    rank = axes.get(node.target)
    if rank is None:
        return False
    arguments = schema.arguments(node)
    stride = spread(arguments["stride"] or arguments["kernel_size"], rank)
    return stride is not None and any(step > 1 for step in stride)


def windowed(reader: SpacedReader) -> SpacedRule | NotSpaced:
    """A convolution or a pool (`WINDOWS`) of a value on a grid, or of one as it was."""
    target = reader.node.target
    if target in traits.CONVOLUTIONS_ANY_PADDING:
        return _convolution(reader, traits.CONVOLUTIONS_ANY_PADDING[target])
    if target in traits.MAX_POOLS:
        return _maximum(reader, traits.MAX_POOLS[target])
    if target in traits.AVERAGE_POOLS:
        pool = AveragePool.of(reader.node)
        return (
            NotSpaced("a pool whose sizes are computed") if pool is None else average(reader, pool)
        )
    return _adaptive(reader, traits.ADAPTIVE_AVERAGE_POOLS[target])


def _sources(reader: SpacedReader, x: fx.Node, rank: int) -> list[Spread] | NotSpaced:
    """How the last `rank` axes of a value stand."""
    grid, value, found = reader.plan.grid(x), x.meta["val"], []
    if any(axis < value.ndim - rank for axis in grid):
        return NotSpaced("positions of channels stand apart")
    for axis in range(value.ndim - rank, value.ndim):
        size = value.shape[axis]
        if not isinstance(size, int):
            return NotSpaced("sizes of images are known at run time alone")
        part = grid.get(axis, Spread.even(size, 1, size))
        if part.gap is None:
            return NotSpaced("positions stand on no even grid")
        found.append(part)
    return found


def _place(
    reader: SpacedReader, x: fx.Node, windows: Sequence[SpacedWindow]
) -> _SpacedWindows | NotSpaced:
    sources = _sources(reader, x, len(windows))
    if isinstance(sources, NotSpaced):
        return sources
    found = [window.on(source) for window, source in zip(windows, sources, strict=True)]
    spreads = tuple(made for _, made in found)
    first = x.meta["val"].ndim - len(windows)
    grid = kept({first + k: made for k, made in enumerate(spreads)})
    gaps = tuple(source.gap or 1 for source in sources)
    return _SpacedWindows(tuple(pads for pads, _ in found), gaps, tuple(sources), spreads, grid)


def _windows(node: fx.Node, kernel: Sequence[int], pads: Pads | None) -> list[SpacedWindow] | None:
    """The windows of a call; None where an argument is no number."""
    arguments, rank = schema.arguments(node), len(kernel)
    stride = spread(arguments["stride"] or list(kernel), rank)
    dilation = spread(arguments.get("dilation", 1), rank)
    counts = node.meta["val"].shape[-rank:]
    if stride is None or dilation is None or pads is None:
        return None
    return [
        SpacedWindow(kernel[k], stride[k], dilation[k], *pads[k], counts[k]) for k in range(rank)
    ]


def _pads(value: Any, kernel: Sequence[int], dilation: Any) -> Pads | None:
    """Positions in front and behind; "same" has one more behind where they are odd."""
    if value == "valid":
        return ((0, 0),) * len(kernel)
    if isinstance(value, str):
        gaps = spread(dilation, len(kernel))
        if gaps is None:
            return None
        reach = [gap * (size - 1) for gap, size in zip(gaps, kernel, strict=True)]
        return tuple((n // 2, n - n // 2) for n in reach)
    numbers = spread(value, len(kernel))
    return None if numbers is None else tuple((n, n) for n in numbers)


def _convolution(reader: SpacedReader, rank: int) -> SpacedRule | NotSpaced:
    arguments = schema.arguments(reader.node)
    x, weight = arguments["input"], arguments["weight"]
    if any(reader.plan.grid(arguments[name]) for name in ("weight", "bias")):
        return NotSpaced("its weights stand apart")
    kernel = tuple(weight.meta["val"].shape[2:])
    windows = _windows(reader.node, kernel, _pads(arguments["padding"], kernel, arguments["dilation"]))
    if windows is None:
        return NotSpaced("a convolution whose sizes are computed")
    placed = _place(reader, x, windows)
    if isinstance(placed, NotSpaced):
        return placed

    def emit(here: Emission) -> fx.Node:
        value, inner = padded(here.editor, here.node, here.read(x), placed.pads, 0)
        gaps = [w.dilation * gap for w, gap in zip(windows, placed.gaps, strict=True)]
        args = (value, here.read(weight), arguments["bias"], [1] * rank, list(inner), gaps)
        return here.call(traits.CONV_OF_AXES[rank], *args, arguments["groups"])

    return SpacedRule((placed.grid,), emit)


def _maximum(reader: SpacedReader, rank: int) -> SpacedRule | NotSpaced:
    arguments = schema.arguments(reader.node)
    x, kernel = arguments["self"], spread(arguments["kernel_size"], rank)
    if reader.plan.target.pool_windows != "any" and kernel != (1,) * rank:
        return NotSpaced("windows of the target's pools do not overlap")
    pads = None if kernel is None else _pads(arguments["padding"], kernel, 1)
    windows = None if kernel is None else _windows(reader.node, kernel, pads)
    if windows is None:
        return NotSpaced("a pool whose sizes are computed")
    placed = _place(reader, x, windows)
    if isinstance(placed, NotSpaced):
        return placed
    gaps = [w.dilation * gap for w, gap in zip(windows, placed.gaps, strict=True)]
    own = _is_own(placed.pads, [w.kernel for w in windows])
    spans = [gap * (w.kernel - 1) + 1 for w, gap in zip(windows, gaps, strict=True)]
    if max(spans) > (most := reader.plan.target.pool_size):
        return NotSpaced(f"its windows would reach over {spans}, the target's over up to {most:g}")

    def emit(here: Emission) -> fx.Node:
        value, inner = here.read(x), [front for front, _ in placed.pads]
        if not own:
            dtype = value.meta["val"].dtype
            lowest = LOWEST if dtype.is_floating_point else torch.iinfo(dtype).min
            flat = [n for pair in reversed(placed.pads) for n in pair]
            value, inner = here.call(PAD, value, flat, lowest), [0] * rank
        kernel = [w.kernel for w in windows]
        return here.call(here.node.target, value, kernel, [1] * rank, inner, gaps)

    sizes = [source.size for source in placed.sources]
    empty = zip(windows, sizes, placed.pads, gaps, placed.spreads, strict=True)
    return SpacedRule((placed.grid,), emit, wild=any(_is_empty(*axis) for axis in empty))


def _is_empty(
    window: SpacedWindow, size: int, pads: tuple[int, int], gap: int, made: Spread
) -> bool:
    """Does some window read padding alone?"""
    reads = [range(k - pads[0], k - pads[0] + gap * window.kernel, gap) for k in range(made.size)]
    return any(all(not 0 <= n < size for n in places) for places in reads)


def _is_own(pads: Pads, kernel: Sequence[int]) -> bool:
    """Can a pool pad so? By half a window at most, alike at both ends."""
    return all(front == behind and 2 * front <= n
               for (front, behind), n in zip(pads, kernel, strict=True))  # fmt: skip


def average(reader: SpacedReader, pool: AveragePool) -> SpacedRule | NotSpaced:
    """An average pool: a depthwise convolution, and its count map where its divisors differ."""
    node, rank = reader.node, len(pool.kernel)
    x = schema.arguments(node)["self"]
    value = x.meta["val"]
    counts = node.meta["val"].shape[-rank:] if node.target in WINDOWS else (1,) * rank
    sizes = static_sizes(x, rank)
    if sizes is None:
        return NotSpaced("sizes of images are known at run time alone")
    kernel = pool.taps(sizes)
    windows = [SpacedWindow(k, s, 1, *pair, n) for k, s, pair, n in
               zip(kernel, pool.stride, pool.pads(sizes), counts, strict=True)]  # fmt: skip
    placed = _place(reader, x, windows)
    if isinstance(placed, NotSpaced):
        return placed
    fits = max(pool.kernel) <= reader.plan.target.pool_size
    if _stays(node, pool, placed) and reader.plan.target.pool_windows == "any" and fits:
        return SpacedRule(
            (placed.grid,), lambda here: here.again(stride=[1] * rank, ceil_mode=False)
        )
    if not value.is_floating_point():
        return NotSpaced("an average of integers is rounded, which a convolution is not")
    if not isinstance(value.shape[-rank - 1], int):
        return NotSpaced("the number of channels is known at run time alone")
    shared = divisors(pool, sizes)
    if shared.ndim and "multiply" not in reader.plan.target.ops:
        return NotSpaced("windows at borders count less, and the target cannot multiply")

    def emit(here: Emission) -> fx.Node:
        weight = 1.0 if shared.ndim else 1 / int(shared)
        made = summed(here.editor, here.node, here.read(x), kernel, weight,
                      pads=placed.pads, stride=[1] * rank, dilation=placed.gaps)  # fmt: skip
        if not shared.ndim:
            return made
        factor = shared.double().reciprocal()
        for axis, part in enumerate(placed.spreads):
            factor = factor.index_select(axis, part.nearest())
        return times(here.editor, here.node, made, factor)

    return SpacedRule((placed.grid,), emit)


def _stays(node: fx.Node, pool: AveragePool, placed: _SpacedWindows) -> bool:
    """Is a pool of a value as it was the same pool with stride 1?"""
    own = all(pair == (p, p) for pair, p in zip(placed.pads, pool.padding, strict=True))
    return node.target in traits.AVERAGE_POOLS and own and set(placed.gaps) == {1} and not pool.ceil


def _adaptive(reader: SpacedReader, rank: int) -> SpacedRule | NotSpaced:
    """Windows of one size that do not overlap: a pool; of another kind there is none."""
    pool, x = AveragePool.of(reader.node), schema.arguments(reader.node)["self"]
    if pool is None:
        return NotSpaced("windows of an adaptive pool overlap, or its sizes are dynamic")
    grid = reader.plan.grid(x)
    if min(grid) < x.meta["val"].ndim - rank:
        return NotSpaced("positions of channels stand apart")
    whole = pool.kernel == tuple(x.meta["val"].shape[-rank:])
    if whole and reader.plan.may_mask(x, 0, share_of(grid, "mean")):
        return reduced(x, grid, ({},), "mean")
    return average(reader, pool)
