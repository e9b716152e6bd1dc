"""Quantization as two custom ops, which graphs and files preserve.

As ATen arithmetic no runtime would recognize it; as QuantizeLinear and DequantizeLinear it selects
the layers that ONNX Runtime computes in integers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from demask.errors import BadInput
from demask.ops import schema
from demask.ops.custom import CustomOp
from demask.ops.entry import Case, Entry
from demask.ops.entry import Shape as S
from demask.ops.schema import fake
from demask.registry import CUSTOM_OPS

#: The dtypes of quantized values, by name. Ops take the name: for a number that a file has in the
#: place of a dtype, torch looks up a kernel, and crashes if there is none.
DTYPES = {"uint8": torch.uint8, "int8": torch.int8, "int16": torch.int16, "uint16": torch.uint16}


def dtype_of(name: str) -> torch.dtype:
    """The dtype with a name; raises BadInput for one that is not in DTYPES."""
    if name not in DTYPES:
        raise BadInput(f"expected one of {', '.join(DTYPES)} to quantize to, got {name!r}")
    return DTYPES[name]


def broadcast_scale(scale: Tensor, x: Tensor, axis: int) -> Tensor:
    """A scale (or zero point) in a shape that broadcasts with x: of one element, or of one per
    position of an axis. Raises BadInput for other shapes."""
    if scale.ndim == 0 or (scale.ndim == 1 and scale.shape[0] == 1):
        return scale.reshape(())
    if scale.ndim != 1 or not -x.ndim <= axis < x.ndim or scale.shape[0] != x.shape[axis]:
        raise BadInput(
            f"expected a scale per position of axis {axis} of {list(x.shape)}, got one of {list(scale.shape)}"
        )
    sizes = [1] * x.ndim
    sizes[axis] = -1
    return scale.reshape(sizes)


def quantize_values(x: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int, dtype: str) -> Tensor:
    """saturate(round(x / scale) + zero_point) in a dtype; rounds half to even."""
    integer_type = dtype_of(dtype)
    float_type = torch.float64 if scale.dtype == torch.float64 else torch.float32
    rounded = (x.to(scale.dtype) / broadcast_scale(scale, x, axis)).to(float_type).round()
    if zero_point is not None:
        rounded = rounded + broadcast_scale(zero_point.to(float_type), x, axis)
    limits = torch.iinfo(integer_type)
    return rounded.clamp(limits.min, limits.max).to(integer_type)


def dequantize_values(x: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int) -> Tensor:
    """(x - zero_point) * scale in the dtype of `scale`, multiplied in float32 at least."""
    if x.is_floating_point() or x.is_complex() or not scale.is_floating_point():
        raise BadInput(f"expected integers and a floating-point scale, got {x.dtype} and {scale.dtype}")
    if zero_point is not None:
        x = x.to(torch.int32) - broadcast_scale(zero_point.to(torch.int32), x, axis)
    float_type = torch.float64 if scale.dtype == torch.float64 else torch.float32
    return (x.to(float_type) * broadcast_scale(scale.to(float_type), x, axis)).to(scale.dtype)


@torch.library.custom_op("demask::quantize", mutates_args=())
def quantize(x: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int, dtype: str) -> Tensor:
    """`quantize_values` as an op."""
    return quantize_values(x, scale, zero_point, axis, dtype)


@torch.library.custom_op("demask::dequantize", mutates_args=())
def dequantize(x: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int) -> Tensor:
    """`dequantize_values` as an op."""
    return dequantize_values(x, scale, zero_point, axis)


@quantize.register_fake
def _(x: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int, dtype: str) -> Tensor:
    _check(x, scale, zero_point, axis)
    return torch.empty_like(x, dtype=dtype_of(dtype))


@dequantize.register_fake
def _(x: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int) -> Tensor:
    _check(x, scale, zero_point, axis)
    return torch.empty_like(x, dtype=scale.dtype)


def _check(x: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int) -> None:
    """Raise BadInput for scales and zero points that do not broadcast with x."""
    broadcast_scale(scale, x, axis)
    if zero_point is not None:
        broadcast_scale(zero_point, x, axis)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save the arguments of `dequantize` for its gradient."""
    *tensors, ctx.axis = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of the arguments of `dequantize`: the scale's; None for the others."""
    x, scale, zero_point = ctx.saved_tensors
    with torch.enable_grad():
        scale = scale.detach().requires_grad_()
        output = dequantize_values(x, scale, zero_point, ctx.axis)
        (scale_gradient,) = torch.autograd.grad(output, scale, gradient)
    return None, scale_gradient, None, None


dequantize.register_autograd(_gradients, setup_context=_save_inputs)

CUSTOM_OPS.register("quantize", CustomOp(quantize_values))
CUSTOM_OPS.register("dequantize", CustomOp(dequantize_values))


def _line(node: fx.Node) -> str:
    """Elementwise; a scale with one element per position of an axis has that axis."""
    call_arguments = schema.arguments(node)
    x, *other_sizes = (schema.sizes(fake(o.value)) for o in schema.operands(node))
    rank, axis = len(x), call_arguments["axis"]
    axes = [f"a{k}" for k in range(rank)]
    others = [axes[axis] if len(sizes) == 1 and sizes != (1,) else "1" * len(sizes) for sizes in other_sizes]
    whole = " ".join(axes)
    return f"{', '.join([whole, *others])} -> {whole}"


_POINT, _ONE = S((), True, 9), S((), True, "positive")
_EACH, _POINTS = S((3,), True, "positive"), S((3,), True, 9)
ENTRIES = [
    (
        "demask.quantize.default",
        Entry(
            _line,
            cases=(
                Case((S((2, 3, 4)), _ONE, None, 1, "int8"), {}),
                Case((S((2, 3, 4)), _ONE, _POINT, 1, "uint8"), {}),
                Case((S((2, 3, 4)), _EACH, _POINTS, 1, "uint8"), {}),
                Case((S((2, 4, 3)), _EACH, None, -1, "uint16"), {}),
            ),
        ),
    ),
    (
        "demask.dequantize.default",
        Entry(
            _line,
            cases=(
                Case((S((2, 3, 4), of=200), _ONE, None, 1), {}),
                Case((S((2, 3, 4), of=200), _ONE, _POINT, 1), {}),
                Case((S((2, 3, 4), of=200), _EACH, _POINTS, 1), {}),
                Case((S((2, 4, 3), of=200), _EACH, None, -1), {}),
            ),
        ),
    ),
]
