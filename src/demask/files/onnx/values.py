"""Values of an ONNX graph while it runs.

A `torch.Tensor`; `Host`, numbers known without reading a tensor (shapes, indices, scalars); a list,
for a sequence; None, for an absent optional value. Arithmetic on sizes is done on `Host` values, so
that `torch.export` sees symbolic sizes instead of tensors of sizes.

Floats computed from sizes are fractions: exporters compute sizes as floor(float(size) * 0.5).
`torch.export` can compare such a size with others if it is written as size // 2, but not if it contains
floats.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demask.compat.symbolic_shapes import statically_known_false, statically_known_true
from demask.errors import BadInput

MAX_DENOMINATOR = 2**20  # a float that is not a fraction of integers up to this stays a float
MAX_HOST = 65_536  # elements; larger constants are tensors only
MAX_READ = 2**20  # elements of a tensor that may be read as Python numbers
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
    """An array of known numbers: of `dtype`, or of Python objects where some are symbolic sizes of `torch.export`."""

    array: np.ndarray
    dtype: torch.dtype | None  # None: text
    tensor_name: str | None = None  # of the module's tensor with these values
    folds: bool = True  # whether ops may compute on the array (not for weights, which can change)

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


@dataclass(frozen=True, slots=True, eq=False)
class Ratio:
    """numerator / denominator, with Python's arithmetic; results that are not fractions are floats."""

    numerator: Any  # an int or a torch.SymInt
    denominator: int = 1

    @property
    def number(self) -> Any:
        """As a float."""
        numerator = torch.sym_float(self.numerator)
        return numerator if self.denominator == 1 else numerator / self.denominator

    def __floor__(self) -> Any:
        return self.numerator // self.denominator

    def __ceil__(self) -> Any:
        return -(-self.numerator // self.denominator)

    def __trunc__(self) -> Any:
        if self.denominator == 1 or statically_known_true(self.numerator >= 0):
            return self.numerator // self.denominator
        return math.trunc(self.number)

    def __round__(self) -> Any:
        return self.numerator if self.denominator == 1 else round(self.number)

    def __neg__(self) -> Any:
        return Ratio(-self.numerator, self.denominator)

    def __abs__(self) -> Any:
        return Ratio(abs(self.numerator), self.denominator)

    def __add__(self, other: Any) -> Any:
        return _apply_to_ratios(self, other, operator.add)

    def __sub__(self, other: Any) -> Any:
        return _apply_to_ratios(self, other, operator.sub)

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __mul__(self, other: Any) -> Any:
        factor = as_ratio(other)
        if factor is None or self.denominator * factor.denominator > MAX_DENOMINATOR:
            return self.number * plain(other)
        return Ratio(self.numerator * factor.numerator, self.denominator * factor.denominator)

    def __truediv__(self, other: Any) -> Any:
        factor = as_ratio(other)
        if factor is None or not isinstance(factor.numerator, int) or factor.numerator <= 0:
            return self.number / plain(other)
        return self * Ratio(factor.denominator, factor.numerator)

    def __rtruediv__(self, other: Any) -> Any:
        return plain(other) / self.number

    def __pow__(self, other: Any) -> Any:
        return self.number ** plain(other)

    def __rpow__(self, other: Any) -> Any:
        return plain(other) ** self.number

    def __mod__(self, other: Any) -> Any:
        return self.number % plain(other)

    def __rmod__(self, other: Any) -> Any:
        return plain(other) % self.number

    def __lt__(self, other: Any) -> Any:
        return _compare_ratios(self, other, operator.lt)

    def __le__(self, other: Any) -> Any:
        return _compare_ratios(self, other, operator.le)

    def __gt__(self, other: Any) -> Any:
        return _compare_ratios(self, other, operator.gt)

    def __ge__(self, other: Any) -> Any:
        return _compare_ratios(self, other, operator.ge)

    def __eq__(self, other: Any) -> Any:
        return _compare_ratios(self, other, operator.eq)

    def __ne__(self, other: Any) -> Any:
        return _compare_ratios(self, other, operator.ne)

    __radd__, __rmul__ = __add__, __mul__


def as_ratio(x: Any) -> Ratio | None:
    """A number as a ratio, None if it is not one."""
    if x is None or isinstance(x, Ratio):
        return x
    if isinstance(x, int | torch.SymInt):
        return Ratio(x)
    if not isinstance(x, float) or not math.isfinite(x):
        return None
    fraction = Fraction(str(x))
    if max(abs(fraction.numerator), fraction.denominator) > MAX_DENOMINATOR:
        return None
    return Ratio(fraction.numerator, fraction.denominator)


def plain(x: Any) -> Any:
    """A number as one of Python or torch, a ratio as float."""
    return x.number if isinstance(x, Ratio) else x


def extend_choice(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`function`, min or max of two integers, extended to ratios."""

    def call(a: Any, b: Any) -> Any:
        if not isinstance(a, Ratio) and not isinstance(b, Ratio):
            return function(a, b)
        return _apply_to_ratios(a, b, function)

    return call


def _apply_to_ratios(a: Any, b: Any, function: Callable[[Any, Any], Any]) -> Any:
    """function(a, b), where function(a * k, b * k) == function(a, b) * k."""
    numerators = _common_numerators(a, b)
    if numerators is None:
        return function(plain(a), plain(b))
    return Ratio(function(*numerators[:2]), numerators[2])


def _compare_ratios(a: Any, b: Any, function: Callable[[Any, Any], Any]) -> Any:
    numerators = _common_numerators(a, b)
    return function(plain(a), plain(b)) if numerators is None else function(*numerators[:2])


def _common_numerators(a: Any, b: Any) -> tuple[Any, Any, int] | None:
    """Numerators of two numbers and their common denominator; None if one is not a ratio."""
    a, b = as_ratio(a), as_ratio(b)
    if a is None or b is None:
        return None
    denominator = math.lcm(a.denominator, b.denominator)
    if denominator > MAX_DENOMINATOR:
        return None
    return a.numerator * (denominator // a.denominator), b.numerator * (denominator // b.denominator), denominator


SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool, Ratio)


def on_host(
    real: Callable[..., Any], symbolic: Callable[..., Any] | None = None, dtype: torch.dtype | None = None
) -> Callable[..., Any]:
    """A host function: `real` on arrays of numpy's dtypes, `symbolic` on each element if some are
    symbolic (None: compute on tensors). dtype: of the result, by default the first input's."""

    def call(*arrays: Any) -> Any:
        if not any(a.dtype == object for a in arrays):
            with np.errstate(all="ignore"):
                return np.asarray(real(*arrays))
        if symbolic is None:
            return NotImplemented
        result = elements(symbolic, *arrays)
        return result if dtype is None else Host.of(result, dtype)

    return call


def elements(function: Callable[..., Any], *arrays: Any) -> np.ndarray:
    """`function` applied elementwise to broadcast arrays, as an array of objects."""
    results = np.frompyfunc(function, len(arrays), 1)(*map(objects, arrays))
    return np.asarray(results, dtype=object)


def objects(array: np.ndarray) -> np.ndarray:
    """The array with Python numbers as elements."""
    if array.dtype not in (np.float16, np.float32):
        return array.astype(object)
    # 0.7, not 0.699999988: ten times the latter is 7 in float32 but less in Python's float64
    return np.asarray(np.frompyfunc(float, 1, 1)(array.astype(np.str_)), dtype=object)


def settled(condition: Any) -> Any:
    """A condition as a bool if it is equal for all sizes, else unchanged."""
    if isinstance(condition, bool) or statically_known_true(condition):
        return bool(condition)
    return False if statically_known_false(condition) else condition


def either(condition: Any, a: Any, b: Any) -> Any:
    """a if the condition is true, else b."""
    condition = settled(condition)
    if isinstance(condition, bool):
        return a if condition else b
    return torch.sym_ite(condition, plain(a), plain(b))
