"""Ops of com.microsoft that ONNX Runtime's optimizer writes in place of several of ONNX's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from demask.errors import BadInput
from demask.files.onnx.op_functions import Ops
from demask.files.onnx.ops.math.activation import OPS as ACTIVATIONS
from demask.files.onnx.ops.nn.linear import convolution, gemm, matmul
from demask.files.onnx.ops.nn.norms import layer_norm, rms_norm

OPS = Ops("com.microsoft")


def _activated(x: Tensor, name: str, params: Sequence[float]) -> Tensor:
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


@OPS("FusedConv")
def fused_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, added: Tensor | None = None, *,
    activation: str = "", activation_params: Sequence[float] = (), auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None, group: int = 1,
    kernel_shape: Sequence[int] | None = None, pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """activation(conv(x, weight, bias) + added)."""
    y = convolution(x, weight, bias, auto_pad=auto_pad, dilations=dilations, group=group,
                    kernel_shape=kernel_shape, pads=pads, strides=strides)  # fmt: skip
    return _activated(y if added is None else y + added, activation, activation_params)


@OPS("FusedGemm")
def fused_gemm(
    a: Tensor, b: Tensor, c: Tensor | None = None, *, activation: str = "",
    activation_alpha: float | None = None, activation_beta: float | None = None,
    activation_gamma: float | None = None, alpha: float = 1.0, beta: float = 1.0,
    transA: int = 0, transB: int = 0,  # noqa: N803
) -> Tensor:  # fmt: skip
    """activation(alpha a b + beta c)."""
    params = [p for p in (activation_alpha, activation_beta, activation_gamma) if p is not None]
    y = gemm(a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)
    return _activated(y, activation, params)


@OPS("FusedMatMul")
def fused_matmul(
    a: Tensor, b: Tensor, *, alpha: float = 1.0, transA: int = 0, transB: int = 0,  # noqa: N803
    transBatchA: int = 0, transBatchB: int = 0,  # noqa: N803
) -> Tensor:  # fmt: skip
    """alpha a b, each with its last two axes exchanged, or its first axis moved before these."""
    a, b = (x.movedim(0, -2) if moves else x for x, moves in ((a, transBatchA), (b, transBatchB)))
    a, b = (x.mT if swaps and x.ndim > 1 else x for x, swaps in ((a, transA), (b, transB)))
    y = matmul(a, b)
    return y if alpha == 1 else y * alpha


@OPS("Gelu")
def gelu(x: Tensor) -> Tensor:
    """x times the cumulative normal distribution at x."""
    return functional.gelu(x)


@OPS("BiasGelu")
def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """gelu(x + bias)."""
    return functional.gelu(x + bias)


@OPS("FastGelu")
def fast_gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """gelu(x + bias), approximated by tanh."""
    return functional.gelu(x if bias is None else x + bias, approximate="tanh")


@OPS("QuickGelu")
def quick_gelu(x: Tensor, *, alpha: float = 1.702) -> Tensor:
    """x sigmoid(alpha x)."""
    return x * torch.sigmoid(alpha * x)


@OPS("SkipLayerNormalization")
def skip_layer_norm(
    x: Tensor, skip: Tensor, scale: Tensor, shift: Tensor | None = None,
    bias: Tensor | None = None, *, epsilon: float = 1e-12,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """x + skip + bias, normalized over the last axis, and as the fourth output not normalized."""
    total = x + skip if bias is None else x + skip + bias
    normalized = layer_norm(total, scale, shift, epsilon=epsilon, outputs=1)
    return normalized, None, None, total


@OPS("SkipSimplifiedLayerNormalization")
def skip_rms_norm(
    x: Tensor, skip: Tensor, scale: Tensor, bias: Tensor | None = None, *, epsilon: float = 1e-12
) -> tuple[Tensor | None, ...]:
    """x + skip + bias, divided by its root mean square over the last axis, and not divided."""
    total = x + skip if bias is None else x + skip + bias
    return rms_norm(total, scale, epsilon=epsilon), None, None, total
