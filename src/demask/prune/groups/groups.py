"""Groups (stub until the builder of groups is merged)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Member:
    parameter: str
    axis: int
    outer: int
    inner: int
    offset: int
    produces: bool
    size: int = 0

    def positions(self, k: int) -> Tensor:
        o = torch.arange(self.outer)[:, None] * self.size * self.inner
        return (self.offset + o + k * self.inner + torch.arange(self.inner)).reshape(-1)


@dataclass(frozen=True)
class Group:
    name: str
    size: int
    members: tuple[Member, ...]
    kind: str = "channel"
