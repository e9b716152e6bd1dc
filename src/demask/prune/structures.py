"""Structures: what is removed as one. Each offers candidates: units with a score each."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from demask.errors import BadInput
from demask.prune.coupling import KINDS_OF, Coupling, Group, Member, select_groups


class Candidates(Protocol):
    """What a structure offers to remove: units, numbered from 0.

    name: of the group or weight. units: how many. members: the parameters that they are in.
    group: None for units of a single weight.
    """

    @property
    def name(self) -> str: ...

    @property
    def units(self) -> int: ...

    @property
    def members(self) -> tuple[Member, ...]: ...

    @property
    def group(self) -> Group | None: ...

    def expand(self, keep: Tensor) -> dict[str, Tensor]:
        """By parameter, a mask of its shape, True where it stays. keep: bool [units]."""
        ...

    def reduce(self, member: Member, values: Tensor) -> Tensor:
        """The sum of values over each unit, [units]. values: of the shape of the member's
        parameter."""
        ...

    def alive(self, masks: Mapping[str, Tensor]) -> Tensor:
        """The units that masks leave, bool [units]."""
        ...

    def choose(self, scores: Tensor, count: int) -> Tensor:
        """The `count` units of the highest scores, as far as the structure allows, bool [units].
        Of equal scores the first ones stay."""
        ...


def keep_highest(scores: Tensor, count: int) -> Tensor:
    """Where the `count` highest scores are, bool; of equal ones the first."""
    keep = torch.zeros(scores.shape, dtype=torch.bool)
    keep[torch.argsort(scores, descending=True, stable=True)[:count]] = True
    return keep


@dataclass(frozen=True, eq=False)
class GroupSlices:
    """The slices of a group. shapes: of the parameters that compute them."""

    group: Group
    shapes: Mapping[str, torch.Size]

    @property
    def name(self) -> str:
        return self.group.name

    @property
    def units(self) -> int:
        return self.group.size

    @property
    def members(self) -> tuple[Member, ...]:
        return self.group.members

    def expand(self, keep: Tensor) -> dict[str, Tensor]:
        masks: dict[str, Tensor] = {}
        for member in self.group.producers:
            shape = self.shapes[member.parameter]
            line = [-1 if axis == member.axis else 1 for axis in range(len(shape))]
            mask = masks.setdefault(member.parameter, torch.ones(shape, dtype=torch.bool))
            mask &= member.mask(keep).view(line)
        return masks

    def reduce(self, member: Member, values: Tensor) -> Tensor:
        sums = values.movedim(member.axis, 0).reshape(values.shape[member.axis], -1).sum(1).cpu()
        inside = member.slices >= 0
        return sums.new_zeros(self.units).index_add(0, member.slices[inside], sums[inside])

    def alive(self, masks: Mapping[str, Tensor]) -> Tensor:
        return ~self.group.gone(masks)

    def choose(self, scores: Tensor, count: int) -> Tensor:
        return keep_highest(scores, count)


@dataclass(frozen=True, eq=False)
class WeightBlocks:
    """Blocks of rows x columns of one weight, as a matrix [outputs, kernel positions and inputs]
    in which inputs are consecutive; the last block of an axis may be smaller. Elements are blocks
    of 1 x 1.

    shape: of the weight. rows: its axis of outputs. most: (n, m): n of m consecutive inputs stay at
    least; None: no limit.
    """

    name: str
    shape: torch.Size
    rows: int
    block: tuple[int, int] = (1, 1)
    least: tuple[int, int] | None = None
    group: None = None

    @property
    def _matrix_axes(self) -> list[int]:
        rest = [axis for axis in range(len(self.shape)) if axis != self.rows]
        return [self.rows, *rest[1:], rest[0]]

    @property
    def _as_matrix(self) -> tuple[int, int]:
        outputs = self.shape[self.rows]
        return outputs, math.prod(self.shape) // outputs

    @property
    def _block_grid(self) -> tuple[int, int]:
        rows, columns = (-(-n // b) for n, b in zip(self._as_matrix, self.block, strict=True))
        return rows, columns

    @property
    def units(self) -> int:
        return math.prod(self._block_grid)

    @property
    def members(self) -> tuple[Member, ...]:
        return (Member(self.name, self.rows, torch.arange(self.shape[self.rows]), True),)

    def expand(self, keep: Tensor) -> dict[str, Tensor]:
        blocks = keep.reshape(self._block_grid)
        for axis, n in enumerate(self.block):
            blocks = blocks.repeat_interleave(n, axis)
        rows, columns = self._as_matrix
        moved = blocks[:rows, :columns].reshape([self.shape[axis] for axis in self._matrix_axes])
        back = sorted(range(len(self.shape)), key=self._matrix_axes.__getitem__)
        return {self.name: moved.permute(back).contiguous()}

    def reduce(self, member: Member, values: Tensor) -> Tensor:
        matrix = values.permute(self._matrix_axes).reshape(self._as_matrix).cpu()
        (rows, columns), (r, c) = self._as_matrix, self.block
        matrix = nn.functional.pad(matrix, (0, -columns % c, 0, -rows % r))
        grid = self._block_grid
        return matrix.reshape(grid[0], r, grid[1], c).sum((1, 3)).reshape(-1)

    def alive(self, masks: Mapping[str, Tensor]) -> Tensor:
        mask = masks.get(self.name)
        if mask is None:
            return torch.ones(self.units, dtype=torch.bool)
        return self.reduce(self.members[0], mask.double()) > 0

    def choose(self, scores: Tensor, count: int) -> Tensor:
        """The highest scores; with `least`, these and the n highest of every m."""
        if self.least is None:
            return keep_highest(scores, count)
        n, m = self.least
        rows = scores.reshape(self._as_matrix)
        columns = rows.shape[1]
        lowest = torch.full((rows.shape[0], -columns % m), -torch.inf, dtype=rows.dtype)
        parts = torch.cat((rows, lowest), 1).reshape(rows.shape[0], -1, m)
        ranks = parts.argsort(dim=2, descending=True, stable=True).argsort(dim=2)
        needed = (ranks < n).reshape(rows.shape[0], -1)[:, :columns].reshape(-1)
        return needed | keep_highest(scores.masked_fill(needed, torch.inf), count)


def find_candidates(structure: str, coupling: Coupling, shapes: Mapping[str, torch.Size]) -> tuple[Candidates, ...]:
    """What a structure offers to remove in a network. Raises BadInput for an unknown structure, and
    where the network offers nothing.

    shapes: of the parameters, by name.
    """
    candidates: tuple[Candidates, ...]
    if structure in KINDS_OF:
        groups = select_groups(coupling, KINDS_OF[structure])
        candidates = tuple(GroupSlices(group, shapes) for group in groups)
    else:
        block, least = _read_pattern(structure)
        candidates = tuple(
            WeightBlocks(name, shapes[name], axis, block, least) for name, axis in coupling.matrices() if name in shapes
        )
    if not candidates:
        raise BadInput(
            f"this network has no {structure} that can be removed: all of them reach its inputs or "
            "outputs, a call that needs full axes, or what `skip` names; see demask.prune.groups"
        )
    return candidates


def _read_pattern(structure: str) -> tuple[tuple[int, int], tuple[int, int] | None]:
    """The block of "element", "block:RxC" or "n:m", and the n of m that stay. Raises BadInput."""
    if structure == "element":
        return (1, 1), None
    if match := re.fullmatch(r"block:([1-9]\d*)x([1-9]\d*)", structure):
        return (int(match[1]), int(match[2])), None
    if match := re.fullmatch(r"([1-9]\d*):([1-9]\d*)", structure):
        n, m = int(match[1]), int(match[2])
        if n < m:
            return (1, 1), (n, m)
    raise BadInput(
        f"expected a structure of {', '.join(KINDS_OF)}, element, block:RxC (block:4x1) or n:m (2:4); got {structure!r}"
    )
