"""A trial: a pure function of a network and the number of slices to remove from each group."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import torch
from torch import nn

from demask.machine.clock import set_threads
from demask.prune.masked_copies import PruningOptions, call_evaluate, masked_copy

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
