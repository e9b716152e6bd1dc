"""Unsigned numbers of 16, 32 and 64 bits, for which PyTorch has few kernels, as int64."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
TOP = torch.iinfo(torch.int64).min  # the sign bit


def widened(function: Callable[..., Any], ordered: bool = False) -> Callable[..., Any]:
    """`function`, and for unsigned numbers `function` in int64.

    uint64 keeps its bits, which serves arithmetic modulo 2**64; where `ordered` it keeps its order
    instead. Tensors of int64 that come out are made unsigned again.
    """

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        dtype = next((x.dtype for x in args if isinstance(x, Tensor) and x.dtype in UNSIGNED), None)
        if dtype is None:
            return function(*args, **named)
        made = function(*(_number(x, dtype, ordered) for x in args), **named)
        return narrowed(made, dtype, ordered) if made.dtype == torch.int64 else made

    return call


def widen(x: Tensor, ordered: bool = False) -> Tensor:
    """x as it is, or in int64 if it is unsigned."""
    if x.dtype == torch.uint64:
        return x.view(torch.int64) ^ TOP if ordered else x.view(torch.int64)
    return x.to(torch.int64) if x.dtype in UNSIGNED else x


def narrowed(x: Tensor, dtype: torch.dtype, ordered: bool = False) -> Tensor:
    """What `widen` made, unsigned again."""
    if dtype == torch.uint64:
        return (x ^ TOP if ordered else x).view(dtype)
    return x.to(dtype)


def quotient(a: Tensor, b: Tensor) -> Tensor:
    """a / b cut to a whole number, of uint64 (Hacker's Delight, 9-3)."""
    a, b = widen(a), widen(b)
    low = b > 0  # of the others only 0 or 1 can come out
    halves = torch.div((a >> 1) & ~TOP, torch.where(low, b, 1), rounding_mode="floor") << 1
    halves = halves + _reaches(a - halves * b, b).to(torch.int64)
    return narrowed(torch.where(low, halves, _reaches(a, b).to(torch.int64)), torch.uint64)


def _reaches(a: Tensor, b: Tensor) -> Tensor:
    return (a ^ TOP) >= (b ^ TOP)


def _number(x: Any, dtype: torch.dtype, ordered: bool) -> Any:
    if isinstance(x, Tensor):
        return widen(x, ordered)
    if isinstance(x, int) and dtype == torch.uint64:
        return x + TOP if ordered else x - 2**64 * (x >= 2**63)
    return x
