"""ONNX ops that read or write at indices: gathers, scatters, one-hot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from demask.errors import BadInput
from demask.files.onnx.op_functions import Int, Ops, Value
from demask.files.onnx.ops.data.move import by_bits, known
from demask.files.onnx.values import MAX_HOST, SYMBOLIC, Host, product

OPS = Ops()

_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
#: torch has no scatter_reduce for these dtypes; the dtype to use instead
_REDUCE_DTYPE = {torch.bool: torch.uint8, torch.uint16: torch.int32, torch.uint32: torch.int64}


def _nonnegative_indices(indices: Tensor, size: Any) -> Tensor:
    """Indices, with `size` added to negative ones."""
    return torch.where(indices < 0, indices + size, indices)


def _as_int64(indices: Tensor) -> Tensor:
    return indices if indices.dtype == torch.int64 else indices.long()


def _host_gathered(x: np.ndarray, indices: np.ndarray, *, axis: int = 0) -> Any:
    rest = product(n for k, n in enumerate(x.shape) if k != axis % x.ndim)
    if not known(indices) or indices.size * rest > MAX_HOST:
        return NotImplemented
    return np.take(x, indices.astype(np.int64), axis)


@OPS("Gather", host=_host_gathered)
def gather(x: Tensor, indices: Value, *, axis: int = 0, as_tensor: Callable[[Any], Tensor]) -> Tensor:
    """Slices of x along an axis, at indices of any shape, negative ones from the end."""
    axis %= x.ndim
    if isinstance(indices, Host):
        view = _view_at(x, indices.array, axis)
        if view is not None:
            return view
        indices = _host_nonnegative(indices, x.shape[axis])
    positions = as_tensor(indices)
    if not isinstance(indices, Host) or not known(indices.array) or (indices.array < 0).any():
        positions = _nonnegative_indices(positions, x.shape[axis])
    if axis == 0 and x.ndim == 2 and x.is_floating_point():
        return F.embedding(positions, x)
    if positions.ndim == 1:
        return x.index_select(axis, positions)
    rows = x.index_select(axis, positions.reshape(-1))
    return rows.reshape(*x.shape[:axis], *positions.shape, *x.shape[axis + 1 :])


def _view_at(x: Tensor, indices: np.ndarray, axis: int) -> Tensor | None:
    """x at indices, as a view by select or slice; None where that is not possible."""
    if indices.ndim == 0:
        return x.select(axis, indices.item())
    if indices.ndim > 1 or not len(indices):
        return None
    if len(indices) == 1:
        return x.select(axis, indices.item()).unsqueeze(axis)
    size = x.shape[axis]
    if not known(indices) or isinstance(size, SYMBOLIC):
        return None
    first, last, step = int(indices[0]), int(indices[-1]), int(indices[1]) - int(indices[0])
    if step < 1 or (np.diff(indices) != step).any() or not -size <= first <= last < size:
        return None
    if first < 0 <= last:
        return None
    end = last + 1
    return torch.ops.aten.slice.Tensor(x, axis, first, end or size, step)


def _host_nonnegative(indices: Host, size: Any) -> Host:
    """Known indices, with a known `size` added to negative ones."""
    array = indices.array
    if isinstance(size, SYMBOLIC) or not known(array):
        return indices
    if array.size and not -size <= array.min() <= array.max() < size:
        raise BadInput(f"expected indices of {size} positions, got {array.min()} to {array.max()}")
    return Host.of(np.where(array < 0, array + size, array)) if (array < 0).any() else indices


@OPS("GatherElements")
@by_bits
def gather_elements(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    """y[i, j] = x[i, indices[i, j]] (for axis 1)."""
    return x.gather(axis, _nonnegative_indices(_as_int64(indices), x.shape[axis]))


@OPS("GatherND")
def gather_nd(x: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
    """x at the positions in the last axis of `indices`, after batch axes that both have."""
    rank = indices.ndim - 1
    batch = [torch.arange(x.shape[k], device=x.device).reshape([-1] + [1] * (rank - 1 - k)) for k in range(batch_dims)]
    return x[(*batch, *_as_int64(indices).unbind(-1))]


def _host_set(x: np.ndarray, updates: np.ndarray, positions: Any) -> np.ndarray:
    result = x.astype(object if updates.dtype == object else x.dtype)
    result[positions] = updates
    return result


def _host_scattered(
    x: np.ndarray, indices: np.ndarray, updates: np.ndarray, *, axis: int = 0, reduction: str = "none"
) -> Any:
    if reduction != "none" or not known(indices):
        return NotImplemented
    positions: list[Any] = list(np.indices(indices.shape))
    positions[axis] = indices.astype(np.int64)
    return _host_set(x, updates, tuple(positions))


@OPS("Scatter", "ScatterElements", host=_host_scattered)
def scatter_elements(x: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0, reduction: str = "none") -> Tensor:
    """x with updates written (added, ...) at indices along an axis."""
    indices = _nonnegative_indices(_as_int64(indices), x.shape[axis])
    if reduction == "none":
        return _scatter_along(x, axis, indices, updates)
    return _scatter_reduce(x, axis, indices, updates, reduction)


@by_bits
def _scatter_along(x: Tensor, axis: int, indices: Tensor, updates: Tensor) -> Tensor:
    return x.scatter(axis, indices, updates)


@by_bits
def _put_at(x: Tensor, updates: Tensor, positions: tuple[Tensor, ...]) -> Tensor:
    return x.index_put(positions, updates)


def _scatter_reduce(x: Tensor, axis: int, indices: Tensor, updates: Tensor, reduction: str) -> Tensor:
    if reduction not in _REDUCTIONS:
        raise BadInput(f"expected reduction none, add, mul, max or min, got {reduction!r}")
    dtype = _REDUCE_DTYPE.get(x.dtype, x.dtype)
    if reduction == "add" and dtype == x.dtype:
        return x.scatter_add(axis, indices, updates)
    result = x.to(dtype).scatter_reduce(axis, indices, updates.to(dtype), _REDUCTIONS[reduction])
    return result.to(x.dtype)


def _host_scattered_nd(x: np.ndarray, indices: np.ndarray, updates: np.ndarray, *, reduction: str = "none") -> Any:
    if reduction != "none" or not known(indices):
        return NotImplemented
    return _host_set(x, updates, tuple(np.moveaxis(indices.astype(np.int64), -1, 0)))


@OPS("ScatterND", host=_host_scattered_nd)
def scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, *, reduction: str = "none") -> Tensor:
    """x with updates written (added, ...) at the positions in the last axis of `indices`."""
    positions = _as_int64(indices).unbind(-1)
    if reduction == "none":
        return _put_at(x, updates, positions)
    sizes = x.shape[: len(positions)]
    rows, rest = torch.zeros_like(positions[0]), product(x.shape[len(positions) :])
    for position, size in zip(positions, sizes, strict=True):
        rows = rows * size + _nonnegative_indices(position, size)
    rows = rows.reshape(-1, 1).expand(-1, rest)
    flat = x.reshape(product(sizes), rest)
    return _scatter_reduce(flat, 0, rows, updates.reshape(-1, rest), reduction).reshape(x.shape)


@OPS("TensorScatter")
@by_bits
def tensor_scatter(
    cache: Tensor, update: Tensor, write_indices: Tensor | None = None, *, mode: str = "linear", axis: int = -2
) -> Tensor:
    """The cache with the update written along an axis, from each sample's start index."""
    if mode not in ("linear", "circular"):
        raise BadInput(f"expected mode linear or circular, got {mode!r}")
    axis, length = axis % cache.ndim, update.shape[axis]
    if write_indices is None:
        return cache.slice_scatter(update, axis, 0, length)
    positions = _as_int64(write_indices).unsqueeze(1) + torch.arange(length, device=cache.device)
    positions = positions % cache.shape[axis] if mode == "circular" else positions
    shape = [1] * cache.ndim
    shape[0], shape[axis] = -1, length
    return cache.scatter(axis, positions.reshape(shape).expand_as(update), update)


@OPS("OneHot")
def one_hot(indices: Tensor, depth: Int, values: Tensor, *, axis: int = -1) -> Tensor:
    """values[1] where the position on the new axis equals the index, values[0] elsewhere."""
    depth = torch.sym_int(depth) if isinstance(depth, float | torch.SymFloat) else depth
    axis = axis + indices.ndim + 1 if axis < 0 else axis
    positions = torch.arange(depth, device=indices.device)
    positions = positions.reshape([-1] + [1] * (indices.ndim - axis))
    hot = _nonnegative_indices(_as_int64(indices), depth).unsqueeze(axis) == positions
    return torch.where(hot, values[1], values[0])


@OPS("Compress")
def compress(x: Tensor, condition: Tensor, *, axis: int | None = None) -> Tensor:
    """Slices of x along an axis (by default of flattened x) where the condition is true."""
    x = x.flatten() if axis is None else x
    return x.index_select(axis or 0, condition.nonzero().squeeze(1))


@OPS("ReverseSequence")
@by_bits
def reverse_sequence(x: Tensor, lengths: Tensor, *, batch_axis: int = 1, time_axis: int = 0) -> Tensor:
    """x with the first `lengths` steps of each sample reversed."""
    if {batch_axis, time_axis} != {0, 1}:
        raise BadInput(f"expected axes 0 and 1, got {batch_axis} and {time_axis}")
    steps = torch.arange(x.shape[time_axis], device=x.device).unsqueeze(batch_axis)
    lengths = _as_int64(lengths).unsqueeze(time_axis)
    positions = torch.where(steps < lengths, lengths - 1 - steps, steps)
    return x.gather(time_axis, positions.reshape(*positions.shape, *[1] * (x.ndim - 2)).expand_as(x))
