"""ONNX ops that bring values to mean 0 and variance 1, then scale and shift them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from demask.errors import BadInput
from demask.files.onnx.op_functions import Ops
from demask.files.onnx.read.reader import DTYPES

OPS = Ops()


@OPS("BatchNormalization", stored=(3, 4))
def batch_norm(
    x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor, *, epsilon: float = 1e-5,
    momentum: float = 0.9, spatial: int = 1, training_mode: int = 0, outputs: int, version: int,
) -> Any:  # fmt: skip
    """By the running statistics; in training mode (before opset 14: with several outputs) by
    those of x, with the running ones moved towards them."""
    shape = x.shape
    if x.ndim == 1:
        x = x.unsqueeze(1)
    if not spatial:  # opset 7: each place of an image is a channel of its own
        x, scale, bias = x.flatten(1), scale.reshape(-1), bias.reshape(-1)
        mean, var = mean.reshape(-1), var.reshape(-1)
    if training_mode or (version < 14 and outputs > 1):
        return _trained(x, scale, bias, mean, var, epsilon, momentum, shape)[:outputs]
    mean, var = (s if s.dtype == scale.dtype else s.to(scale.dtype) for s in (mean, var))
    if scale.dtype != x.dtype and x.dtype not in (torch.float16, torch.bfloat16):
        scale, bias, mean, var = (t.to(x.dtype) for t in (scale, bias, mean, var))
    made = functional.batch_norm(x, mean, var, scale, bias, False, 1 - momentum, epsilon)
    return made if made.shape == shape else made.reshape(shape)


def _trained(
    x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor, epsilon: float,
    momentum: float, shape: Sequence[int],
) -> tuple[Tensor, ...]:  # fmt: skip
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    over = [0, *range(2, x.ndim)]
    v, m = torch.var_mean(wide, over, correction=0)
    made = functional.batch_norm(
        wide, m, v, scale.to(wide.dtype), bias.to(wide.dtype), False, 0.0, epsilon
    )
    moved = [(old * momentum + new * (1 - momentum)).to(old.dtype)
             for old, new in ((mean, m), (var, v))]  # fmt: skip
    return (made.to(x.dtype).reshape(shape), *moved, m.to(mean.dtype), v.to(var.dtype))


@OPS("InstanceNormalization")
def instance_norm(x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    """Each channel of each sample alone."""
    return torch.instance_norm(x, scale, bias, None, None, True, 0.1, epsilon, False)


def stashed(x: Tensor, stash_type: int) -> Tensor:
    """x in the precision in which statistics are to be computed; torch's norms compute those of
    halves in float32 of their own accord."""
    if stash_type not in (1, 10, 11, 16):
        raise BadInput(f"expected stash_type 1, 10, 11 or 16, got {stash_type}")
    return x.double() if stash_type == 11 else x


def _is_whole(scale: Tensor | None, sizes: Sequence[int]) -> bool:
    """Is it a parameter that torch's norms take, not one that is spread over axes?"""
    return scale is None or (scale.ndim == len(sizes) and scale.shape == sizes)


@OPS("LayerNormalization")
def layer_norm(
    x: Tensor, scale: Tensor, bias: Tensor | None = None, *, axis: int = -1, epsilon: float = 1e-5,
    stash_type: int = 1, outputs: int,
) -> Any:  # fmt: skip
    """Over the axes from `axis` on; then the mean and 1 / the standard deviation."""
    first = axis % x.ndim
    sizes, wide = x.shape[first:], stashed(x, stash_type)
    like = scale.dtype == x.dtype == wide.dtype and (bias is None or bias.dtype == x.dtype)
    if like and _is_whole(scale, sizes) and _is_whole(bias, sizes):
        made = functional.layer_norm(x, sizes, scale, bias, epsilon)
    else:
        made = functional.layer_norm(wide, sizes, None, None, epsilon).to(x.dtype) * scale
        made = made if bias is None else made + bias
    if outputs == 1:
        return made
    kept = DTYPES[stash_type]
    wide = wide.float() if wide.dtype in (torch.float16, torch.bfloat16) else wide
    var, mean = torch.var_mean(wide, list(range(first, x.ndim)), correction=0, keepdim=True)
    return (made, mean.to(kept), (var + epsilon).rsqrt().to(kept))[:outputs]


@OPS("RMSNormalization")
def rms_norm(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    """x over its root mean square over the axes from `axis` on."""
    sizes, wide = x.shape[axis % x.ndim :], stashed(x, stash_type)
    if scale.dtype == x.dtype == wide.dtype and _is_whole(scale, sizes):
        return functional.rms_norm(x, sizes, scale, epsilon)
    made = functional.rms_norm(wide, sizes, None, epsilon).to(x.dtype)
    return made.to(scale.dtype) * scale


@OPS("GroupNormalization")
def group_norm(
    x: Tensor, scale: Tensor, bias: Tensor, *, num_groups: int, epsilon: float = 1e-5,
    stash_type: int = 1, version: int,
) -> Tensor:  # fmt: skip
    """Each group of channels of each sample alone; before opset 21 one scale for each group."""
    if version < 21:
        each = x.shape[1] // num_groups
        scale, bias = scale.repeat_interleave(each), bias.repeat_interleave(each)
    wide = stashed(x, stash_type)
    if scale.dtype == x.dtype == wide.dtype:
        return torch.group_norm(x, num_groups, scale, bias, epsilon)
    made = torch.group_norm(wide, num_groups, None, None, epsilon).to(x.dtype)
    space = [1] * (x.ndim - 2)
    return made * scale.reshape(-1, *space) + bias.reshape(-1, *space)
