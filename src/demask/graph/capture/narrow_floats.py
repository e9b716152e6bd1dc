"""Whether a network in float64 computes narrower floats."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from demask.compat.dispatch import TorchDispatchMode
from demask.numerics import NARROW, to_double


class _NarrowFloats(TorchDispatchMode):
    """Records whether a call returns floats narrower than float64."""

    has_any = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves(result)
        self.has_any |= any(isinstance(t, Tensor) and t.dtype in NARROW for t in leaves)
        return result


def narrows(network: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether a network in float64 computes narrower floats, or cannot run since its code casts."""
    inputs = pytree.tree_map(to_double, (args, kwargs))
    with torch.no_grad(), _NarrowFloats() as mode:
        try:
            network(*inputs[0], **inputs[1])
        except RuntimeError:
            return True
    return mode.has_any
