"""Elementwise ONNX ops: arithmetic, comparisons, logic, bits."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.files.onnx.op_functions import Number, Ops
from demask.files.onnx.ops.math.host import either, elements, on_host, settled
from demask.files.onnx.ops.math.wide_unsigned import TOP, UNSIGNED, narrowed, quotient, widen, widened
from demask.files.onnx.size_fractions import Ratio, extend_choice, plain
from demask.files.onnx.values import TORCH, Host

OPS = Ops()


# -- of one input --------------------------------------------------------------------------------


def _rounded(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: Ratio(function(x))


def _one(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x)


for _name, _function, _host in (
    ("Abs", lambda x: x if x.dtype in UNSIGNED else torch.abs(x), on_host(np.abs, abs)),
    ("BitwiseNot", widened(torch.bitwise_not), on_host(np.invert)),
    ("Ceil", torch.ceil, on_host(np.ceil, _rounded(math.ceil))),
    ("Exp", torch.exp, on_host(np.exp)),
    ("Floor", torch.floor, on_host(np.floor, _rounded(math.floor))),
    ("Log", torch.log, on_host(np.log)),
    ("Neg", torch.neg, on_host(np.negative, operator.neg)),
    ("Not", torch.logical_not, on_host(np.logical_not, torch.sym_not)),
    ("Reciprocal", torch.reciprocal, on_host(np.reciprocal, lambda x: 1 / x)),
    ("Round", torch.round, on_host(np.rint, _rounded(round))),
    ("Sign", lambda x: (x != 0).to(x.dtype) if x.dtype in UNSIGNED else torch.sign(x), on_host(np.sign)),
    ("Sqrt", torch.sqrt, on_host(np.sqrt, lambda x: torch.sym_sqrt(plain(x)))),
):
    OPS(_name, host=_host)(_one(_function))

for _name in "Acos Acosh Asin Asinh Atan Atanh Cos Cosh Erf Sin Sinh Tan Tanh".split():
    OPS(_name)(_one(getattr(torch, _name.lower())))


def _readable(x: Tensor) -> Tensor:
    return x.to(torch.float32) if x.dtype.itemsize == 1 else x


OPS("IsNaN")(lambda x: torch.isnan(_readable(x)))


@OPS("IsInf")
def is_infinite(x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    """Whether each element is infinite, with one of the selected signs."""
    x = _readable(x)
    if detect_negative and detect_positive:
        return torch.isinf(x)
    if detect_negative or detect_positive:
        return torch.isposinf(x) if detect_positive else torch.isneginf(x)
    return torch.zeros_like(x, dtype=torch.bool)


# -- of two inputs -------------------------------------------------------------------------------


def _operand(x: Tensor, other: Any) -> Any:
    """A tensor, or a number if arithmetic of x with it has x's dtype, else it as a tensor."""
    if isinstance(other, Tensor):
        return other
    is_integer = not isinstance(other, float | torch.SymFloat)
    fits = x.dtype != torch.bool if is_integer else x.is_floating_point()
    return other if fits else torch.scalar_tensor(other, dtype=x.dtype, device=x.device)


def _pair(function: Callable[..., Tensor], mirrored: Callable[..., Tensor]) -> Any:
    """mirrored(b, a) == function(a, b)"""

    def call(a: Number, b: Number) -> Tensor:
        return function(a, _operand(a, b)) if isinstance(a, Tensor) else mirrored(b, _operand(b, a))

    return call


for _name, _function, _mirrored, _real in (
    ("Add", torch.add, torch.add, operator.add),
    ("Sub", torch.sub, torch.rsub, operator.sub),
    ("Mul", torch.mul, torch.mul, operator.mul),
):
    OPS(_name, host=on_host(_real, _real))(widened(_pair(_function, _mirrored)))


def _truth(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *numbers: settled(function(*numbers))


for _name, _function, _mirrored, _real in (
    ("Equal", torch.eq, torch.eq, operator.eq),
    ("Greater", torch.gt, torch.lt, operator.gt),
    ("GreaterOrEqual", torch.ge, torch.le, operator.ge),
    ("Less", torch.lt, torch.gt, operator.lt),
    ("LessOrEqual", torch.le, torch.ge, operator.le),
):
    _host = on_host(_real, _truth(_real), torch.bool)
    OPS(_name, host=_host)(widened(_pair(_function, _mirrored), ordered=True))


def _two(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, b: function(a, b)


for _name, _function, _host in (
    ("And", torch.logical_and, on_host(np.logical_and, _truth(operator.and_))),
    ("Or", torch.logical_or, on_host(np.logical_or, _truth(operator.or_))),
    ("Xor", torch.logical_xor, on_host(np.logical_xor)),
    ("BitwiseAnd", torch.bitwise_and, on_host(np.bitwise_and)),
    ("BitwiseOr", torch.bitwise_or, on_host(np.bitwise_or)),
    ("BitwiseXor", torch.bitwise_xor, on_host(np.bitwise_xor)),
):
    OPS(_name, host=_host)(_two(_function))


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
    b = _operand(a, b)
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


def _real_power(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.power(a, b).astype(a.dtype)


def _power(a: Any, b: Any) -> Any:
    return torch.sym_int(a**b) if _are_integers(a) else a**b


@OPS("Pow", host=on_host(_real_power, _power))
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


def _all(function: Callable[..., Tensor]) -> Any:
    def call(*xs: Number) -> Tensor:
        first, *others = sorted(xs, key=lambda x: not isinstance(x, Tensor))
        return reduce(function, others, first)

    return call


def _joined(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *xs: reduce(function, xs)


for _name, _function, _real, _each in (
    ("Max", _larger, np.maximum, extend_choice(torch.sym_max)),
    ("Min", _smaller, np.minimum, extend_choice(torch.sym_min)),
    ("Sum", torch.add, operator.add, operator.add),
):
    _host = on_host(_joined(_real), _joined(_each))
    OPS(_name, host=_host)(widened(_all(_function), ordered=True))

OPS("Mean")(lambda *xs: reduce(torch.add, xs) / len(xs))


def _host_clip(x: np.ndarray, min: Any = None, max: Any = None) -> Any:
    larger, smaller = extend_choice(torch.sym_max), extend_choice(torch.sym_min)
    for bound, real, each in ((min, np.maximum, larger), (max, np.minimum, smaller)):
        x = x if bound is None else on_host(real, each)(x, np.asarray(bound, x.dtype))
    return x


def _clip(x: Tensor, min: Number = None, max: Number = None) -> Tensor:
    """x clamped to at least `min`, then to at most `max`."""
    if isinstance(min, Tensor) or isinstance(max, Tensor):
        x = x if min is None else _larger(x, min)
        return x if max is None else _smaller(x, max)
    return x if min is None and max is None else torch.clamp(x, min, max)


OPS("Clip", host=_host_clip, stored=(1, 2))(widened(_clip, ordered=True))


def _host_where(condition: np.ndarray, a: np.ndarray, b: np.ndarray) -> Any:
    dtypes = [x.dtype for x in (a, b) if x.dtype != object]
    if condition.dtype != object and len(dtypes) == 2:
        return np.where(condition, a, b)
    result = elements(either, condition, a, b)
    floats = any(isinstance(x, float | torch.SymFloat | Ratio) for x in result.flat)
    dtype = TORCH.get(dtypes[0]) if dtypes else torch.float32 if floats else torch.int64
    return Host.of(result, dtype)


OPS("Where", host=_host_where)(lambda truth, a, b: torch.where(truth, a, b))
