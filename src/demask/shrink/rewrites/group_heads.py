"""Heads of very different sizes, attended to in groups.

All heads of one call have one size, that of the largest. Where some have far more live positions
than others, several calls, each for heads of similar sizes, compute less:

    attend(q, k, v)  ==  joined(attend(q[g], k[g], v[g]) for g in groups)

Nothing is cut here: every call between the entry of heads and their merge is repeated per group.
The following passes cut each group to its own largest head.
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
from demask.shrink.layout.heads import HeadGroup, HeadGroups
from demask.shrink.layout.layout_analysis import LayoutAnalysis

aten = torch.ops.aten
_MOST = 3  # groups: each one adds a call
_SHARE = 1 / 16  # of the live positions without groups: a smaller gain is not worth a call


def group_heads(analysis: LayoutAnalysis) -> Program | None:
    """The program with such heads in groups; None where one call for all is as small."""
    program, head_groups = analysis.program, analysis.head_groups
    heads: dict[int, list[HeadGroup]] = {}
    for member in head_groups.groups:
        heads.setdefault(member.outer, []).append(member)
    plans = {cell: groups for cell, members in heads.items() if (groups := partition(members))}
    if not plans:
        return None
    grouper = _Grouper(program, analysis.relations, head_groups)
    changed = [grouper.split(cell, groups) for cell, groups in plans.items()]
    if not any(changed):
        return None
    return grouper.editor.finish()


def partition(head_groups: Sequence[HeadGroup]) -> list[list[int]]:
    """Groups of heads with the fewest live positions; [] where a single group has about as few."""
    counts = torch.stack([member.live.sum(1) for member in head_groups], 1)
    order = sorted(range(len(counts)), key=lambda head: (int(counts[head].sum()), head))
    alone = _padded_positions(counts, [order])
    best, least = [], float(alone)
    for more in range(1, min(_MOST, len(order))):
        for ends in itertools.combinations(range(1, len(order)), more):
            cuts = [0, *ends, len(order)]
            groups = [sorted(order[a:b]) for a, b in itertools.pairwise(cuts)]
            cost = _padded_positions(counts, groups) + more * alone * _SHARE
            if cost < least:
                best, least = groups, cost
    return best


def _padded_positions(counts: Tensor, groups: Sequence[Sequence[int]]) -> int:
    """Live positions if every live head of a group is as large as the largest."""
    total = 0
    for group in groups:
        alive = counts[list(group)]
        total += int((alive.sum(1) > 0).sum()) * int(alive.max(0).values.sum())
    return total


class _Grouper:
    """Repeats calls over heads per group, in a copy of a graph."""

    def __init__(self, program: Program, relations: Relations, head_groups: HeadGroups):
        self.relations, self.head_groups = relations, head_groups
        self.order = list(program.graph.nodes)
        self.editor = GraphEditor(program)
        self.graph, self.copies = self.editor.graph, self.editor.copies
        self.store = ConstantStore(self.editor)

    def split(self, cell: int, groups: list[list[int]]) -> bool:
        """Attend to the heads of a cell in groups; returns whether every call allows it."""
        inside = [node for node in self.order if self._is_inside(node, cell)]
        if not inside or not all(self._is_uniform(node, cell) for node in inside):
            return False
        parts: dict[fx.Node, list[fx.Node]] = {}
        for node in inside:
            with self.graph.inserting_before(self.copies[node].next):
                parts[node] = [self._call_for_group(node, k, cell, groups, parts) for k in range(len(groups))]
        for node in inside:
            self._join(node, cell, groups, parts, set(inside))
        return True

    def _only_head_axis(self, axes: Any, cell: int) -> int | None:
        """The one axis that heads are on, or None."""
        matching = [k for k, axis in enumerate(axes or ()) if cell in axis]
        return matching[0] if len(matching) == 1 else None

    def _head_axis(self, node: fx.Node, cell: int) -> int:
        """The axis of a call's output that heads are on, for a call inside."""
        axis = self._only_head_axis(self.head_groups.value[node, 0], cell)
        assert axis is not None
        return axis

    def _is_inside(self, node: fx.Node, cell: int) -> bool:
        relation = self.relations.get(node)
        axis = self._only_head_axis(self.head_groups.value.get((node, 0)), cell)
        if axis is None or not isinstance(relation, Relation):
            return False
        return not self.head_groups.is_raw(relation, relation.outs[0][axis])

    def _is_uniform(self, node: fx.Node, cell: int) -> bool:
        """Whether a call treats every head alike."""
        relation: Any = self.relations[node]
        if len(relation.outs) != 1 or relation.moved or relation.entry.free:
            return False
        axis = self._head_axis(node, cell)
        letters = set(relation.outs[0][axis])
        own = [self._only_head_axis(self.head_groups.slot.get((node, k)), cell) for k in range(len(relation.ins))]
        read = [set(relation.ins[k][d]) & letters for k, d in enumerate(own) if d is not None]
        plain = not letters & (relation.complete | relation.window)
        return bool(read) and all(read) and plain

    def _call_for_group(self, node: fx.Node, k: int, cell: int, groups: Any, parts: Any) -> fx.Node:
        """A call for the heads of group k."""
        relation: Any = self.relations[node]
        copy, values = self.copies[node], []
        for number, operand in enumerate(relation.operands):
            slot, value = self.head_groups.slot.get((node, number)), operand.value
            axis = self._only_head_axis(slot, cell)
            if not isinstance(value, fx.Node) or slot is None or axis is None:
                values.append(self.copies.get(value, value))
            elif value in parts and self.head_groups.value[key_of(value)][axis] == slot[axis]:
                values.append(parts[value][k])
            else:
                rows = self._positions_of_heads(slot[axis], cell, groups[k])
                values.append(self._select(self.copies[value], axis, rows))
        arguments = schema.replace_operands(schema.arguments(copy), relation.operands, values)
        if relation.entry.args is not None:
            axis = self._head_axis(node, cell)
            sizes = self.editor.sizes(copy)
            sizes[axis] = len(self._positions_of_heads(self.head_groups.value[node, 0][axis], cell, groups[k]))
            arguments |= relation.entry.args(node, [sizes])
        return self.editor.call_named(node.target, arguments, node)

    def _positions_of_heads(self, cells: Sequence[int], cell: int, heads: Sequence[int]) -> Tensor:
        sizes = [self.head_groups.placer.cells.size(c) or 1 for c in cells]
        every = torch.arange(int(torch.tensor(sizes).prod())).view(sizes)
        return every.index_select(list(cells).index(cell), torch.tensor(heads)).reshape(-1)

    def _select(self, value: fx.Node, axis: int, rows: Tensor) -> fx.Node:
        index = self.store.constant_here(rows, f"{value.name}_heads")
        return self.editor.call(aten.index_select.default, value, axis, index)

    def _join(self, node: fx.Node, cell: int, groups: Any, parts: Any, inside: set) -> None:
        """Let all other readers of heads read the groups joined, in the original order."""
        copy = self.copies[node]
        axis = self._head_axis(node, cell)
        sizes = {user for user in copy.users if user.target is aten.sym_size.int}
        readers = [u for u in copy.users if u not in sizes and not self._replaced(u, inside)]
        if not readers:
            return
        cells = self.head_groups.value[node, 0][axis]
        rows = torch.cat([self._positions_of_heads(cells, cell, heads) for heads in groups])
        with self.graph.inserting_before(max(parts[node]).next):
            both = self.editor.call(aten.cat.default, parts[node], axis)
            ordered = self._select(both, axis, torch.argsort(rows))
        for new in (both, ordered):
            new.meta = {**node.meta, **new.meta}
        for user in readers:
            user.replace_input_with(copy, ordered)

    def _replaced(self, user: fx.Node, inside: set[fx.Node]) -> bool:
        return any(self.copies[node] is user for node in inside)
