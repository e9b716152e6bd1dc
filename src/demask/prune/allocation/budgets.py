"""An allocation within a budget of multiply-adds.

And what this has in common with a budget of seconds (`latency`): the groups of a pruner as a knapsack,
what a budget may be, and what an allocation reads of a `Pruner`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from demask.prune.removal_cost import CountedProducts

if TYPE_CHECKING:
    from demask.prune.pruner import Pruner
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from demask.errors import BadInput
from demask.graph.module_copy import structural_copy
from demask.prune.allocation.knapsack import Choice, CountedCost, Item, Knapsack, spaced_counts
from demask.prune.masks import find_places, read_masks
from demask.prune.pruner import Pruner
from demask.prune.scores import L1, L2


@dataclass(frozen=True)
class NetworkContext:
    """The network of a pruner.

    left: by group, of any kind, which slices are left, bool [size]. names: of the groups to prune.
    progress: the share of the way from the full network to the last step of the schedule.
    """

    pruner: Pruner
    left: Mapping[str, Tensor]
    names: tuple[str, ...]
    progress: float

    @classmethod
    def of(cls, pruner: Pruner, fraction: float) -> NetworkContext:
        """The context of a step to a fraction. Raises BadInput for units that are no slices."""
        single = next((c.name for c in pruner.candidates if c.group is None), None)
        if single is not None:
            raise BadInput(
                f"expected a structure of slices, such as channel, for a budget; "
                f"{pruner.structure} (in {single}) removes nothing that a dense network computes"
            )
        left = pruner.removal_cost.left(read_masks(pruner.model))
        schedule: Any = pruner.schedule
        last = getattr(schedule, "end", getattr(schedule, "fraction", fraction))
        progress = min(fraction / last, 1.0) if last else 1.0
        return cls(pruner, left, tuple(c.name for c in pruner.candidates), progress)

    @property
    def args(self) -> tuple[Any, ...]:
        """The example inputs by position."""
        return self.pruner.inputs[0]

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """The example inputs by name."""
        return self.pruner.inputs[1] or {}

    @torch.no_grad()
    def masked(self, masks: Mapping[str, Tensor]) -> nn.Module:
        """A copy of the model in eval mode, in which slices outside of `masks` are zeros."""
        copy = structural_copy(self.pruner.model, share=False).eval()
        places = find_places(copy)
        for candidates in (c for c in self.pruner.candidates if c.name in masks):
            for name, mask in candidates.expand(masks[candidates.name]).items():
                parameter = places[name][0].parameter
                parameter.mul_(mask.to(parameter.device))
        return copy


Scores = Mapping[str, Tensor]  # by group, [size]: higher is more important


@dataclass(frozen=True, slots=True)
class Problem:
    """The groups to allocate: their scores, which slices are left, and the counts to choose of."""

    scores: Mapping[str, Tensor]
    left: Mapping[str, Tensor]
    items: Mapping[str, Item]

    @classmethod
    def of(cls, scores: Scores, context: NetworkContext, floor: float, most: int) -> Problem:
        """The problem for these scores. most: the number of counts of each group, about."""
        left = {name: context.left[name] for name in context.names}
        if isinstance(context.pruner.score, L1 | L2):  # layers of small weights are no less important
            means = {name: scores[name][left[name]].mean().clamp(min=1e-300) for name in context.names}
            scores = {name: scores[name] / means[name] for name in context.names}
        items = {}
        for name in context.names:
            own, size = scores[name][left[name]], int(left[name].sum())
            least = min(max(math.ceil(floor * len(left[name])), 1), size)
            counts = spaced_counts(least, size, max(math.ceil(size / most), 1))
            items[name] = Item.of(own, counts)
        return cls(scores, left, items)

    def best(self, cost: CountedCost, budget: float, name: Callable[[float], str]) -> Choice:
        """The best counts within a budget."""
        return Knapsack(self.items, cost, budget).best(name)

    def value(self, choice: Choice) -> float:
        """The importance of the slices that stay."""
        return sum(i.values[i.counts.index(choice[n])] for n, i in self.items.items())

    def least(self) -> Choice:
        """The least counts."""
        return {name: item.counts[0] for name, item in self.items.items()}

    def most(self) -> Choice:
        """All slices that are left."""
        return {name: item.counts[-1] for name, item in self.items.items()}

    def masks(self, choice: Choice) -> dict[str, Tensor]:
        """The masks that retain the best slices of each group; the first of equal ones."""
        masks = {}
        for name, count in choice.items():
            scores = self.scores[name].double().cpu().masked_fill(~self.left[name], -torch.inf)
            best = torch.sort(scores, descending=True, stable=True).indices[:count]
            masks[name] = torch.zeros_like(self.left[name]).index_fill_(0, best, True)
        return masks


def check_budget(value: Any, name: str, meaning: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise BadInput(f"expected {name}, {meaning}, above 0, got {value!r:.40}")


def check_floor(floor: Any) -> None:
    if not isinstance(floor, (int, float)) or not 0 <= floor <= 1:
        raise BadInput(f"expected a floor from 0 to 1, got {floor!r:.40}")


MOST_COUNTS = 64  # counts per group in the knapsack


@dataclass(frozen=True, slots=True)
class MACs:
    """As much importance as fits in a number of multiply-adds of one call on the example inputs.

    The multiply-adds are those after `demask`. Scores are added across groups, so they must have one scale, as
    `Taylor` has; those of `L1` and `L2` are divided by the mean of their group first. A schedule says in how many
    steps the budget is reached, not how much is removed.

    Args:
        budget: multiply-adds, an int; or a share of those at the start (without tokens that nothing
            reads), a float from 0 to 1.
        floor: the share of its slices that each group retains at least; one slice always stays.

    Example:
        >>> import torch
        >>> from demask import prune
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
        >>> prune.Pruner(net, torch.zeros(1, 8), allocation=prune.MACs(budget=0.5)).step().left
        {'0': 32}
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
        original = cost.macs({})
        final = self.budget * original if self._is_share else self.budget
        budget = exact = original + (final - original) * context.progress
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
