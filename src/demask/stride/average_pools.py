"""Average pools as convolutions, and convolutions as average pools.

    avg_pool(x) == conv(x, ones / divisor)                      each channel by itself
    avg_pool(x) == conv(x, ones) * (1 / counts)                 where windows at borders count less

A pool that does not count its padding, or whose last windows reach beyond it (ceil mode), divides
by another number at its borders: these numbers are the count map, exact for the sizes of the call.
The other way round a convolution whose weights are one number per channel, none of them between
channels, is a pool: that of which its divisors are, or the sum of a window times a constant.
Equal but for the order and rounding of sums; of a dense kernel, whose weights between channels are
zeros, under the licence that 0 * x is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Any

import torch
from torch import Tensor, fx

from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.graph.queries import only_reader
from demask.ops import schema, traits

aten = torch.ops.aten
PAD = aten.constant_pad_nd.default
Pads = tuple[tuple[int, int], ...]  # per axis: positions in front, positions behind


@dataclass(frozen=True, slots=True)
class AveragePool:
    """An average pool, axis by axis. ceil: do windows that reach beyond the padding count?
    include: do positions of the padding? divisor: what sums are divided by, None for counts."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    ceil: bool = False
    include: bool = True
    divisor: int | None = None

    @classmethod
    def of(cls, node: fx.Node) -> AveragePool | None:
        """The pool that a call is; None for other calls and for sizes known at run time alone, and
        for adaptive ones whose windows overlap."""
        if node.target in traits.ADAPTIVE_AVERAGE_POOLS:
            return _adaptive(node)
        if node.target not in traits.AVERAGE_POOLS:
            return None
        arguments, rank = schema.arguments(node), traits.AVERAGE_POOLS[node.target]
        kernel, padding = (spread(arguments[name], rank) for name in ("kernel_size", "padding"))
        stride = spread(arguments["stride"], rank) if arguments["stride"] else kernel
        if kernel is None or stride is None or padding is None:
            return None
        override = arguments.get("divisor_override")
        flags = bool(arguments["ceil_mode"]), bool(arguments["count_include_pad"])
        return cls(kernel, stride, padding, *flags, override)

    @property
    def size(self) -> int:
        """Positions of a whole window."""
        return math.prod(self.kernel)

    @property
    def is_even(self) -> bool:
        """Is the divisor the same for windows at any place of images of any size?"""
        uncounted = not self.include and any(self.padding)
        return self.divisor is not None or not (self.ceil or uncounted)

    def lengths(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """How many windows there are along each axis (ATen's pooling_output_shape)."""
        return tuple(_length(*axis, self.ceil) for axis in self._axes(sizes))

    def counts(self, sizes: Sequence[int]) -> Tensor:
        """What the sum of each window is divided by: int64, one axis per axis of the image."""
        if self.divisor is not None:
            return torch.full(self.lengths(sizes), self.divisor)
        return outer([torch.tensor(axis) for axis in self.counted(sizes)])

    def counted(self, sizes: Sequence[int]) -> list[list[int]]:
        """How many positions of each window count, axis by axis."""
        axes = zip(self._axes(sizes), self.lengths(sizes), strict=True)
        return [_counts(*axis, count, self.include) for axis, count in axes]

    def taps(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The kernel, as far as windows reach into the image: of ceil_mode they may be larger than
        all of it."""
        reach = zip(self.kernel, sizes, self.padding, strict=True)
        return tuple(min(k, n + p) for k, n, p in reach) if self.ceil else self.kernel

    def pads(self, sizes: Sequence[int]) -> Pads:
        """Zeros in front and behind, of which every window of `taps` reads as many as it has
        positions."""
        axes = zip(self.taps(sizes), self._axes(sizes), self.lengths(sizes), strict=True)
        found = [(p, p if (n + 2 * p - taps) // s + 1 == count
                  else max((count - 1) * s + taps - n - p, 0))
                 for taps, (n, _, s, p), count in axes]  # fmt: skip
        return tuple(found)

    def _axes(self, sizes: Sequence[int]) -> list[tuple[int, int, int, int]]:
        return list(zip(sizes, self.kernel, self.stride, self.padding, strict=True))


def _adaptive(node: fx.Node) -> AveragePool | None:
    rank = traits.ADAPTIVE_AVERAGE_POOLS[node.target]
    sizes = static_sizes(schema.arguments(node)["self"], rank)
    counts = static_sizes(node, rank)
    if sizes is None or counts is None:
        return None
    if any(n % count for n, count in zip(sizes, counts, strict=True)):
        return None
    kernel = tuple(n // count for n, count in zip(sizes, counts, strict=True))
    return AveragePool(kernel, kernel, (0,) * rank)


def spread(value: Any, rank: int) -> tuple[int, ...] | None:
    """An argument with one number for every axis, or one for all; None if one is no number."""
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    items = items * rank if len(items) == 1 else items
    return tuple(items) if all(isinstance(n, int) for n in items) else None


def outer(vectors: Sequence[Tensor]) -> Tensor:
    """The product of vectors, each along an axis of its own."""
    return reduce(lambda made, vector: made.unsqueeze(-1) * vector, vectors)


def _length(size: int, kernel: int, stride: int, pad: int, ceil: bool) -> int:
    count = (size + 2 * pad - kernel + (stride - 1 if ceil else 0)) // stride + 1
    # The last window must begin inside the image or in front of it.
    return count - 1 if ceil and (count - 1) * stride >= size + pad else count


def _counts(size: int, kernel: int, stride: int, pad: int, count: int, include: bool) -> list[int]:
    starts = [k * stride - pad for k in range(count)]
    if include:
        return [min(start + kernel, size + pad) - start for start in starts]
    return [min(start + kernel, size) - max(start, 0) for start in starts]


def pools_to_convs(program: Program, *, whole: bool = True) -> Program:
    """The program with every average pool as a depthwise convolution, and a multiplication by its
    count map where its divisors differ.

    Pools of integers stay (they round), those whose count map would depend on sizes known at run
    time alone, and adaptive ones whose windows overlap. whole: also adaptive ones over the whole
    image, which are means?
    """
    editor = GraphEditor(program)
    for node in editor.calls(*traits.AVERAGE_POOLS, *traits.ADAPTIVE_AVERAGE_POOLS):
        made = _as_conv(editor, node) if whole or not _is_mean(node) else None
        if made is not None:
            editor.replace(node, made)
    return editor.finish()


def _is_mean(node: fx.Node) -> bool:
    rank = traits.ADAPTIVE_AVERAGE_POOLS.get(node.target)
    return rank is not None and set(node.meta["val"].shape[-rank:]) == {1}


def _as_conv(editor: GraphEditor, node: fx.Node) -> fx.Node | None:
    pool, x = AveragePool.of(node), schema.arguments(node)["self"]
    value = x.meta["val"]
    if pool is None or not value.is_floating_point():
        return None
    rank = len(pool.kernel)
    if not isinstance(value.shape[-rank - 1], int):
        return None
    sizes = static_sizes(x, rank)
    if sizes is None and (pool.ceil or not pool.is_even):
        return None
    pads: Pads = tuple((p, p) for p in pool.padding)
    kernel = pool.kernel
    if sizes is not None:
        pads, kernel = pool.pads(sizes), pool.taps(sizes)
    shared = divisors(pool, sizes)
    weight = 1.0 if shared.ndim else 1 / int(shared)
    made = summed(editor, node, x, kernel, weight, pads=pads, stride=pool.stride)
    return scaled(editor, node, made, shared.double().reciprocal()) if shared.ndim else made


def static_sizes(x: fx.Node, rank: int) -> tuple[int, ...] | None:
    """The sizes of the last `rank` axes; None where one is known at run time alone."""
    sizes = tuple(x.meta["val"].shape[-rank:])
    return sizes if all(isinstance(n, int) for n in sizes) else None


def summed(
    editor: GraphEditor,
    node: fx.Node,
    x: fx.Node,
    kernel: Sequence[int],
    weight: float,
    *,
    pads: Pads,
    stride: Sequence[int],
    dilation: Sequence[int] | None = None,
) -> fx.Node:
    """`weight` times the sum of each window of `x`, zeros around it, each channel by itself: a
    depthwise convolution before `node`."""
    value, rank = x.meta["val"], len(kernel)
    channels = value.shape[-rank - 1]
    x, inner = padded(editor, node, x, pads, 0)
    taps = torch.full((channels, 1, *kernel), weight, dtype=value.dtype)
    read = editor.add_constant(f"{node.name}_taps", taps, node)
    gaps = [1] * rank if dilation is None else list(dilation)
    args = (x, read, None, list(stride), list(inner), gaps, channels)
    return described(editor.insert(node, None, traits.CONV_OF_AXES[rank], *args), node)


def padded(
    editor: GraphEditor, reader: fx.Node, x: fx.Node, pads: Pads, value: float
) -> tuple[fx.Node, tuple[int, ...]]:
    """`x` and what a call that pads alike at both ends is to pad: all of it where `pads` do that;
    none where they do not, and `x` is padded before."""
    if value == 0 and all(front == behind for front, behind in pads):
        return x, tuple(front for front, _ in pads)
    flat = [n for pair in reversed(pads) for n in pair]
    made = editor.insert(reader, None, PAD, x, flat, value) if any(flat) else x
    return made, (0,) * len(pads)


def scaled(editor: GraphEditor, node: fx.Node, x: fx.Node, factor: Tensor) -> fx.Node:
    """`x` times a constant, before `node`."""
    dtype = x.meta["val"].dtype
    read = editor.add_constant(f"{node.name}_scale", factor.to(dtype), node)
    return described(editor.insert(node, None, aten.mul.Tensor, x, read), node)


def described(made: fx.Node, node: fx.Node) -> fx.Node:
    """A call that stands for another: what is known of that one, but for its value, is of it."""
    kept = {k: v for k, v in node.meta.items() if k not in ("val", "effect", "positions")}
    made.meta = {**kept, **made.meta}
    return made


@dataclass(frozen=True, slots=True)
class _Sums:
    """A convolution that sums up windows: `last` is scale * the sum of each window of x, with
    `pads` zeros around it. weights: the number of each channel; scale: what stands for 1 / counts.
    """

    last: fx.Node
    x: fx.Node
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    pads: Pads
    weights: Tensor
    scale: Tensor | None


def convs_to_pools(program: Program, *, means: bool = False) -> Program:
    """The program with convolutions that sum up the windows of each channel as average pools.

    Those are: weights one number per channel, all of them finite and not zero, no weight between
    channels, no bias, dilation 1, at most half a window padded. A multiplication behind, which
    nothing else reads past, goes into the divisor where it is the count map of a pool. Else the
    pool is followed by a multiplication, unless the divisor is a whole number. means: only those
    that are a pool and nothing else, and whose weights are no parameters: what `pools_to_convs`
    made.
    """
    editor = GraphEditor(program)
    for node in editor.calls(*traits.CONVOLUTIONS):
        sums = None if means and _is_trained(editor, node) else _sums(editor, node)
        made = None if sums is None else _as_pool(editor, sums, scales=not means)
        if sums is not None and made is not None:
            editor.replace(sums.last, made)
    return editor.finish()


def _is_trained(editor: GraphEditor, node: fx.Node) -> bool:
    read = schema.arguments(node)["weight"]
    return editor.tensor(read) is None or editor.constants[str(read.target)].parameter


def _sums(editor: GraphEditor, node: fx.Node) -> _Sums | None:
    arguments, rank = schema.arguments(node), traits.CONVOLUTIONS[node.target]
    weight, x = editor.tensor(arguments["weight"]), arguments["input"]
    stride, dilation = spread(arguments["stride"], rank), spread(arguments["dilation"], rank)
    inner = spread(arguments["padding"], rank)
    if weight is None or stride is None or inner is None or arguments["bias"] is not None:
        return None
    weights = _channel_weights(weight)
    if weights is None or dilation != (1,) * rank or x.meta["val"].shape[-rank - 1] != len(weights):
        return None
    pads: Pads = tuple((p, p) for p in inner)
    outer_pads = _zeros_around(x, rank) if not any(inner) else None
    if outer_pads is not None:
        x, pads = x.args[0], outer_pads
    last, scale = _scale_after(editor, node, rank)
    kernel = tuple(weight.shape[2:])
    return _Sums(last, x, kernel, stride, pads, weights, scale)


def _channel_weights(weight: Tensor) -> Tensor | None:
    """The one number of each channel; None where there are several, or weights between channels."""
    count, within = weight.shape[:2]
    if not weight.is_floating_point() or not bool(weight.isfinite().all()) or count % within:
        return None
    flat = weight.flatten(2)
    own = flat[torch.arange(count), torch.arange(count) % within]
    alike = bool((own == own[:, :1]).all()) and bool((own[:, 0] != 0).all())
    others = int((flat != 0).sum()) > own.numel()
    return own[:, 0] if alike and not others else None


def _zeros_around(x: fx.Node, rank: int) -> Pads | None:
    """What a call pads with zeros along the last axes; None if it does something else."""
    if x.target is not PAD:
        return None
    arguments = schema.arguments(x)
    flat = list(arguments["pad"])
    if arguments["value"] or len(flat) > 2 * rank or not all(isinstance(n, int) for n in flat):
        return None
    flat += [0] * (2 * rank - len(flat))
    if any(n < 0 for n in flat):
        return None
    return tuple((flat[2 * k], flat[2 * k + 1]) for k in reversed(range(rank)))


def _scale_after(editor: GraphEditor, node: fx.Node, rank: int) -> tuple[fx.Node, Tensor | None]:
    """The multiplication by a constant map that alone reads a convolution, and its map."""
    reader = only_reader(node)
    if reader is None or reader.target is not aten.mul.Tensor:
        return node, None
    other = reader.args[1] if reader.args[0] is node else reader.args[0]
    scale = editor.tensor(other)
    shape = tuple(node.meta["val"].shape[-rank:])
    if scale is None or tuple(scale.shape) != shape or scale.dtype != node.meta["val"].dtype:
        return node, None
    return reader, scale


def _as_pool(editor: GraphEditor, sums: _Sums, *, scales: bool) -> fx.Node | None:
    """The pool that sums of windows are; if there is none, one times numbers, if it `scales`."""
    rank = len(sums.kernel)
    if any(2 * front > k for (front, _), k in zip(sums.pads, sums.kernel, strict=True)):
        return None  # pools pad by half a window at most
    sizes = static_sizes(sums.x, rank)
    small = sizes is None or any(k > n for k, n in zip(sums.kernel, sizes, strict=True))
    if rank == 3 and any(map(any, sums.pads)) and small:
        return None  # avg_pool3d takes no image smaller than its window, padded or not
    if sizes is None and (sums.scale is not None or any(a != b for a, b in sums.pads)):
        return None
    for pool in _candidates(sums):
        if _has_windows(sums, pool, sizes) and _divides(sums, pool, sizes):
            return _call(editor, sums, pool)
    if not scales:
        return None
    whole = None if rank == 1 else 1
    plain = [AveragePool(sums.kernel, sums.stride, tuple(front for front, _ in sums.pads), ceil, True,
                  whole) for ceil in (False, True)]  # fmt: skip
    pool = next((pool for pool in plain if _has_windows(sums, pool, sizes)), None)
    if pool is None:
        return None
    factor = sums.weights.double().reshape(-1, *[1] * rank)
    factor = factor * divisors(pool, sizes).double()
    factor = factor if sums.scale is None else factor * sums.scale.double()
    return scaled(editor, sums.last, _call(editor, sums, pool), factor)


def _candidates(sums: _Sums) -> list[AveragePool]:
    """Pools that may divide by what the convolution multiplies by: of counts, or of one number."""
    weight = float(sums.weights[0])
    whole = round(1 / weight) if 2.0**-31 < weight <= 1 else 0
    divisors = [None, whole] if len(sums.kernel) > 1 and whole else [None]
    padding = tuple(front for front, _ in sums.pads)
    return [AveragePool(sums.kernel, sums.stride, padding, *flags)
            for flags in product((False, True), (True, False), divisors)]  # fmt: skip


def _has_windows(sums: _Sums, pool: AveragePool, sizes: tuple[int, ...] | None) -> bool:
    """Has the pool as many windows as the convolution; for any size, if it is not known?"""
    if sizes is None:
        return pool.is_even and not pool.ceil
    return pool.lengths(sizes) == tuple(sums.last.meta["val"].shape[-len(sums.kernel) :])


def _divides(sums: _Sums, pool: AveragePool, sizes: tuple[int, ...] | None) -> bool:
    """Are the pool's divisors, rounded as the convolution's weights are, those weights?"""
    given = sums.weights[0] if sums.scale is None else sums.weights[0] * sums.scale
    said = divisors(pool, sizes).double().reciprocal().to(sums.weights.dtype)
    return bool((sums.weights == sums.weights[0]).all()) and bool((said == given).all())


def divisors(pool: AveragePool, sizes: tuple[int, ...] | None) -> Tensor:
    """What each window is divided by; one number where that is the same for all."""
    if pool.is_even or sizes is None:
        return torch.tensor(pool.divisor or pool.size)
    counts = pool.counts(sizes)
    return counts.flatten()[0] if bool((counts == counts.flatten()[0]).all()) else counts


def _call(editor: GraphEditor, sums: _Sums, pool: AveragePool) -> fx.Node:
    override = [] if len(pool.kernel) == 1 else [pool.divisor]
    lists = list(pool.kernel), list(pool.stride), list(pool.padding)
    args = (sums.x, *lists, pool.ceil, pool.include, *override)
    made = editor.insert(sums.last, None, traits.AVERAGE_POOL_OF_AXES[len(pool.kernel)], *args)
    return described(made, sums.last)
