"""ONNX ops that choose elements: the largest, those that differ, those that are not zero."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from demask.files.onnx.op_functions import Int, Ops
from demask.files.onnx.ops.math.wide_unsigned import UNSIGNED

OPS = Ops()


@OPS("TopK")
def top(
    x: Tensor, k: Int, *, axis: int = -1, largest: int = 1, sorted: int = 1
) -> tuple[Tensor, Tensor]:
    """The k largest along an axis and their places, of equals the first ones."""
    # not torch.topk, which takes any of the equals
    values, places = torch.sort(x, dim=axis, descending=bool(largest), stable=True)
    return values.narrow(axis, 0, k), places.narrow(axis, 0, k)


@OPS("Unique")
def unique(x: Tensor, *, axis: int | None = None, sorted: int = 1) -> tuple[Tensor, ...]:
    """Elements (slices along an axis) that differ; their first places; where each element went;
    how many of each there are."""
    x = x.reshape(-1) if axis is None else x
    axis = 0 if axis is None else axis
    found, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True, dim=axis)
    places = torch.arange(x.shape[axis], device=x.device)
    first = torch.full_like(counts, x.shape[axis]).scatter_reduce(0, inverse, places, "amin")
    if sorted:
        return found, first, inverse, counts
    order = torch.argsort(first)
    return (
        found.index_select(axis, order),
        first[order],
        torch.argsort(order)[inverse],
        counts[order],
    )


def _host_nonzero(x: np.ndarray) -> Any:
    return NotImplemented if x.dtype == object else np.stack(np.nonzero(np.atleast_1d(x)))


@OPS("NonZero", host=_host_nonzero)
def nonzero(x: Tensor) -> Tensor:
    """The places of what is not zero, [axes, how many]."""
    x = torch.atleast_1d(x)
    return torch.nonzero(x != 0 if x.dtype in UNSIGNED else x).transpose(0, 1)
