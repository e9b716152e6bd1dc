"""ONNX ops with random numbers from PyTorch's generator: a node's `seed` is ignored."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from demask.files.onnx.op_functions import Float, Int, Ops
from demask.files.onnx.ops.math.cast import dtype_of

OPS = Ops()


@OPS("RandomNormal")
def normal(
    *,
    shape: Sequence[int],
    dtype: int = 1,
    mean: float = 0.0,
    scale: float = 1.0,
    seed: float | None = None,
    device: torch.device,
) -> Tensor:
    """Normal numbers, of a shape."""
    return torch.randn(shape, dtype=dtype_of(dtype), device=device) * scale + mean


@OPS("RandomNormalLike")
def normal_like(
    x: Tensor, *, dtype: int | None = None, mean: float = 0.0, scale: float = 1.0, seed: float | None = None
) -> Tensor:
    """Normal numbers, of x's shape."""
    result_dtype = x.dtype if dtype is None else dtype_of(dtype)
    return torch.randn_like(x, dtype=result_dtype) * scale + mean


@OPS("RandomUniform")
def uniform(
    *,
    shape: Sequence[int],
    dtype: int = 1,
    low: float = 0.0,
    high: float = 1.0,
    seed: float | None = None,
    device: torch.device,
) -> Tensor:
    """Uniform numbers between `low` and `high`, of a shape."""
    return torch.rand(shape, dtype=dtype_of(dtype), device=device) * (high - low) + low


@OPS("RandomUniformLike")
def uniform_like(
    x: Tensor, *, dtype: int | None = None, low: float = 0.0, high: float = 1.0, seed: float | None = None
) -> Tensor:
    """Uniform numbers between `low` and `high`, of x's shape."""
    result_dtype = x.dtype if dtype is None else dtype_of(dtype)
    return torch.rand_like(x, dtype=result_dtype) * (high - low) + low


@OPS("Bernoulli")
def bernoulli(x: Tensor, *, dtype: int | None = None, seed: float | None = None) -> Tensor:
    """1 with probability x, else 0."""
    return torch.bernoulli(x).to(x.dtype if dtype is None else dtype_of(dtype))


@OPS("Multinomial")
def multinomial(x: Tensor, *, dtype: int = 6, sample_size: int = 1, seed: float | None = None) -> Tensor:
    """Classes drawn with the probabilities softmax(x)."""
    return torch.multinomial(torch.softmax(x, -1), sample_size, True).to(dtype_of(dtype))


@OPS("Dropout")
def dropout(
    x: Tensor, ratio: Float = 0.5, training_mode: Int = False, *, seed: int | None = None, outputs: int, version: int
) -> Tensor | tuple[Tensor, Tensor]:
    """x, in training with elements dropped, and the mask of the others."""
    mask_dtype = torch.bool if version >= 10 else x.dtype
    if not training_mode or ratio == 0:
        return x if outputs < 2 else (x, torch.ones_like(x, dtype=mask_dtype))
    mask = torch.rand_like(x) >= ratio
    return x * mask / (1 - ratio), mask.to(mask_dtype)
