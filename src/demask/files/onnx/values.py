"""Values of an ONNX graph while it runs.

A `torch.Tensor`; `Host`, numbers known without reading a tensor (shapes, indices, scalars); a list,
for a sequence; None, for an absent optional value. Arithmetic on sizes is done on `Host` values, so
that `torch.export` sees symbolic sizes instead of tensors of sizes.
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

MAX_HOST = 65_536  # elements; larger constants are tensors only
MAX_READ = 2**20  # elements of a tensor that may be read as Python numbers
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool, Ratio)

#: numpy's dtype for torch's; values of others (bfloat16, 8-bit floats) are never `Host`
NUMPY: Mapping[torch.dtype, np.dtype] = {
    getattr(torch, name): np.dtype(name)
    for name in "float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool "
    "complex64 complex128".split()
}
BITS = {1: torch.uint8, 2: torch.int16}
TORCH = {value: key for key, value in NUMPY.items()}


@dataclass(frozen=True, slots=True)
class Host:
    """An array of known numbers: a numpy array of `dtype`, or of Python objects where some are
    symbolic sizes of `torch.export`. tensor_name: name of the module's tensor with these values.
    folds: whether ops may compute on the array (not for weights, which can change)."""

    array: np.ndarray
    dtype: torch.dtype | None  # None: text
    tensor_name: str | None = None
    folds: bool = True

    @classmethod
    def of(cls, array: Any, like: torch.dtype | None = None) -> Host:
        """From an array or a number; `like` is the dtype where numpy's is object."""
        array = np.asarray(array)
        if array.dtype == object:
            if not any(isinstance(x, SYMBOLIC) for x in array.flat) and like in NUMPY:
                return cls(array.astype(NUMPY[like]), like)  # type: ignore[index]
            return cls(array, like)
        return cls(array, TORCH.get(array.dtype))


def numpy_of(x: Tensor) -> np.ndarray:
    """The array of a tensor; of a dtype that numpy lacks with ml_dtypes', which onnx needs."""
    x = x.detach().cpu()
    if x.dtype in NUMPY:
        return x.numpy()
    import ml_dtypes

    name = str(x.dtype).removeprefix("torch.")
    return x.contiguous().view(BITS[x.dtype.itemsize]).numpy().view(getattr(ml_dtypes, name))


Value = Tensor | Host | list[Any] | None


def tensor_of(value: Any, lookup: Callable[[str], Tensor], device: torch.device) -> Any:
    """A value as a tensor; sequences and None unchanged. lookup: a module's tensor by name."""
    if not isinstance(value, Host):
        return value
    if value.tensor_name is not None:
        return lookup(value.tensor_name)
    if value.dtype is None:
        raise BadInput("text where a tensor was expected")
    if value.array.dtype != object:
        return torch.tensor(value.array.tolist(), dtype=value.dtype, device=device).reshape(value.array.shape)
    numbers = [torch.scalar_tensor(plain(x), dtype=value.dtype, device=device) for x in value.array.flat]
    return torch.stack(numbers).reshape(value.array.shape)


def numbers_of(value: Any) -> list[Any]:
    """All numbers of a value, in order. Numbers read from a tensor are unbacked sizes to
    `torch.export`."""
    if isinstance(value, Host):
        return [plain(x) for x in value.array.reshape(-1).tolist()]
    if isinstance(value, Tensor):
        if isinstance(value.numel(), int) and value.numel() > MAX_READ:
            raise BadInput(f"expected at most {MAX_READ} numbers to read, got {value.numel()}")
        return value.reshape(-1).tolist()
    return [value] if isinstance(value, int | float | bool) else list(value)


def number_of(value: Any) -> Any:
    """The only number of a value."""
    numbers = numbers_of(value)
    if len(numbers) != 1:
        raise BadInput(f"expected one number, got {len(numbers)}")
    return numbers[0]


def product(sizes: Any) -> Any:
    """The product of sizes, symbolic or not."""
    return reduce(operator.mul, sizes, 1)
