"""What an allocation within a budget reads of a `Pruner`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from demask.errors import BadInput
from demask.graph.module_copy import structural_copy
from demask.prune.masks import find_places, read_masks

if TYPE_CHECKING:
    from demask.prune.pruner import Pruner
    from demask.prune.structures import Candidates


@dataclass(frozen=True)
class NetworkContext:
    """The network of a pruner.

    left: by group, of any kind, which slices are left, bool [size]. names: of the groups to prune.
    progress: the share of the way from the whole network to the last step of the schedule.
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
        for candidates in self._with(masks):
            for name, mask in candidates.expand(masks[candidates.name]).items():
                parameter = places[name][0].parameter
                parameter.mul_(mask.to(parameter.device))
        return copy

    def _with(self, masks: Mapping[str, Tensor]) -> list[Candidates]:
        return [c for c in self.pruner.candidates if c.name in masks]
