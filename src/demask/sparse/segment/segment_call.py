"""Calls of a segment without torch's dispatcher, in the code that optimized networks run.

A call of the op converts its lists of tensors and the text of the program from Python to C++ and
back, and looks up the plans by the memory of the weights. A bound function has the program, and
remembers the plans of the last weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from demask.compat.dispatch import (
    count_dispatch_modes,
    count_function_modes,
    has_functorch_transforms,
    tracing_state,
)
from demask.kernels.plan_cache import plans_of
from demask.sparse.segment.segment_op import PLAIN, SegmentPlans

segment = torch.ops.demask.segment.default


@dataclass(frozen=True, slots=True)
class _KnownPlans:
    """Plans of certain weights. It keeps neither alive: caches of plans end with their weights."""

    plans: weakref.ref[SegmentPlans]
    weights: tuple[tuple[weakref.ref[Tensor], int], ...]  # with their addresses

    @classmethod
    def of(cls, plans: SegmentPlans, weights: Sequence[Tensor]) -> _KnownPlans:
        return cls(weakref.ref(plans), tuple((weakref.ref(w), w.data_ptr()) for w in weights))

    def belong_to(self, weights: Sequence[Tensor]) -> bool:
        """Whether the plans are for these tensors, which may have new values."""
        if len(weights) != len(self.weights):
            return False
        for (known, address), weight in zip(self.weights, weights, strict=True):
            if known() is not weight or weight.data_ptr() != address:
                return False
        return True


def bound(arguments: Mapping[str, Any]) -> tuple[Callable[..., list[Tensor]], tuple[Any, ...]]:
    """A function that equals the op for the program in `arguments` (by name), and its arguments:
    inputs and weights. Several threads may call it at once."""
    text: str = arguments["program"]
    last: _KnownPlans | None = None

    def bound_segment(inputs: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
        nonlocal last
        if not _is_plain_call():
            return segment(inputs, weights, text)
        known = last
        plans = known.plans() if known is not None and known.belong_to(weights) else None
        if plans is None:
            if not _are_plain(inputs) or not _are_plain(weights):
                return segment(inputs, weights, text)
            plans = plans_of(weights, text, SegmentPlans)
            last = _KnownPlans.of(plans, weights)
        # Plans check that static inputs are the tensors that they have converted.
        elif not _are_plain([inputs[k] for k in plans.dynamic]):
            return segment(inputs, weights, text)
        return plans.run(inputs, weights)

    return bound_segment, (arguments["inputs"], arguments["weights"])


def _are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors are dense ones of torch on the CPU."""
    for tensor in tensors:
        if type(tensor) not in PLAIN or not tensor.is_cpu or tensor.layout is not torch.strided:
            return False
    return True


def _is_plain_call() -> bool:
    """Whether the op would do no more with plain tensors now than run a plan."""
    if torch.is_grad_enabled() or count_dispatch_modes() or count_function_modes():
        return False
    return not has_functorch_transforms() and tracing_state() is None
