"""Thin callbacks that let training engines prune, each with its engine, an extra; and what they share: when
to prune, and what is removed at the end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from demask.errors import BadInput
from demask.prune.coupling import as_arguments
from demask.prune.pruner import Pruned, Pruner
from demask.shrink.demask import demask
from demask.shrink.training.carry import carry


class ScheduledPruner:
    """A pruner that takes its steps at certain steps of training.

    It masks the network with ones at once: masks change the order of a module's parameters, and the
    optimizers of a run and of the run that continues from its checkpoint need one order.

    Attributes:
        pruner: the pruner.
        history: what its steps masked, a list of `Pruned`.
    """

    def __init__(self, pruner: Pruner, start: int, every: int, rounds: int):
        """start: the training step (updates so far) before whose update the first step is taken.
        every: training steps in between. rounds: the number of steps in all."""
        if start < 0 or every < 1 or rounds < 1:
            raise BadInput(
                f"expected start of 0 or more, every and rounds of 1 or more, got {start}, {every} and {rounds}"
            )
        self.pruner, self.history = pruner, list[Pruned]()
        self._start, self._every, self._rounds = start, every, rounds
        state = pruner.state_dict()
        for candidates in pruner.candidates:
            masks = candidates.expand(torch.ones(candidates.units, dtype=torch.bool))
            state["masks"] = masks | state["masks"]
        pruner.load_state_dict(state)

    def before_update(self, updates: int) -> Pruned | None:
        """Take the pruner's step if one is due, and return what it masked. Gradients of the coming
        update are there, for scores that read them. updates: those so far."""
        done = self.pruner.steps
        if done >= self._rounds or updates < self._start + done * self._every:
            return None
        self.history.append(self.pruner.step())
        return self.history[-1]

    def finish(self, example_inputs: Any, optimizers: Iterable[Any]) -> nn.Module:
        """The small network, for which the optimizers are from now on (`demask.carry`); the masked
        one does not change."""
        model = self.pruner.model
        slim = demask(model, *as_arguments(example_inputs))
        for optimizer in optimizers:
            carry(slim, optimizer)
        return slim.train(model.training)
