"""The plans that an optimized network runs, to be printed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from demask.compat.dispatch import TorchDispatchMode
from demask.kernels.plan_cache import plans_of
from demask.sparse.segment.segment_op import SegmentPlans

if TYPE_CHECKING:
    from demask.exec.tape.segment_plan import SegmentPlan


class PlanRecorder(TorchDispatchMode):
    """Keeps the plan of each segment that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.plans: list[SegmentPlan] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.demask.segment.default:
            inputs, weights, text = args
            plans = plans_of(weights, text, SegmentPlans)
            plan, _ = plans.plan(plans.key(inputs, weights), inputs, weights)
            if plan is not None:
                self.plans.append(plan)
        return func(*args, **kwargs or {})


def segment_plans(network: nn.Module, *args: Any, **kwargs: Any) -> list[SegmentPlan]:
    """The plans of the segments of an optimized network, in the order of their calls: print one to see what it does.

    A row of the table is a value: the op that computes it, the values that it reads, its size (channels x height x
    width; tokens are pixels of one row), how it is split into tiles (one for each lane of a vector), the phases in
    which threads compute it (a barrier is between phases), and the kernels with the number of their calls. "in 7"
    means that it has its memory within that of value 7, "with 7" that its layer is computed in the phase of value 7.

    Args:
        network: a result of `demask.optimize`, or a network that has one in it.
        args, kwargs: inputs; the network is called once with them.

    Returns:
        The plans; empty if no part of the network is a segment.

    >>> import demask
    >>> from torch import nn
    >>> layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)
    >>> fast = demask.optimize(nn.Sequential(*layers).eval(), (torch.zeros(1, 3, 8, 8),))
    >>> for plan in segment_plans(fast, torch.zeros(1, 3, 8, 8)):
    ...     print(plan)  # doctest: +SKIP
    """
    recorder = PlanRecorder()
    with torch.no_grad(), recorder:
        network(*args, **kwargs)
    return recorder.plans
