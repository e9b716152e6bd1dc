"""Head groups: positions of attention heads that only calls per head read.

An axis (head, position) has the union of the positions that its heads need. If every call that
reads it treats each head alike, positions may be ordered per head, and heads may be separated.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from demask.facts.known import Key, key_of
from demask.ops import Relation, schema
from demask.shrink.layout.placement import Placer

FinalCells = tuple[tuple[int, ...], ...]  # the final cells of each axis of a tensor


@dataclass(slots=True)
class HeadGroup:
    """Positions (cell `inner`) of heads (cell `outer`).

    enters: values (and constants that a call reads) to reorder. leaves: operands to put back into
    the plain order. Each has the axis, whose cells end in (outer, inner). live: bool [outer,
    inner].
    """

    outer: int
    inner: int
    live: Tensor
    enters: set[tuple[Key, int]] = field(default_factory=set)
    constants: set[tuple[fx.Node, int, int]] = field(default_factory=set)
    leaves: set[tuple[fx.Node, int, int]] = field(default_factory=set)

    @property
    def order(self) -> Tensor | None:
        """Live positions first in each head: int64 [outer, inner]; None if no head gets smaller."""
        counts = self.live.sum(1)
        if int(counts.max()) >= int(self.live.any(0).sum()):
            return None
        return torch.argsort((~self.live).to(torch.int8), dim=1, stable=True)


class HeadGroups:
    """The pairs of cells of a graph whose inner positions may be ordered per head."""

    def __init__(self, placer: Placer):
        self.placer, self.relations, self.needs = placer, placer.relations, placer.needs
        self.value = {key: self._leaves(axes) for key, axes in self.placer.value.items()}
        self.slot = {edge: self._leaves(axes) for edge, axes in self.placer.slot.items()}
        self.excluded: set[int] = set()
        self.groups = self._find()

    def _leaves(self, axes: Any) -> FinalCells:
        return tuple(tuple(self.placer.cells.leaves(cells)) for cells in axes)

    def _find(self) -> list[HeadGroup]:
        groups: dict[int, HeadGroup] = {}
        cells = self.placer.cells
        tensors = [*self.value.values(), *self.slot.values()]
        pairs = [pair for axes in tensors for axis in axes for pair in itertools.pairwise(axis)]
        for outer, inner in dict.fromkeys(pairs):
            heads, size = cells.size(outer), cells.size(inner)
            if heads in (None, 1) or size in (None, 1) or outer == inner or cells.forced(inner):
                continue
            fresh = HeadGroup(outer, inner, torch.zeros(heads or 0, size or 0, dtype=torch.bool))
            if groups.setdefault(inner, fresh).outer != outer:
                self.excluded.add(inner)
        for key, axes in self.value.items():
            self._add_value(key, axes, groups)
        for node, relation in self.relations.items():
            if isinstance(relation, Relation):
                self._add_call(node, relation, groups)
        self._exclude_others(groups)
        return [group for inner, group in groups.items() if inner not in self.excluded]

    def _add_value(self, key: Key, axes: FinalCells, groups: dict[int, HeadGroup]) -> None:
        """Add the live positions of a value, and whether it is computed in the plain order."""
        relation = self.relations.get(key[0])
        for d, axis in enumerate(axes):
            for inner in axis:
                if inner not in groups:
                    continue
                group = groups[inner]
                if not any(group.outer in other for other in axes):
                    self.excluded.add(inner)
                    continue
                group.live |= self._live_pairs(key, axes, group)
                if isinstance(relation, Relation) and self.is_raw(relation, relation.outs[key[1]][d]):
                    self._add_edge(group, axis, (key, d), group.enters)

    @staticmethod
    def is_raw(relation: Relation, axis: tuple[str, ...]) -> bool:
        """Whether an output axis comes from a constant weight, or from a move."""
        if set(axis) & (relation.moved | relation.complete | relation.window):
            return True
        if relation.entry.fill != "sum":
            return relation.entry.free
        return any(
            set(axis) & relation.letters(relation.ins[k])
            for k in relation.factors
            if schema.is_constant(relation.operands[k].value)
        )

    def _add_edge(self, group: HeadGroup, axis: tuple[int, ...], where: Any, into: set[Any]) -> None:
        """Add an axis to gather along. It must have both heads and positions, positions last."""
        if axis[-2:] == (group.outer, group.inner):
            into.add(where)
        else:
            self.excluded.add(group.inner)

    def _add_call(self, node: fx.Node, relation: Relation, groups: dict[int, HeadGroup]) -> None:
        """Add the operands that a call reads in the plain order, and the constants to reorder."""
        for k, operand in enumerate(relation.operands):
            slot = self.slot.get((node, k))
            if slot is None or not isinstance(operand.value, fx.Node):
                continue
            value_axes = self.value.get(key_of(operand.value), slot)
            for d, (mine, theirs) in enumerate(zip(slot, value_axes, strict=True)):
                for inner in set(mine) | set(theirs):
                    if inner in groups:
                        self._add_operand(groups[inner], relation, k, d, mine, theirs)

    def _add_operand(self, group: HeadGroup, relation: Relation, k: int, d: int, mine: Any, theirs: Any) -> None:
        node, value = relation.node, relation.operands[k].value
        if relation.entry.fill == "sum" and schema.is_constant(value):
            return  # Weights and biases stay; the other operand, or the output, is reordered.
        if schema.is_constant(value) or key_of(value) not in self.value:  # known everywhere: a constant
            self._add_edge(group, mine, (node, k, d), group.constants)
            return
        if group.inner not in theirs:
            self.excluded.add(group.inner)
            return
        if mine != theirs or self._summed_with_weight(relation, k, d):
            self._add_edge(group, theirs, (node, k, d), group.leaves)

    def _summed_with_weight(self, relation: Relation, k: int, d: int) -> bool:
        letters = set(relation.ins[k][d]) & relation.contracted
        others = [o for j, o in enumerate(relation.operands) if j in relation.factors and j != k]
        return bool(letters) and relation.entry.fill == "sum" and any(schema.is_constant(o.value) for o in others)

    def _exclude_others(self, groups: dict[int, HeadGroup]) -> None:
        """Exclude what outputs, and ops without an entry, read: they need the plain order."""
        for node in self.placer.graph.nodes:
            if isinstance(self.relations.get(node), Relation) or node.op in ("placeholder", "get_attr"):
                continue
            for source in node.all_input_nodes:
                for axis in self.value.get(key_of(source), ()):
                    self.excluded |= set(axis) & set(groups)

    def _live_pairs(self, key: Key, axes: FinalCells, group: HeadGroup) -> Tensor:
        """The live positions of a value as (outer, inner)."""
        mask, cells = self.needs.live[key], self.placer.cells
        shape: list[int] = []
        flat: list[int] = []
        for axis, n in zip(axes, mask.shape, strict=True):
            shape += [1] * len(axis) if n == 1 else [cells.size(c) or 1 for c in axis]
            flat += axis
        mask = mask.reshape(shape)
        a, b = flat.index(group.outer), flat.index(group.inner)
        rest = [k for k in range(mask.ndim) if k not in (a, b)]
        mask = mask.any(dim=rest, keepdim=True) if rest else mask
        mask = mask.permute([a, b, *rest]).reshape(mask.shape[a], mask.shape[b])
        return mask.expand(group.live.shape)
