"""Quantization as two ops of demask's own, so that it stays whole in graphs and files.

In ATen ops it is arithmetic that no runtime knows again; as QuantizeLinear and DequantizeLinear it
tells ONNX Runtime which layers to run on whole numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from demask.errors import BadInput
from demask.ops import schema
from demask.ops.custom import Own
from demask.ops.entry import Case, Entry
from demask.ops.entry import Shape as S
from demask.registry import CUSTOM_OPS

#: what a value can be quantized to, by name. Ops take the name: torch looks up kernels by whatever
#: number stands in a file for a dtype, and crashes where it has none.
DTYPES = {"uint8": torch.uint8, "int8": torch.int8, "int16": torch.int16, "uint16": torch.uint16}


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name; BadInput for one that nothing is quantized to."""
    if name not in DTYPES:
        raise BadInput(f"expected one of {', '.join(DTYPES)} to quantize to, got {name!r}")
    return DTYPES[name]


def along(scale: Tensor, x: Tensor, axis: int) -> Tensor:
    """A scale (or zero point) in a shape that goes with x: one number, or one for each place on an
    axis."""
    if scale.ndim == 0 or (scale.ndim == 1 and scale.shape[0] == 1):
        return scale.reshape(())
    if scale.ndim != 1 or not -x.ndim <= axis < x.ndim or scale.shape[0] != x.shape[axis]:
        raise BadInput(
            f"expected a scale for each place on axis {axis} of {list(x.shape)}, got one of "
            f"{list(scale.shape)}"
        )
    sizes = [1] * x.ndim
    sizes[axis] = -1
    return scale.reshape(sizes)


def quantized(x: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int, dtype: str) -> Tensor:
    """saturate(round(x / scale) + zero_point) in a dtype; half is rounded to even."""
    kind = dtype_of(dtype)
    wide = torch.float64 if scale.dtype == torch.float64 else torch.float32
    whole = (x.to(scale.dtype) / along(scale, x, axis)).to(wide).round()
    if zero_point is not None:
        whole = whole + along(zero_point.to(wide), x, axis)
    limits = torch.iinfo(kind)
    return whole.clamp(limits.min, limits.max).to(kind)


def dequantized(x: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int) -> Tensor:
    """(x - zero_point) * scale in the dtype of `scale`, multiplied in float32 at least."""
    if x.is_floating_point() or x.is_complex() or not scale.is_floating_point():
        raise BadInput(f"expected whole numbers and a scale, got {x.dtype} and {scale.dtype}")
    if zero_point is not None:
        x = x.to(torch.int32) - along(zero_point.to(torch.int32), x, axis)
    wide = torch.float64 if scale.dtype == torch.float64 else torch.float32
    return (x.to(wide) * along(scale.to(wide), x, axis)).to(scale.dtype)


@torch.library.custom_op("demask::quantize", mutates_args=())
def quantize(x: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int, dtype: str) -> Tensor:
    """`quantized` as an op."""
    return quantized(x, scale, zero_point, axis, dtype)


@torch.library.custom_op("demask::dequantize", mutates_args=())
def dequantize(x: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int) -> Tensor:
    """`dequantized` as an op."""
    return dequantized(x, scale, zero_point, axis)


@quantize.register_fake
def _(x: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int, dtype: str) -> Tensor:
    _check(x, scale, zero_point, axis)
    return torch.empty_like(x, dtype=dtype_of(dtype))


@dequantize.register_fake
def _(x: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int) -> Tensor:
    _check(x, scale, zero_point, axis)
    return torch.empty_like(x, dtype=scale.dtype)


def _check(x: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int) -> None:
    """Raise BadInput for scales and zero points that do not go with x."""
    along(scale, x, axis)
    if zero_point is not None:
        along(zero_point, x, axis)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.axis = inputs
    ctx.save_for_backward(*tensors)


def _slopes(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
    """Whole numbers have no gradient; the scale has."""
    x, scale, zero_point = ctx.saved_tensors
    with torch.enable_grad():
        scale = scale.detach().requires_grad_()
        made = dequantized(x, scale, zero_point, ctx.axis)
        (found,) = torch.autograd.grad(made, scale, slope)
    return None, found, None, None


dequantize.register_autograd(_slopes, setup_context=_keep)

CUSTOM_OPS.register("quantize", Own(quantized))
CUSTOM_OPS.register("dequantize", Own(dequantized))


def _line(node: fx.Node) -> str:
    """Position by position; a scale for each place on an axis goes along it."""
    found = schema.arguments(node)
    x, *rest = (schema.sizes(o.value.meta["val"]) for o in schema.operands(node))
    rank, axis = len(x), found["axis"]
    axes = [f"a{k}" for k in range(rank)]
    own = [axes[axis] if len(sizes) == 1 and sizes != (1,) else "1" * len(sizes) for sizes in rest]
    whole = " ".join(axes)
    return f"{', '.join([whole, *own])} -> {whole}"


_POINT, _ONE = S((), True, 9), S((), True, "positive")
_EACH, _POINTS = S((3,), True, "positive"), S((3,), True, 9)
ENTRIES = [
    ("demask.quantize.default", Entry(_line, cases=(
        Case((S((2, 3, 4)), _ONE, None, 1, "int8"), {}),
        Case((S((2, 3, 4)), _ONE, _POINT, 1, "uint8"), {}),
        Case((S((2, 3, 4)), _EACH, _POINTS, 1, "uint8"), {}),
        Case((S((2, 4, 3)), _EACH, None, -1, "uint16"), {}),
    ))),
    ("demask.dequantize.default", Entry(_line, cases=(
        Case((S((2, 3, 4), of=200), _ONE, None, 1), {}),
        Case((S((2, 3, 4), of=200), _ONE, _POINT, 1), {}),
        Case((S((2, 3, 4), of=200), _EACH, _POINTS, 1), {}),
        Case((S((2, 4, 3), of=200), _EACH, None, -1), {}),
    ))),
]  # fmt: skip
