"""Activations in LLVM IR, each within 4 units in the last place or within torch's own error.

Non-finite inputs give the same as torch: NaN stays NaN, whatever its payload, and 0 * inf is NaN.
Every exponential is of a number <= 0, so none overflows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llvmlite import ir

from demask.errors import BadInput
from demask.ops.activations import ACTIVATIONS, Act, Activation

if TYPE_CHECKING:
    from demask.kernels.llvm.emitter import Emitter, Value

LN2_HIGH = 0.693145751953125  # ln 2 in 17 bits: n * LN2_HIGH is exact
#: (e**r - 1 - r) / r**2, a polynomial in r for |r| <= ln 2 / 2: a least-squares fit, weighted until
#: errors are equal, 3.1e-9 of e**r
EXP_COEFFICIENTS = (
    0.49999993447711044,
    0.16666520630902493,
    0.041668388062218426,
    0.008368716954755606,
    0.0013814597848218549,
)
#: e**(x * x / 2) * normal_cdf(-x) is t * (c0 + c1 t + ...) with a relative error of 3.5e-9, where
#: t = 1 / (1 + 0.3 x) and 0 <= x <= 14.5; a least-squares fit, weighted until errors are equal
TAIL = 0.3
TAIL_COEFFICIENTS = (
    0.11968669001752870,
    0.11957180958211397,
    0.11023546304679867,
    0.07838946061014362,
    0.09615740375209456,
    -0.07942459282050272,
    0.19178589553225590,
    -0.22821464196729496,
    0.11243606353458509,
    -0.02062355301757861,
)


def activated(e: Emitter, x: Value, act: Act | None) -> Value:
    """act(x) of a vector of float32; x if there is no activation."""
    return x if act is None else LOWERINGS[act[0]](e, x, *act[1])


def _relu(e: Emitter, x: Value) -> Value:
    return e.larger(x, e.splat(0.0))


def _clamp(e: Emitter, x: Value, lowest: float, highest: float) -> Value:
    return e.smaller(e.larger(x, e.splat(lowest)), e.splat(highest))


def _leaky_relu(e: Emitter, x: Value, factor: float) -> Value:
    scaled = e.b.fmul(x, e.splat(factor))
    return e.b.select(e.b.fcmp_ordered(">", x, e.splat(0.0)), x, scaled)


def _elu(e: Emitter, x: Value, alpha: float) -> Value:
    """x above 0, else alpha * (e**x - 1)."""
    power, power_minus_1 = reduced_exponential(e, e.larger(e.smaller(x, e.splat(0.0)), e.splat(-80.0)), 0)
    below = e.elementwise("copysign", e.fma(power, power_minus_1, e.b.fsub(power, e.splat(1.0))), x)
    is_above = e.b.fcmp_ordered(">", x, e.splat(0.0))
    return e.b.select(is_above, x, e.b.fmul(below, e.splat(alpha)))


def _selu(e: Emitter, x: Value) -> Value:
    """Of Klambauer et al. 2017."""
    return e.b.fmul(_elu(e, x, 1.6732632423543772), e.splat(1.0507009873554805))


def _hardsigmoid(e: Emitter, x: Value) -> Value:
    sixth = e.b.fmul(e.b.fadd(x, e.splat(3.0)), e.splat(1 / 6))
    return _clamp(e, sixth, 0.0, 1.0)


def _hardswish(e: Emitter, x: Value) -> Value:
    return e.b.fmul(x, _hardsigmoid(e, x))


def _sigmoid(e: Emitter, x: Value) -> Value:
    return _logistic(e, x, e.splat(1.0))


def _silu(e: Emitter, x: Value) -> Value:
    return _logistic(e, x, x)


def _logistic(e: Emitter, x: Value, factor: Value) -> Value:
    """factor / (1 + e**-x), as factor * z / (1 + z) with z = e**x where x is negative."""
    z = exponential(e, e.b.fneg(e.elementwise("fabs", x)))
    negative = e.b.fcmp_ordered("<", x, e.splat(0.0))
    top = e.b.select(negative, e.b.fmul(factor, z), factor)
    return e.b.fdiv(top, e.b.fadd(e.splat(1.0), z))


def _mish(e: Emitter, x: Value) -> Value:
    """x tanh(ln(1 + e**x)) == x p / (p + q), where nothing cancels: of z = e**-|x|, p = z (z + 2) and
    q = 2 where x is negative, else p = 1 + 2 z and q = 2 z z."""
    b = e.b
    z = exponential(e, b.fneg(e.elementwise("fabs", x)))
    double, negative = b.fadd(z, z), b.fcmp_ordered("<", x, e.splat(0.0))
    p = b.select(negative, e.fma(z, z, double), b.fadd(double, e.splat(1.0)))
    q = b.select(negative, e.splat(2.0), b.fmul(double, z))
    return b.fdiv(b.fmul(x, p), b.fadd(p, q))


def _tanh(e: Emitter, x: Value) -> Value:
    """m / (m + 2) with m = e**2|x| - 1, and the sign of x: nothing cancels near 0."""
    magnitude = e.smaller(e.elementwise("fabs", x), e.splat(10.0))
    power, power_minus_1 = reduced_exponential(e, e.b.fadd(magnitude, magnitude), 0)
    m = e.fma(power, power_minus_1, e.b.fsub(power, e.splat(1.0)))
    return e.elementwise("copysign", e.b.fdiv(m, e.b.fadd(m, e.splat(2.0))), x)


def _gelu(e: Emitter, x: Value) -> Value:
    """x * normal_cdf(x), with the tail of the CDF as e**(-x * x / 2) * polynomial."""
    b, one = e.b, e.splat(1.0)
    magnitude = e.smaller(e.elementwise("fabs", x), e.splat(16.0))
    half = b.fmul(magnitude, e.splat(0.5))
    square = b.fmul(magnitude, half)
    rounding = e.fma(magnitude, half, b.fneg(square))
    t = b.fdiv(one, e.fma(magnitude, e.splat(TAIL), one))
    tail = e.splat(TAIL_COEFFICIENTS[-1])
    for coefficient in TAIL_COEFFICIENTS[-2::-1]:
        tail = e.fma(tail, t, e.splat(coefficient))
    power = exponential(e, b.fneg(square))
    power = e.fma(power, b.fneg(rounding), power)
    tail = b.fmul(b.fmul(tail, t), power)
    negative = b.fcmp_ordered("<", x, e.splat(0.0))
    return b.fmul(x, b.select(negative, tail, b.fsub(one, tail)))


def _gelu_tanh(e: Emitter, x: Value) -> Value:
    """0.5 x (1 + tanh(u)) = x / (1 + e**-2u), u = sqrt(2 / pi) (x + 0.044715 x**3)."""
    double = 2 * math.sqrt(2 / math.pi)
    cubic = e.fma(e.b.fmul(x, x), e.splat(0.044715 * double), e.splat(double))
    return _logistic(e, e.b.fmul(x, cubic), x)


def exponential(e: Emitter, x: Value) -> Value:
    """e**x of x <= 0, within 2 units in the last place; 0 below -104."""
    exponent_shift = 64  # 2**n itself may be too small for a normal number
    power, power_minus_1 = reduced_exponential(e, e.larger(x, e.splat(-104.0)), exponent_shift)
    shifted = e.fma(power_minus_1, power, power)
    return e.b.fmul(shifted, e.splat(2.0**-exponent_shift))


def reduced_exponential(e: Emitter, x: Value, exponent_shift: int) -> tuple[Value, Value]:
    """2**(n + exponent_shift) and e**r - 1, where x = n ln 2 + r and |r| <= ln 2 / 2.

    Requires -127 < n + exponent_shift < 128. Adding 1.5 * 2**23 rounds n and leaves n +
    exponent_shift + 127, the bits of the power, in the lowest bits of the sum. e**r - 1 is NaN for
    NaN.
    """
    b, magic = e.b, e.splat(12582912.0 + 127 + exponent_shift)
    shifted = e.fma(x, e.splat(1 / math.log(2)), magic)
    n = b.fsub(shifted, magic)
    r = e.fma(n, e.splat(-LN2_HIGH), x)
    r = e.fma(n, e.splat(LN2_HIGH - math.log(2)), r)
    y = e.splat(EXP_COEFFICIENTS[-1])
    for coefficient in EXP_COEFFICIENTS[-2::-1]:
        y = e.fma(y, r, e.splat(coefficient))
    power_minus_1 = e.fma(b.fmul(y, r), r, r)
    bits = b.shl(b.bitcast(shifted, e.ints), ir.Constant(e.ints, [23] * e.lanes))
    return b.bitcast(bits, e.vector), power_minus_1


#: name in `ops.activations` -> function (emitter, vector, *parameters) -> vector
LOWERINGS: dict[str, Callable[..., Any]] = {
    "relu": _relu,
    "sigmoid": _sigmoid,
    "tanh": _tanh,
    "hardswish": _hardswish,
    "hardsigmoid": _hardsigmoid,
    "silu": _silu,
    "mish": _mish,
    "leaky_relu": _leaky_relu,
    "elu": _elu,
    "selu": _selu,
    "clamp": _clamp,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
}


def register(activation: Activation, llvm: Callable[..., Any]) -> None:
    """Add an activation and its LLVM lowering (emitter, vector, *parameters) -> vector.

    Triton compiles functions from the text of their files, so it has no lowering for it: on a GPU,
    torch computes the activation after the product.

    Raises:
        BadInput: the name is in use.
    """
    if activation.name in ACTIVATIONS:
        raise BadInput(f"expected an unused activation name, got {activation.name!r}")
    LOWERINGS[activation.name] = llvm
    ACTIVATIONS[activation.name] = activation
