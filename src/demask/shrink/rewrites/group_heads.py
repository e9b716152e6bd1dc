"""Heads of very different sizes, attended to in groups.

All heads of one call have one size, that of the largest. Where some kept far more positions than
others, several calls, each for heads of like sizes, compute less:

    attend(q, k, v)  ==  joined(attend(q[g], k[g], v[g]) for g in groups)

Nothing is cut here: every call between where heads come in and where they are merged is made again
per group, and the passes that follow cut each group to its own largest head (design, section 4).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from demask.facts.known import Relations, key_of
from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.ops import Relation, schema
from demask.shrink.emit.constant_store import ConstantStore
from demask.shrink.layout.heads import Fiber, Fibers
from demask.shrink.layout.layout_analysis import LayoutAnalysis

aten = torch.ops.aten
_MOST = 3  # groups: every one is a call more
_SHARE = 1 / 16  # of the positions that are kept otherwise: less is not worth the calls


def grouped(analysis: LayoutAnalysis) -> Program | None:
    """The program with such heads in groups; None where one call for all is as small."""
    program, held = analysis.program, analysis.fibers
    heads: dict[int, list[Fiber]] = {}
    for fiber in held.found:
        heads.setdefault(fiber.outer, []).append(fiber)
    plans = {cell: groups for cell, found in heads.items() if (groups := partition(found))}
    if not plans:
        return None
    walk = _Grouper(program, analysis.relations, held)
    done = [walk.split(cell, groups) for cell, groups in plans.items()]
    if not any(done):
        return None
    return walk.editor.finish()


def partition(fibers: Sequence[Fiber]) -> list[list[int]]:
    """Groups of heads with which the fewest positions are kept; [] where one group does nearly."""
    counts = torch.stack([fiber.live.sum(1) for fiber in fibers], 1)
    order = sorted(range(len(counts)), key=lambda head: (int(counts[head].sum()), head))
    alone = _cost(counts, [order])
    best, least = [], float(alone)
    for more in range(1, min(_MOST, len(order))):
        for ends in itertools.combinations(range(1, len(order)), more):
            cuts = [0, *ends, len(order)]
            groups = [sorted(order[a:b]) for a, b in itertools.pairwise(cuts)]
            cost = _cost(counts, groups) + more * alone * _SHARE
            if cost < least:
                best, least = groups, cost
    return best


def _cost(counts: Tensor, groups: Sequence[Sequence[int]]) -> int:
    """Positions kept: every head of a group as large as its largest; heads that are gone, none."""
    total = 0
    for group in groups:
        alive = counts[list(group)]
        total += int((alive.sum(1) > 0).sum()) * int(alive.max(0).values.sum())
    return total


class _Grouper:
    """Makes calls over heads again, group by group, in a copy of a graph."""

    def __init__(self, program: Program, relations: Relations, fibers: Fibers):
        self.relations, self.fibers = relations, fibers
        self.order = list(program.graph.nodes)
        self.editor = GraphEditor(program)
        self.graph, self.copies = self.editor.graph, self.editor.copies
        self.pool = ConstantStore(self.editor)

    def split(self, cell: int, groups: list[list[int]]) -> bool:
        """Attend to the heads of a cell in groups, if every call between allows it."""
        inside = [node for node in self.order if self._is_inside(node, cell)]
        if not inside or not all(self._carries(node, cell) for node in inside):
            return False
        parts: dict[fx.Node, list[fx.Node]] = {}
        for node in inside:
            with self.graph.inserting_before(self.copies[node].next):
                parts[node] = [
                    self._again(node, k, cell, groups, parts) for k in range(len(groups))
                ]
        for node in inside:
            self._join(node, cell, groups, parts, set(inside))
        return True

    def _axis(self, axes: Any, cell: int) -> int | None:
        """The one axis that heads are on."""
        found = [k for k, axis in enumerate(axes or ()) if cell in axis]
        return found[0] if len(found) == 1 else None

    def _home(self, node: fx.Node, cell: int) -> int:
        """The axis of what a call makes that heads are on, for a call inside."""
        axis = self._axis(self.fibers.value[node, 0], cell)
        assert axis is not None
        return axis

    def _is_inside(self, node: fx.Node, cell: int) -> bool:
        relation = self.relations.get(node)
        axis = self._axis(self.fibers.value.get((node, 0)), cell)
        if axis is None or not isinstance(relation, Relation):
            return False
        return not self.fibers.is_raw(relation, relation.outs[0][axis])

    def _carries(self, node: fx.Node, cell: int) -> bool:
        """Does a call do for each head what it does for any?"""
        relation: Any = self.relations[node]
        if len(relation.outs) != 1 or relation.moved or relation.entry.free:
            return False
        axis = self._home(node, cell)
        letters = set(relation.outs[0][axis])
        own = [self._axis(self.fibers.slot.get((node, k)), cell) for k in range(len(relation.ins))]
        read = [set(relation.ins[k][d]) & letters for k, d in enumerate(own) if d is not None]
        plain = not letters & (relation.complete | relation.window)
        return bool(read) and all(read) and plain

    def _again(self, node: fx.Node, k: int, cell: int, groups: Any, parts: Any) -> fx.Node:
        """A call for the heads of group k."""
        relation: Any = self.relations[node]
        copy, values = self.copies[node], []
        for number, operand in enumerate(relation.operands):
            slot, value = self.fibers.slot.get((node, number)), operand.value
            axis = self._axis(slot, cell)
            if not isinstance(value, fx.Node) or slot is None or axis is None:
                values.append(self.copies.get(value, value))
            elif value in parts and self.fibers.value[key_of(value)][axis] == slot[axis]:
                values.append(parts[value][k])
            else:
                rows = self._rows(slot[axis], cell, groups[k])
                values.append(self._select(self.copies[value], axis, rows))
        found = schema.replaced(schema.arguments(copy), relation.operands, values)
        if relation.entry.args is not None:
            axis = self._home(node, cell)
            sizes = self.editor.sizes(copy)
            sizes[axis] = len(self._rows(self.fibers.value[node, 0][axis], cell, groups[k]))
            found |= relation.entry.args(node, [sizes])
        return self.editor.call_named(node.target, found, node)

    def _rows(self, cells: Sequence[int], cell: int, heads: Sequence[int]) -> Tensor:
        """The positions of an axis that belong to some heads."""
        sizes = [self.fibers.placer.cells.size(c) or 1 for c in cells]
        every = torch.arange(int(torch.tensor(sizes).prod())).view(sizes)
        return every.index_select(list(cells).index(cell), torch.tensor(heads)).reshape(-1)

    def _select(self, value: fx.Node, axis: int, rows: Tensor) -> fx.Node:
        index = self.pool.here(rows, f"{value.name}_heads")
        return self.editor.call(aten.index_select.default, value, axis, index)

    def _join(self, node: fx.Node, cell: int, groups: Any, parts: Any, inside: set) -> None:
        """Whatever else reads heads reads all of them, in the order they were."""
        copy = self.copies[node]
        axis = self._home(node, cell)
        sizes = {user for user in copy.users if user.target is aten.sym_size.int}
        readers = [u for u in copy.users if u not in sizes and not self._replaced(u, inside)]
        if not readers:
            return
        cells = self.fibers.value[node, 0][axis]
        rows = torch.cat([self._rows(cells, cell, heads) for heads in groups])
        with self.graph.inserting_before(max(parts[node]).next):
            both = self.editor.call(aten.cat.default, parts[node], axis)
            made = self._select(both, axis, torch.argsort(rows))
        for new in (both, made):
            new.meta = {**node.meta, **new.meta}
        for user in readers:
            user.replace_input_with(copy, made)

    def _replaced(self, user: fx.Node, inside: set[fx.Node]) -> bool:
        return any(self.copies[node] is user for node in inside)
