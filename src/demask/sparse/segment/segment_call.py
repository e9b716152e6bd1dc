"""Calls of a segment without torch's dispatcher, in the code that optimized networks run.

A call of the op converts its lists of tensors and the text of the program from Python to C++ and
back, and looks up the plans by the memory of the weights. A bound function has the program, and
remembers the plans of the last weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
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
ADDRESS = Tensor.data_ptr


class _KnownPlans:
    """Plans of certain weights. It keeps neither alive: caches of plans end with their weights.

    Weights are recognized by their numbers in Python, which are theirs as long as they live, and
    their addresses: both are compared without a loop of Python, as a network may have hundreds.
    """

    __slots__ = ("addresses", "are_alive", "ends", "numbers", "plans")

    def __init__(self, plans: SegmentPlans, weights: Sequence[Tensor]):
        self.plans = weakref.ref(plans)
        self.numbers, self.addresses = list(map(id, weights)), list(map(ADDRESS, weights))
        self.are_alive = True
        self.ends = [weakref.ref(weight, self._forget) for weight in weights]

    def _forget(self, _: object) -> None:
        self.are_alive = False

    def belong_to(self, weights: Sequence[Tensor]) -> bool:
        """Whether the plans are for these tensors, which may have new values."""
        are_known = self.are_alive and list(map(id, weights)) == self.numbers
        return are_known and list(map(ADDRESS, weights)) == self.addresses


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
            last = _KnownPlans(plans, weights)
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
