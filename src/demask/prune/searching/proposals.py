"""Which amounts to try next: a function of the trials before, so that a search can go on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from demask.prune.searching.trial import SearchTrial, cost_of

UNIFORM = (0.25, 0.5, 0.75)  # of the range: the first proposals, the same for every group


def propose(
    ranges: Mapping[str, tuple[int, int]],
    history: Sequence[SearchTrial],
    numbers: Sequence[int],
    *,
    cost: str,
    budget: float | None,
    seed: int,
) -> list[dict[str, int]]:
    """Slices to remove of each group, for the trials of these numbers.

    The first are uniform, the others of a tree-structured Parzen estimator (Optuna's `TPESampler`).
    The result depends on the arguments alone: a search that was killed proposes the same again.

    Args:
        ranges: by group, the least and the most slices to remove.
        history: the trials of smaller numbers, in order.
    """
    with quiet_optuna() as optuna:
        several = budget is None
        directions = ["maximize", "minimize"] if several else ["maximize"]
        study = optuna.create_study(directions=directions)
        space = {n: optuna.distributions.IntDistribution(*r) for n, r in ranges.items()}
        for trial, values in zip(history, _values(history, cost, budget), strict=True):
            study.add_trial(optuna.trial.create_trial(params=dict(trial.removed), distributions=space, values=values))
        proposals = []
        for number in numbers:
            if number < len(UNIFORM):
                study.enqueue_trial(_uniform(ranges, UNIFORM[number]))
            study.sampler = optuna.samplers.TPESampler(seed=mix(seed, number))
            proposals.append(dict(study.ask(space).params))
    return proposals


def _uniform(ranges: Mapping[str, tuple[int, int]], share: float) -> dict[str, int]:
    return {name: least + round(share * (most - least)) for name, (least, most) in ranges.items()}


def _values(history: Sequence[SearchTrial], cost: str, budget: float | None) -> list[list[float]]:
    """What the sampler compares: accuracy and cost; or, under a budget, one number that orders the
    trials: by accuracy, and after all of these those over the budget, by how much they are."""
    if budget is None:
        return [[trial.accuracy or 0.0, cost_of(cost, trial)] for trial in history]
    worst = min((t.accuracy for t in history if t.accuracy is not None), default=0.0)
    return [[worst - cost_of(cost, trial) / budget if trial.accuracy is None else trial.accuracy] for trial in history]


def mix(seed: int, number: int) -> int:
    """A seed of 31 bits for trial `number` of a search with `seed`."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0] >> 1)


@contextmanager
def quiet_optuna() -> Iterator[Any]:
    """Optuna, which tells of warnings alone in the block."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield optuna
    finally:
        optuna.logging.set_verbosity(before)
