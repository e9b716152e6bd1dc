"""Cells: the axes that must be cut alike, and what is left of each.

Every axis of every live tensor is a list of cells, major first. Ops that carry an axis share its
cell; a `view` splits one. A cell's support is the union of what its tensors need, so along an axis
of several cells the support is their product. Any superset of what is needed is correct: a position
kept although it is known is simply computed.

A support that only run time tells is an `RunTimeIndex` beside these: a graph value, another one at every
call (see `indexed`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from demask.ops.relation import MAX_AXIS

Positions = tuple[int, ...] | None  # old positions in new order; None: the whole axis, in order
Layout = tuple[Positions, ...]  # per axis of a tensor


@dataclass(frozen=True, slots=True)
class RunTimeIndex:
    """A run-time support of an axis: the positions (a, p, b) for every p that a graph value holds.

    source: an input of the graph, int64 [k], distinct positions below `size`, in any order. outer,
    inner: how many positions the cells before and behind make, where an axis has several.
    """

    source: fx.Node
    size: int
    outer: int = 1
    inner: int = 1

    @property
    def length(self) -> int:
        """How long the whole axis is."""
        return self.outer * self.size * self.inner


At = tuple[
    tuple[int, RunTimeIndex], ...
]  # run-time supports of a tensor, by axis; others are whole


def whole(positions: Sequence[int], size: int) -> Positions:
    """Positions, or None if they are the whole axis in order.

    >>> whole([0, 1, 2], 3) is None
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
    """Union-find over cells, with splitting. Mutable while a placement is made, and only there."""

    def __init__(self) -> None:
        self._cells: list[_Cell] = []
        self._up: dict[int, int] = {}
        self._parts: dict[int, tuple[int, ...]] = {}

    def new(self, size: int | None) -> int:
        """A fresh cell; size None is a dynamic axis, which is never cut, as is one that
        is too long to be looked at."""
        size = None if size is None or size > MAX_AXIS else size
        live = None if size is None else torch.zeros(size, dtype=torch.bool)
        self._cells.append(_Cell(size, live))
        return len(self._cells) - 1

    def leaves(self, cells: Iterable[int]) -> list[int]:
        """The cells that these have become: roots, split where they were split."""
        found: list[int] = []
        for cell in cells:
            while cell in self._up:
                cell = self._up[cell]
            found += self.leaves(self._parts[cell]) if cell in self._parts else [cell]
        return found

    def size(self, cell: int) -> int | None:
        return self._cells[cell].size

    def unify(self, left: Sequence[int], right: Sequence[int]) -> bool:
        """Tie two axes cell by cell, splitting where one is finer; False where sizes do not divide
        (the axes then stay untied, and values are adapted between them)."""
        a, b = self.leaves(left), self.leaves(right)
        if not self._divides([self.size(c) for c in a], [self.size(c) for c in b]):
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

    def _divides(self, a: list[int | None], b: list[int | None]) -> bool:
        """Can both lists be split into one common list?"""
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
        self._up[high] = low
        self._cells[low].forced |= self._cells[high].forced
        self._cells[low].ordered |= self._cells[high].ordered
        live, other = self._cells[low].live, self._cells[high].live
        if live is not None and other is not None:
            live |= other

    def force(self, cells: Iterable[int]) -> None:
        """These must stay whole and in order."""
        for cell in self.leaves(cells):
            self._cells[cell].forced = True

    def order(self, cells: Iterable[int]) -> None:
        """What is kept of these stays in order."""
        for cell in self.leaves(cells):
            self._cells[cell].ordered = True

    def ordered(self, cell: int) -> bool:
        return self._cells[cell].ordered or self.forced(cell)

    def forced(self, cell: int) -> bool:
        return self._cells[cell].forced or self._cells[cell].size is None

    def need(self, cells: Sequence[int], mask: Tensor) -> None:
        """Add to the support: mask is bool over the axis (length 1: the same all along)."""
        found = self.leaves(cells)
        sizes = [self.size(cell) for cell in found]
        for k, cell in enumerate(found):
            live = self._cells[cell].live
            if live is None:
                continue
            if len(mask) == 1 or None in sizes:
                live |= bool(mask.any())
                continue
            part = mask.reshape([1 if size is None else size for size in sizes])
            rest = [d for d in range(len(found)) if d != k]
            live |= part.any(dim=rest) if rest else part

    def support(self, cell: int) -> Tensor | None:
        """bool [size]: what is kept; None where dynamic."""
        live = self._cells[cell].live
        if live is None:
            return None
        return torch.ones_like(live) if self._cells[cell].forced else live
