"""ONNX ops that select elements: the largest, the distinct, the nonzero."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from demask.files.onnx.op_functions import Int, Ops
from demask.files.onnx.ops.math.wide_unsigned import UNSIGNED

OPS = Ops()


@OPS("TopK")
def top(x: Tensor, k: Int, *, axis: int = -1, largest: int = 1, sorted: int = 1) -> tuple[Tensor, Tensor]:
    """The k largest values along an axis and their indices, the first of equal ones."""
    # not torch.topk, which returns any of equal values
    values, indices = torch.sort(x, dim=axis, descending=bool(largest), stable=True)
    return values.narrow(axis, 0, k), indices.narrow(axis, 0, k)


@OPS("Unique")
def unique(x: Tensor, *, axis: int | None = None, sorted: int = 1) -> tuple[Tensor, ...]:
    """Distinct elements (slices along an axis), their first positions, the index of each element
    among them, and their counts."""
    x = x.reshape(-1) if axis is None else x
    axis = 0 if axis is None else axis
    distinct, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True, dim=axis)
    positions = torch.arange(x.shape[axis], device=x.device)
    first = torch.full_like(counts, x.shape[axis]).scatter_reduce(0, inverse, positions, "amin")
    if sorted:
        return distinct, first, inverse, counts
    order = torch.argsort(first)
    return (distinct.index_select(axis, order), first[order], torch.argsort(order)[inverse], counts[order])


def _host_nonzero(x: np.ndarray) -> Any:
    return NotImplemented if x.dtype == object else np.stack(np.nonzero(np.atleast_1d(x)))


@OPS("NonZero", host=_host_nonzero)
def nonzero(x: Tensor) -> Tensor:
    """The indices of nonzero elements, [axes, count]."""
    x = torch.atleast_1d(x)
    return torch.nonzero(x != 0 if x.dtype in UNSIGNED else x).transpose(0, 1)
