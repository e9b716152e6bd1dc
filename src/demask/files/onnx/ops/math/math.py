"""Elementwise ONNX ops: arithmetic, comparisons, logic, bits. Unsigned integers of 16, 32 and 64 bits
are computed in int64: PyTorch has few kernels for them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import reduce, wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.files.onnx.op_functions import Number, Ops
from demask.files.onnx.values import TORCH, Host, Ratio, either, elements, extend_choice, on_host, plain, settled

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
TOP = torch.iinfo(torch.int64).min  # the sign bit
OPS = Ops()


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
        result = function(*(_widen_operand(x, dtype, ordered) for x in args), **named)
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


def _widen_operand(x: Any, dtype: torch.dtype, ordered: bool) -> Any:
    if isinstance(x, Tensor):
        return widen(x, ordered)
    if isinstance(x, int) and dtype == torch.uint64:
        return x + TOP if ordered else x - 2**64 * (x >= 2**63)
    return x


# -- of one input --------------------------------------------------------------------------------


def _as_ratio_function(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: Ratio(function(x))


def _unary(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x)


for _name, _function, _host in (
    ("Abs", lambda x: x if x.dtype in UNSIGNED else torch.abs(x), on_host(np.abs, abs)),
    ("BitwiseNot", widened(torch.bitwise_not), on_host(np.invert)),
    ("Ceil", torch.ceil, on_host(np.ceil, _as_ratio_function(math.ceil))),
    ("Exp", torch.exp, on_host(np.exp)),
    ("Floor", torch.floor, on_host(np.floor, _as_ratio_function(math.floor))),
    ("Log", torch.log, on_host(np.log)),
    ("Neg", torch.neg, on_host(np.negative, operator.neg)),
    ("Not", torch.logical_not, on_host(np.logical_not, torch.sym_not)),
    ("Reciprocal", torch.reciprocal, on_host(np.reciprocal, lambda x: 1 / x)),
    ("Round", torch.round, on_host(np.rint, _as_ratio_function(round))),
    ("Sign", lambda x: (x != 0).to(x.dtype) if x.dtype in UNSIGNED else torch.sign(x), on_host(np.sign)),
    ("Sqrt", torch.sqrt, on_host(np.sqrt, lambda x: torch.sym_sqrt(plain(x)))),
):
    OPS(_name, host=_host)(_unary(_function))

for _name in "Acos Acosh Asin Asinh Atan Atanh Cos Cosh Erf Sin Sinh Tan Tanh".split():
    OPS(_name)(_unary(getattr(torch, _name.lower())))


def _widen_float8(x: Tensor) -> Tensor:
    return x.to(torch.float32) if x.dtype.itemsize == 1 else x


OPS("IsNaN")(lambda x: torch.isnan(_widen_float8(x)))


@OPS("IsInf")
def is_infinite(x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    """Whether each element is infinite, with one of the selected signs."""
    x = _widen_float8(x)
    if detect_negative and detect_positive:
        return torch.isinf(x)
    if detect_negative or detect_positive:
        return torch.isposinf(x) if detect_positive else torch.isneginf(x)
    return torch.zeros_like(x, dtype=torch.bool)


# -- of two inputs -------------------------------------------------------------------------------


def _number_operand(x: Tensor, other: Any) -> Any:
    """A tensor, or a number if arithmetic of x with it has x's dtype, else it as a tensor."""
    if isinstance(other, Tensor):
        return other
    is_integer = not isinstance(other, float | torch.SymFloat)
    fits = x.dtype != torch.bool if is_integer else x.is_floating_point()
    return other if fits else torch.scalar_tensor(other, dtype=x.dtype, device=x.device)


def _commuted(function: Callable[..., Tensor], mirrored: Callable[..., Tensor]) -> Any:
    """mirrored(b, a) == function(a, b)"""

    def call(a: Number, b: Number) -> Tensor:
        return function(a, _number_operand(a, b)) if isinstance(a, Tensor) else mirrored(b, _number_operand(b, a))

    return call


for _name, _function, _mirrored, _real in (
    ("Add", torch.add, torch.add, operator.add),
    ("Sub", torch.sub, torch.rsub, operator.sub),
    ("Mul", torch.mul, torch.mul, operator.mul),
):
    OPS(_name, host=on_host(_real, _real))(widened(_commuted(_function, _mirrored)))


def _settled_function(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *numbers: settled(function(*numbers))


for _name, _function, _mirrored, _real in (
    ("Equal", torch.eq, torch.eq, operator.eq),
    ("Greater", torch.gt, torch.lt, operator.gt),
    ("GreaterOrEqual", torch.ge, torch.le, operator.ge),
    ("Less", torch.lt, torch.gt, operator.lt),
    ("LessOrEqual", torch.le, torch.ge, operator.le),
):
    _host = on_host(_real, _settled_function(_real), torch.bool)
    OPS(_name, host=_host)(widened(_commuted(_function, _mirrored), ordered=True))


def _binary(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, b: function(a, b)


for _name, _function, _host in (
    ("And", torch.logical_and, on_host(np.logical_and, _settled_function(operator.and_))),
    ("Or", torch.logical_or, on_host(np.logical_or, _settled_function(operator.or_))),
    ("Xor", torch.logical_xor, on_host(np.logical_xor)),
    ("BitwiseAnd", torch.bitwise_and, on_host(np.bitwise_and)),
    ("BitwiseOr", torch.bitwise_or, on_host(np.bitwise_or)),
    ("BitwiseXor", torch.bitwise_xor, on_host(np.bitwise_xor)),
):
    OPS(_name, host=_host)(_binary(_function))


@OPS("BitShift")
def shifted(x: Tensor, counts: Tensor, *, direction: str) -> Tensor:
    """x with its bits shifted; a shift by all bits or more leaves only the sign."""
    if direction not in ("LEFT", "RIGHT"):
        raise BadInput(f"expected direction LEFT or RIGHT, got {direction!r}")
    bits, dtype, signed = 8 * x.dtype.itemsize, x.dtype, x.dtype.is_signed
    x, counts = widen(x), widen(counts)
    # as ints: counts of uint8 cannot be compared with 0, nor those of int8 be negated
    in_range = (counts >= 0) & (counts < bits)
    counts = torch.where(in_range, counts, bits - 1)
    if direction == "LEFT":
        result = torch.where(in_range, x << counts, 0)
    elif dtype == torch.uint64:
        halves = ((x >> 1) & ~TOP) >> torch.clamp(counts - 1, min=0)
        result = torch.where(in_range, torch.where(counts == 0, x, halves), 0)
    else:
        result = x >> counts if signed else torch.where(in_range, x >> counts, 0)
    return narrowed(result, dtype)


def _are_integers(*numbers: Any) -> bool:
    return all(isinstance(x, int | torch.SymInt) for x in numbers)


def cut_quotient(a: Any, b: Any) -> Any:
    """a / b of numbers, some of them sizes; for integers rounded towards zero, as in C."""
    if not _are_integers(a, b):
        return a / b
    if settled(b > 0) is True and settled(a >= 0) is True:
        return a // b
    if settled(b > 0) is True and settled(a <= 0) is True:
        return -(-a // b)
    return math.trunc(a / b)


def _real_quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind == "f":
        return a / b
    return a // b + ((a % b != 0) & ((a < 0) != (b < 0))).astype(a.dtype)


@OPS("Div", host=on_host(_real_quotient, cut_quotient))
def divided(a: Tensor, b: Number) -> Tensor:
    """a / b; for integers rounded towards zero, as in C."""
    b = _number_operand(a, b)
    if a.is_floating_point():
        return torch.div(a, b)
    if a.dtype == torch.uint64:
        return quotient(a, b)
    return widened(torch.div)(a, b, rounding_mode="trunc")


def _host_remainder(a: np.ndarray, b: np.ndarray, *, fmod: int = 0) -> Any:
    if fmod:
        return on_host(np.fmod, lambda x, y: x - cut_quotient(x, y) * y)(a, b)
    return on_host(np.mod, operator.mod)(a, b)


@OPS("Mod", host=_host_remainder)
def remainder(a: Tensor, b: Tensor, *, fmod: int = 0) -> Tensor:
    """The remainder of a / b, with b's sign, or a's with `fmod`."""
    if a.dtype == torch.uint64:
        return narrowed(widen(a) - widen(quotient(a, b)) * widen(b), a.dtype)
    return widened(torch.fmod if fmod else torch.remainder)(a, b)


def _symbolic_power(a: Any, b: Any) -> Any:
    return torch.sym_int(a**b) if _are_integers(a) else a**b


@OPS("Pow", host=on_host(lambda a, b: np.power(a, b).astype(a.dtype), _symbolic_power))
def power(a: Tensor, b: Number) -> Tensor:
    """a to the power b, in a's dtype."""
    if isinstance(b, Tensor) and b.dtype != a.dtype:
        b = b.to(a.dtype) if a.is_floating_point() else widen(b)
    result = torch.pow(a, b)
    return result if result.dtype == a.dtype else result.to(a.dtype)


# -- of several inputs ---------------------------------------------------------------------------


def _larger(a: Tensor, b: Number) -> Tensor:
    return torch.maximum(a, b) if isinstance(b, Tensor) else torch.clamp(a, min=b)


def _smaller(a: Tensor, b: Number) -> Tensor:
    return torch.minimum(a, b) if isinstance(b, Tensor) else torch.clamp(a, max=b)


def _fold_tensors(function: Callable[..., Tensor]) -> Any:
    def call(*xs: Number) -> Tensor:
        first, *others = sorted(xs, key=lambda x: not isinstance(x, Tensor))
        return reduce(function, others, first)

    return call


def _fold_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *xs: reduce(function, xs)


for _name, _function, _real, _each in (
    ("Max", _larger, np.maximum, extend_choice(torch.sym_max)),
    ("Min", _smaller, np.minimum, extend_choice(torch.sym_min)),
    ("Sum", torch.add, operator.add, operator.add),
):
    _host = on_host(_fold_numbers(_real), _fold_numbers(_each))
    OPS(_name, host=_host)(widened(_fold_tensors(_function), ordered=True))

OPS("Mean")(lambda *xs: reduce(torch.add, xs) / len(xs))


def _host_clip(x: np.ndarray, min: Any = None, max: Any = None) -> Any:
    larger, smaller = extend_choice(torch.sym_max), extend_choice(torch.sym_min)
    for bound, real, each in ((min, np.maximum, larger), (max, np.minimum, smaller)):
        x = x if bound is None else on_host(real, each)(x, np.asarray(bound, x.dtype))
    return x


def _clip_tensor(x: Tensor, min: Number = None, max: Number = None) -> Tensor:
    """x clamped to at least `min`, then to at most `max`."""
    if isinstance(min, Tensor) or isinstance(max, Tensor):
        x = x if min is None else _larger(x, min)
        return x if max is None else _smaller(x, max)
    return x if min is None and max is None else torch.clamp(x, min, max)


OPS("Clip", host=_host_clip, stored=(1, 2))(widened(_clip_tensor, ordered=True))


def _host_where(condition: np.ndarray, a: np.ndarray, b: np.ndarray) -> Any:
    dtypes = [x.dtype for x in (a, b) if x.dtype != object]
    if condition.dtype != object and len(dtypes) == 2:
        return np.where(condition, a, b)
    result = elements(either, condition, a, b)
    floats = any(isinstance(x, float | torch.SymFloat | Ratio) for x in result.flat)
    dtype = TORCH.get(dtypes[0]) if dtypes else torch.float32 if floats else torch.int64
    return Host.of(result, dtype)


OPS("Where", host=_host_where)(lambda truth, a, b: torch.where(truth, a, b))
