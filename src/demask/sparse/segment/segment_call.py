"""Calls of a segment without torch's dispatcher, in the code that optimized networks run.

A call of the op converts its lists of tensors and the text of the program from Python to C++ and
back, and looks up the plans by the memory of the weights. A bound function has the program, and
remembers the plan of the last call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, float32, get_num_threads, strided

from demask.compat.dispatch import count_dispatch_modes, count_function_modes, has_functorch_transforms, tracing_state
from demask.kernels.llvm.availability import NoPlan
from demask.kernels.plan_cache import VERSION, plans_of
from demask.sparse.segment.segment_op import PLAIN, SegmentPlans

segment = torch.ops.demask.segment.default
ADDRESS = Tensor.data_ptr


class _KnownCall:
    """A plan for certain weights and for inputs of certain sizes. It keeps neither alive: caches of
    plans end with their weights.

    Weights are recognized by their numbers in Python, which are theirs as long as they live, their
    addresses and versions: all are compared without a loop of Python, as a network may have
    hundreds. So little is done here because kernels leave nothing of this code in the caches.
    """

    __slots__ = ("addresses", "are_alive", "count", "ends", "numbers", "plan", "probe", "sizes", "threads", "versions")

    def __init__(self, plans: SegmentPlans, inputs: Sequence[Tensor], weights: Sequence[Tensor]):
        """Raises KeyError if there is no plan for the inputs as they are."""
        key = plans.key(inputs, weights)
        plan, copied = plans.plans[key]
        if plan is None or copied or plans.probe is None or any(w.is_inference() for w in weights):
            raise KeyError
        self.plan, self.probe = weakref.ref(plan), plans.probe
        self.numbers, self.addresses = list(map(id, weights)), list(map(ADDRESS, weights))
        self.versions = list(key[0][:-1])  # those of the plan, whatever is written meanwhile
        self.count, self.threads = len(inputs), torch.get_num_threads()
        self.sizes = [(k, inputs[k].shape, inputs[k].stride()) for k in plans.dynamic]
        self.are_alive = True
        self.ends = [weakref.ref(weight, self._forget) for weight in weights]

    def _forget(self, _: object) -> None:
        self.are_alive = False

    def outputs(self, inputs: list[Tensor], weights: list[Tensor]) -> list[Tensor] | None:
        """The outputs by the plan; None if it is not for these tensors, or weights have changed.

        Plans check that static inputs are the tensors that they have converted.
        """
        if not self.are_alive or list(map(id, weights)) != self.numbers:
            return None
        if list(map(ADDRESS, weights)) != self.addresses:
            return None
        if list(map(VERSION, weights)) != self.versions or get_num_threads() != self.threads:
            return None
        for k, shape, stride in self.sizes:
            x = inputs[k]
            if type(x) not in PLAIN or not x.is_cpu or x.layout is not strided:
                return None
            if x.shape != shape or x.stride() != stride or x.dtype is not float32:
                return None
        plan = self.plan()
        if plan is None or len(inputs) != self.count or not self.probe.same():
            return None
        try:
            return plan(inputs)
        except NoPlan:  # no memory for a call now
            return None


def bound(arguments: Mapping[str, Any]) -> tuple[Callable[..., list[Tensor]], tuple[Any, ...]]:
    """A function that equals the op for the program in `arguments` (by name), and its arguments:
    inputs and weights. Several threads may call it at once."""
    text: str = arguments["program"]
    last: _KnownCall | None = None

    def bound_segment(inputs: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
        nonlocal last
        if not _is_plain_call():
            return segment(inputs, weights, text)
        known = last
        if known is not None and (outputs := known.outputs(inputs, weights)) is not None:
            return outputs
        if not _are_plain(inputs) or not _are_plain(weights):
            return segment(inputs, weights, text)
        plans = plans_of(weights, text, SegmentPlans)
        outputs = plans.run(inputs, weights)
        with suppress(KeyError):
            last = _KnownCall(plans, inputs, weights)
        return outputs

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
