"""Average pools as convolutions, and convolutions as average pools.

    avg_pool(x) == conv(x, ones / divisor)                      a depthwise convolution
    avg_pool(x) == conv(x, ones) * (1 / counts)                 if border windows have fewer counts

A pool that does not count its padding, or whose last windows reach beyond it (ceil mode), divides
by other numbers at borders: the count map, exact for the sizes of the call. Conversely, a
convolution that sums the windows of each channel and divides them is a pool. Both are equal up to the
order and rounding of sums, and, for a dense kernel with zeros between channels, under the assumption
that 0 * x is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from demask.graph.editor import GraphEditor
from demask.graph.value import Value
from demask.ops import schema, traits
from demask.ops.schema import fake
from demask.rewrites.rule import Phase, case, rule

aten = torch.ops.aten
PAD = aten.constant_pad_nd.default
Pads = tuple[tuple[int, int], ...]  # per axis: positions before and after
X1, X2 = (2, 3, 7), (2, 3, 7, 8)  # the shapes of most cases


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
        """Number of positions in a full window."""
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


@rule(
    *traits.AVERAGE_POOLS,
    *traits.ADAPTIVE_AVERAGE_POOLS,
    cases=(
        case(lambda x: F.avg_pool1d(x, 3, 2, 1, count_include_pad=False), X1),
        case(lambda x: F.avg_pool2d(x, (3, 2), 2, (1, 0), ceil_mode=True), X2),
        case(lambda x: F.avg_pool2d(x, 2, divisor_override=3), X2, dynamic={0: (2, 3)}),
        case(lambda x: F.adaptive_avg_pool2d(x, (7, 2)), (2, 3, 7, 8)),
        case(lambda x: F.avg_pool3d(x, 2), (2, 3, 4, 5, 6)),
    ),
    refused=(
        case(lambda x: F.adaptive_avg_pool2d(x, (2, 2)), X2),
        case(lambda x: F.adaptive_avg_pool2d(x, 1), X2),
        case(lambda x: F.avg_pool2d(x, 2), torch.ones(1, 2, 4, 4, dtype=torch.int64)),
        case(lambda x: F.avg_pool2d(x, 2), X2, dynamic={0: (1,)}),
        case(lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), X2, dynamic={0: (2,)}),
        case(lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True, divisor_override=2), X2, dynamic={0: (2,)}),
    ),
    exact=False,
)
def pool_as_convolution(out: Value, x: Value, *arguments: Any) -> Value | None:
    """An average pool is a depthwise convolution, times the inverse counts of windows if these differ.

    A mean of all positions stays: it is an adaptive pool to one window."""
    pool = AveragePool.of(out.node)
    if pool is None or not x.dtype.is_floating_point:
        return None
    rank = len(pool.kernel)
    is_mean = out.calls(*traits.ADAPTIVE_AVERAGE_POOLS) and set(out.shape[-rank:]) == {1}
    if is_mean or not isinstance(x.shape[-rank - 1], int):
        return None
    sizes = static_sizes(x.node, rank)
    if sizes is None and (pool.ceil or not pool.is_even):
        return None
    pads: Pads = tuple((p, p) for p in pool.padding)
    kernel = pool.kernel
    if sizes is not None:
        pads, kernel = pool.pads(sizes), pool.taps(sizes)
    shared = divisors(pool, sizes)
    weight = 1.0 if shared.ndim else 1 / int(shared)
    sums = sum_windows(out.editor, out.node, x.node, kernel, weight, pads=pads, stride=pool.stride)
    if shared.ndim:
        sums = multiply(out.editor, out.node, sums, shared.double().reciprocal())
    return Value(sums, out.editor)


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
    """A convolution that sums windows of x, which has `pads` zeros around it, times `weight`.
    windows: the output's spatial shape."""

    x: Value
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    pads: Pads
    weight: Tensor
    windows: tuple[Any, ...]


def _sums(conv: Value) -> _Sums | None:
    """A convolution as sums of windows; None if it is none, or its weight is trained."""
    arguments, rank = conv.arguments, traits.CONVOLUTIONS[conv.target]
    weight, x = arguments["weight"].constant, arguments["input"]
    stride, dilation = per_axis(arguments["stride"], rank), per_axis(arguments["dilation"], rank)
    inner = per_axis(arguments["padding"], rank)
    if weight is None or stride is None or inner is None or arguments["bias"] is not None:
        return None
    number = _one_weight(weight)
    if number is None or dilation != (1,) * rank or x.shape[-rank - 1] != len(weight):
        return None
    if conv.editor.constants[arguments["weight"].target].parameter:
        return None
    pads: Pads = tuple((p, p) for p in inner)
    outer_pads = _zeros_around(x, rank) if not any(inner) else None
    if outer_pads is not None:
        x, pads = x.arg("self"), outer_pads
    return _Sums(x, tuple(weight.shape[2:]), stride, pads, number, tuple(conv.shape[-rank:]))


def _one_weight(weight: Tensor) -> Tensor | None:
    """The weight of each channel for itself, a scalar; None if there are several, or weights for
    other channels."""
    count, within = weight.shape[:2]
    if not weight.is_floating_point() or count % within:
        return None
    flat = weight.flatten(2)
    own = flat[torch.arange(count), torch.arange(count) % within]
    number = own[0, 0]
    alike = bool((own == number).all()) and bool(number.isfinite()) and bool(number != 0)
    others = int((flat != 0).sum()) > own.numel()
    return number if alike and not others else None


def _zeros_around(x: Value, rank: int) -> Pads | None:
    """The zeros that a pad adds along the last axes; None for other calls."""
    if not x.calls(PAD):
        return None
    flat = list(x.arg("pad"))
    if x.arg("value") or len(flat) > 2 * rank or not all(isinstance(n, int) for n in flat):
        return None
    flat += [0] * (2 * rank - len(flat))
    if any(n < 0 for n in flat):
        return None
    return tuple((flat[2 * k], flat[2 * k + 1]) for k in reversed(range(rank)))


def _pool_of(out: Value, sums: _Sums, scale: Tensor | None) -> Value | None:
    """The pool that is equal to sums of windows, times a map; None if there is none."""
    rank = len(sums.kernel)
    if any(2 * before > k for (before, _), k in zip(sums.pads, sums.kernel, strict=True)):
        return None  # pools pad by half a window at most
    sizes = static_sizes(sums.x.node, rank)
    small = sizes is None or any(k > n for k, n in zip(sums.kernel, sizes, strict=True))
    if rank == 3 and any(map(any, sums.pads)) and small:
        return None  # avg_pool3d rejects images smaller than its window, padded or not
    if sizes is None and (scale is not None or any(a != b for a, b in sums.pads)):
        return None
    actual = sums.weight if scale is None else sums.weight * scale
    for pool in _candidates(sums):
        expected = divisors(pool, sizes).double().reciprocal().to(actual.dtype)
        if _has_windows(sums, pool, sizes) and bool((expected == actual).all()):
            override = [] if rank == 1 else [pool.divisor]
            lists = list(pool.kernel), list(pool.stride), list(pool.padding)
            return out.call(traits.AVERAGE_POOL_OF_AXES[rank], sums.x, *lists, pool.ceil, pool.include, *override)
    return None


def _candidates(sums: _Sums) -> list[AveragePool]:
    """Pools that might divide by the inverse of the convolution's weight: by counts, or by one
    number."""
    weight = float(sums.weight)
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
    return pool.lengths(sizes) == sums.windows


def divisors(pool: AveragePool, sizes: tuple[int, ...] | None) -> Tensor:
    """The divisor of each window; one number if it is the same for all."""
    if pool.is_even or sizes is None:
        return torch.tensor(pool.divisor or pool.size)
    counts = pool.counts(sizes)
    return counts.flatten()[0] if bool((counts == counts.flatten()[0]).all()) else counts


def _windows(x: Tensor, number: float = 0.25, size: int = 2, **settings: Any) -> Tensor:
    """The sum of the windows of each channel, times a number, as a convolution."""
    convolve = (F.conv1d, F.conv2d, F.conv3d)[x.ndim - 3]
    settings = {"stride": 2, "groups": x.shape[1]} | settings
    shape = (x.shape[1], 1, *[size] * (x.ndim - 2))
    weight = torch.tensor([number] * math.prod(shape), dtype=x.dtype).reshape(shape)
    return convolve(x, weight, **settings)


def _ceil_map(x: Tensor, read: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """An average pool in ceil mode of 7 positions: the last window has one position."""
    sums = _windows(aten.constant_pad_nd(x, [0, 1]), 1.0)
    mean = sums * torch.tensor([0.5, 0.5, 0.5, 1], dtype=x.dtype)
    return (mean, sums) if read else mean


@rule(
    aten.mul.Tensor,
    cases=(
        case(_ceil_map, (2, 3, 7)),
        case(
            lambda x: (
                torch.tensor([[0.25, 0.25], [0.5, 0.5]], dtype=x.dtype)
                * _windows(aten.constant_pad_nd(x, [0, 0, 0, 1]), 1.0)
            ),
            (2, 3, 3, 4),
        ),
    ),
    refused=(
        case(lambda x: _ceil_map(x, read=True), (2, 3, 7)),
        case(lambda x: _ceil_map(x), (2, 3, 7), dynamic={0: (2,)}),
        case(lambda x: _windows(x, 1.0) * torch.tensor([0.5, 0.5, 0.25], dtype=x.dtype), (2, 3, 7)),
        case(lambda x: _windows(x, 1.0) * 0.5, (2, 3, 7)),
        case(lambda x: x * torch.tensor([0.5, 0.5, 1.0], dtype=x.dtype), (2, 3)),
    ),
    exact=False,
)
def scaled_sums_as_pool(out: Value, a: Any, b: Any) -> Value | None:
    """A convolution that sums windows, times the inverse count of each, is an average pool."""
    for conv, factor in ((a, b), (b, a)):
        if not isinstance(conv, Value) or not conv.calls(*traits.CONVOLUTIONS) or len(conv.users) > 1:
            continue
        scale, sums = factor.constant if isinstance(factor, Value) else None, _sums(conv)
        if sums is not None and scale is not None and tuple(scale.shape) == sums.windows and scale.dtype == conv.dtype:
            return _pool_of(out, sums, scale)
    return None


X = (2, 4, 8, 8)


_IDENTITY = torch.eye(4, dtype=torch.float64).reshape(4, 4, 1, 1)


def _trained_mean() -> nn.Module:
    mean = nn.Conv2d(4, 4, 2, groups=4, bias=False)
    nn.init.constant_(mean.weight, 0.25)
    return mean


@rule(
    *traits.CONVOLUTIONS,
    cases=(
        case(_windows, X),
        case(lambda x: _windows(x, 1 / 3, padding=1), X),
        case(lambda x: _windows(x, 0.5), (2, 3, 7), dynamic={0: (0, 2)}),
        case(lambda x: _windows(aten.constant_pad_nd(x, [1, 0, 1, 0]), 1.0), (2, 3, 7, 7)),
        case(lambda x: F.conv2d(x, _IDENTITY), X),
        case(lambda x: F.conv2d(x, _IDENTITY[:2, :2].repeat(2, 1, 1, 1), groups=2), X),
        case(lambda x: _windows(x, 0.125), (2, 3, 4, 4, 4)),
        case(lambda x: _windows(x, 1 / 27, size=3, padding=1), (2, 3, 3, 4, 4)),
    ),
    refused=(case(nn.Conv2d(4, 4, 1, groups=4, bias=False), X),),
    exact=False,
)
def sums_as_pool(out: Value, *arguments: Any) -> Value | None:
    """A convolution with the weights of an average pool is one, unless they are trained.

    Each channel has one number as weights, the inverse of a divisor, and none for other channels."""
    sums = _sums(out)
    return None if sums is None else _pool_of(out, sums, None)


POOLS_AS_CONVOLUTIONS = Phase("average pools as convolutions", (pool_as_convolution,))
# A convolution whose map of counts follows it is no pool of its own.
SCALED_SUMS_AS_POOLS = Phase("convolutions and count maps as average pools", (scaled_sums_as_pool,))
SUMS_AS_POOLS = Phase("convolutions as average pools", (sums_as_pool,))
