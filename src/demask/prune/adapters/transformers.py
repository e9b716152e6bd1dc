"""A callback that prunes while transformers' Trainer trains. It needs transformers, accelerate."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from demask.errors import BadInput
from demask.prune.adapters import ScheduledPruner
from demask.prune.pruner import Pruned, Pruner

FILE = "pruner.pt"  # in the folder of a checkpoint
LOGGER = logging.getLogger(__name__)


class TrainerPruneCallback(TrainerCallback):
    """Takes the steps of a `Pruner` while transformers' Trainer trains.

    Every checkpoint gets the masks, in pruner.pt. What each step masked is logged (level INFO).

    Args:
        pruner: of the Trainer's model; its schedule says how much is masked after each step. The
            model is masked with ones. Make the callback before the Trainer.
        every: optimizer steps between pruning steps. Default: 100.
        rounds: the number of pruning steps. Default: 10.
        start: optimizer steps before the first one. Default: 0.
        resume: the folder of a checkpoint to go on from: as `trainer.train(resume_from_checkpoint=
            folder)`, which reads the weights. Default: None.
        demask_with: example inputs to demask the model with when training ends. Default: None, for
            no such thing.

    Attributes:
        history: what the steps masked, a list of `Pruned`.
        slim: the small network, if `demask_with` is set and training has ended. The Trainer's
            optimizer is for it then.

    Example::

        pruner = prune.Pruner(net, example, schedule=prune.Cubic(0, 0.5, steps=4))
        callback = PruneCallback(pruner, every=50, rounds=4)
        trainer = Trainer(..., callbacks=[callback])
    """

    def __init__(
        self,
        pruner: Pruner,
        *,
        every: int = 100,
        rounds: int = 10,
        start: int = 0,
        resume: str | Path | None = None,
        demask_with: Any = None,
    ):
        self._scheduled = ScheduledPruner(pruner, start, every, rounds)
        self._demask_with = demask_with
        self.slim: nn.Module | None = None
        if resume is not None:
            file = Path(resume, FILE)
            if not file.exists():
                raise BadInput(f"expected {file}, which this callback writes into checkpoints")
            pruner.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))

    @property
    def history(self) -> list[Pruned]:
        """What the steps masked."""
        return self._scheduled.history

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Prune where a step is due."""
        pruned = self._scheduled.before_update(state.global_step)
        if pruned is not None:
            LOGGER.info("pruning step %d\n%s", pruned.step, pruned)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the masks into the checkpoint."""
        if state.is_world_process_zero:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            torch.save(self._scheduled.pruner.state_dict(), folder / FILE)

    def on_train_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Demask, if that is wanted."""
        if self._demask_with is not None:
            inner = getattr(optimizer, "optimizer", optimizer)  # of accelerate's wrapper
            optimizers = [] if inner is None else [inner]
            self.slim = self._scheduled.finish(self._demask_with, optimizers)


PruneCallback = TrainerPruneCallback  # its public name: one in each module of an engine
