"""How numbers of one type are held as another, where parts come from and go to.

8-bit images: y is written as round(clamp(y, 0, 1) * 255), halves to even, in the value's own
floating type (float16 and bfloat16 in float32), and NaN as 0. x is read for a network that takes
floating numbers as x / 255, the inverse. All other numbers keep their value, as by `Tensor.copy_`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from demask.errors import BadInput
from demask.traverse.axes import Axes, strides


def is_quantized(values: torch.dtype, stored: torch.dtype) -> bool:
    """Are floating numbers written in 8 bits?"""
    return stored == torch.uint8 and values.is_floating_point


def scratch_size(values: torch.dtype, stored: torch.dtype) -> int:
    """Bytes for each element that the conversion needs."""
    return computed(values).itemsize if is_quantized(values, stored) else 0


def check_conversion(values: torch.dtype, stored: torch.dtype) -> None:
    """Raise BadInput where `values` cannot be held as `stored`: bits would be lost unasked."""
    if not holds(values, stored):
        raise BadInput(
            f"values of {name_of(values)} cannot be held as {name_of(stored)}: numbers would be "
            "lost; choose another dtype, or convert them in the network"
        )


def holds(values: torch.dtype, stored: torch.dtype) -> bool:
    """Can values be held as another type, for a user who asked for it or at no loss?"""
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


def computed(values: torch.dtype) -> torch.dtype:
    """The type in which 8 bits are made of values."""
    return torch.float64 if values == torch.float64 else torch.float32


def assign(into: Tensor, held: Tensor) -> None:
    """What a source holds, as the network takes it."""
    into.copy_(held)
    if is_quantized(into.dtype, held.dtype):
        into.div_(255)


def convert(given: Tensor, into: Tensor, axes: Axes, scratch: Tensor) -> None:
    """Write values as the dtype of `into` holds them; scratch: as many elements, for 8 bits."""
    if not is_quantized(given.dtype, into.dtype):
        into.copy_(given)
        return
    # In the order of the part, which is fast; the copy at the end changes order and dtype at once.
    work = scratch[: given.numel()].as_strided(given.shape, strides(given.shape, axes))
    if given.dtype == work.dtype:
        torch.clamp(given, 0, 1, out=work)
    else:
        work.copy_(given).clamp_(0, 1)
    into.copy_(work.nan_to_num_(0.0).mul_(255).round_())


def name_of(dtype: torch.dtype) -> str:
    """A dtype as users write it: float32."""
    return str(dtype).removeprefix("torch.")
