"""A callback that prunes while Lightning trains. It needs the package lightning."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from demask.prune.adapters import ScheduledPruner
from demask.prune.pruner import Pruned, Pruner


class LightningPruneCallback(Callback):
    """Takes the steps of a `Pruner` while Lightning's Trainer trains.

    Checkpoints have the masks; `trainer.fit(..., ckpt_path=...)` continues with them. What a step
    masked is printed, and logged as pruned_parameters and pruned_macs (what remains).

    Args:
        pruner: of the LightningModule's network: `Pruner(module.net, example_inputs, ...)`; its
            schedule says how much is masked after each step. The network is masked with ones.
        every: optimizer steps between pruning steps. Default: 100.
        rounds: the number of pruning steps. Default: 10.
        start: optimizer steps before the first one. Default: 0.
        demask_with: example inputs to demask the network with when training ends. Default: None,
            for no such thing.

    Attributes:
        history: what the steps masked, a list of `Pruned`.
        slim: the small network, if `demask_with` is set and training has ended. The trainer's
            optimizers are for it then.

    Example::

        pruner = prune.Pruner(net, example, schedule=prune.Cubic(0, 0.5, steps=4))
        callback = PruneCallback(pruner, every=50, rounds=4)
        trainer = Trainer(..., callbacks=[callback])
    """

    def __init__(self, pruner: Pruner, *, every: int = 100, rounds: int = 10, start: int = 0, demask_with: Any = None):
        self._scheduled = ScheduledPruner(pruner, start, every, rounds)
        self._demask_with = demask_with
        self.slim: nn.Module | None = None

    @property
    def history(self) -> list[Pruned]:
        """What the steps masked."""
        return self._scheduled.history

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Read the masks of a checkpoint: its weights are those of a masked network."""
        if stage == "fit" and trainer.ckpt_path:
            checkpoint = torch.load(trainer.ckpt_path, map_location="cpu", weights_only=False)
            self.load_state_dict(checkpoint["callbacks"][self.state_key])

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Prune where a step is due."""
        pruned = self._scheduled.before_update(trainer.global_step)
        if pruned is not None:
            rank_zero_info(f"pruning step {pruned.step}\n{pruned}")
            sizes = {"pruned_parameters": pruned.after.parameters, "pruned_macs": pruned.after.macs}
            pl_module.log_dict({name: float(size) for name, size in sizes.items()})

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Demask, if that is wanted."""
        if self._demask_with is not None:
            self.slim = self._scheduled.finish(self._demask_with, trainer.optimizers)

    def state_dict(self) -> dict[str, Any]:
        """The pruner's state."""
        return self._scheduled.pruner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the pruner's state."""
        self._scheduled.pruner.load_state_dict(state_dict)


PruneCallback = LightningPruneCallback  # its public name: one in each module of an engine
