"""ONNX activations."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from demask.errors import BadInput
from demask.files.onnx.op_functions import Ops
from demask.files.onnx.ops.math.math import widened

OPS = Ops()
RUNTIME = "com.microsoft"  # the domain of ops that ONNX Runtime's optimizer writes
# attributes are float32 in the file
_SIXTH = torch.tensor(1 / 6).item()
_SELU = (torch.tensor(1.6732632423543772).item(), torch.tensor(1.0507009873554805).item())

for _name, _function in {
    "HardSwish": lambda x: functional.hardswish(x),
    "Mish": lambda x: functional.mish(x),
    "Relu": lambda x: torch.relu(x),
    "Sigmoid": lambda x: torch.sigmoid(x),
    "Softsign": lambda x: functional.softsign(x),
    "Celu": lambda x, *, alpha=1.0: functional.celu(x, alpha),
    "Elu": lambda x, *, alpha=1.0: functional.elu(x, alpha),
    "LeakyRelu": lambda x, *, alpha=0.01: functional.leaky_relu(x, alpha),
    "ThresholdedRelu": lambda x, *, alpha=1.0: functional.threshold(x, alpha, 0.0),
    "Swish": lambda x, *, alpha=1.0: _swish(x, alpha),
    "SwiGLU": lambda gate, x, *, alpha=1.0: _swish(gate, alpha) * x,
}.items():
    OPS(_name)(_function)


def _swish(x: Tensor, alpha: float) -> Tensor:
    return functional.silu(x) if alpha == 1 else x * torch.sigmoid(alpha * x)


@OPS("Gelu")
def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """x times the cumulative normal distribution at x."""
    if approximate not in ("none", "tanh"):
        raise BadInput(f"expected approximate none or tanh, got {approximate!r}")
    return functional.gelu(x, approximate=approximate)


@OPS("HardSigmoid")
def hard_sigmoid(x: Tensor, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    """alpha * x + beta, clamped to 0 and 1."""
    if (alpha, beta) == (_SIXTH, 0.5):
        return functional.hardsigmoid(x)
    return torch.clamp(alpha * x + beta, 0, 1)


@OPS("Selu")
def selu(x: Tensor, *, alpha: float = _SELU[0], gamma: float = _SELU[1]) -> Tensor:
    """gamma * elu(x)"""
    if abs(alpha - _SELU[0]) + abs(gamma - _SELU[1]) < 1e-6:
        return functional.selu(x)
    return gamma * functional.elu(x, alpha)


@OPS("Softplus")
def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x))"""
    # above the threshold the result is x: 20, PyTorch's default, is too low for float64
    return functional.softplus(x, 1, 40) if x.dtype == torch.float64 else functional.softplus(x)


@OPS("Shrink")
def shrink(x: Tensor, *, bias: float = 0.0, lambd: float = 0.5) -> Tensor:
    """0 where |x| <= lambd, elsewhere x moved towards zero by `bias`."""
    if x.is_floating_point() and bias in (0, lambd) and lambd >= 0:
        return functional.softshrink(x, lambd) if bias else functional.hardshrink(x, lambd)
    shrunk = torch.where(x < -lambd, x + bias, torch.where(x > lambd, x - bias, 0))
    return shrunk.to(x.dtype)


@OPS("PRelu")
def prelu(x: Tensor, weight: Tensor) -> Tensor:
    """x, times `weight` where it is negative."""
    if x.is_floating_point() and (weight.numel() == 1 or _is_per_channel(x, weight)):
        return functional.prelu(x, weight if weight.ndim == 1 else weight.reshape(-1))
    return widened(lambda x, weight: torch.where(x < 0, weight * x, x))(x, weight)


def _is_per_channel(x: Tensor, weight: Tensor) -> bool:
    """Whether the weight differs only along axis 1."""
    sizes = (1,) * (x.ndim - weight.ndim) + tuple(weight.shape)
    others = sizes[:1] + sizes[2:]
    return x.ndim >= 2 and len(sizes) == x.ndim and all(n == 1 for n in others)


@OPS("Gelu", domain=RUNTIME)
def plain_gelu(x: Tensor) -> Tensor:
    """x times the cumulative normal distribution at x."""
    return functional.gelu(x)


@OPS("BiasGelu", domain=RUNTIME)
def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """gelu(x + bias)."""
    return functional.gelu(x + bias)


@OPS("FastGelu", domain=RUNTIME)
def fast_gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """gelu(x + bias), approximated by tanh."""
    return functional.gelu(x if bias is None else x + bias, approximate="tanh")


@OPS("QuickGelu", domain=RUNTIME)
def quick_gelu(x: Tensor, *, alpha: float = 1.702) -> Tensor:
    """x sigmoid(alpha x)."""
    return x * torch.sigmoid(alpha * x)
