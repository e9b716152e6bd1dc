"""ONNX ops on quantized tensors. Sums of integers are exact: float64 represents all below 2^53.

Integers of 2 and 4 bits are stored as int8 or uint8, floats of 4 and 6 bits as float32, so result
types are passed as numbers of ONNX's element types.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from demask.errors import BadInput
from demask.files.onnx.op_functions import Ops
from demask.files.onnx.ops.math.cast import cast
from demask.files.onnx.ops.nn.linear import convolution
from demask.files.onnx.read.tensors import DTYPES, NARROW
from demask.ops import quantization as quantize
from demask.ops.quantization import broadcast_scale

OPS = Ops()
UINT8 = 2
NUMBERS = {dtype: number for number, dtype in DTYPES.items()}
#: least and largest number of an element type
RANGES = {
    2: (0, 255),
    3: (-128, 127),
    4: (0, 65535),
    5: (-32768, 32767),
    21: (0, 15),
    22: (-8, 7),
    25: (0, 3),
    26: (-2, 1),
}
FLOATS = (17, 18, 19, 20, 23, 27, 28)  # of 8, 4 and 6 bits


def spread(scale: Tensor, x: Tensor, axis: int, block_size: int) -> Tensor:
    """A scale or zero point in a shape that broadcasts with x: one number, one per position on an
    axis, or one per block of positions."""
    if not block_size or scale.ndim == 0 or scale.shape == (1,):
        return broadcast_scale(scale, x, axis)
    if block_size < 0 or scale.ndim != x.ndim:
        raise BadInput(
            f"expected a scale for each block of {x.ndim} axes, got one of {scale.ndim}, for blocks of {block_size}"
        )
    return scale.repeat_interleave(block_size, axis).narrow(axis, 0, x.shape[axis])


def quantized(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    axis: int = 1,
    block_size: int = 0,
    to: int = UINT8,
    precision: int = 0,
    saturate: bool = True,
) -> Tensor:
    """saturate(round(x / scale) + zero_point) in element type `to`; half is rounded to even.

    The division is in the dtype of `scale`, or of `precision`. saturate: for 8-bit floats, whether
    overflow becomes the largest number instead of infinity or NaN.
    """
    dtype = DTYPES[precision] if precision else scale.dtype
    if dtype not in (torch.float16, torch.bfloat16, torch.float64):
        dtype = torch.float32
    ratio = x.to(dtype) / spread(scale.to(dtype), x, axis, block_size)
    if zero_point is not None:
        zero_point = spread(zero_point.to(torch.float32), x, axis, block_size)
    return fitted(ratio, zero_point, to, saturate)


def fitted(ratio: Tensor, zero_point: Tensor | None, to: int, saturate: bool = True) -> Tensor:
    """A ratio, rounded for integer types, plus the zero point, in element type `to`."""
    ratio = ratio.to(torch.promote_types(ratio.dtype, torch.float32))
    rounded = ratio.round() if to in RANGES else ratio
    shifted = rounded if zero_point is None else rounded + zero_point
    if to in RANGES:
        return shifted.clamp(*RANGES[to]).to({**DTYPES, **NARROW}[to])
    if to not in FLOATS:
        raise BadInput(f"expected a type of few bits, got ONNX's number {to}")
    return cast(shifted, to=to, saturate=int(saturate))


def dequantized(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int = 1, block_size: int = 0, to: int = 0
) -> Tensor:
    """(x - zero_point) * scale, computed in float32 or wider, in the dtype of `scale` or `to`."""
    dtype = DTYPES[to] if to else scale.dtype
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise BadInput(f"expected an output of 16 or 32 bits, got {dtype}; set output_dtype")
    compute_dtype = torch.promote_types(dtype, torch.float32)
    if zero_point is not None:
        integer_dtype = torch.float32 if x.is_floating_point() else torch.int32
        x = x.to(integer_dtype) - spread(zero_point.to(integer_dtype), x, axis, block_size)
    return (x.to(compute_dtype) * spread(scale.to(compute_dtype), x, axis, block_size)).to(dtype)


@OPS("QuantizeLinear", stored=(1, 2))
def quantize_linear(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: int = 0,
    saturate: int = 1,
) -> Tensor:
    """x quantized, by default in the type of the zero point; as one op of demask's own if that
    supports it."""
    default_type = UINT8 if zero_point is None else NUMBERS[zero_point.dtype]
    to = output_dtype or default_type
    dtype = str(DTYPES.get(to)).removeprefix("torch.")
    plain = scale.is_floating_point() and scale.ndim < 2 and not (precision or block_size)
    if dtype in quantize.DTYPES and plain and to == default_type:
        return quantize.quantize(x, scale, zero_point, axis, dtype)
    return quantized(x, scale, zero_point, axis, block_size, to, precision, bool(saturate))


@OPS("DequantizeLinear", stored=(0, 1, 2))
def dequantize_linear(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
) -> Tensor:
    """x dequantized; as one op of demask's own if that supports it."""
    plain = scale.is_floating_point() and scale.ndim < 2 and not (output_dtype or block_size)
    if x.dtype in (*quantize.DTYPES.values(), torch.int32) and plain:
        return quantize.dequantize(x, scale, zero_point, axis)
    return dequantized(x, scale, zero_point, axis, block_size, output_dtype)


@OPS("DynamicQuantizeLinear")
def dynamic_quantize_linear(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x in uint8, with the scale and zero point that cover its range."""
    least, most = x.amin().clamp(max=0), x.amax().clamp(min=0)
    scale = torch.where(most == least, 1.0, (most - least) / 255)  # as onnxruntime
    zero_point = (-least / scale).clamp(0, 255).round()
    return quantized(x, scale, zero_point), scale, zero_point.to(torch.uint8)


def _subtract_zero_point(x: Tensor, zero_point: Tensor | None, axis: int | None = None) -> Tensor:
    """x - zero_point in float64. axis: of x, for a zero point with one axis."""
    x = x.to(torch.float64)
    if zero_point is None:
        return x
    return x - _broadcast_scale(zero_point, x, axis).to(torch.float64)


def _subtract_zero_point_of_weights(w: Tensor, zero_point: Tensor | None, axis: int) -> Tensor:
    """w - zero_point in float64, by a product that shows zeros of integers that are not folded."""
    centered = _subtract_zero_point(w, zero_point, axis)
    return centered if zero_point is None else centered * (w != _broadcast_scale(zero_point, w, axis))


def _broadcast_scale(scale: Tensor, x: Tensor, axis: int | None) -> Tensor:
    if scale.ndim != 1 or scale.shape[0] == 1 or axis is None:
        return scale.reshape(()) if scale.ndim == 1 and scale.shape[0] == 1 else scale
    return scale.reshape([-1 if k == axis % x.ndim else 1 for k in range(x.ndim)])


def _wrap_to_int32(x: Tensor) -> Tensor:
    """Integers in int32, with wrap-around."""
    return x.to(torch.int64).to(torch.int32)


@OPS("MatMulInteger")
def matmul_integer(
    a: Tensor, b: Tensor, a_zero_point: Tensor | None = None, b_zero_point: Tensor | None = None
) -> Tensor:
    """(a - a_zero_point) @ (b - b_zero_point) in int32; zero points are one number, or one per row
    of a and per column of b."""
    a_axis = -2 if a.ndim > 1 else None
    return _wrap_to_int32(
        _subtract_zero_point(a, a_zero_point, a_axis) @ _subtract_zero_point_of_weights(b, b_zero_point, -1)
    )


@OPS("QLinearMatMul", stored=(1, 2, 3, 4, 5, 6, 7))
def qlinear_matmul(
    a: Tensor,
    a_scale: Tensor,
    a_zero_point: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_zero_point: Tensor,
    y_scale: Tensor,
    y_zero_point: Tensor,
) -> Tensor:
    """The product of two quantized matrices, quantized."""
    a_axis = -2 if a.ndim > 1 else None
    product = _subtract_zero_point(a, a_zero_point, a_axis) @ _subtract_zero_point_of_weights(b, b_zero_point, -1)
    scales = [s.to(torch.float32) for s in (a_scale, b_scale, y_scale)]
    scale = _broadcast_scale(scales[0], product, a_axis) * _broadcast_scale(scales[1], product, -1) / scales[2]
    return _requantize(product, scale, y_zero_point)


def _requantize(product: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """product * scale, computed in float32 as in onnxruntime, in the type of the zero point."""
    ratio = product.to(torch.float32) * scale
    return fitted(ratio, zero_point.to(torch.float32), NUMBERS[zero_point.dtype])


@OPS("ConvInteger")
def conv_integer(
    x: Tensor,
    w: Tensor,
    x_zero_point: Tensor | None = None,
    w_zero_point: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """A convolution of integers, in int32; padding is x's zero point."""
    return _wrap_to_int32(
        convolution(
            _subtract_zero_point(x, x_zero_point),
            _subtract_zero_point_of_weights(w, w_zero_point, 0),
            auto_pad=auto_pad,
            dilations=dilations,
            group=group,
            kernel_shape=kernel_shape,
            pads=pads,
            strides=strides,
        )
    )


@OPS("QLinearConv", stored=(1, 2, 3, 4, 5, 6, 7, 8))
def qlinear_conv(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_zero_point: Tensor,
    y_scale: Tensor,
    y_zero_point: Tensor,
    bias: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """A convolution of quantized tensors, quantized. bias: int32, in units of x_scale * w_scale."""
    product = convolution(
        _subtract_zero_point(x, x_zero_point),
        _subtract_zero_point_of_weights(w, w_zero_point, 0),
        None if bias is None else bias.to(torch.float64),
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )
    scale = x_scale * _broadcast_scale(w_scale, product, 1) / y_scale
    return _requantize(product, scale, y_zero_point)
