"""Ops of oneDNN, which torch's compiler calls, for float32 and bfloat16 on the CPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

NAMESPACE = "mkldnn"
# Convolution and linear layer with an epilogue, and packing of their weights.
OPS = ("_convolution_pointwise", "_linear_pointwise", "_reorder_convolution_weight", "_reorder_linear_weight")


def ops() -> Any:
    """torch's namespace of these ops."""
    return torch.ops.mkldnn


@cache
def available(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch has these ops for tensors of this dtype on this device."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    known = all(hasattr(ops(), name) for name in OPS[:3])
    return known and (dtype is torch.float32 or (dtype is torch.bfloat16 and _has_bf16()))


def _has_bf16() -> bool:
    return bool(ops()._is_mkldnn_bf16_supported())
