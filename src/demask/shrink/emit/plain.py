"""Calls that move positions, emitted for the live positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from demask.facts.known import key_of, value_of
from demask.ops import Relation
from demask.ops.schema import fake
from demask.shrink.emit.context import EmitContext
from demask.shrink.layout.cells import Layout, Positions, cut_positions

aten = torch.ops.aten


def emit_move(context: EmitContext, relation: Relation, live: list[int]) -> None:
    """Emit the outputs of a call that moves positions: the wanted ones are taken directly."""
    for k in live:
        _emit_moved(context, relation, k)


def is_untouched(context: EmitContext, relation: Relation, live: list[int]) -> bool:
    """Whether nothing is cut along the axes that a call moves."""
    if not any(relation.moves):
        return True
    for k in live:
        layout = context.placement.value[relation.node, k]
        if any(p is not None and set(a) & relation.moved for p, a in zip(layout, relation.outs[k], strict=True)):
            return False
    for k, operand in enumerate(relation.operands):
        available = context.adapter.have(key_of(operand.value))
        if operand.value.op == "get_attr":
            continue
        if available is None:
            return False
        # A value that is gathered along other axes anyway is gathered along moved axes as well.
        slot = context.placement.slot[relation.node, k]
        for have, want, axis in zip(available, slot, relation.ins[k], strict=True):
            if have is not None if set(axis) & relation.moved else have != want:
                return False
    return True


def _emit_moved(context: EmitContext, relation: Relation, out: int) -> None:
    node, operand = relation.node, relation.operands[0].value
    layout: Any = context.placement.value[node, out]
    axes = {base: axis for axis, base in _moved_axes(relation, out)}
    if len(relation.operands) > 1:
        _emit_joined(context, relation, out, layout)
        return
    want: Any = list(context.placement.slot[node, 0])
    pads: Any = []
    for base, move in relation.moves[out].items():
        source = next(k for k, a in enumerate(relation.ins[0]) if any(x.startswith(f"{base}<") for x in a))
        wanted: Positions = layout[axes[base]] if base in axes else None
        sources, positions = move.source.tolist(), move.position.tolist()
        rows = list(range(len(sources))) if wanted is None else list(wanted)
        real = [positions[r] for r in rows if sources[r] >= 0]
        size = value_of(operand).shape[source]
        # A constant is stored once, however often its entries are read.
        stored = sorted(set(real)) if operand.op == "get_attr" and len(real) > size else real
        want[source] = cut_positions(stored, size)
        place = {p: k for k, p in reversed(list(enumerate(stored)))}
        pads.append((source, rows, move, [place[p] for p in real]))
    value = context.adapter.adapt(operand, tuple(want))
    for source, rows, move, read in pads:
        if read != list(range(fake(value).shape[source])):
            value = context.adapter.select(value, source, read)
        value = _pad_back(context, value, source, rows, move)
    gone = [k for k, a in enumerate(relation.ins[0]) if _is_removed(relation, out, a)]
    for axis in sorted(gone, reverse=True):
        value = context.editor.call(aten.squeeze.dim, value, axis)
    context.emit(node, out, value, layout)


def _moved_axes(relation: Relation, out: int) -> list[tuple[int, str]]:
    suffix = ">"
    return [
        (k, "".join(a).partition(suffix)[0]) for k, a in enumerate(relation.outs[out]) if a and a[0] in relation.moved
    ]


def _is_removed(relation: Relation, out: int, axis: tuple[str, ...]) -> bool:
    if not axis or axis[0] not in relation.moved:
        return False
    base = axis[0].partition("<")[0]
    return all(base != other for _, other in _moved_axes(relation, out))


def _pad_back(context: EmitContext, value: fx.Node, axis: int, rows: list[int], move: Any) -> fx.Node:
    """The value with its live padded positions (on an axis of several cells) added again."""
    sources = move.source.tolist()
    padded = [k for k, r in enumerate(rows) if sources[r] < 0]
    if not padded:
        return value
    gone = set(padded)
    real = [k for k in range(len(rows)) if k not in gone]
    return context.adapter.scatter(value, axis, tuple(real), len(rows), move.value)


def _emit_joined(context: EmitContext, relation: Relation, out: int, layout: Layout) -> None:
    """Emit cat and similar ops: from each operand the wanted positions, joined. Operands without
    wanted positions are removed."""
    ((base, move),) = relation.moves[out].items()
    axis = next(k for k, base_ in _moved_axes(relation, out) if base_ == base)
    wanted, sources, positions = layout[axis], move.source.tolist(), move.position.tolist()
    rows = list(range(len(sources))) if wanted is None else list(wanted)
    pieces, order = [], []
    for k, operand in enumerate(relation.operands):
        mine = [r for r in rows if sources[r] == k]
        if not mine:
            continue
        want = list(context.placement.slot[relation.node, k])
        size = value_of(operand.value).shape[axis]
        want[axis] = cut_positions([positions[r] for r in mine], size)
        pieces.append(context.adapter.adapt(operand.value, tuple(want)))
        order += mine
    joined = pieces[0] if len(pieces) == 1 else context.editor.call(aten.cat.default, pieces, axis)
    final = list(layout)
    final[axis] = cut_positions(order, len(sources))
    context.emit(relation.node, out, joined, tuple(final))
