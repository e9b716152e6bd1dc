"""Heads that lost different positions: survivors first in each head.

The size of a head is one number for all heads, so an axis (head, position) keeps the positions that
any head keeps. But the order of positions within a head is free where only products and moves over
that head read them: with each head's survivors first, all heads shrink to the largest head's count.

    cut(W_v), attend, cut(W_o)  ==  cut(P W_v), attend, cut(W_o P^-1)        P per head

Nothing is cut here: gathers are put where such values come in and go out, and the passes that
follow absorb them into the weights (design, section 4).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from demask.facts.known import Facts, Key, Relations, key_of
from demask.facts.needed import Needs
from demask.graph.build import Builder, mode_of
from demask.graph.program import Program, copied
from demask.ops import Relation, schema
from demask.shrink.place import Placer, is_constant
from demask.shrink.pool import Pool

aten = torch.ops.aten
Leaves = tuple[tuple[int, ...], ...]  # the cells of each axis of a tensor, as they are at the end


def aligned(program: Program, relations: Relations, facts: Facts, needs: Needs) -> Program | None:
    """The program with such heads re-ordered; None where no head would become smaller."""
    placer = Placer(program.graph, relations, facts, needs)
    placer.tie()
    fibers = [f for f in Fibers(placer, relations, needs).found() if f.order is not None]
    if not fibers:
        return None
    graph, copies = copied(program)
    build = Builder(graph, mode_of(graph))
    pool = Pool(build, program.constants, [n for n in graph.nodes if n.op == "placeholder"])
    pool.constants |= program.constants
    for fiber in fibers:
        _reorder(fiber, copies, build, pool)
    return program.with_graph(graph, pool.constants)


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
    """Finds the pairs of cells whose inner positions may be ordered head by head."""

    def __init__(self, placer: Placer, relations: Relations, needs: Needs):
        self.placer, self.relations, self.needs = placer, relations, needs
        self.value = {key: self._leaves(axes) for key, axes in placer.value.items()}
        self.slot = {edge: self._leaves(axes) for edge, axes in placer.slot.items()}
        self.bad: set[int] = set()

    def _leaves(self, axes: Any) -> Leaves:
        return tuple(tuple(self.placer.cells.leaves(cells)) for cells in axes)

    def found(self) -> list[Fiber]:
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
            if is_constant(relation.operands[k].value)
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
        if relation.entry.fill == "sum" and is_constant(value):
            return  # Weights and biases stay; the other operand, or the output, is re-ordered.
        if is_constant(value):
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
            and any(is_constant(o.value) for o in others)
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


def _reorder(fiber: Fiber, copies: dict[fx.Node, fx.Node], build: Builder, pool: Pool) -> None:
    """Gathers where values of a fiber come in and go out."""
    order = fiber.order
    assert order is not None
    inverse = torch.argsort(order, dim=1)
    for (node, k), axis in fiber.enters:
        for value in _values(copies[node], k):
            with build.graph.inserting_before(value.next):
                made = _gather(value, axis, order, build, pool)
            value.replace_all_uses_with(
                made, delete_user_cb=lambda user, made=made: user is not made
            )
    for node, k, axis in fiber.leaves:
        _reread(copies[node], k, axis, inverse, build, pool)
    for node, k, axis in fiber.constants:
        _reread(copies[node], k, axis, order, build, pool)


def _values(node: fx.Node, k: int) -> list[fx.Node]:
    """The nodes that stand for output k of a call."""
    if not isinstance(node.meta["val"], (list, tuple)):
        return [node]
    return [user for user in node.users if user.args[1] == k]


def _reread(node: fx.Node, k: int, axis: int, order: Tensor, build: Builder, pool: Pool) -> None:
    """Operand k of a call, gathered along an axis before the call reads it."""
    operand = schema.operands(node)[k]
    with build.graph.inserting_before(node):
        made = _gather(operand.value, axis, order, build, pool)
    found = schema.replaced(schema.arguments(node), (operand,), [made])
    args, kwargs = schema.call(node.target, found)
    node.args, node.kwargs = tuple(args), kwargs


def _gather(value: fx.Node, axis: int, order: Tensor, build: Builder, pool: Pool) -> fx.Node:
    """The entries of an axis (..., head, position), positions of each head in a new order."""
    heads, size = order.shape
    whole = order + torch.arange(heads).unsqueeze(1) * size
    count = value.meta["val"].shape[axis] // (heads * size)
    index = (whole + torch.arange(count).view(-1, 1, 1) * heads * size).reshape(-1)
    read = pool.here(index, f"{value.name}_order")
    return build.call(aten.index_select.default, value, axis, read)
