"""ONNX normalization ops: mean 0 and variance 1, then scale and shift."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from demask.errors import BadInput
from demask.files.onnx.op_functions import Ops
from demask.files.onnx.ops.math.activation import RUNTIME
from demask.files.onnx.read.reader import DTYPES

OPS = Ops()


@OPS("BatchNormalization", stored=(3, 4))
def batch_norm(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    spatial: int = 1,
    training_mode: int = 0,
    outputs: int,
    version: int,
) -> Any:
    """x normalized by running statistics; in training mode (before opset 14: with several outputs)
    by those of x, with updated running statistics as further outputs."""
    shape = x.shape
    if x.ndim == 1:
        x = x.unsqueeze(1)
    if not spatial:  # opset 7: each position of an image is a separate channel
        x, scale, bias = x.flatten(1), scale.reshape(-1), bias.reshape(-1)
        mean, var = mean.reshape(-1), var.reshape(-1)
    if training_mode or (version < 14 and outputs > 1):
        return _batch_norm_in_training(x, scale, bias, mean, var, epsilon, momentum, shape)[:outputs]
    mean, var = (s if s.dtype == scale.dtype else s.to(scale.dtype) for s in (mean, var))
    if scale.dtype != x.dtype and x.dtype not in (torch.float16, torch.bfloat16):
        scale, bias, mean, var = (t.to(x.dtype) for t in (scale, bias, mean, var))
    result = functional.batch_norm(x, mean, var, scale, bias, False, 1 - momentum, epsilon)
    return result if result.shape == shape else result.reshape(shape)


def _batch_norm_in_training(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    epsilon: float,
    momentum: float,
    shape: Sequence[int],
) -> tuple[Tensor, ...]:
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    axes = [0, *range(2, x.ndim)]
    v, m = torch.var_mean(wide, axes, correction=0)
    result = functional.batch_norm(wide, m, v, scale.to(wide.dtype), bias.to(wide.dtype), False, 0.0, epsilon)
    running = [(old * momentum + new * (1 - momentum)).to(old.dtype) for old, new in ((mean, m), (var, v))]
    return (result.to(x.dtype).reshape(shape), *running, m.to(mean.dtype), v.to(var.dtype))


@OPS("InstanceNormalization")
def instance_norm(x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    """Each channel of each sample normalized separately."""
    return torch.instance_norm(x, scale, bias, None, None, True, 0.1, epsilon, False)


def stashed(x: Tensor, stash_type: int) -> Tensor:
    """x in the dtype for its statistics: float64 if `stash_type` is 11. torch's norms compute those
    of 16-bit floats in float32 by themselves."""
    if stash_type not in (1, 10, 11, 16):
        raise BadInput(f"expected stash_type 1, 10, 11 or 16, got {stash_type}")
    return x.double() if stash_type == 11 else x


def _is_unbroadcast(scale: Tensor | None, sizes: Sequence[int]) -> bool:
    """Whether a parameter has exactly these sizes, as torch's norms require."""
    return scale is None or (scale.ndim == len(sizes) and scale.shape == sizes)


@OPS("LayerNormalization")
def layer_norm(
    x: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    outputs: int,
) -> Any:
    """x normalized over the axes from `axis` on; the mean; 1 / the standard deviation."""
    first = axis % x.ndim
    sizes, wide = x.shape[first:], stashed(x, stash_type)
    has_one_dtype = scale.dtype == x.dtype == wide.dtype and (bias is None or bias.dtype == x.dtype)
    if has_one_dtype and _is_unbroadcast(scale, sizes) and _is_unbroadcast(bias, sizes):
        result = functional.layer_norm(x, sizes, scale, bias, epsilon)
    else:
        result = functional.layer_norm(wide, sizes, None, None, epsilon).to(x.dtype) * scale
        result = result if bias is None else result + bias
    if outputs == 1:
        return result
    stash_dtype = DTYPES[stash_type]
    wide = wide.float() if wide.dtype in (torch.float16, torch.bfloat16) else wide
    var, mean = torch.var_mean(wide, list(range(first, x.ndim)), correction=0, keepdim=True)
    return (result, mean.to(stash_dtype), (var + epsilon).rsqrt().to(stash_dtype))[:outputs]


@OPS("RMSNormalization", "SimplifiedLayerNormalization")  # the latter by ONNX Runtime
def rms_norm(x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1) -> Tensor:
    """x divided by its root mean square over the axes from `axis` on."""
    sizes, wide = x.shape[axis % x.ndim :], stashed(x, stash_type)
    if scale.dtype == x.dtype == wide.dtype and _is_unbroadcast(scale, sizes):
        return functional.rms_norm(x, sizes, scale, epsilon)
    normalized = functional.rms_norm(wide, sizes, None, epsilon).to(x.dtype)
    return normalized.to(scale.dtype) * scale


@OPS("GroupNormalization")
def group_norm(
    x: Tensor, scale: Tensor, bias: Tensor, *, num_groups: int, epsilon: float = 1e-5, stash_type: int = 1, version: int
) -> Tensor:
    """Each group of channels of each sample normalized; before opset 21 one scale per group."""
    if version < 21:
        group_size = x.shape[1] // num_groups
        scale, bias = scale.repeat_interleave(group_size), bias.repeat_interleave(group_size)
    wide = stashed(x, stash_type)
    if scale.dtype == x.dtype == wide.dtype:
        return torch.group_norm(x, num_groups, scale, bias, epsilon)
    normalized = torch.group_norm(wide, num_groups, None, None, epsilon).to(x.dtype)
    space = [1] * (x.ndim - 2)
    return normalized * scale.reshape(-1, *space) + bias.reshape(-1, *space)


@OPS("SkipLayerNormalization", domain=RUNTIME)
def skip_layer_norm(
    x: Tensor,
    skip: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    epsilon: float = 1e-12,
) -> tuple[Tensor | None, ...]:
    """x + skip + bias, normalized over the last axis, and as the fourth output not normalized."""
    total = x + skip if bias is None else x + skip + bias
    normalized = layer_norm(total, scale, shift, epsilon=epsilon, outputs=1)
    return normalized, None, None, total


@OPS("SkipSimplifiedLayerNormalization", domain=RUNTIME)
def skip_rms_norm(
    x: Tensor, skip: Tensor, scale: Tensor, bias: Tensor | None = None, *, epsilon: float = 1e-12
) -> tuple[Tensor | None, ...]:
    """x + skip + bias, divided by its root mean square over the last axis, and not divided."""
    total = x + skip if bias is None else x + skip + bias
    return rms_norm(total, scale, epsilon=epsilon), None, None, total
