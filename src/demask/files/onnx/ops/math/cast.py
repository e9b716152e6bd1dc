"""ONNX ops that change a tensor's dtype.

Integers of 2 and 4 bits are stored as int8 or uint8, floats of 4 and 6 bits as float32, with values
of the smaller type only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.files.onnx.op_functions import Ops, Value
from demask.files.onnx.read.reader import DTYPES
from demask.files.onnx.values import NUMPY, Host, Ratio, either, elements, settled

OPS = Ops()
TEXT = 8
_SMALL_INTS = {21: (torch.uint8, 4), 22: (torch.int8, 4), 25: (torch.uint8, 2), 26: (torch.int8, 2)}
_FLOATS8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)


@dataclass(frozen=True, slots=True)
class SmallFloat:
    """A float format without infinities or NaN. mantissa_bits: without the leading one. least: the
    smallest exponent. largest: the largest number."""

    mantissa_bits: int
    least: int
    largest: float

    def __call__(self, x: Tensor) -> Tensor:
        """x rounded to this format, half to even, as float32."""
        x = x.to(torch.float32)
        exponent = torch.clamp(torch.frexp(x).exponent - 1, min=self.least) - self.mantissa_bits
        step = torch.ldexp(torch.ones_like(x), exponent)
        rounded = torch.clamp(torch.round(x / step) * step, -self.largest, self.largest)
        return torch.where(torch.isnan(x), -0.0, rounded)  # as in ml_dtypes


#: float4e2m1, float6e2m3, float6e3m2
_SMALL_FLOATS = {23: SmallFloat(1, 0, 6.0), 27: SmallFloat(3, 0, 7.5), 28: SmallFloat(2, -2, 28.0)}


def dtype_of(number: int) -> torch.dtype:
    """torch's dtype of an ONNX element type; BadInput if it has none."""
    if number not in DTYPES:
        raise BadInput(f"expected an element type that PyTorch has, got ONNX's number {number}")
    return DTYPES[number]


def _cast_element(x: Any, dtype: torch.dtype) -> Any:
    """A number as the Python number of a dtype: a bool, an int or a float."""
    if dtype == torch.bool:
        return settled(x != 0)
    if isinstance(x, bool | torch.SymBool):
        x = either(x, 1, 0)
    if dtype.is_floating_point:
        return Ratio(x) if isinstance(x, int | torch.SymInt) else x
    return x if isinstance(x, int | torch.SymInt) else math.trunc(x)


def _parse_number(text: str, dtype: torch.dtype) -> Any:
    if dtype.is_floating_point:
        return float(text)
    return int(text) if text.strip().lstrip("+-").isdigit() else int(float(text))


def _host_cast(x: np.ndarray, *, to: int, saturate: int = 1, round_mode: str = "up") -> Any:
    dtype = DTYPES.get(to)
    text = x.dtype.kind == "U" or isinstance(next(x.flat, None), str)
    if text and to == TEXT:
        return x
    if text and dtype is not None:
        numbers = [_parse_number(str(e), dtype) for e in x.flat]
        return torch.tensor(numbers, dtype=dtype).reshape(x.shape)
    if dtype is None or dtype not in NUMPY or dtype.is_complex:
        return NotImplemented
    if x.dtype == object:
        return Host.of(elements(lambda e: _cast_element(e, dtype), x), dtype)
    with np.errstate(all="ignore"):
        return x.astype(NUMPY[dtype])


@OPS("Cast", host=_host_cast)
def cast(x: Tensor, *, to: int, saturate: int = 1, round_mode: str = "up") -> Tensor | Host:
    """x in another dtype; numbers beyond an 8-bit float become its largest if `saturate`."""
    if to == TEXT:
        return Host.of(np.array([str(n) for n in _number_texts(x)], dtype=object).reshape(x.shape))
    if to in _SMALL_FLOATS:
        return _SMALL_FLOATS[to](x)
    if to in _SMALL_INTS:
        return _truncate_to_bits(x, *_SMALL_INTS[to])
    dtype = dtype_of(to)
    if dtype == torch.float8_e8m0fnu:
        return _power_of_two(x, bool(saturate), round_mode)
    return _cast_to(x, dtype, bool(saturate))


def _cast_to(x: Tensor, dtype: torch.dtype, saturate: bool) -> Tensor:
    if dtype not in _FLOATS8:
        return x if x.dtype == dtype else x.to(dtype)
    x = x if x.is_floating_point() and x.dtype.itemsize > 1 else x.to(torch.float32)
    if saturate:
        largest = torch.finfo(dtype).max
        x = torch.clamp(x, -largest, largest)
    elif dtype == torch.float8_e4m3fn:  # numbers up to 464 round to the largest, 448
        x = torch.where(torch.abs(x) > 464, torch.nan, x)
    return x.to(dtype)


def _truncate_to_bits(x: Tensor, dtype: torch.dtype, bits: int) -> Tensor:
    low = x.to(torch.int32) & (2**bits - 1)
    if dtype.is_signed:
        low = low - ((low >> (bits - 1)) << bits)
    return low.to(dtype)


def _power_of_two(x: Tensor, saturate: bool, round_mode: str) -> Tensor:
    """x as float8e8m0: its exponent in 8 bits, rounded; 255 for NaN."""
    if round_mode not in ("up", "down", "nearest"):
        raise BadInput(f"expected round_mode up, down or nearest, got {round_mode!r}")
    bits = x.to(torch.float32).view(torch.int32)
    exponent, fraction = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    least = {"up": 1, "down": 0x800000, "nearest": 0x400000}[round_mode]
    exponent = torch.where(exponent == 0xFF, exponent, exponent + (fraction >= least).int())
    if saturate:
        exponent = torch.where(torch.isnan(x), exponent, torch.clamp(exponent, max=0xFE))
    return exponent.to(torch.uint8).view(torch.float8_e8m0fnu)


def _number_texts(x: Tensor) -> list[str]:
    return list(np.asarray(x.detach().cpu()).reshape(-1).astype(np.str_))


@OPS("CastLike")
def cast_like(
    x: Value, like: Value, *, to: int = 0, saturate: int = 1, round_mode: str = "up", as_tensor: Any
) -> Tensor | Host:
    """x in the dtype of `like`, or of `to`, a dtype that torch lacks (`read.reader.with_types`)."""
    if like is None or isinstance(like, list):
        raise BadInput("expected a tensor whose dtype to use, got none")
    if isinstance(like, Host) and like.dtype is None:
        return cast(as_tensor(x), to=TEXT)
    to = to or next(number for number, dtype in DTYPES.items() if dtype == like.dtype)
    if isinstance(x, Host) and x.folds:
        host = _host_cast(x.array, to=to)
        if host is not NotImplemented:
            return host if isinstance(host, Host | Tensor) else Host.of(host)
    return cast(as_tensor(x), to=to, saturate=saturate, round_mode=round_mode)


@OPS("BitCast")
def bit_cast(x: Tensor, *, to: int) -> Tensor:
    """The same bits as another dtype of the same size."""
    dtype = dtype_of(to)
    if dtype.itemsize != x.dtype.itemsize:
        raise BadInput(f"expected a dtype of {8 * x.dtype.itemsize} bits, got {dtype}")
    return x.view(dtype)
