"""Conversion of dtypes between the parts of a value and its source or sink.

Images of 8 bits: y is written as round(clamp(y, 0, 1) * 255), halves to even, computed in y's
dtype (float16 and bfloat16 in float32), and NaN as 0. uint8 x is read as x / 255 by networks that
take floating-point inputs. Images of 16 bits: the same with uint16 and 65535. Other conversions
keep the value, like `Tensor.copy_`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from demask.errors import BadInput
from demask.traverse.storage.boxes import view_flat

LARGEST = {torch.uint8: 255, torch.uint16: 65535}  # stored for 1.0


def is_quantized(values: torch.dtype, stored: torch.dtype) -> bool:
    """Whether floating-point values are stored as uint8 or uint16."""
    return stored in LARGEST and values.is_floating_point


def scratch_size(values: torch.dtype, stored: torch.dtype) -> int:
    """Bytes per element that the conversion needs."""
    return work_dtype(values).itemsize if is_quantized(values, stored) else 0


def check_conversion(values: torch.dtype, stored: torch.dtype) -> None:
    """Raise BadInput where numbers of dtype `values` would lose information as `stored`."""
    if not can_store(values, stored):
        raise BadInput(
            f"values of {name_of(values)} cannot be stored as {name_of(stored)}: numbers would be "
            "lost; choose another dtype, or convert them in the network"
        )


def can_store(values: torch.dtype, stored: torch.dtype) -> bool:
    """Whether `values` may be stored as `stored`: without loss, or as floating point of any size or
    8-bit images."""
    if values == stored or values.is_complex or stored.is_complex:
        return values == stored
    if values.is_floating_point:
        return stored.is_floating_point or is_quantized(values, stored)
    if stored.is_floating_point or values == torch.bool:
        return True
    if stored == torch.bool:
        return False
    one, other = torch.iinfo(values), torch.iinfo(stored)
    return other.min <= one.min and one.max <= other.max


def work_dtype(values: torch.dtype) -> torch.dtype:
    """The dtype in which values are converted to 8 bits."""
    return torch.float64 if values == torch.float64 else torch.float32


def assign(into: Tensor, values: Tensor) -> None:
    """Copy a source's values into a part; uint8 becomes x / 255 in floating-point parts."""
    into.copy_(values)
    if is_quantized(into.dtype, values.dtype):
        into.div_(LARGEST[values.dtype])


def convert(values: Tensor, into: Tensor, scratch: Tensor) -> None:
    """Write values to `into` in its dtype. scratch: memory of as many elements, for 8 bits."""
    if not is_quantized(values.dtype, into.dtype):
        into.copy_(values)
        return
    # In the values' own order, which is fast; the copy at the end changes order and dtype at once.
    dims = sorted(range(values.dim()), key=lambda axis: -values.stride(axis))
    work = view_flat(scratch, values.shape, dims)
    if values.dtype == work.dtype:
        torch.clamp(values, 0, 1, out=work)
    else:
        work.copy_(values).clamp_(0, 1)
    into.copy_(work.nan_to_num_(0.0).mul_(LARGEST[into.dtype]).round_())


def name_of(dtype: torch.dtype) -> str:
    """A dtype as users write it: float32."""
    return str(dtype).removeprefix("torch.")
