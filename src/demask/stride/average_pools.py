"""Average pools as convolutions, and convolutions as average pools.

    avg_pool(x) == conv(x, ones / divisor)                      a depthwise convolution
    avg_pool(x) == conv(x, ones) * (1 / counts)                 if border windows have fewer counts

A pool that does not count its padding, or whose last windows reach beyond it (ceil mode), divides
by other numbers at borders: the count map, exact for the sizes of the call. Conversely, a depthwise
convolution with one number per channel as weights is a pool, or the sum of windows times a
constant. Both are equal up to the order and rounding of sums, and, for a dense kernel with zeros
between channels, under the assumption that 0 * x is 0.
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
from demask.ops.schema import fake

aten = torch.ops.aten
PAD = aten.constant_pad_nd.default
Pads = tuple[tuple[int, int], ...]  # per axis: positions before and after


@dataclass(frozen=True, slots=True)
class AveragePool:
    """An average pool, one number per axis. ceil: whether windows may reach beyond the padding.
    include: whether positions of the padding count. divisor: of sums; None for counts."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    ceil: bool = False
    include: bool = True
    divisor: int | None = None

    @classmethod
    def of(cls, node: fx.Node) -> AveragePool | None:
        """The pool of a call. None for other calls, for sizes known only at run time, and for
        adaptive pools whose windows overlap."""
        if node.target in traits.ADAPTIVE_AVERAGE_POOLS:
            return _adaptive(node)
        if node.target not in traits.AVERAGE_POOLS:
            return None
        arguments, rank = schema.arguments(node), traits.AVERAGE_POOLS[node.target]
        kernel, padding = (per_axis(arguments[name], rank) for name in ("kernel_size", "padding"))
        stride = per_axis(arguments["stride"], rank) if arguments["stride"] else kernel
        if kernel is None or stride is None or padding is None:
            return None
        override = arguments.get("divisor_override")
        flags = bool(arguments["ceil_mode"]), bool(arguments["count_include_pad"])
        return cls(kernel, stride, padding, *flags, override)

    @property
    def size(self) -> int:
        """Number of positions in a whole window."""
        return math.prod(self.kernel)

    @property
    def is_even(self) -> bool:
        """Whether all windows have the same divisor, for images of any size."""
        uncounted = not self.include and any(self.padding)
        return self.divisor is not None or not (self.ceil or uncounted)

    def lengths(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Number of windows along each axis (ATen's pooling_output_shape)."""
        return tuple(_length(*axis, self.ceil) for axis in self._axis_geometry(sizes))

    def counts(self, sizes: Sequence[int]) -> Tensor:
        """The divisor of each window: int64, with the output's spatial shape."""
        if self.divisor is not None:
            return torch.full(self.lengths(sizes), self.divisor)
        return outer([torch.tensor(axis) for axis in self.counted(sizes)])

    def counted(self, sizes: Sequence[int]) -> list[list[int]]:
        """The number of counted positions of each window, along each axis."""
        axes = zip(self._axis_geometry(sizes), self.lengths(sizes), strict=True)
        return [_counts(*axis, count, self.include) for axis, count in axes]

    def taps(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The kernel, cropped to the part of windows that reads the image: in ceil mode windows may
        be larger than the image."""
        reach = zip(self.kernel, sizes, self.padding, strict=True)
        return tuple(min(k, n + p) for k, n, p in reach) if self.ceil else self.kernel

    def pads(self, sizes: Sequence[int]) -> Pads:
        """Zeros before and after each axis, so that every window of `taps` is complete."""
        axes = zip(self.taps(sizes), self._axis_geometry(sizes), self.lengths(sizes), strict=True)
        pads = [
            (p, p if (n + 2 * p - taps) // s + 1 == count else max((count - 1) * s + taps - n - p, 0))
            for taps, (n, _, s, p), count in axes
        ]
        return tuple(pads)

    def _axis_geometry(self, sizes: Sequence[int]) -> list[tuple[int, int, int, int]]:
        return list(zip(sizes, self.kernel, self.stride, self.padding, strict=True))


def _adaptive(node: fx.Node) -> AveragePool | None:
    """The pool of an adaptive call whose windows are of one size and do not overlap."""
    rank = traits.ADAPTIVE_AVERAGE_POOLS[node.target]
    sizes = static_sizes(schema.arguments(node)["self"], rank)
    counts = static_sizes(node, rank)
    if sizes is None or counts is None:
        return None
    if any(n % count for n, count in zip(sizes, counts, strict=True)):
        return None
    kernel = tuple(n // count for n, count in zip(sizes, counts, strict=True))
    return AveragePool(kernel, kernel, (0,) * rank)


def per_axis(value: Any, rank: int) -> tuple[int, ...] | None:
    """An argument as one number per axis; None if one is not an int."""
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    items = items * rank if len(items) == 1 else items
    return tuple(items) if all(isinstance(n, int) for n in items) else None


def outer(vectors: Sequence[Tensor]) -> Tensor:
    """The outer product of vectors: axis k has the length of vector k."""
    return reduce(lambda product, vector: product.unsqueeze(-1) * vector, vectors)


def _length(size: int, kernel: int, stride: int, pad: int, ceil: bool) -> int:
    count = (size + 2 * pad - kernel + (stride - 1 if ceil else 0)) // stride + 1
    # The last window must begin inside the image or in the padding before it.
    return count - 1 if ceil and (count - 1) * stride >= size + pad else count


def _counts(size: int, kernel: int, stride: int, pad: int, count: int, include: bool) -> list[int]:
    starts = [k * stride - pad for k in range(count)]
    if include:
        return [min(start + kernel, size + pad) - start for start in starts]
    return [min(start + kernel, size) - max(start, 0) for start in starts]


def pools_to_convs(program: Program, *, whole: bool = True) -> Program:
    """The program with average pools as depthwise convolutions, followed by a multiplication by the
    count map if divisors differ.

    Pools of integers remain (they round), as do pools whose count map depends on sizes known only
    at run time, and adaptive ones with overlapping windows. whole: whether to convert adaptive
    pools over the whole image (means), too.
    """
    editor = GraphEditor(program)
    for node in editor.calls(*traits.AVERAGE_POOLS, *traits.ADAPTIVE_AVERAGE_POOLS):
        replacement = _as_conv(editor, node) if whole or not _is_mean(node) else None
        if replacement is not None:
            editor.replace(node, replacement)
    return editor.finish()


def _is_mean(node: fx.Node) -> bool:
    """Whether a call is an adaptive pool over the whole image."""
    rank = traits.ADAPTIVE_AVERAGE_POOLS.get(node.target)
    return rank is not None and set(fake(node).shape[-rank:]) == {1}


def _as_conv(editor: GraphEditor, node: fx.Node) -> fx.Node | None:
    """The depthwise convolution of a pool, inserted before it, and scaled if divisors differ."""
    pool, x = AveragePool.of(node), schema.arguments(node)["self"]
    value = fake(x)
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
    sums = sum_windows(editor, node, x, kernel, weight, pads=pads, stride=pool.stride)
    return multiply(editor, node, sums, shared.double().reciprocal()) if shared.ndim else sums


def static_sizes(x: fx.Node, rank: int) -> tuple[int, ...] | None:
    """The sizes of the last `rank` axes; None if one is known only at run time."""
    sizes = tuple(fake(x).shape[-rank:])
    return sizes if all(isinstance(n, int) for n in sizes) else None


def sum_windows(
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
    """`weight` times the sum of each window of `x`, padded by zeros: a depthwise convolution,
    inserted before `node`."""
    value, rank = fake(x), len(kernel)
    channels = value.shape[-rank - 1]
    x, inner = pad_input(editor, node, x, pads, 0)
    taps = torch.full((channels, 1, *kernel), weight, dtype=value.dtype)
    read = editor.add_constant(f"{node.name}_taps", taps, node)
    gaps = [1] * rank if dilation is None else list(dilation)
    args = (x, read, None, list(stride), list(inner), gaps, channels)
    return copy_metadata(editor.insert(node, None, traits.CONV_OF_AXES[rank], *args), node)


def pad_input(
    editor: GraphEditor, reader: fx.Node, x: fx.Node, pads: Pads, value: float
) -> tuple[fx.Node, tuple[int, ...]]:
    """`x` and the padding argument of a call that reads it: `pads` if they are symmetric zeros,
    else 0 and a padded `x`."""
    if value == 0 and all(before == after for before, after in pads):
        return x, tuple(before for before, _ in pads)
    flat = [n for pair in reversed(pads) for n in pair]
    padded_x = editor.insert(reader, None, PAD, x, flat, value) if any(flat) else x
    return padded_x, (0,) * len(pads)


def multiply(editor: GraphEditor, node: fx.Node, x: fx.Node, factor: Tensor) -> fx.Node:
    """`x` times a constant, inserted before `node`."""
    dtype = fake(x).dtype
    read = editor.add_constant(f"{node.name}_scale", factor.to(dtype), node)
    return copy_metadata(editor.insert(node, None, aten.mul.Tensor, x, read), node)


def copy_metadata(replacement: fx.Node, node: fx.Node) -> fx.Node:
    """The replacement of a call, with the call's metadata except for its value."""
    metadata = {k: v for k, v in node.meta.items() if k not in ("val", "effect", "positions")}
    replacement.meta = {**metadata, **replacement.meta}
    return replacement


@dataclass(frozen=True, slots=True)
class _Sums:
    """A convolution that sums windows: `last` is scale * the weighted sum of each window of x, with
    `pads` zeros around it. weights: one number per channel. scale: a map in place of 1 / counts.
    """

    last: fx.Node
    x: fx.Node
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    pads: Pads
    weights: Tensor
    scale: Tensor | None


def convs_to_pools(program: Program, *, means: bool = False) -> Program:
    """The program with convolutions that sum the windows of each channel as average pools.

    These have one finite nonzero weight per channel, no weights between channels, no bias, dilation
    1, and padding of at most half a window. A multiplication that alone reads the convolution is
    absorbed if it is the count map of a pool. Otherwise a multiplication follows the pool, unless
    the divisor is a whole number. means: only convolutions that are exactly a pool, and whose
    weights are not parameters: the output of `pools_to_convs`.
    """
    editor = GraphEditor(program)
    for node in editor.calls(*traits.CONVOLUTIONS):
        sums = None if means and _is_trained(editor, node) else _sums(editor, node)
        pool = None if sums is None else _as_pool(editor, sums, scales=not means)
        if sums is not None and pool is not None:
            editor.replace(sums.last, pool)
    return editor.finish()


def _is_trained(editor: GraphEditor, node: fx.Node) -> bool:
    """Whether a convolution's weight is a parameter, or computed."""
    read = schema.arguments(node)["weight"]
    return editor.tensor(read) is None or editor.constants[str(read.target)].parameter


def _sums(editor: GraphEditor, node: fx.Node) -> _Sums | None:
    """A convolution as sums of windows; None if it is none."""
    arguments, rank = schema.arguments(node), traits.CONVOLUTIONS[node.target]
    weight, x = editor.tensor(arguments["weight"]), arguments["input"]
    stride, dilation = per_axis(arguments["stride"], rank), per_axis(arguments["dilation"], rank)
    inner = per_axis(arguments["padding"], rank)
    if weight is None or stride is None or inner is None or arguments["bias"] is not None:
        return None
    weights = _channel_weights(weight)
    if weights is None or dilation != (1,) * rank or fake(x).shape[-rank - 1] != len(weights):
        return None
    pads: Pads = tuple((p, p) for p in inner)
    outer_pads = _zeros_around(x, rank) if not any(inner) else None
    if outer_pads is not None:
        x, pads = x.args[0], outer_pads
    last, scale = _scale_after(editor, node, rank)
    kernel = tuple(weight.shape[2:])
    return _Sums(last, x, kernel, stride, pads, weights, scale)


def _channel_weights(weight: Tensor) -> Tensor | None:
    """One weight per channel, (C,); None if a channel has several, or reads other channels."""
    count, within = weight.shape[:2]
    if not weight.is_floating_point() or not bool(weight.isfinite().all()) or count % within:
        return None
    flat = weight.flatten(2)
    own = flat[torch.arange(count), torch.arange(count) % within]
    alike = bool((own == own[:, :1]).all()) and bool((own[:, 0] != 0).all())
    others = int((flat != 0).sum()) > own.numel()
    return own[:, 0] if alike and not others else None


def _zeros_around(x: fx.Node, rank: int) -> Pads | None:
    """The zeros that a pad adds along the last axes; None for other calls."""
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
    """The multiplication by a constant map that alone reads a convolution, and the map; else the
    convolution and None."""
    reader = only_reader(node)
    if reader is None or reader.target is not aten.mul.Tensor:
        return node, None
    other = reader.args[1] if reader.args[0] is node else reader.args[0]
    scale = editor.tensor(other)
    shape = tuple(fake(node).shape[-rank:])
    if scale is None or tuple(scale.shape) != shape or scale.dtype != fake(node).dtype:
        return node, None
    return reader, scale


def _as_pool(editor: GraphEditor, sums: _Sums, *, scales: bool) -> fx.Node | None:
    """The pool that is equal to sums of windows, or, if `scales`, a pool times a constant; None if
    there is none."""
    rank = len(sums.kernel)
    if any(2 * before > k for (before, _), k in zip(sums.pads, sums.kernel, strict=True)):
        return None  # pools pad by half a window at most
    sizes = static_sizes(sums.x, rank)
    small = sizes is None or any(k > n for k, n in zip(sums.kernel, sizes, strict=True))
    if rank == 3 and any(map(any, sums.pads)) and small:
        return None  # avg_pool3d rejects images smaller than its window, padded or not
    if sizes is None and (sums.scale is not None or any(a != b for a, b in sums.pads)):
        return None
    for pool in _candidates(sums):
        if _has_windows(sums, pool, sizes) and _divides(sums, pool, sizes):
            return _call(editor, sums, pool)
    if not scales:
        return None
    whole = None if rank == 1 else 1
    padding = tuple(before for before, _ in sums.pads)
    plain = [AveragePool(sums.kernel, sums.stride, padding, ceil, True, whole) for ceil in (False, True)]
    pool = next((pool for pool in plain if _has_windows(sums, pool, sizes)), None)
    if pool is None:
        return None
    factor = sums.weights.double().reshape(-1, *[1] * rank)
    factor = factor * divisors(pool, sizes).double()
    factor = factor if sums.scale is None else factor * sums.scale.double()
    return multiply(editor, sums.last, _call(editor, sums, pool), factor)


def _candidates(sums: _Sums) -> list[AveragePool]:
    """Pools that might divide by the inverse of the convolution's weights: by counts, or by one
    number."""
    weight = float(sums.weights[0])
    whole = round(1 / weight) if 2.0**-31 < weight <= 1 else 0
    divisors = [None, whole] if len(sums.kernel) > 1 and whole else [None]
    padding = tuple(before for before, _ in sums.pads)
    return [
        AveragePool(sums.kernel, sums.stride, padding, *flags)
        for flags in product((False, True), (True, False), divisors)
    ]


def _has_windows(sums: _Sums, pool: AveragePool, sizes: tuple[int, ...] | None) -> bool:
    """Whether the pool has as many windows as the convolution (for all sizes, if unknown)."""
    if sizes is None:
        return pool.is_even and not pool.ceil
    return pool.lengths(sizes) == tuple(fake(sums.last).shape[-len(sums.kernel) :])


def _divides(sums: _Sums, pool: AveragePool, sizes: tuple[int, ...] | None) -> bool:
    """Whether the inverse of the pool's divisors, rounded, equals the convolution's weights."""
    actual = sums.weights[0] if sums.scale is None else sums.weights[0] * sums.scale
    expected = divisors(pool, sizes).double().reciprocal().to(sums.weights.dtype)
    return bool((sums.weights == sums.weights[0]).all()) and bool((expected == actual).all())


def divisors(pool: AveragePool, sizes: tuple[int, ...] | None) -> Tensor:
    """The divisor of each window; one number if it is the same for all."""
    if pool.is_even or sizes is None:
        return torch.tensor(pool.divisor or pool.size)
    counts = pool.counts(sizes)
    return counts.flatten()[0] if bool((counts == counts.flatten()[0]).all()) else counts


def _call(editor: GraphEditor, sums: _Sums, pool: AveragePool) -> fx.Node:
    override = [] if len(pool.kernel) == 1 else [pool.divisor]
    lists = list(pool.kernel), list(pool.stride), list(pool.padding)
    args = (sums.x, *lists, pool.ceil, pool.include, *override)
    replacement = editor.insert(sums.last, None, traits.AVERAGE_POOL_OF_AXES[len(pool.kernel)], *args)
    return copy_metadata(replacement, sums.last)
