"""Cells: groups of axes that must be cut alike, and the support of each.

Every axis of every live tensor is a list of cells, major first. Ops that carry an axis share its
cell; a `view` splits one. The support of a cell is the union of what its tensors need, so the
support of an axis with several cells is their product. Any superset of what is needed is correct: a
position that is live although its value is known is simply computed.

A support known only at run time is a `RunTimeIndex`: a graph value, another one at every call (see
`runtime_index`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from demask.ops.relation import MAX_AXIS

Positions = tuple[int, ...] | None  # old positions in new order; None: the full axis, in order
Layout = tuple[Positions, ...]  # per axis of a tensor


@dataclass(frozen=True, slots=True)
class RunTimeIndex:
    """A run-time support of an axis: the positions (a, p, b) for every p in a graph value.

    source: an input of the graph, int64 [k], distinct positions below `size`, in any order. outer,
    inner: number of positions of the cells before and after, where an axis has several cells.
    """

    source: fx.Node
    size: int
    outer: int = 1
    inner: int = 1

    @property
    def length(self) -> int:
        """The size of the full axis."""
        return self.outer * self.size * self.inner


# Per axis with a run-time support, in any order; the other axes of the tensor are whole.
RunTimeSupports = tuple[tuple[int, RunTimeIndex], ...]


def cut_positions(positions: Sequence[int], size: int) -> Positions:
    """Positions, or None if they are the full axis in order.

    >>> cut_positions([0, 1, 2], 3) is None
    True
    """
    return None if list(positions) == list(range(size)) else tuple(positions)


@dataclass(slots=True)
class _Cell:
    size: int | None
    live: Tensor | None  # bool [size]; None where dynamic
    forced: bool = False
    ordered: bool = False


class Cells:
    """Union-find over cells, with splitting. Mutable only while a placement is computed."""

    def __init__(self) -> None:
        self._cells: list[_Cell] = []
        self._parents: dict[int, int] = {}
        self._parts: dict[int, tuple[int, ...]] = {}

    def new(self, size: int | None) -> int:
        """A new cell. size: None for a dynamic axis; it is never cut, nor one above MAX_AXIS."""
        size = None if size is None or size > MAX_AXIS else size
        live = None if size is None else torch.zeros(size, dtype=torch.bool)
        self._cells.append(_Cell(size, live))
        return len(self._cells) - 1

    def leaves(self, cells: Iterable[int]) -> list[int]:
        """The current cells of an axis: roots, and the parts of split cells."""
        current: list[int] = []
        for cell in cells:
            while cell in self._parents:
                cell = self._parents[cell]
            current += self.leaves(self._parts[cell]) if cell in self._parts else [cell]
        return current

    def size(self, cell: int) -> int | None:
        """The size of a cell; None where dynamic."""
        return self._cells[cell].size

    def unify(self, left: Sequence[int], right: Sequence[int]) -> bool:
        """Tie two axes cell by cell, splitting where one is finer.

        Returns False where sizes do not divide: the axes then stay separate, and values are adapted
        between them.
        """
        a, b = self.leaves(left), self.leaves(right)
        if not self._has_common_split([self.size(c) for c in a], [self.size(c) for c in b]):
            return False
        while a and b:
            m, n = self.size(a[0]), self.size(b[0])
            if m == n:
                self._join(a.pop(0), b.pop(0))
            elif m == 1:
                a.pop(0)
            elif n == 1:
                b.pop(0)
            elif m is not None and n is not None and m > n:
                a[:1] = self._split(a[0], n)
            elif m is not None and n is not None:
                b[:1] = self._split(b[0], m)
            a, b = self.leaves(a), self.leaves(b)
        return True

    def _has_common_split(self, a: list[int | None], b: list[int | None]) -> bool:
        """Whether both lists of sizes can be split into one common list."""
        while a and b:
            m, n = a.pop(0), b.pop(0)
            if m == n:
                continue
            if m == 1:
                b.insert(0, n)
            elif n == 1:
                a.insert(0, m)
            elif m is None or n is None:
                return False
            elif m % n == 0:
                a.insert(0, m // n)
            elif n % m == 0:
                b.insert(0, n // m)
            else:
                return False
        return all(n == 1 for n in [*a, *b])

    def _split(self, cell: int, major: int) -> list[int]:
        size = self._cells[cell].size
        assert size is not None
        self._parts[cell] = (self.new(major), self.new(size // major))
        for part in self._parts[cell]:
            self._cells[part].forced = self._cells[cell].forced
            self._cells[part].ordered = self._cells[cell].ordered
        live = self._cells[cell].live
        if live is not None:
            self.need(self._parts[cell], live)
        return list(self._parts[cell])

    def _join(self, a: int, b: int) -> None:
        if a == b:
            return
        low, high = min(a, b), max(a, b)
        self._parents[high] = low
        self._cells[low].forced |= self._cells[high].forced
        self._cells[low].ordered |= self._cells[high].ordered
        live, other = self._cells[low].live, self._cells[high].live
        if live is not None and other is not None:
            live |= other

    def force(self, cells: Iterable[int]) -> None:
        """Require these cells to be whole and in order."""
        for cell in self.leaves(cells):
            self._cells[cell].forced = True

    def order(self, cells: Iterable[int]) -> None:
        """Require the support of these cells to be in order."""
        for cell in self.leaves(cells):
            self._cells[cell].ordered = True

    def ordered(self, cell: int) -> bool:
        """Whether the support must be in order."""
        return self._cells[cell].ordered or self.forced(cell)

    def forced(self, cell: int) -> bool:
        """Whether the cell must be whole and in order."""
        return self._cells[cell].forced or self._cells[cell].size is None

    def need(self, cells: Sequence[int], mask: Tensor) -> None:
        """Add to the support. mask: bool over the axis (length 1: the same all along)."""
        current = self.leaves(cells)
        sizes = [self.size(cell) for cell in current]
        for k, cell in enumerate(current):
            live = self._cells[cell].live
            if live is None:
                continue
            if len(mask) == 1 or None in sizes:
                live |= bool(mask.any())
                continue
            part = mask.reshape([1 if size is None else size for size in sizes])
            rest = [d for d in range(len(current)) if d != k]
            live |= part.any(dim=rest) if rest else part

    def line(self, cells: Iterable[int]) -> Tensor | None:
        """The support of an axis of several cells, bool [size]; None where dynamic."""
        line = torch.ones(1, dtype=torch.bool)
        for cell in self.leaves(cells):
            support = self.support(cell)
            if support is None:
                return None
            line = (line[:, None] & support).reshape(-1)
        return line

    def need_one(self) -> None:
        """Add the first position of every cell that has none."""
        for k, cell in enumerate(self._cells):
            if k not in self._parents and k not in self._parts and cell.size and not cell.forced:
                assert cell.live is not None
                cell.live[0] |= not bool(cell.live.any())

    def counts(self) -> list[int | None]:
        """The number of live positions of every cell; None where all are."""
        return [None if cell.forced or cell.live is None else int(cell.live.sum()) for cell in self._cells]

    def support(self, cell: int) -> Tensor | None:
        """The support of a cell, bool [size]; None where dynamic."""
        live = self._cells[cell].live
        if live is None:
            return None
        return torch.ones_like(live) if self._cells[cell].forced else live
