"""What an allocation may know of the network that is pruned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from demask.errors import BadInput
from demask.graph.module_copy import structural_copy
from demask.graph.program import Program
from demask.ops import Table
from demask.prune.groups.groups import Group
from demask.prune.removal_cost import RemovalCost
from demask.shrink.pipeline import canonicalize, capture_program


@dataclass(frozen=True)
class NetworkContext:
    """A network, its example inputs and its groups.

    masks: by group, which slices are left, bool [size]; a group without one is whole. progress: the
    share of the way from the whole network to the last step of the schedule, from 0 to 1.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    groups: Mapping[str, Group]
    table: Table
    masks: Mapping[str, Tensor] = field(default_factory=dict)
    progress: float = 1.0

    @cached_property
    def program(self) -> Program:
        """The captured program of the model, in canonical notation."""
        program = capture_program(self.model, self.args, self.kwargs, None)
        return canonicalize(program, self.table)

    @cached_property
    def removal_cost(self) -> RemovalCost:
        """Parameters and MACs after a removal."""
        return RemovalCost.of(self.program, self.groups.values(), self.table)

    def left(self, name: str) -> Tensor:
        """Which slices of a group are left, bool [size]."""
        whole = torch.ones(self.groups[name].size, dtype=torch.bool)
        return self.masks.get(name, whole)

    @torch.no_grad()
    def masked(self, masks: Mapping[str, Tensor]) -> nn.Module:
        """A copy of the model in eval mode, in which slices outside of `masks` are zeros."""
        copy = structural_copy(self.model, share=False).eval()
        parameters = dict(copy.named_parameters(remove_duplicate=False))
        for name, mask in masks.items():
            gone = (~mask).nonzero().flatten().tolist()
            for member in (m for m in self.groups[name].members if m.produces and gone):
                positions = torch.cat([member.positions(k) for k in gone])
                parameter = _stored(parameters, member.parameter)
                parameter.index_fill_(member.axis, positions.to(parameter.device), 0)
        return copy


def _stored(parameters: Mapping[str, Tensor], name: str) -> Tensor:
    """The parameter of that name, or the one that is masked at run time in its place."""
    owner, _, last = name.rpartition(".")
    prefix = f"{owner}." if owner else ""
    names = (name, f"{name}_orig", f"{prefix}parametrizations.{last}.original")
    parameter = next((parameters[n] for n in names if n in parameters), None)
    if parameter is None:
        raise BadInput(f"expected a model with the parameter {name!r}; it was renamed or removed")
    return parameter
