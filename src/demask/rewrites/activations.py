"""Activations written as several calls, as torch's single op.

One call reads and writes memory once, and can be fused with a layer. Equal up to rounding.
"""

from __future__ import annotations

from math import isclose
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from demask.graph.value import Value
from demask.rewrites.rule import Phase, case, rule

aten = torch.ops.aten
LINEAR = 20  # tanh(x) is 1 above, so that it does not matter whether softplus(x) is x there
SIXTH = 1e-6  # largest relative error of 1/6 in float32
X = (2, 4)


def _clamped(x: Tensor, high: float) -> Tensor:
    return torch.clamp(x + high / 2, 0, high)


@rule(
    aten.mul.Tensor,
    cases=(case(lambda x: x * x.sigmoid(), X), case(lambda x: x.sigmoid() * x, X)),
    refused=(case(lambda x, y: y * x.sigmoid(), X, X), case(lambda x: x * x.float().sigmoid(), X)),
    exact=False,
)
def silu(out: Value, a: Any, b: Any) -> Value | None:
    """x * sigmoid(x) == silu(x)"""
    return _gated(out, a, b, aten.sigmoid.default, aten.silu.default)


@rule(
    aten.mul.Tensor,
    cases=(case(lambda x: x * F.hardsigmoid(x), X), case(lambda x: F.hardsigmoid(x) * x, X)),
    refused=(case(lambda x, y: y * F.hardsigmoid(x), X, X),),
    exact=False,
)
def hardswish(out: Value, a: Any, b: Any) -> Value | None:
    """x * hardsigmoid(x) == hardswish(x)"""
    return _gated(out, a, b, aten.hardsigmoid.default, aten.hardswish.default)


@rule(
    aten.mul.Tensor,
    cases=(case(lambda x: x * F.softplus(x).tanh(), X), case(lambda x: F.softplus(x).tanh() * x, X)),
    refused=(
        case(lambda x, y: y * F.softplus(x).tanh(), X, X),
        case(lambda x: x * F.softplus(x, 2).tanh(), X),
        case(lambda x: x * F.softplus(x, threshold=0).tanh(), X),
        case(lambda x: x * F.silu(x).tanh(), X),
        case(lambda x: x * F.softplus(x), X),
        case(lambda x: x * 2, X),
    ),
    exact=False,
)
def mish(out: Value, a: Value, b: Any) -> Value | None:
    """x * tanh(softplus(x)) == mish(x)"""
    x, gate = (a, b) if isinstance(b, Value) and b.calls(aten.tanh.default) else (b, a)
    if not gate.calls(aten.tanh.default):
        return None
    plus = gate.arg("self")
    if not plus.calls(aten.softplus.default) or plus.arg("self") != x:
        return None
    if plus.arg("beta") != 1 or plus.arg("threshold") < LINEAR:
        return None
    return out.call(aten.mish.default, x)


def _gated(out: Value, a: Any, b: Any, gate: Any, op: Any) -> Value | None:
    """An op of x for x times the gate of x, of the dtype of x."""
    for x, other in ((a, b), (b, a)):
        if isinstance(other, Value) and other.calls(gate) and other.arg("self") == x and x.dtype == out.dtype:
            return out.call(op, x)
    return None


@rule(
    aten.mul.Tensor,
    aten.div.Tensor,
    cases=(case(lambda x: x * _clamped(x, 6) / 6, X), case(lambda x: _clamped(x, 6) * x * (1 / 6), X)),
    refused=(
        case(lambda x: x * _clamped(x, 6) / 5, X),
        case(lambda x: _clamped(x, 6) / x / 6, X),
        case(lambda x: x * _clamped(x, 4) / 6, X),
        case(lambda x, y: y * _clamped(x, 6) / 6, X, X),
    ),
    exact=False,
)
def hardswish_of_six(out: Value, x: Any, number: Any) -> Value | None:
    """x * clamp(x + 3, 0, 6) / 6 == hardswish(x)"""
    product = _scaled(out)
    if product is None or not product.calls(aten.mul.Tensor):
        return None
    a, b = product.arg("self"), product.arg("other")
    for factor, other in ((a, b), (b, a)):
        if _center(other, 6) == factor and isinstance(factor, Value) and factor.dtype == out.dtype:
            return out.call(aten.hardswish.default, factor)
    return None


@rule(
    aten.mul.Tensor,
    aten.div.Tensor,
    cases=(case(lambda x: _clamped(x, 6) / 6, X), case(lambda x: _clamped(x, 6) * (1 / 6), X)),
    refused=(
        case(lambda x: _clamped(x, 4) / 6, X),
        case(lambda x: torch.clamp(x + 2, 0, 6) / 6, X),
        case(lambda x: torch.clamp(x + 3, 0, 5) / 6, X),
        case(lambda x: torch.clamp(x + 3, min=0) / 6, X),
        case(lambda x: torch.clamp(torch.add(x, 3, alpha=2), 0, 6) / 6, X),
        case(lambda x: _clamped(x, 6) / 3, X),
        case(lambda x: _clamped(x, 6) * 6, X),
    ),
    exact=False,
)
def hardsigmoid_of_six(out: Value, x: Any, number: Any) -> Value | None:
    """clamp(x + 3, 0, 6) / 6 == hardsigmoid(x)"""
    return _hardsigmoid(out, _center(_scaled(out), 6))


@rule(
    aten.clamp.default,
    cases=(case(lambda x: _clamped(x / 6, 1), X), case(lambda x: _clamped(x * float(torch.tensor(1 / 6)), 1), X)),
    refused=(case(lambda x: _clamped(x / 6, 2), X), case(lambda x: _clamped(x * 0.2, 1), X)),
    exact=False,
    tolerance=SIXTH,
)
def hardsigmoid_of_one(out: Value, x: Value, low: Any, high: Any) -> Value | None:
    """clamp(x / 6 + 1/2, 0, 1) == hardsigmoid(x)"""
    return _hardsigmoid(out, _scaled(_center(out, 1)))


def _hardsigmoid(out: Value, x: Value | None) -> Value | None:
    return None if x is None or x.dtype != out.dtype else out.call(aten.hardsigmoid.default, x)


def _center(value: Any, high: int) -> Value | None:
    """The x of clamp(x + high / 2, 0, high)."""
    if not isinstance(value, Value) or not value.calls(aten.clamp.default):
        return None
    total = value.arg("self")
    if (value.arg("min"), value.arg("max")) != (0, high) or not total.calls(aten.add.Tensor):
        return None
    x, number = total.arg("self"), total.arg("other")
    return x if isinstance(x, Value) and number == high / 2 and total.arg("alpha") == 1 else None


def _scaled(value: Value | None) -> Value | None:
    """The x of x / 6."""
    if value is None or not value.calls(aten.div.Tensor, aten.mul.Tensor):
        return None
    x, number = value.arg("self"), value.arg("other")
    if not isinstance(x, Value) or not isinstance(number, int | float):
        return None
    return x if isclose(number, 6 if value.calls(aten.div.Tensor) else 1 / 6, rel_tol=SIXTH) else None


ACTIVATIONS = Phase("activations", (silu, hardswish, mish, hardswish_of_six, hardsigmoid_of_six, hardsigmoid_of_one))
