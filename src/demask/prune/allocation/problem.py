"""What budgets have in common: the groups of a pruner as a knapsack, and what a budget may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from demask.errors import BadInput
from demask.prune.allocation.context import NetworkContext
from demask.prune.allocation.knapsack import Choice, CountedCost, Item, Knapsack, spaced_counts

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
