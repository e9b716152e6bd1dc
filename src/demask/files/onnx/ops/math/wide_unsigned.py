"""Arithmetic on unsigned integers of 16, 32 and 64 bits in int64: PyTorch has few kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
TOP = torch.iinfo(torch.int64).min  # the sign bit


def widened(function: Callable[..., Any], ordered: bool = False) -> Callable[..., Any]:
    """`function`, computed in int64 for unsigned integers.

    uint64 is converted bit by bit, for arithmetic modulo 2**64, or monotonically if `ordered`, for
    comparisons. int64 results are converted back.
    """

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        dtype = next((x.dtype for x in args if isinstance(x, Tensor) and x.dtype in UNSIGNED), None)
        if dtype is None:
            return function(*args, **named)
        result = function(*(_number(x, dtype, ordered) for x in args), **named)
        return narrowed(result, dtype, ordered) if result.dtype == torch.int64 else result

    return call


def widen(x: Tensor, ordered: bool = False) -> Tensor:
    """x, in int64 if it is unsigned."""
    if x.dtype == torch.uint64:
        return x.view(torch.int64) ^ TOP if ordered else x.view(torch.int64)
    return x.to(torch.int64) if x.dtype in UNSIGNED else x


def narrowed(x: Tensor, dtype: torch.dtype, ordered: bool = False) -> Tensor:
    """The inverse of `widen`."""
    if dtype == torch.uint64:
        return (x ^ TOP if ordered else x).view(dtype)
    return x.to(dtype)


def quotient(a: Tensor, b: Tensor) -> Tensor:
    """a / b of uint64, rounded down (Warren, Hacker's Delight, 9-3)."""
    a, b = widen(a), widen(b)
    is_small = b > 0  # for other b the quotient is 0 or 1
    result = torch.div((a >> 1) & ~TOP, torch.where(is_small, b, 1), rounding_mode="floor") << 1
    result = result + _is_at_least(a - result * b, b).to(torch.int64)
    return narrowed(torch.where(is_small, result, _is_at_least(a, b).to(torch.int64)), torch.uint64)


def _is_at_least(a: Tensor, b: Tensor) -> Tensor:
    return (a ^ TOP) >= (b ^ TOP)


def _number(x: Any, dtype: torch.dtype, ordered: bool) -> Any:
    if isinstance(x, Tensor):
        return widen(x, ordered)
    if isinstance(x, int) and dtype == torch.uint64:
        return x + TOP if ordered else x - 2**64 * (x >= 2**63)
    return x
