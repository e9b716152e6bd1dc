"""Whether a plan runs by compiled kernels or by torch's ops: the former where their memory fits.

Compiled kernels are faster, but may take more memory: for transformed weights, for tiles, and for
the compiler where a call compiles. No budget is too small for them that is enough for torch's ops.
"""

from __future__ import annotations

from collections.abc import Callable

from demask.errors import BudgetTooSmall
from demask.traverse.analysis.flow import Flow
from demask.traverse.planning.plan import TilePlan
from demask.traverse.planning.plan_memory import MemoryLayout, lay_out_checked
from demask.traverse.planning.planner import plan_tiles

Cut = Callable[[MemoryLayout], MemoryLayout]


def plan_flow(
    flow: Flow,
    budget: int,
    *,
    reserved: int = 0,
    compiles: bool = False,
    workers: int = 1,
    cut: Callable[[Flow], Cut] | None = None,
) -> tuple[Flow, TilePlan, MemoryLayout]:
    """The flow with the kernels that fit a budget, its fastest plan, and the memory layout.

    compiles: whether the call itself compiles the kernels, within the budget. cut: the function
    `cut` of `plan_tiles` for a flow. For others see `plan_tiles`.

    Raises:
        BudgetTooSmall: if no plan fits; its `least` is a sufficient budget in bytes.
    """

    def planned(flow: Flow, reserved: int) -> tuple[Flow, TilePlan, MemoryLayout]:
        own_cut = None if cut is None else cut(flow)
        return flow, *plan_tiles(flow, budget, reserved=reserved, workers=workers, cut=own_cut)

    compiler = flow.compiler_bytes
    if not compiler:
        return planned(flow, reserved)
    try:
        return planned(flow, reserved + compiler * compiles)
    except BudgetTooSmall:
        return planned(flow.without_compiler, reserved)


def lay_out_plan(flow: Flow, plan: TilePlan) -> tuple[Flow, MemoryLayout]:
    """The flow with the kernels that fit a plan's budget, and the memory layout of its segments.

    Plans from files may come from machines without our kernels. Raises BadInput where the plan
    cannot run.
    """
    layout = lay_out_checked(flow, plan.segments)
    if layout.peak <= max(plan.budget, plan.peak) or not flow.compiler_bytes:
        return flow, layout
    flow = flow.without_compiler
    return flow, lay_out_checked(flow, plan.segments)


__all__ = ["lay_out_plan", "plan_flow"]
