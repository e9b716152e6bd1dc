"""What the calls have in common that run by kernels compiled in this process."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from demask.kernels.llvm import availability as llvm
from demask.kernels.llvm.isa import host
from demask.ops.activations import Act, find_onednn_activation
from demask.ops.schema import fake
from demask.traverse.axes import COLUMNS, ROWS
from demask.traverse.local.call import LocalCall, Sliding
from demask.tune.epilogue import Epilogue

LLVM = 40 * 2**20  # bytes that the compiler takes, measured


def is_float32(call: LocalCall) -> bool:
    """Whether the call reads and writes float32 in the memory of the CPU."""
    operands = (fake(o.value) for o in call.relation.operands if hasattr(o.value, "meta"))
    tensors = (fake(call.node), *operands)
    return all(t.dtype is torch.float32 and t.device.type == "cpu" for t in tensors)


def is_laid_out(call: LocalCall, axes: tuple[Sliding, ...]) -> bool:
    """Whether parts are stored as rows, columns, channels of one image."""
    rank, cut = len(call.shape), call.cuts[0]
    sliding, cut_axes = {s.axis + rank for s in axes}, [a for a in call.axes if a is not None]
    channels = rank - len(sliding) - 1
    is_cut_alike = cut.axes == call.axes and all(cut.arrives[: len(cut_axes)])
    is_one_image = channels >= 0 and math.prod(call.shape[:channels]) == 1
    return is_cut_alike and is_one_image and sliding == set(cut_axes) and len(cut_axes) == len(axes) <= 2


@functools.cache
def compiles() -> bool:
    """Whether LLVM compiles for this machine, and the kernels run on this system."""
    try:
        return llvm.is_installed() and host().lanes > 0
    except (OSError, RuntimeError):
        return False


def across(call: LocalCall, axes: tuple[Sliding, ...]) -> tuple[Sliding | None, Sliding]:
    """The windows along rows and columns. A sequence is one row: its axis is that of columns."""
    by_axis = {s.axis + len(call.shape): s for s in axes}
    if call.axes[COLUMNS] is None:
        return None, by_axis[call.axes[ROWS]]  # type: ignore[index]
    return by_axis[call.axes[ROWS]], by_axis[call.axes[COLUMNS]]  # type: ignore[index]


class PartDims(NamedTuple):
    """A part's axes of rows (None in a sequence), columns and channels; width: its channels."""

    rows: int | None
    columns: int
    channels: int
    width: int

    def of(self, part: Tensor) -> tuple[int, int, int] | None:
        """Rows, columns and the stride of rows in floats; None where columns are not dense."""
        shape, strides = part.shape, part.stride()
        columns, width = shape[self.columns], self.width
        if columns > 1 and strides[self.columns] != width:
            return None
        if width > 1 and strides[self.channels] != 1:
            return None
        if self.rows is None:
            return 1, columns, columns * width
        return shape[self.rows], columns, strides[self.rows]


def fused(after: Epilogue | None) -> Act | None:
    """An activation for the kernel; None where torch computes it: with an exponential, or a NaN
    parameter."""
    if after is None or any(map(math.isnan, after.scalars)):
        return None
    activation = find_onednn_activation(after.name, after.algorithm)
    if activation is None or activation.exponential:
        return None
    return activation.name, tuple(after.scalars)


__all__ = ["LLVM", "PartDims", "across", "compiles", "fused", "is_float32", "is_laid_out"]
