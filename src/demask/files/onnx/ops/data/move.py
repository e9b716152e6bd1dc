"""ONNX ops that move values or create tensors of known values: shapes, slices, pads, ranges."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from demask.errors import BadInput
from demask.files.onnx.op_functions import Float, Int, Ints, Ops, Value
from demask.files.onnx.read.reader import DTYPES
from demask.files.onnx.values import MAX_HOST, SYMBOLIC, Host, number_of, product

OPS = Ops()

FAR = 2**31 - 1  # exporters write this, or 2**63 - 1, for "to the end"
MAX_FILLED = 1024  # elements of a new host value; a larger tensor is cheaper
_BITS = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    **{dtype: torch.uint8 for dtype in DTYPES.values() if dtype.is_floating_point and dtype.itemsize == 1},
}
_MODES = {"reflect": "reflect", "edge": "replicate"}


def known(*arrays: Any) -> bool:
    """Whether all numbers are plain, none a symbolic size of `torch.export`."""
    return not any(isinstance(n, SYMBOLIC) for a in arrays if a is not None for n in np.asarray(a).flat)


def by_bits(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorator of a function that only moves values: dtypes with few kernels in torch are viewed
    as integers of the same size."""

    @functools.wraps(function)
    def moved(x: Tensor, *args: Any, **named: Any) -> Tensor:
        bits_dtype = _BITS.get(x.dtype)
        if bits_dtype is None:
            return function(x, *args, **named)
        has_dtype = [isinstance(a, Tensor) and a.dtype == x.dtype for a in args]
        args = tuple(a.view(bits_dtype) if b else a for a, b in zip(args, has_dtype, strict=True))
        return function(x.view(bits_dtype), *args, **named).view(x.dtype)

    return moved


def ints(array: Any) -> list[Any]:
    """The numbers of a host array or an attribute, as Python numbers."""
    return np.reshape(array, -1).tolist()


@OPS("Shape")
def shape(x: Value, *, start: int = 0, end: int | None = None) -> Host:
    """The sizes of x, from axis `start` to `end`."""
    return Host.of(np.array(sizes_of(x)[start:end], dtype=object), torch.int64)


def sizes_of(x: Any) -> list[Any]:
    """The sizes of a tensor or an array."""
    return list(x.array.shape if isinstance(x, Host) else x.shape)


@OPS("Size")
def size(x: Value) -> Host:
    """The number of x's elements."""
    return Host.of(np.array(product(sizes_of(x)), dtype=object), torch.int64)


@OPS("Identity")
def identity(x: Value) -> Value:
    """x."""
    return x


def _host_reshaped(x: np.ndarray, shape: Any, *, allowzero: int = 0) -> Any:
    if not known(shape):
        return NotImplemented
    return x.reshape(_reshape_sizes(x.shape, ints(shape), allowzero))


def _reshape_sizes(sizes: Any, shape: list[Any], allowzero: int) -> list[Any]:
    if allowzero:
        return shape
    return [sizes[k] if isinstance(n, int) and n == 0 else n for k, n in enumerate(shape)]


@OPS("Reshape", host=_host_reshaped)
def reshape(x: Tensor, shape: Ints, *, allowzero: int = 0) -> Tensor:
    """x in another shape; a size of 0 means x's own size, unless `allowzero`."""
    return x.reshape(_reshape_sizes(x.shape, shape, allowzero))


def _flattened_sizes(sizes: Sequence[Any], axis: int) -> list[Any]:
    axis = axis + len(sizes) if axis < 0 else axis
    return [product(sizes[:axis]), product(sizes[axis:])]


@OPS("Flatten", host=lambda x, *, axis=1: x.reshape(_flattened_sizes(x.shape, axis)))
def flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    """x as a matrix: the axes before `axis` are its rows."""
    if axis == 1 and x.ndim > 1:
        return x.flatten(1)
    return x.reshape(_flattened_sizes(x.shape, axis))


OPS("Transpose", host=lambda x, *, perm=None: np.transpose(x, perm))(
    lambda x, *, perm=None: x.permute(perm or tuple(range(x.ndim))[::-1])
)


def _host_joined(*xs: np.ndarray, axis: int = 1) -> Any:
    return NotImplemented if sum(x.size for x in xs) > MAX_HOST else np.concatenate(xs, axis)


OPS("Concat", host=_host_joined)(lambda *xs, axis=1: torch.cat(xs, axis))


def _host_squeezed(x: np.ndarray, axes: Any = None) -> np.ndarray:
    return np.squeeze(x, None if axes is None else tuple(ints(axes)))


@OPS("Squeeze", host=_host_squeezed)
def squeeze(x: Tensor, axes: Ints | None = None) -> Tensor:
    """x without `axes` of size 1, by default all of them."""
    if axes is None:
        return x.squeeze()
    for axis in axes:
        if isinstance(x.shape[axis], int) and x.shape[axis] != 1:
            raise BadInput(f"expected size 1 of axis {axis}, got {x.shape[axis]}")
    return x.squeeze(axes[0]) if len(axes) == 1 else x.squeeze(tuple(axes))


@OPS("Unsqueeze", host=lambda x, axes: np.expand_dims(x, tuple(ints(axes))))
def unsqueeze(x: Tensor, axes: Ints) -> Tensor:
    """x with new axes of size 1."""
    rank = x.ndim + len(axes)
    for axis in sorted(axis + rank if axis < 0 else axis for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _host_sliced(x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
    if not known(starts, ends, axes, steps):
        return NotImplemented
    starts, ends = ints(starts), ints(ends)
    axes = range(len(starts)) if axes is None else ints(axes)
    steps = [1] * len(starts) if steps is None else ints(steps)
    slices = [slice(None)] * x.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        before_first = step < 0 and end < -x.shape[axis]
        slices[axis] = slice(start, None if before_first else end, step)
    return x[tuple(slices)]


@OPS("Slice", host=_host_sliced)
@by_bits
def sliced(x: Tensor, starts: Ints, ends: Ints, axes: Ints | None = None, steps: Ints | None = None) -> Tensor:
    """x[start:end:step] along each of some axes."""
    axes = list(range(len(starts))) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        x = _one_slice(x, axis, start, end, step)
    return x


def _one_slice(x: Tensor, axis: int, start: Int, end: Int, step: Int) -> Tensor:
    is_known = isinstance(start, int) and isinstance(end, int)
    if step > 0:
        is_all = is_known and start == 0 and end >= FAR and step == 1
        return x if is_all else torch.ops.aten.slice.Tensor(x, axis, start, end, step)
    if step == -1 and is_known and (start == -1 or start >= FAR) and end <= -FAR:
        return x.flip(axis)
    size = x.shape[axis]
    first, bound = (torch.sym_max(-1, torch.sym_min(size - 1, n + size if n < 0 else n)) for n in (start, end))
    count = torch.sym_max(0, -((bound - first) // -step))
    last = first + (count - 1) * step
    return torch.ops.aten.slice.Tensor(x, axis, last, last + count * -step, -step).flip(axis)


def _host_parts(
    x: np.ndarray, split: Any = None, *, axis: int = 0, num_outputs: int | None = None, outputs: int
) -> Any:
    if not known(split):
        return NotImplemented
    sizes = ints(split) if split is not None else _equal_sizes(x.shape[axis], num_outputs or outputs)
    return tuple(np.split(x, np.cumsum(sizes)[:-1], axis))


def _equal_sizes(size: Any, count: int) -> list[Any]:
    part = -(-size // count)
    return [part] * (count - 1) + [size - part * (count - 1)]


@OPS("Split", host=_host_parts)
def split(
    x: Tensor, split: Ints | None = None, *, axis: int = 0, num_outputs: int | None = None, outputs: int
) -> tuple[Tensor, ...]:
    """Parts of x along an axis, by default of equal sizes except the last."""
    sizes = _equal_sizes(x.shape[axis], num_outputs or outputs) if split is None else split
    return tuple(x.split_with_sizes(sizes, axis))


def _host_expanded(x: np.ndarray, shape: Any) -> Any:
    if not known(shape):
        return NotImplemented
    sizes = np.broadcast_shapes(x.shape, tuple(ints(shape)))
    return NotImplemented if product(sizes) > MAX_HOST else np.broadcast_to(x, sizes)


@OPS("Expand", host=_host_expanded)
def expand(x: Tensor, shape: Ints) -> Tensor:
    """x broadcast with a tensor of this shape."""
    shape = [1] * (x.ndim - len(shape)) + shape
    new_axes = len(shape) - x.ndim
    sizes = [-1 if k >= new_axes and isinstance(n, int) and n == 1 else n for k, n in enumerate(shape)]
    is_same = new_axes == 0 and all(
        isinstance(n, int) and n in (-1, size) for n, size in zip(sizes, x.shape, strict=True)
    )
    return x if is_same else x.expand(sizes)


def _host_tiled(x: np.ndarray, repeats: Any) -> Any:
    if not known(repeats) or x.size * product(ints(repeats)) > MAX_HOST:
        return NotImplemented
    return np.tile(x, ints(repeats))


@OPS("Tile", host=_host_tiled)
def tile(x: Tensor, repeats: Ints) -> Tensor:
    """x repeated along each axis."""
    once = [isinstance(n, int) and n == 1 for n in repeats]
    if all(one or size == 1 for one, size in zip(once, x.shape, strict=True)):
        return x.expand([-1 if one else n for one, n in zip(once, repeats, strict=True)])
    return x.repeat(repeats)


def _pad_pairs(rank: int, pads: list[Any], axes: list[Any] | None) -> list[tuple[Any, Any]]:
    """Padding before and after each axis."""
    axes = list(range(rank)) if axes is None else axes
    if len(pads) != 2 * len(axes):
        raise BadInput(f"expected {2 * len(axes)} pads, got {len(pads)}")
    pairs = [(0, 0)] * rank
    for axis, before, after in zip(axes, pads, pads[len(axes) :], strict=False):
        pairs[axis] = (before, after)
    return pairs


def _host_padded(
    x: np.ndarray,
    pads: Any,
    constant_value: Any = None,
    axes: Any = None,
    *,
    mode: str = "constant",
    value: float = 0.0,
) -> Any:
    if not known(pads, axes) or mode != "constant" or min(ints(pads), default=0) < 0:
        return NotImplemented
    pairs = _pad_pairs(x.ndim, ints(pads), None if axes is None else ints(axes))
    if product(n + sum(pair) for n, pair in zip(x.shape, pairs, strict=True)) > MAX_HOST:
        return NotImplemented
    filler = value if constant_value is None else ints(constant_value)[0]
    return np.pad(x, pairs, constant_values=filler)


@OPS("Pad", host=_host_padded)
def pad(
    x: Tensor,
    pads: Ints,
    constant_value: Float = None,
    axes: Ints | None = None,
    *,
    mode: str = "constant",
    value: float = 0.0,
) -> Tensor:
    """x padded, or cropped where a pad is negative."""
    pairs = _pad_pairs(x.ndim, pads, axes)
    if mode == "constant":
        return padded(x, pairs, value if constant_value is None else constant_value)
    if mode not in ("reflect", "edge", "wrap"):
        raise BadInput(f"expected mode constant, reflect, edge or wrap, got {mode!r}")
    cut = [(min(before, 0), min(after, 0)) for before, after in pairs]
    if any(map(any, cut)):
        x = padded(x, cut)
        pairs = [(max(before, 0), max(after, 0)) for before, after in pairs]
    if mode in _MODES and _torch_pads(x, pairs, mode):
        return padded(x, pairs, mode=_MODES[mode])
    for axis, (before, after) in enumerate(pairs):
        if not _is_zero((before, after)):
            x = x.index_select(axis, _source_positions(x.shape[axis], before, after, mode, x.device))
    return x


def _is_zero(pair: tuple[Any, Any]) -> bool:
    return all(isinstance(n, int) and n == 0 for n in pair)


def padded(x: Tensor, pairs: Sequence[tuple[Any, Any]], value: Any = None, mode: str = "constant") -> Tensor:
    """x with padding before and after each axis."""
    lead = next((k for k, pair in enumerate(pairs) if not _is_zero(pair)), len(pairs))
    flat = [n for pair in reversed(pairs[lead:]) for n in pair]
    if not flat:
        return x
    if mode == "constant":
        return F.pad(x, flat, value=value)
    return F.pad(x, flat + [0] * (2 * (x.ndim - 2) - len(flat)), mode=mode)


def _torch_pads(x: Tensor, pairs: Sequence[tuple[Any, Any]], mode: str) -> bool:
    """Whether F.pad computes this: it pads the last axes of 3 to 5, floats, and reflects once."""
    if not x.is_floating_point() or x.dtype in _BITS or not 3 <= x.ndim <= 5:
        return False
    if not all(map(_is_zero, pairs[:2])):
        return False
    short = [max(pair) >= n for n, pair in zip(x.shape, pairs, strict=True) if isinstance(n, int)]
    return mode == "edge" or not any(short)


def _source_positions(size: Any, before: Any, after: Any, mode: str, device: torch.device) -> Tensor:
    """Source position on an axis of each position after padding."""
    positions = torch.arange(-before, size + after, device=device)
    if mode == "edge":
        return positions.clamp(0, size - 1)
    if mode == "wrap":
        return positions % size
    positions = positions % (2 * torch.sym_max(size - 1, 1))
    return torch.minimum(positions, 2 * (size - 1) - positions).abs()


def _host_range(start: np.ndarray, limit: np.ndarray, delta: np.ndarray, *, stash_type: int = 1) -> Any:
    if not known(start, limit, delta) or start.dtype.kind not in "iuO":
        return NotImplemented
    numbers = range(*(ints(n)[0] for n in (start, limit, delta)))
    return np.array(numbers, start.dtype) if len(numbers) <= MAX_FILLED else NotImplemented


@OPS("Range", host=_host_range)
def ranged(start: Value, limit: Value, delta: Value, *, stash_type: int = 1, device: torch.device) -> Tensor:
    """start, start + delta, ... below the limit."""
    dtype: torch.dtype = start.dtype  # type: ignore[union-attr]
    first, end, step = map(number_of, (start, limit, delta))
    if any(isinstance(n, SYMBOLIC) for n in (first, end, step)):
        return torch.arange(first, end, step, dtype=dtype, device=device)
    if not dtype.is_floating_point:
        end = first if (end - first) * step < 0 else end
        return torch.arange(first, end, step, dtype=dtype, device=device)
    compute_dtype = DTYPES[stash_type] if dtype.itemsize < 4 else dtype
    count = max(0, math.ceil((end - first) / step))
    return (torch.arange(count, dtype=compute_dtype, device=device) * step + first).to(dtype)


def _host_filled(shape: Any, *, value: Value = None) -> Any:
    if not known(shape) or product(ints(shape)) > MAX_FILLED or isinstance(value, Tensor):
        return NotImplemented
    filler = np.zeros(1, np.float32) if value is None else value.array  # type: ignore[union-attr]
    return np.broadcast_to(filler.reshape(()), ints(shape))


@OPS("ConstantOfShape", host=_host_filled)
def filled(shape: Ints, *, value: Value = None, device: torch.device) -> Tensor:
    """A tensor filled with one number, by default 0."""
    if value is None:
        return torch.zeros(shape, device=device)
    if isinstance(value, Tensor):
        return value.to(device).reshape(()).expand(shape)
    return torch.full(shape, number_of(value), dtype=value.dtype, device=device)  # type: ignore[union-attr]


@OPS("EyeLike")
def eye_like(x: Value, *, dtype: int | None = None, k: int = 0, device: torch.device) -> Tensor:
    """Ones on a diagonal, k above the main one, in a matrix of x's shape."""
    kind: torch.dtype = x.dtype if dtype is None else DTYPES[dtype]  # type: ignore[union-attr]
    rows, columns = (torch.arange(n, device=device) for n in sizes_of(x))
    return (columns - rows.unsqueeze(1) == k).to(kind)


@OPS("Trilu")
@by_bits
def trilu(x: Tensor, k: Int = 0, *, upper: int = 1) -> Tensor:
    """x with zeros below its k-th diagonal, or above it."""
    return x.triu(k) if upper else x.tril(k)


_ORDERS = ("DCR", "CRD")


@OPS("DepthToSpace")
@by_bits
def depth_to_space(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    """Channels rearranged to blocks of pixels."""
    _one_of(mode, _ORDERS)
    if mode == "CRD":
        return F.pixel_shuffle(x, blocksize)
    n, c, h, w = x.shape
    c //= blocksize**2
    blocks = x.reshape(n, blocksize, blocksize, c, h, w).permute(0, 3, 4, 1, 5, 2)
    return blocks.reshape(n, c, h * blocksize, w * blocksize)


@OPS("SpaceToDepth")
@by_bits
def space_to_depth(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    """Blocks of pixels rearranged to channels."""
    _one_of(mode, _ORDERS)
    if mode == "CRD":
        return F.pixel_unshuffle(x, blocksize)
    n, c, h, w = x.shape
    h, w = h // blocksize, w // blocksize
    blocks = x.reshape(n, c, h, blocksize, w, blocksize).permute(0, 3, 5, 1, 2, 4)
    return blocks.reshape(n, c * blocksize**2, h, w)


def _one_of(mode: str, modes: Sequence[str]) -> None:
    if mode not in modes:
        raise BadInput(f"expected mode {' or '.join(modes)}, got {mode!r}")


@OPS("CenterCropPad")
def center_crop_pad(x: Tensor, shape: Ints, *, axes: Sequence[int] | None = None) -> Tensor:
    """x cropped or padded with zeros around its center, to these sizes of its axes."""
    pairs: list[tuple[Any, Any]] = [(0, 0)] * x.ndim
    for axis, wanted in zip(range(x.ndim) if axes is None else axes, shape, strict=True):
        size = x.shape[axis]
        excess, missing = torch.sym_max(size - wanted, 0), torch.sym_max(wanted - size, 0)
        if not (isinstance(excess, int) and excess == 0):
            x = torch.ops.aten.slice.Tensor(x, axis, excess // 2, excess // 2 + size - excess)
        pairs[axis] = (missing // 2, missing - missing // 2)
    return padded(x, pairs)
