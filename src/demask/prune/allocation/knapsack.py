"""How many slices each group retains: the most importance at a cost within a budget.

The cost is no sum over groups, for a layer between two groups costs the product of their widths. So
a reference is chosen, the cost is separated there into what each group adds while the others stay
at the reference, and dynamic programming over `LEVELS` levels of cost solves that knapsack exactly,
as in HALP (Shen et al. 2022, "Structural pruning via latency-saliency knapsack"). The solution is
the next reference. Last, single steps and exchanges of two groups are judged by the exact cost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from demask.errors import BadInput

LEVELS, REFERENCES, EXCHANGES, PARTNERS = 400, 8, 200, 12
Choice = dict[str, int]  # by name of the group: how many slices stay


class CountedCost(Protocol):
    """The cost of a network as a function of the numbers of slices that stay."""

    def total(self, counts: Mapping[str, int]) -> float:
        """The cost; it must not fall as counts grow."""
        ...


@dataclass(frozen=True, slots=True)
class Item:
    """A group in the knapsack. counts: the numbers of slices that it may retain, in rising order;
    values: the importance of the best so many slices, each."""

    counts: tuple[int, ...]
    values: tuple[float, ...]

    @classmethod
    def of(cls, scores: Tensor, counts: Sequence[int]) -> Item:
        """The item of a group whose slices have these scores."""
        best = torch.sort(scores.double().cpu(), descending=True).values
        sums = torch.cat([torch.zeros(1, dtype=torch.float64), best.cumsum(0)])
        return cls(tuple(counts), tuple(float(sums[n]) for n in counts))


@dataclass(frozen=True, slots=True)
class Knapsack:
    """The choice of one count per item with the largest sum of values and a cost within `budget`.

    A choice in methods is a dict of places in `Item.counts`, by name of the group.
    """

    items: Mapping[str, Item]
    cost: CountedCost
    budget: float

    def best(self, name: Callable[[float], str] = "{:,.6g}".format) -> Choice:
        """The counts of the best choice. It is the same for the same items in the same order.

        name: a cost in words, for the message of BadInput, raised where the least counts cost more
        than the budget.
        """
        least = dict.fromkeys(self.items, 0)
        if self._cost(least) > self.budget:
            raise BadInput(
                f"expected a budget of at least {name(self._cost(least))}, the least that can be "
                f"reached with these groups and floors; got {name(self.budget)}"
            )
        choice, tried = self._largest_equal_share(), []
        most = {n: len(item.counts) - 1 for n, item in self.items.items()}
        if self._cost(most) <= self.budget:
            return self._counts(most)
        candidates = [choice]
        while choice not in tried and len(tried) < REFERENCES:
            tried.append(choice)
            choice = self._best_separately(choice)
            candidates.append(self._fill_up(self._within_budget(choice)))
        best = max(candidates, key=self._value)  # the first of equal ones
        return self._counts(self._exchange_while_better(best))

    def _counts(self, choice: Mapping[str, int]) -> Choice:
        return {name: item.counts[choice[name]] for name, item in self.items.items()}

    def _cost(self, choice: Mapping[str, int]) -> float:
        return self.cost.total(self._counts(choice))

    def _value(self, choice: Mapping[str, int]) -> float:
        return sum(item.values[choice[name]] for name, item in self.items.items())

    def _largest_equal_share(self) -> Choice:
        """The same share of all items, as large as fits: the first reference."""
        low, high = 0, 64  # in 64ths
        while high - low > 1:
            middle = (low + high) // 2
            fits = self._cost(self._choice_of_share(middle / 64)) <= self.budget
            low, high = (middle, high) if fits else (low, middle)
        return self._choice_of_share(low / 64)

    def _choice_of_share(self, share: float) -> Choice:
        """The largest counts of at most a share of each item's; the least where none is."""
        return {
            name: max((k for k, n in enumerate(item.counts) if n <= share * item.counts[-1]), default=0)
            for name, item in self.items.items()
        }

    def _best_separately(self, reference: Choice) -> Choice:
        """The best choice where each item costs what it does with the others at the reference."""
        extra = {name: self._extra_costs(name, reference) for name in self.items}
        fixed = self._cost(reference) - sum(extra[n][reference[n]] for n in self.items)
        room = self.budget - fixed  # for what items cost beyond their least counts
        if room <= 0:
            return dict.fromkeys(self.items, 0)
        level = room / LEVELS
        values = torch.full((LEVELS + 1,), -torch.inf, dtype=torch.float64)
        values[0] = 0.0
        chosen: list[Tensor] = []
        for name, item in self.items.items():
            options = []
            for k, seconds in enumerate(extra[name]):
                steps = max(int(-(-seconds // level)), 0)  # rounded up: never above the budget
                moved = torch.full_like(values, -torch.inf)
                if steps <= LEVELS:
                    moved[steps:] = values[: LEVELS + 1 - steps] + item.values[k]
                options.append(moved)
            values, best = torch.stack(options).max(0)
            chosen.append(best)
        return self._trace_choice(values, chosen, extra, level)

    def _extra_costs(self, name: str, reference: Choice) -> list[float]:
        """The cost of each count of an item beyond its least one, the others at the reference."""
        costs = [self._cost({**reference, name: k}) for k in range(len(self.items[name].counts))]
        return [cost - costs[0] for cost in costs]

    def _trace_choice(
        self, values: Tensor, chosen: list[Tensor], extra: Mapping[str, list[float]], level: float
    ) -> Choice:
        """The choice of the best final level, item by item from the last."""
        at = int(values.argmax())
        choice: Choice = {}
        for name, best in zip(reversed(list(self.items)), reversed(chosen), strict=True):
            choice[name] = int(best[at])
            at -= max(int(-(-extra[name][choice[name]] // level)), 0)
        return {name: choice[name] for name in self.items}

    def _within_budget(self, choice: Choice) -> Choice:
        """The choice with steps down, those that lose the least value for what they save, until it
        is within the budget."""
        choice, cost = dict(choice), self._cost(choice)
        while cost > self.budget:
            _, name, cost = max(self._steps(choice, cost, -1))
            choice[name] -= 1
        return choice

    def _fill_up(self, choice: Choice) -> Choice:
        """The choice with steps up, those with the most value for their cost, while they fit."""
        choice, cost = dict(choice), self._cost(choice)
        while fitting := [s for s in self._steps(choice, cost, 1) if s[2] <= self.budget]:
            _, name, cost = max(fitting)
            choice[name] += 1
        return choice

    def _steps(self, choice: Choice, cost: float, step: int) -> list[tuple[float, str, float]]:
        """Per item that has a next count: value for cost, its name, the cost of all after it."""
        steps = []
        for name, item in self.items.items():
            k = choice[name] + step
            if 0 <= k < len(item.counts):
                after = self._cost({**choice, name: k})
                gain = item.values[k] - item.values[choice[name]]
                difference = max(abs(after - cost), 1e-12 * max(cost, 1e-300))
                # steps down compare what is lost per saved cost, the least first
                steps.append((gain / difference, name, after))
        return steps

    def _exchange_while_better(self, choice: Choice) -> Choice:
        """The choice after exchanges of two items, one step up and some down, while one pays."""
        for _ in range(EXCHANGES):
            better = self._first_better_exchange(choice)
            if better is None:
                break
            choice = better
        return choice

    def _first_better_exchange(self, choice: Choice) -> Choice | None:
        """The first exchange that raises the value within the budget, filled up; None if none. Only
        the `PARTNERS` best steps up and down are combined."""
        value, cost = self._value(choice), self._cost(choice)
        ups = sorted(self._steps(choice, cost, 1), reverse=True)[:PARTNERS]
        downs = sorted(self._steps(choice, cost, -1), reverse=True)[:PARTNERS]
        for _, up, _ in ups:
            raised = {**choice, up: choice[up] + 1}
            for down in [name for _, name, _ in downs if name != up]:
                for k in range(choice[down] - 1, -1, -1):
                    lowered = {**raised, down: k}
                    if self._value(lowered) <= value:
                        break
                    if self._cost(lowered) <= self.budget:
                        return self._fill_up(lowered)
        return None


def spaced_counts(floor: int, size: int, step: int) -> tuple[int, ...]:
    """Counts from `floor` to `size` in multiples of `step`, with both ends.

    >>> spaced_counts(1, 10, 4)
    (1, 4, 8, 10)
    """
    inner = [n for n in range(step, size, step) if n > floor]
    return tuple(n for n, after in pairwise([floor, *inner, size, size + 1]) if n < after)
