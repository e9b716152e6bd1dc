"""The knapsack: within the budget, as good as all choices tried one by one, the same each time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping

import pytest
import torch

from demask.errors import BadInput
from demask.prune.allocation.knapsack import Item, Knapsack, spaced_counts


class Chain:
    """The cost of layers between neighboring groups; with `step`, widths cost in multiples."""

    def __init__(self, names: str, draw: random.Random, step: int = 1):
        self.layers = [(draw.uniform(0.5, 2), a, b) for a, b in itertools.pairwise(names)]
        self.step = step

    def total(self, counts: Mapping[str, int]) -> float:
        wide = {name: -(-n // self.step) * self.step for name, n in counts.items()}
        return sum(weight * wide[a] * wide[b] for weight, a, b in self.layers)


def drawn(seed: int, step: int = 1) -> tuple[Knapsack, float]:
    """A small problem, and the value of its best choice."""
    draw = random.Random(seed)
    cost = Chain("abcd", draw, step)
    scores = {n: torch.tensor([draw.random() * draw.choice([1, 3]) for _ in range(6)]) for n in "abcd"}
    items = {name: Item.of(own, range(1, 7)) for name, own in scores.items()}
    least, most = (cost.total(dict.fromkeys("abcd", n)) for n in (1, 6))
    budget = least + (most - least) * draw.uniform(0.1, 0.9)
    problem = Knapsack(items, cost, budget)
    choices = itertools.product(range(1, 7), repeat=4)
    values = [
        value(problem, counts) for c in choices if cost.total(counts := dict(zip("abcd", c, strict=True))) <= budget
    ]
    return problem, max(values)


def value(problem: Knapsack, counts: Mapping[str, int]) -> float:
    return sum(item.values[item.counts.index(counts[n])] for n, item in problem.items.items())


@pytest.mark.parametrize("step", [1, 3])
def test_nearly_the_best_of_all_choices_and_within_the_budget(step: int) -> None:
    shares = []
    for seed in range(25):
        problem, best = drawn(seed, step)
        counts = problem.best()
        assert problem.cost.total(counts) <= problem.budget
        assert problem.best() == counts
        shares.append(value(problem, counts) / best)
    assert min(shares) > 0.9 and sum(share > 1 - 1e-9 for share in shares) >= 18, shares


def test_a_width_that_saves_nothing_is_not_given_up() -> None:
    """Steps of 4: 5 slices cost what 8 do, so a choice never ends between them for nothing."""
    scores = torch.ones(16)
    draw = random.Random(0)
    items = {name: Item.of(scores, range(1, 17)) for name in "abc"}
    problem = Knapsack(items, Chain("abc", draw, 4), 120.0)
    counts = problem.best()
    for name, n in counts.items():
        if n < 16:
            assert problem.cost.total({**counts, name: n + 1}) > 120


def test_all_slices_stay_where_they_fit() -> None:
    problem, _ = drawn(3)
    whole = Knapsack(problem.items, problem.cost, 1e9)
    assert whole.best() == dict.fromkeys("abcd", 6)


def test_the_least_reachable_is_said() -> None:
    problem, _ = drawn(3)
    least = problem.cost.total(dict.fromkeys("abcd", 1))
    with pytest.raises(BadInput, match=f"at least {least:.3f} of cost.*got 0.100 of cost"):
        Knapsack(problem.items, problem.cost, 0.1).best("{:.3f} of cost".format)
    exactly = Knapsack(problem.items, problem.cost, least)
    assert exactly.best() == dict.fromkeys("abcd", 1)


def test_the_most_important_slices_are_counted_first() -> None:
    item = Item.of(torch.tensor([1.0, 5.0, 3.0]), (1, 2, 3))
    assert item.values == (5.0, 8.0, 9.0)


def test_counts_have_both_ends() -> None:
    assert spaced_counts(3, 3, 2) == (3,)
    assert spaced_counts(4, 10, 4) == (4, 8, 10)
    assert spaced_counts(1, 9, 1) == tuple(range(1, 10))
