"""Fibers: positions that belong to heads, and that only calls head by head read.

An axis (head, position) keeps the positions that any head keeps. Where every call that reads it
does the same to each head, positions may be ordered head by head, and heads may go apart.
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

Leaves = tuple[tuple[int, ...], ...]  # the cells of each axis of a tensor, as they are at the end


@dataclass(slots=True)
class Fiber:
    """Positions (cell `inner`) that belong to heads (cell `outer`).

    enters: values (and constants a call reads) to re-order, leaves: operands to put back, each with
    the axis, whose cells end in (outer, inner). live: bool [outer, inner], what is kept.
    """

    outer: int
    inner: int
    live: Tensor
    enters: set[tuple[Key, int]] = field(default_factory=set)
    constants: set[tuple[fx.Node, int, int]] = field(default_factory=set)
    leaves: set[tuple[fx.Node, int, int]] = field(default_factory=set)

    @property
    def order(self) -> Tensor | None:
        """Per head its survivors first: int64 [outer, inner]; None where no head gets smaller."""
        counts = self.live.sum(1)
        if int(counts.max()) >= int(self.live.any(0).sum()):
            return None
        return torch.argsort((~self.live).to(torch.int8), dim=1, stable=True)


class Fibers:
    """The pairs of cells of a graph whose inner positions may be ordered head by head."""

    def __init__(self, placer: Placer):
        self.placer, self.relations, self.needs = placer, placer.relations, placer.needs
        self.value = {key: self._leaves(axes) for key, axes in self.placer.value.items()}
        self.slot = {edge: self._leaves(axes) for edge, axes in self.placer.slot.items()}
        self.bad: set[int] = set()
        self.found = self._found()

    def _leaves(self, axes: Any) -> Leaves:
        return tuple(tuple(self.placer.cells.leaves(cells)) for cells in axes)

    def _found(self) -> list[Fiber]:
        fibers: dict[int, Fiber] = {}
        cells = self.placer.cells
        tensors = [*self.value.values(), *self.slot.values()]
        pairs = [pair for axes in tensors for axis in axes for pair in itertools.pairwise(axis)]
        for outer, inner in dict.fromkeys(pairs):
            heads, size = cells.size(outer), cells.size(inner)
            if heads in (None, 1) or size in (None, 1) or outer == inner or cells.forced(inner):
                continue
            fresh = Fiber(outer, inner, torch.zeros(heads or 0, size or 0, dtype=torch.bool))
            if fibers.setdefault(inner, fresh).outer != outer:
                self.bad.add(inner)
        for key, axes in self.value.items():
            self._value(key, axes, fibers)
        for node, relation in self.relations.items():
            if isinstance(relation, Relation):
                self._call(node, relation, fibers)
        self._others(fibers)
        return [fiber for inner, fiber in fibers.items() if inner not in self.bad]

    def _value(self, key: Key, axes: Leaves, fibers: dict[int, Fiber]) -> None:
        """What a value keeps, and whether it is made in the plain order."""
        relation = self.relations.get(key[0])
        for d, axis in enumerate(axes):
            for inner in axis:
                if inner not in fibers:
                    continue
                fiber = fibers[inner]
                if not any(fiber.outer in other for other in axes):
                    self.bad.add(inner)
                    continue
                fiber.live |= self._joint(key, axes, fiber)
                if isinstance(relation, Relation) and self.is_raw(
                    relation, relation.outs[key[1]][d]
                ):
                    self._edge(fiber, axis, (key, d), fiber.enters)

    @staticmethod
    def is_raw(relation: Relation, axis: tuple[str, ...]) -> bool:
        """Does an output axis come from a constant weight, or by a move?"""
        if set(axis) & (relation.moved | relation.complete | relation.window):
            return True
        if relation.entry.fill != "sum":
            return relation.entry.free
        return any(
            set(axis) & relation.letters(relation.ins[k])
            for k in relation.factors
            if schema.is_constant(relation.operands[k].value)
        )

    def _edge(self, fiber: Fiber, axis: tuple[int, ...], where: Any, into: set[Any]) -> None:
        """An axis to gather along: it must hold heads and positions both, positions last."""
        if axis[-2:] == (fiber.outer, fiber.inner):
            into.add(where)
        else:
            self.bad.add(fiber.inner)

    def _call(self, node: fx.Node, relation: Relation, fibers: dict[int, Fiber]) -> None:
        """Which operands of a call must come in the plain order, which constants in the new one."""
        for k, operand in enumerate(relation.operands):
            slot = self.slot.get((node, k))
            if slot is None or not isinstance(operand.value, fx.Node):
                continue
            held = self.value.get(key_of(operand.value), slot)
            for d, (mine, theirs) in enumerate(zip(slot, held, strict=True)):
                for inner in set(mine) | set(theirs):
                    if inner in fibers:
                        self._operand(fibers[inner], relation, k, d, mine, theirs)

    def _operand(
        self, fiber: Fiber, relation: Relation, k: int, d: int, mine: Any, theirs: Any
    ) -> None:
        node, value = relation.node, relation.operands[k].value
        if relation.entry.fill == "sum" and schema.is_constant(value):
            return  # Weights and biases stay; the other operand, or the output, is re-ordered.
        if (
            schema.is_constant(value) or key_of(value) not in self.value
        ):  # known everywhere: filled in
            self._edge(fiber, mine, (node, k, d), fiber.constants)
            return
        if fiber.inner not in theirs:
            self.bad.add(fiber.inner)
            return
        if mine != theirs or self._summed_with_weight(relation, k, d):
            self._edge(fiber, theirs, (node, k, d), fiber.leaves)

    def _summed_with_weight(self, relation: Relation, k: int, d: int) -> bool:
        letters = set(relation.ins[k][d]) & relation.contracted
        others = [o for j, o in enumerate(relation.operands) if j in relation.factors and j != k]
        return (
            bool(letters)
            and relation.entry.fill == "sum"
            and any(schema.is_constant(o.value) for o in others)
        )

    def _others(self, fibers: dict[int, Fiber]) -> None:
        """Outputs, and ops without an entry, read the plain order."""
        for node in self.placer.graph.nodes:
            if isinstance(self.relations.get(node), Relation) or node.op in (
                "placeholder",
                "get_attr",
            ):
                continue
            for source in node.all_input_nodes:
                for axis in self.value.get(key_of(source), ()):
                    self.bad |= set(axis) & set(fibers)

    def _joint(self, key: Key, axes: Leaves, fiber: Fiber) -> Tensor:
        """What a value keeps of (outer, inner)."""
        mask, cells = self.needs.live[key], self.placer.cells
        shape: list[int] = []
        flat: list[int] = []
        for axis, n in zip(axes, mask.shape, strict=True):
            shape += [1] * len(axis) if n == 1 else [cells.size(c) or 1 for c in axis]
            flat += axis
        mask = mask.reshape(shape)
        a, b = flat.index(fiber.outer), flat.index(fiber.inner)
        rest = [k for k in range(mask.ndim) if k not in (a, b)]
        mask = mask.any(dim=rest, keepdim=True) if rest else mask
        mask = mask.permute([a, b, *rest]).reshape(mask.shape[a], mask.shape[b])
        return mask.expand(fiber.live.shape)
