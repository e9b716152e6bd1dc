"""What the names of an ONNX graph stand for while it runs.

A `torch.Tensor`; `Host`, numbers known without looking into a tensor (shapes, indices, scalars); a
list, for a sequence; None, for an optional value that is not there. Arithmetic on sizes happens in
`Host` values, so that `torch.export` sees sizes and no tensors of sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.files.onnx.size_fractions import Ratio, plain

MAX_HOST = 65_536  # elements; larger constants are tensors alone
MAX_READ = 2**20  # elements of a tensor that become Python's numbers
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool, Ratio)

#: numpy's dtype of torch's; the rest (bfloat16, 8-bit floats) are no host values
NUMPY: Mapping[torch.dtype, np.dtype] = {
    getattr(torch, name): np.dtype(name)
    for name in "float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool "
    "complex64 complex128".split()
}
TORCH = {value: key for key, value in NUMPY.items()}


@dataclass(frozen=True, slots=True)
class Host:
    """An array whose numbers are known: a numpy array of `dtype`, or of Python objects where some
    are sizes that `torch.export` keeps symbolic. held: the module's tensor of the same values.
    folds: may arithmetic on it be done here? (not on weights, which can change)"""

    array: np.ndarray
    dtype: torch.dtype | None  # None: text
    held: str | None = None
    folds: bool = True

    @classmethod
    def of(cls, array: Any, like: torch.dtype | None = None) -> Host:
        """Of an array or a number; `like` tells the dtype where numpy's is object."""
        array = np.asarray(array)
        if array.dtype == object:
            if not any(isinstance(x, SYMBOLIC) for x in array.flat) and like in NUMPY:
                return cls(array.astype(NUMPY[like]), like)  # type: ignore[index]
            return cls(array, like)
        return cls(array, TORCH.get(array.dtype))


Value = Tensor | Host | list[Any] | None


def tensor_of(value: Any, held: Callable[[str], Tensor], device: torch.device) -> Any:
    """A value as a tensor; sequences and None as they are."""
    if not isinstance(value, Host):
        return value
    if value.held is not None:
        return held(value.held)
    if value.dtype is None:
        raise BadInput("text where a tensor was expected")
    if value.array.dtype != object:
        return torch.tensor(value.array.tolist(), dtype=value.dtype, device=device).reshape(
            value.array.shape
        )
    numbers = [
        torch.scalar_tensor(plain(x), dtype=value.dtype, device=device) for x in value.array.flat
    ]
    return torch.stack(numbers).reshape(value.array.shape)


def numbers_of(value: Any) -> list[Any]:
    """All numbers of a value, in order. Of a tensor they are read, which `torch.export` records as
    sizes that values decide."""
    if isinstance(value, Host):
        return [plain(x) for x in value.array.reshape(-1).tolist()]
    if isinstance(value, Tensor):
        if isinstance(value.numel(), int) and value.numel() > MAX_READ:
            raise BadInput(f"expected at most {MAX_READ} numbers to read, got {value.numel()}")
        return value.reshape(-1).tolist()
    return [value] if isinstance(value, int | float | bool) else list(value)


def number_of(value: Any) -> Any:
    """The one number of a value."""
    found = numbers_of(value)
    if len(found) != 1:
        raise BadInput(f"expected one number, got {len(found)}")
    return found[0]


def product(sizes: Any) -> Any:
    """The product of sizes, symbolic or not."""
    return reduce(operator.mul, sizes, 1)
