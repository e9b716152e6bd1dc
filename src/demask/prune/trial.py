"""A trial: a pure function of a network and the number of slices to remove from each group.

The amounts to try next are a function of the trials before, so that a search can go on.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import nn

from demask.machine.clock import set_threads
from demask.prune.masked_copies import PruningOptions, call_evaluate, masked_copy

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
        for trial, values in zip(history, _compared_values(history, cost, budget), strict=True):
            study.add_trial(optuna.trial.create_trial(params=dict(trial.removed), distributions=space, values=values))
        proposals = []
        for number in numbers:
            if number < len(UNIFORM):
                share = UNIFORM[number]
                study.enqueue_trial({k: least + round(share * (most - least)) for k, (least, most) in ranges.items()})
            study.sampler = optuna.samplers.TPESampler(seed=mix(seed, number))
            proposals.append(dict(study.ask(space).params))
    return proposals


def _compared_values(history: Sequence[SearchTrial], cost: str, budget: float | None) -> list[list[float]]:
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


# Seeds and the number of threads are the process's: workers with several threads take turns.
ONE_AT_A_TIME = Lock()


@dataclass(frozen=True, slots=True)
class TrialTask:
    """What all trials of a search share; `search` documents each."""

    model: nn.Module
    evaluate: Callable[[nn.Module], float]
    example_inputs: Any
    options: PruningOptions
    recover: Callable[[nn.Module], Any] | None
    cost: str
    budget: float | None
    threads: int


@dataclass(frozen=True, slots=True)
class Proposal:
    """What to try: slices to remove by group, and what of that is known before.

    amounts: shares of the groups. milliseconds: predicted; None where the cost is another. seed: of
    torch in the trial.
    """

    number: int
    removed: Mapping[str, int]
    amounts: Mapping[str, float]
    milliseconds: float | None
    seed: int


@dataclass(frozen=True, slots=True)
class SearchTrial:
    """One network that was tried.

    number: of the trial, from 0. removed: slices by group. amounts: their shares of the groups.
    accuracy: what `evaluate` returned; None for a network over the budget, which is not evaluated.
    parameters, macs: of the network after `demask`. milliseconds: predicted, the sum of its layers;
    None where the cost of the search is another.

    Example:
        >>> from demask import prune
        >>> prune.SearchTrial(0, {"conv1": 4}, {"conv1": 0.25}, 0.9, 100, 200, None).macs
        200
    """

    number: int
    removed: Mapping[str, int]
    amounts: Mapping[str, float]
    accuracy: float | None
    parameters: int
    macs: int
    milliseconds: float | None


def cost_of(cost: str, trial: SearchTrial) -> float:
    """The parameters, MACs or milliseconds of a trial, as `cost` says."""
    milliseconds = float("nan") if trial.milliseconds is None else trial.milliseconds
    return {"ms": milliseconds, "macs": trial.macs, "parameters": trial.parameters}[cost]


def run_trial(task: TrialTask, proposal: Proposal) -> SearchTrial:
    """Prune a copy, count its removal, and evaluate it if it fits the budget.

    The result depends on the arguments alone, if `evaluate` and `recover` draw random numbers from
    torch, if at all: its generator is seeded here, and restored.
    """
    number, removed = proposal.number, dict(proposal.removed)
    with ONE_AT_A_TIME, set_threads(task.threads), torch.random.fork_rng():
        torch.manual_seed(proposal.seed)
        copy, size = masked_copy(task.model, task.example_inputs, removed, task.options)
        trial = SearchTrial(
            number, removed, dict(proposal.amounts), None, size.parameters, size.macs, proposal.milliseconds
        )
        if task.budget is not None and cost_of(task.cost, trial) > task.budget:
            return trial
        if task.recover is not None:
            task.recover(copy)
        with torch.no_grad():
            words = "the network as it is" if number < 0 else f"the network of trial {number}"
            accuracy = call_evaluate(task.evaluate, copy.eval(), words)
    return replace(trial, accuracy=accuracy)


def run_pickled_trial(data: bytes, proposal: Proposal) -> SearchTrial:
    """`run_trial` of a pickled task, for workers. data: of `cloudpickle`, from the process that
    started the search."""
    return run_trial(pickle.loads(data), proposal)
