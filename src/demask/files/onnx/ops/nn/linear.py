"""ONNX ops with weights: convolutions and matrix products."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from demask.errors import BadInput
from demask.files.onnx.op_functions import Ops
from demask.files.onnx.ops.math.activation import OPS as ACTIVATIONS
from demask.files.onnx.ops.math.activation import RUNTIME

OPS = Ops()
_CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
_TRANSPOSED = {1: functional.conv_transpose1d, 2: functional.conv_transpose2d, 3: functional.conv_transpose3d}
_larger: Callable[[int, int], int] = torch.sym_max  # type: ignore[assignment]
AUTO = ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")


def padding_of(
    sizes: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    pads: Sequence[int] | None,
    auto_pad: str,
) -> tuple[list[int], list[int]]:
    """Padding before and after each axis of a window op."""
    axes = len(kernel)
    if auto_pad in ("NOTSET", "", "VALID"):
        pads = [0] * 2 * axes if not pads or auto_pad == "VALID" else pads
        return list(pads[:axes]), list(pads[axes:])
    totals = [
        (k - 1) * d if s == 1 else _larger(0, (-(-n // s) - 1) * s + (k - 1) * d + 1 - n)
        for n, k, s, d in zip(sizes, kernel, stride, dilation, strict=True)
    ]
    return halves(totals, auto_pad)


def halves(totals: Sequence[int], auto_pad: str) -> tuple[list[int], list[int]]:
    """Total padding split into before and after; odd ones have one more after (SAME_UPPER)."""
    if auto_pad not in AUTO:
        raise BadInput(f"expected auto_pad to be one of {AUTO}, got {auto_pad!r}")
    small = [n // 2 for n in totals]
    large = [n - n // 2 for n in totals]
    return (small, large) if auto_pad == "SAME_UPPER" else (large, small)


def is_even(before: Sequence[int], after: Sequence[int]) -> bool:
    """Whether the padding is known, and equal on both sides of each axis."""
    known = all(isinstance(n, int) for n in (*before, *after))
    return known and list(before) == list(after)


def padded(x: Tensor, before: Sequence[int], after: Sequence[int], fill: float = 0.0) -> Tensor:
    """x with its last axes padded, or cropped where padding is negative."""
    pairs = [n for pair in zip(reversed(before), reversed(after), strict=True) for n in pair]
    return functional.pad(x, pairs, value=fill)


def windows(rank: int, kernel: Sequence[int], kernel_shape: Sequence[int] | None) -> int:
    """The number of axes that a window slides over; BadInput if it is not 1, 2 or 3."""
    if rank - 2 not in _CONVOLUTIONS or len(kernel) != rank - 2:
        raise BadInput(
            f"expected 3 to 5 axes, and a kernel of two axes less, got {rank} axes and a kernel of {len(kernel)}"
        )
    if kernel_shape and list(kernel_shape) != list(kernel):
        raise BadInput(f"expected kernel_shape {list(kernel)} as in the weight, got {list(kernel_shape)}")
    return rank - 2


@OPS("Conv")
def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """A convolution over 1, 2 or 3 axes."""
    axes = windows(x.ndim, weight.shape[2:], kernel_shape)
    stride, dilation = strides or (1,) * axes, dilations or (1,) * axes
    before, after = padding_of(x.shape[2:], weight.shape[2:], stride, dilation, pads, auto_pad)
    if not is_even(before, after):
        x, before = padded(x, before, after), [0] * axes
    return _CONVOLUTIONS[axes](x, weight, bias, stride, before, dilation, group)


@OPS("ConvTranspose")
def transposed_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    output_padding: Sequence[int] | None = None,
    output_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """The transpose of a convolution over 1, 2 or 3 axes."""
    axes = windows(x.ndim, weight.shape[2:], kernel_shape)
    stride, dilation = strides or (1,) * axes, dilations or (1,) * axes
    extra = list(output_padding or (0,) * axes)
    # Kernel extent minus stride: the padding with which output sizes are input sizes times stride.
    reach = [(k - 1) * d + 1 - s for k, d, s in zip(weight.shape[2:], dilation, stride, strict=True)]
    before, after = list((pads or (0,) * 2 * axes)[:axes]), list((pads or (0,) * 2 * axes)[axes:])
    if output_shape:
        sizes = list(output_shape)[-axes:]
        grown = [s * n for s, n in zip(stride, x.shape[2:], strict=True)]
        totals = [g + r + e - n for g, r, e, n in zip(grown, reach, extra, sizes, strict=True)]
        before, after = halves([max(0, n) for n in totals], auto_pad)
        extra = [e + max(0, -n) for e, n in zip(extra, totals, strict=True)]
    elif auto_pad.startswith("SAME"):
        before, after = halves([max(0, r + e) for r, e in zip(reach, extra, strict=True)], auto_pad)
    elif auto_pad == "VALID":
        before, after = [0] * axes, [0] * axes
    ends = [a - e for a, e in zip(after, extra, strict=True)]
    return _conv_transpose(x, weight, bias, stride, dilation, group, before, ends)


def _conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    dilation: Sequence[int],
    group: int,
    before: list[int],
    after: list[int],
) -> Tensor:
    """The transposed convolution, cropped by `before` and `after` per axis, or padded if negative.
    torch itself crops both ends equally, and pads the end by less than a stride or dilation."""
    call = _TRANSPOSED[len(before)]
    limits = [max(s, d) for s, d in zip(stride, dilation, strict=True)]
    output_padding = [b - a for b, a in zip(before, after, strict=True)]
    if all(0 <= n < r for n, r in zip(output_padding, limits, strict=True)):
        return call(x, weight, bias, stride, before, output_padding, group, dilation)
    if all(n <= 0 for n in output_padding):
        result = call(x, weight, bias, stride, before, 0, group, dilation)
        return padded(result, [0] * len(output_padding), output_padding)
    result = call(x, weight, None, stride, 0, 0, group, dilation)
    result = padded(result, [-n for n in before], [-n for n in after])
    return result if bias is None else result + bias.reshape(-1, *[1] * len(before))


@OPS("Gemm")
def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    """alpha a b + beta c."""
    if not a.is_floating_point():
        integers = [None if t is None else t.to(torch.int64) for t in (a, b, c)]
        return _scaled_product(*integers, alpha, beta, transA, transB).to(a.dtype)  # type: ignore[arg-type]
    return _scaled_product(a, b, c, alpha, beta, transA, transB)


def _scaled_product(
    a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, transpose_a: int, transpose_b: int
) -> Tensor:
    a, weight = a.t() if transpose_a else a, b if transpose_b else b.t()
    if alpha == 1 and (c is None or (beta == 1 and c.ndim == 1 and c.shape == weight.shape[:1])):
        return functional.linear(a, weight, c)
    result = functional.linear(a, weight)
    result = result if alpha == 1 else result * alpha
    return result if c is None else result + (c if beta == 1 else c * beta)


@OPS("MatMul")
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """The product of matrices, or of batches of them."""
    if a.dtype in (torch.uint32, torch.uint64):
        return (a.to(torch.int64) @ b.to(torch.int64)).to(a.dtype)
    if b.ndim == 2 and a.ndim > 1:
        return functional.linear(a, b.t())  # recognized as a layer if b is a weight
    return a @ b


def _apply_activation(x: Tensor, name: str, params: Sequence[float]) -> Tensor:
    """An activation of x, with parameters in the order of its attributes."""
    if name == "Clip":
        return x.clamp(*params)
    functions = {"Tanh": torch.tanh, "Softplus": functional.softplus, "": lambda x: x}
    if name in functions:
        return functions[name](x)
    if ("", name) not in ACTIVATIONS.entries:
        raise BadInput(f"expected an activation that ONNX Runtime fuses, got {name!r}")
    function = ACTIVATIONS.entries["", name].function
    return function(x, **dict(zip(("alpha", "beta"), params, strict=False)))


@OPS("FusedConv", domain=RUNTIME)
def fused_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    added: Tensor | None = None,
    *,
    activation: str = "",
    activation_params: Sequence[float] = (),
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """activation(conv(x, weight, bias) + added)."""
    y = convolution(
        x,
        weight,
        bias,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )
    return _apply_activation(y if added is None else y + added, activation, activation_params)


@OPS("FusedGemm", domain=RUNTIME)
def fused_gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    activation: str = "",
    activation_alpha: float | None = None,
    activation_beta: float | None = None,
    activation_gamma: float | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    """activation(alpha a b + beta c)."""
    params = [p for p in (activation_alpha, activation_beta, activation_gamma) if p is not None]
    y = gemm(a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)
    return _apply_activation(y, activation, params)


@OPS("FusedMatMul", domain=RUNTIME)
def fused_matmul(
    a: Tensor,
    b: Tensor,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
) -> Tensor:
    """alpha a b, each with its last two axes exchanged, or its first axis moved before these."""
    a, b = (x.movedim(0, -2) if moves else x for x, moves in ((a, transBatchA), (b, transBatchB)))
    a, b = (x.mT if swaps and x.ndim > 1 else x for x, swaps in ((a, transA), (b, transB)))
    y = matmul(a, b)
    return y if alpha == 1 else y * alpha
