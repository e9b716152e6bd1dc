"""ONNX functions that replace functions of torch's exporter that are inaccurate or slow."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch

from demask.numerics import rms_norm_eps

aten = torch.ops.aten
RMS_NORMS = 23  # the first op set with RMSNormalization


def functions(opset: int | None = None) -> dict[Any, Any]:
    """Functions for torch's exporter, by op. opset: of the file. Default: the exporter's, an older one."""
    norms = {aten.rms_norm.default: rms_norm} if opset is None or opset < RMS_NORMS else {}
    return norms | {
        aten.amax.default: lambda self, dim=(), keepdim=False: extreme("Max", self, dim, keepdim),
        aten.amin.default: lambda self, dim=(), keepdim=False: extreme("Min", self, dim, keepdim),
        aten.clamp.default: clamp,
        aten.clamp_max.default: lambda self, max: clamp(self, None, max),
        aten.clamp_min.default: lambda self, min: clamp(self, min),
        aten.div.Scalar_mode: divide,
        aten.div.Tensor_mode: divide,
        aten.expm1.default: expm1,
        aten.floor_divide.default: lambda self, other: divide(self, other, "floor"),
        aten.fmod.Scalar: fmod,
        aten.fmod.Tensor: fmod,
        aten.log1p.default: log1p,
        aten.log_sigmoid.default: log_sigmoid,
        aten.logaddexp.default: logaddexp,
        aten.sort.default: sort,
        aten.sort.stable: sort,
        operator.floordiv: divide_sizes,
    }


def rms_norm(self: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """x / sqrt(mean(x²) + eps) · weight over the last axes; of half precisions in float32, as torch computes it."""
    op = _opset()
    is_half = self.dtype.bitwidth < 32
    x = op.Cast(self, to=1) if is_half else self
    axes = op.Constant(value_ints=list(range(-len(normalized_shape), 0)))
    square = op.ReduceMean(op.Mul(x, x), axes, keepdims=1)
    added = rms_norm_eps(torch.float64 if self.dtype.bitwidth == 64 else torch.float32) if eps is None else eps
    added = op.Constant(value_float=added) if is_half else _constant_like(op, added, self)
    x = op.Div(x, op.Sqrt(op.Add(square, added)))
    if weight is not None:
        x = op.Mul(x, op.CastLike(weight, x) if is_half else weight)
    return op.CastLike(x, self) if is_half else x


def divide_sizes(self: Any, other: Any) -> Any:
    """a // b of sizes, which rounds down; Div rounds towards zero, so -(-a // b) would be wrong."""
    op = _opset()
    self, other = (op.Constant(value_int=x) if isinstance(x, int) else x for x in (self, other))
    return op.Div(op.Sub(self, op.Mod(self, other)), other)


def extreme(name: str, self: Any, dim: Any, keepdim: bool) -> Any:
    """The largest or smallest number along some axes; along all of them without `dim`, which the
    exporter's own function needs."""
    op = _opset()
    axes = op.Constant(value_ints=list(dim)) if dim else None
    return getattr(op, f"Reduce{name}")(self, axes, keepdims=int(keepdim))


def clamp(self: Any, min: Any = None, max: Any = None) -> Any:
    """clamp(x, a, b) == Clip(x, a, b), which runtimes fuse; Max or Min for one bound, because ONNX
    Runtime's Clip replaces an absent bound by the largest finite number."""
    op = _opset()
    low, high = (None if bound is None else _constant_like(op, bound, self) for bound in (min, max))
    if low is None or high is None:
        return op.Min(self, high) if low is None else op.Max(self, low)
    return op.Clip(self, low, high)


def divide(self: Any, other: Any, rounding_mode: str | None = None) -> Any:
    """a / b, rounded down or towards zero. Integers are not converted to floats, which have only 24
    bits of precision."""
    op = _opset()
    if not hasattr(other, "dtype"):
        other = _constant_like(op, other, self)
    if rounding_mode is None:
        return op.Div(self, other)
    zero = _constant_like(op, 0, self)
    if rounding_mode == "trunc":
        ratio = op.Div(self, other)  # truncates integers
        is_integer = self.dtype.is_integer()
        return ratio if is_integer else op.Where(op.Less(ratio, zero), op.Ceil(ratio), op.Floor(ratio))
    rest = fmod(self, other)
    ratio = op.Div(op.Sub(self, rest), other)
    signs = op.Xor(op.Less(rest, zero), op.Less(other, zero))
    below = op.And(op.Not(op.Equal(rest, zero)), signs)
    ratio = op.Where(below, op.Sub(ratio, _constant_like(op, 1, self)), ratio)
    if self.dtype.is_integer():
        return ratio
    # (a - rest) / b is an integer, except for its rounding.
    floor = op.Floor(op.Add(ratio, _constant_like(op, 0.5, self)))
    return op.Where(op.Equal(other, zero), op.Div(self, other), floor)


def fmod(self: Any, other: Any) -> Any:
    """The remainder of a / b rounded towards zero. For integers it is computed from Div:
    ONNX Runtime's Mod(fmod=1) converts them to floats."""
    op = _opset()
    if not hasattr(other, "dtype"):
        other = _constant_like(op, other, self)
    if not self.dtype.is_integer():
        return op.Mod(self, other, fmod=1)
    return op.Sub(self, op.Mul(op.Div(self, other), other))


def log_sigmoid(self: Any) -> Any:
    """log(sigmoid(x)) == -softplus(-x), which is finite where sigmoid(x) is 0."""
    op = _opset()
    return op.Neg(op.Softplus(op.Neg(self)))


def logaddexp(self: Any, other: Any) -> Any:
    """log(exp(a) + exp(b)) == max(a, b) + log(1 + exp(-|a - b|)), where no power is infinite."""
    op = _opset()
    larger = op.Max(self, other)
    distance = op.Where(op.Equal(self, other), _constant_like(op, 0.0, self), op.Abs(op.Sub(self, other)))
    return op.Add(larger, op.Softplus(op.Neg(distance)))


def log1p(self: Any) -> Any:
    """log(1 + x) == x · log(u) / (u - 1) where u = 1 + x rounded, and x where u is 1.

    Goldberg, "What every computer scientist should know about floating-point arithmetic", 1991.
    """
    op = _opset()
    one = _constant_like(op, 1.0, self)
    near = op.Add(self, one)
    # At infinity the quotient is NaN; there and below -1 the plain logarithm is exact.
    ratio = op.Mul(op.Log(near), op.Div(self, op.Sub(near, one)))
    exact = op.Where(op.Equal(near, one), self, ratio)
    return op.Where(op.Less(op.Abs(self), one), exact, op.Log(near))


def expm1(self: Any) -> Any:
    """exp(x) - 1 == x · (u - 1) / log(u) where u = exp(x) rounded, and x where u is 1.

    Higham, "Accuracy and stability of numerical algorithms", section 1.14.1.
    """
    op = _opset()
    one = _constant_like(op, 1.0, self)
    power = op.Exp(self)
    ratio = op.Mul(op.Sub(power, one), op.Div(self, op.Log(power)))
    exact = op.Where(op.Equal(power, one), self, ratio)
    return op.Where(op.Less(op.Abs(self), one), exact, op.Sub(power, one))


def sort(self: Any, dim: int = -1, descending: bool = False, *, stable: Any = None) -> Any:
    """Sorted values and their indices, by TopK over the full axis, which is stable."""
    import onnx_ir as ir

    op = _opset()
    if not self.shape.rank():
        return op.Identity(self), op.Constant(value=ir.tensor(np.zeros((), np.int64)))
    kind = self.dtype
    narrow = kind is ir.DataType.BOOL or (kind.is_integer() and kind.bitwidth < 32)
    keys = op.Cast(self, to=ir.DataType.INT32) if narrow else self
    count = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]))
    values, indices = op.TopK(keys, count, axis=dim, largest=int(descending), sorted=1)
    return (op.Cast(values, to=kind) if narrow else values), indices


def _opset() -> Any:
    from onnxscript import opset18

    return opset18


def _constant_like(op: Any, number: Any, x: Any) -> Any:
    """A number as a constant of x's dtype, rounded once (not through float32); a value known only
    at run time is cast."""
    import onnx_ir as ir

    if isinstance(number, ir.Value):
        return op.CastLike(number, x)
    array = torch.tensor(number, dtype=torch.float64).numpy().astype(x.dtype.numpy())
    return op.Constant(value=ir.tensor(array, dtype=x.dtype))
