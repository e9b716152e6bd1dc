"""Activations in Triton, with the formulas of `kernels.llvm.activations`, in float32."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from demask.kernels.llvm import activations as formulas

INVERSE_LN2 = tl.constexpr(1 / math.log(2))
LN2_HIGH = tl.constexpr(formulas.LN2_HIGH)
LN2_LOW = tl.constexpr(math.log(2) - formulas.LN2_HIGH)
DOUBLE_ROOT = tl.constexpr(2 * math.sqrt(2 / math.pi))
TAIL = tl.constexpr(formulas.TAIL)
TAIL_COEFFICIENTS = tl.constexpr(formulas.TAIL_COEFFICIENTS)
#: the activations that `activated` computes
NAMES = (
    "relu",
    "leaky_relu",
    "clamp",
    "sigmoid",
    "silu",
    "mish",
    "tanh",
    "hardsigmoid",
    "hardswish",
    "gelu",
    "gelu_tanh",
)


@triton.jit
def activated(x, ACT: tl.constexpr, first, second):
    """act(x) in float32. ACT: a name in `ops.activations`; first, second: parameters. Keeps NaN."""
    if ACT == "relu":
        x = tl.where(x < 0, 0.0, x)
    elif ACT == "leaky_relu":
        x = tl.where(x > 0, x, first * x)
    elif ACT == "clamp":
        x = tl.where(x < first, first, tl.where(x > second, second, x))
    elif ACT == "sigmoid":
        x = logistic(x, 1.0)
    elif ACT == "silu":
        x = logistic(x, x)
    elif ACT == "mish":
        x = mish(x)
    elif ACT == "tanh":
        x = tanh(x)
    elif ACT == "hardsigmoid":
        x = gate(x)
    elif ACT == "hardswish":
        x = x * gate(x)
    elif ACT == "gelu":
        x = gelu(x)
    elif ACT == "gelu_tanh":
        x = logistic(x * (DOUBLE_ROOT + (0.044715 * DOUBLE_ROOT) * (x * x)), x)
    else:
        tl.static_assert(ACT == "", "no such activation")
    return x


@triton.jit
def logistic(x, factor):
    """factor / (1 + e**-x), as factor * z / (1 + z) with z = e**x where x is negative."""
    z = small_exp(-tl.abs(x))
    return tl.where(x < 0, factor * z, factor) / (1.0 + z)


@triton.jit
def mish(x):
    """x tanh(ln(1 + e**x)) == x p / (p + q), as `kernels.llvm.activations._mish`."""
    z = small_exp(-tl.abs(x))
    p = tl.where(x < 0, z * z + 2.0 * z, 1.0 + 2.0 * z)
    return x * p / (p + tl.where(x < 0, 2.0, 2.0 * z * z))


@triton.jit
def tanh(x):
    """m / (m + 2) with m = e**2|x| - 1, and the sign of x: nothing cancels near 0."""
    magnitude = tl.abs(x)
    magnitude = tl.where(magnitude > 10, 10.0, magnitude)
    power, power_minus_1 = reduced(magnitude + magnitude, tl.constexpr(0))
    m = power * power_minus_1 + (power - 1.0)
    m = m / (m + 2.0)
    return tl.where(x == 0, x, tl.where(x < 0, -m, m))


@triton.jit
def gelu(x):
    """x * normal_cdf(x), with the tail of the CDF as e**(-x * x / 2) * polynomial."""
    magnitude = tl.abs(x)
    magnitude = tl.where(magnitude > 16, 16.0, magnitude)
    half = 0.5 * magnitude
    square = magnitude * half
    power = small_exp(-square)
    power -= power * tl.fma(magnitude, half, -square)
    t = 1.0 / (1.0 + TAIL * magnitude)
    tail = t * TAIL_COEFFICIENTS[9] + TAIL_COEFFICIENTS[8]
    for k in tl.static_range(7, -1, -1):  # pyright: ignore[reportGeneralTypeIssues]
        tail = t * tail + TAIL_COEFFICIENTS[k]
    tail *= t * power
    return x * tl.where(x < 0, tail, 1.0 - tail)


@triton.jit
def small_exp(x):
    """e**x of x <= 0; 0 below -104."""
    power, power_minus_1 = reduced(tl.where(x < -104, -104.0, x), tl.constexpr(64))
    return (1.0 + power_minus_1) * power * 5.421010862427522e-20  # 2**-64


@triton.jit
def reduced(x, ROOM: tl.constexpr):
    """2**(n + ROOM) and e**r - 1 of x = n ln 2 + r, as `kernels.llvm.activations._reduced`."""
    shifted = x * INVERSE_LN2 + (12582912.0 + 127 + ROOM)
    n = shifted - (12582912.0 + 127 + ROOM)
    r = x - n * LN2_HIGH
    r = r - n * LN2_LOW
    y = r * (1 / 5040) + 1 / 720
    y = y * r + 1 / 120
    y = y * r + 1 / 24
    y = y * r + 1 / 6
    y = y * r + 1 / 2
    power = (shifted.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)
    return power, y * r * r + r


@triton.jit
def gate(x):
    """(x + 3) / 6, clamped to 0 and 1."""
    x = (x + 3.0) / 6.0
    return tl.where(x < 0, 0.0, tl.where(x > 1, 1.0, x))
