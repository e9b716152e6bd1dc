"""An allocation within a budget of multiply-adds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from demask.prune.allocation.context import NetworkContext
from demask.prune.allocation.problem import Problem, Scores, check_budget, check_floor
from demask.prune.removal_cost import CountedProducts

if TYPE_CHECKING:
    from demask.prune.pruner import Pruner

MOST_COUNTS = 64  # counts per group in the knapsack


@dataclass(frozen=True, slots=True)
class MACs:
    """As much importance as fits in a number of multiply-adds of one call on the example inputs.

    The multiply-adds are those after `demask`. Scores are added across groups, so they must have
    one scale, as `Taylor` has.

    Args:
        budget: multiply-adds, an int; or a share of those at the start (without tokens that nothing
            reads), a float from 0 to 1.
        floor: the share of its slices that each group retains at least; one slice always stays.

    Example:
        >>> from demask.prune import MACs
        >>> MACs(budget=0.5)
        MACs(budget=0.5, floor=0.05)
    """

    budget: float
    floor: float = 0.05

    def __post_init__(self) -> None:
        check_budget(self.budget, "budget", "multiply-adds, or a share from 0 to 1")
        check_floor(self.floor)

    def __call__(self, scores: Scores, fraction: float, pruner: Pruner) -> dict[str, Tensor]:
        """The slices that stay: by group, bool [size].

        Args:
            scores: by group, [size].
            fraction: how far this step is, relative to the last fraction of the schedule: half of
                it removes half of all multiply-adds that are to be removed.
            pruner: the pruner that asks.

        Raises:
            BadInput: the budget is less than what the floors leave, or units are no slices.
        """
        context = NetworkContext.of(pruner, fraction)
        cost = pruner.removal_cost
        whole = cost.macs({})
        final = self.budget * whole if self._is_share else self.budget
        budget = exact = whole + (final - whole) * context.progress
        problem = Problem.of(scores, context, self.floor, MOST_COUNTS)
        counted = CountedProducts.of(cost.products, context.left)
        while True:
            choice = problem.best(counted, budget, "{:,.0f} MACs".format)
            masks = problem.masks(choice)
            over = cost.macs({**context.left, **masks}) - exact
            if over <= 0:
                return masks
            budget -= max(over, 1)  # slices of one group may cost more than their mean

    @property
    def _is_share(self) -> bool:
        return isinstance(self.budget, float) and self.budget <= 1
