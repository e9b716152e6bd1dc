"""ONNX ops on quantized tensors. Sums of integers are exact: float64 holds each below 2^53.

Types of 2 and 4 bits are held as int8 or uint8, floats of 4 and 6 bits as float32, so the element
type of what is made is ONNX's number.
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
from demask.ops.quantization import along

OPS = Ops()
UINT8 = 2
NUMBERS = {dtype: number for number, dtype in DTYPES.items()}
#: least and largest number of an element type
RANGES = {
    2: (0, 255), 3: (-128, 127), 4: (0, 65535), 5: (-32768, 32767),
    21: (0, 15), 22: (-8, 7), 25: (0, 3), 26: (-2, 1),
}  # fmt: skip
FLOATS = (17, 18, 19, 20, 23, 27, 28)  # of 8 bits, and of 4 and 6


def spread(scale: Tensor, x: Tensor, axis: int, block_size: int) -> Tensor:
    """A scale (or zero point) in a shape that goes with x: one number, one for each place on an
    axis, or one for each block of places."""
    if not block_size or scale.ndim == 0 or scale.shape == (1,):
        return along(scale, x, axis)
    if block_size < 0 or scale.ndim != x.ndim:
        raise BadInput(
            f"expected a scale for each block of {x.ndim} axes, got one of {scale.ndim}, for "
            f"blocks of {block_size}"
        )
    return scale.repeat_interleave(block_size, axis).narrow(axis, 0, x.shape[axis])


def quantized(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int = 1, block_size: int = 0,
    to: int = UINT8, precision: int = 0, saturate: bool = True,
) -> Tensor:  # fmt: skip
    """saturate(round(x / scale) + zero_point) in an element type; half is rounded to even.

    The division is in the type of `scale`, or in the one that `precision` tells. saturate: for
    8-bit floats alone, the largest number instead of infinity or NaN.
    """
    wide = DTYPES[precision] if precision else scale.dtype
    if wide not in (torch.float16, torch.bfloat16, torch.float64):
        wide = torch.float32
    ratio = x.to(wide) / spread(scale.to(wide), x, axis, block_size)
    if zero_point is not None:
        zero_point = spread(zero_point.to(torch.float32), x, axis, block_size)
    return fitted(ratio, zero_point, to, saturate)


def fitted(ratio: Tensor, zero_point: Tensor | None, to: int, saturate: bool = True) -> Tensor:
    """A ratio, rounded if it becomes a whole number, and moved by the zero point, in an element
    type."""
    ratio = ratio.to(torch.promote_types(ratio.dtype, torch.float32))
    whole = ratio.round() if to in RANGES else ratio
    moved = whole if zero_point is None else whole + zero_point
    if to in RANGES:
        return moved.clamp(*RANGES[to]).to({**DTYPES, **NARROW}[to])
    if to not in FLOATS:
        raise BadInput(f"expected a type of few bits, got ONNX's number {to}")
    return cast(moved, to=to, saturate=int(saturate))


def dequantized(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int = 1, block_size: int = 0,
    to: int = 0,
) -> Tensor:  # fmt: skip
    """(x - zero_point) * scale, multiplied in float32, in the type of `scale` or of `to`."""
    made = DTYPES[to] if to else scale.dtype
    if made not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise BadInput(f"expected an output of 16 or 32 bits, got {made}; output_dtype tells it")
    wide = torch.promote_types(made, torch.float32)
    if zero_point is not None:
        whole = torch.float32 if x.is_floating_point() else torch.int32
        x = x.to(whole) - spread(zero_point.to(whole), x, axis, block_size)
    return (x.to(wide) * spread(scale.to(wide), x, axis, block_size)).to(made)


@OPS("QuantizeLinear", stored=(1, 2))
def quantize_linear(
    x: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, axis: int = 1,
    block_size: int = 0, output_dtype: int = 0, precision: int = 0, saturate: int = 1,
) -> Tensor:  # fmt: skip
    """x in few bits. The type is the zero point's where no attribute tells it. Whole, as an op of
    demask's own, where that is one."""
    told = UINT8 if zero_point is None else NUMBERS[zero_point.dtype]
    to = output_dtype or told
    dtype = str(DTYPES.get(to)).removeprefix("torch.")
    plain = scale.is_floating_point() and scale.ndim < 2 and not (precision or block_size)
    if dtype in quantize.DTYPES and plain and to == told:
        return quantize.quantize(x, scale, zero_point, axis, dtype)
    return quantized(x, scale, zero_point, axis, block_size, to, precision, bool(saturate))


@OPS("DequantizeLinear", stored=(0, 1, 2))
def dequantize_linear(
    x: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, axis: int = 1,
    block_size: int = 0, output_dtype: int = 0,
) -> Tensor:  # fmt: skip
    """The numbers that x in few bits stands for. Whole, as an op of demask's own, where that is
    one."""
    plain = scale.is_floating_point() and scale.ndim < 2 and not (output_dtype or block_size)
    if x.dtype in (*quantize.DTYPES.values(), torch.int32) and plain:
        return quantize.dequantize(x, scale, zero_point, axis)
    return dequantized(x, scale, zero_point, axis, block_size, output_dtype)


@OPS("DynamicQuantizeLinear")
def dynamic_quantize_linear(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x in uint8, with the scale and the zero point that make the most of its range."""
    least, most = x.amin().clamp(max=0), x.amax().clamp(min=0)
    scale = torch.where(most == least, 1.0, (most - least) / 255)  # as onnxruntime
    zero_point = (-least / scale).clamp(0, 255).round()
    return quantized(x, scale, zero_point), scale, zero_point.to(torch.uint8)


def _centred(x: Tensor, zero_point: Tensor | None, axis: int | None = None) -> Tensor:
    """x - zero_point in float64; axis: the one that a zero point of one axis goes along."""
    x = x.to(torch.float64)
    if zero_point is None:
        return x
    return x - _along(zero_point, x, axis).to(torch.float64)


def _along(scale: Tensor, x: Tensor, axis: int | None) -> Tensor:
    if scale.ndim != 1 or scale.shape[0] == 1 or axis is None:
        return scale.reshape(()) if scale.ndim == 1 and scale.shape[0] == 1 else scale
    return scale.reshape([-1 if k == axis % x.ndim else 1 for k in range(x.ndim)])


def _int32(x: Tensor) -> Tensor:
    """Whole numbers in int32, which wraps around."""
    return x.to(torch.int64).to(torch.int32)


@OPS("MatMulInteger")
def matmul_integer(
    a: Tensor, b: Tensor, a_zero_point: Tensor | None = None, b_zero_point: Tensor | None = None
) -> Tensor:
    """(a - a_zero_point) @ (b - b_zero_point); zero points are one number, or one for each row of a
    and each column of b."""
    a_axis = -2 if a.ndim > 1 else None
    return _int32(_centred(a, a_zero_point, a_axis) @ _centred(b, b_zero_point, -1))


@OPS("QLinearMatMul", stored=(1, 2, 3, 4, 5, 6, 7))
def qlinear_matmul(
    a: Tensor, a_scale: Tensor, a_zero_point: Tensor, b: Tensor, b_scale: Tensor,
    b_zero_point: Tensor, y_scale: Tensor, y_zero_point: Tensor,
) -> Tensor:  # fmt: skip
    """The product of two quantized matrices, quantized."""
    a_axis = -2 if a.ndim > 1 else None
    product = _centred(a, a_zero_point, a_axis) @ _centred(b, b_zero_point, -1)
    scales = [s.to(torch.float32) for s in (a_scale, b_scale, y_scale)]
    scale = _along(scales[0], product, a_axis) * _along(scales[1], product, -1) / scales[2]
    return _requantized(product, scale, y_zero_point)


def _requantized(product: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """product * scale, in float32 as onnxruntime does it, in the type of the zero point."""
    ratio = product.to(torch.float32) * scale
    return fitted(ratio, zero_point.to(torch.float32), NUMBERS[zero_point.dtype])


@OPS("ConvInteger")
def conv_integer(
    x: Tensor, w: Tensor, x_zero_point: Tensor | None = None, w_zero_point: Tensor | None = None, *,
    auto_pad: str = "NOTSET", dilations: Sequence[int] | None = None, group: int = 1,
    kernel_shape: Sequence[int] | None = None, pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """A convolution of whole numbers; padding is x's zero point."""
    return _int32(convolution(
        _centred(x, x_zero_point), _centred(w, w_zero_point, 0), auto_pad=auto_pad,
        dilations=dilations, group=group, kernel_shape=kernel_shape, pads=pads, strides=strides,
    ))  # fmt: skip


@OPS("QLinearConv", stored=(1, 2, 3, 4, 5, 6, 7, 8))
def qlinear_conv(
    x: Tensor, x_scale: Tensor, x_zero_point: Tensor, w: Tensor, w_scale: Tensor,
    w_zero_point: Tensor, y_scale: Tensor, y_zero_point: Tensor, bias: Tensor | None = None, *,
    auto_pad: str = "NOTSET", dilations: Sequence[int] | None = None, group: int = 1,
    kernel_shape: Sequence[int] | None = None, pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """A convolution of quantized tensors, quantized. bias: int32, in units of x_scale * w_scale."""
    product = convolution(
        _centred(x, x_zero_point), _centred(w, w_zero_point, 0),
        None if bias is None else bias.to(torch.float64), auto_pad=auto_pad, dilations=dilations,
        group=group, kernel_shape=kernel_shape, pads=pads, strides=strides,
    )  # fmt: skip
    scale = x_scale * _along(w_scale, product, 1) / y_scale
    return _requantized(product, scale, y_zero_point)
