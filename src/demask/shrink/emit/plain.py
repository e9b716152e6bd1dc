"""Calls that move positions, again on what is kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from demask.facts.known import key_of, value_of
from demask.ops import Relation
from demask.shrink.emit.context import EmitContext
from demask.shrink.layout.cells import Layout, Positions, whole

aten = torch.ops.aten


def emit_move(walk: EmitContext, relation: Relation, live: list[int]) -> None:
    """A call that moves positions: those wanted are taken straight from where they come from."""
    for k in live:
        _move(walk, relation, k)


def is_untouched(walk: EmitContext, relation: Relation, live: list[int]) -> bool:
    """Whether nothing is cut along the axes that a call moves."""
    if not any(relation.moves):
        return True
    for k in live:
        layout = walk.placement.value[relation.node, k]
        if any(p is not None and set(a) & relation.moved
               for p, a in zip(layout, relation.outs[k], strict=True)):  # fmt: skip
            return False
    for k, operand in enumerate(relation.operands):
        held = walk.adapter.have(key_of(operand.value))
        if operand.value.op == "get_attr":
            continue
        if held is None:
            return False
        # What is gathered on other axes anyway is gathered together with what is moved.
        slot = walk.placement.slot[relation.node, k]
        for have, want, axis in zip(held, slot, relation.ins[k], strict=True):
            if have is not None if set(axis) & relation.moved else have != want:
                return False
    return True


def _move(walk: EmitContext, relation: Relation, out: int) -> None:
    node, operand = relation.node, relation.operands[0].value
    layout: Any = walk.placement.value[node, out]
    axes = {base: axis for axis, base in _moved_axes(relation, out)}
    if len(relation.operands) > 1:
        _gathered_from(walk, relation, out, layout)
        return
    want: Any = list(walk.placement.slot[node, 0])
    pads: Any = []
    for base, move in relation.moves[out].items():
        source = next(
            k for k, a in enumerate(relation.ins[0]) if any(x.startswith(f"{base}<") for x in a)
        )
        wanted: Positions = layout[axes[base]] if base in axes else None
        sources, positions = move.source.tolist(), move.position.tolist()
        rows = list(range(len(sources))) if wanted is None else list(wanted)
        real = [positions[r] for r in rows if sources[r] >= 0]
        size = value_of(operand).shape[source]
        # A constant is stored once, however often its entries are read.
        stored = sorted(set(real)) if operand.op == "get_attr" and len(real) > size else real
        want[source] = whole(stored, size)
        pads.append((source, rows, move, [stored.index(p) for p in real]))
    made = walk.adapter.adapt(operand, tuple(want))
    for source, rows, move, read in pads:
        if read != list(range(made.meta["val"].shape[source])):
            made = walk.adapter.select(made, source, read)
        made = _pad_back(walk, made, source, rows, move)
    gone = [k for k, a in enumerate(relation.ins[0]) if _is_gone(relation, out, a)]
    for axis in sorted(gone, reverse=True):
        made = walk.editor.call(aten.squeeze.dim, made, axis)
    walk.keep(node, out, made, layout)


def _moved_axes(relation: Relation, out: int) -> list[tuple[int, str]]:
    suffix = ">"
    return [(k, "".join(a).partition(suffix)[0]) for k, a in enumerate(relation.outs[out])
            if a and a[0] in relation.moved]  # fmt: skip


def _is_gone(relation: Relation, out: int, axis: tuple[str, ...]) -> bool:
    if not axis or axis[0] not in relation.moved:
        return False
    base = axis[0].partition("<")[0]
    return all(base != other for _, other in _moved_axes(relation, out))


def _pad_back(walk: EmitContext, made: fx.Node, axis: int, rows: list[int], move: Any) -> fx.Node:
    """Padded positions that are kept all the same (an axis of several cells) are put back."""
    sources = move.source.tolist()
    padded = [k for k, r in enumerate(rows) if sources[r] < 0]
    if not padded:
        return made
    gone = set(padded)
    real = [k for k in range(len(rows)) if k not in gone]
    return walk.adapter.scattered(made, axis, tuple(real), len(rows), move.value)


def _gathered_from(walk: EmitContext, relation: Relation, out: int, layout: Layout) -> None:
    """cat and its like: from each operand the positions wanted, joined; operands none of whose
    positions are wanted are gone."""
    ((base, move),) = relation.moves[out].items()
    axis = next(k for k, base_ in _moved_axes(relation, out) if base_ == base)
    wanted, sources, positions = layout[axis], move.source.tolist(), move.position.tolist()
    rows = list(range(len(sources))) if wanted is None else list(wanted)
    pieces, order = [], []
    for k, operand in enumerate(relation.operands):
        mine = [r for r in rows if sources[r] == k]
        if not mine:
            continue
        want = list(walk.placement.slot[relation.node, k])
        size = value_of(operand.value).shape[axis]
        want[axis] = whole([positions[r] for r in mine], size)
        pieces.append(walk.adapter.adapt(operand.value, tuple(want)))
        order += mine
    made = pieces[0] if len(pieces) == 1 else walk.editor.call(aten.cat.default, pieces, axis)
    final = list(layout)
    final[axis] = whole(order, len(sources))
    walk.keep(relation.node, out, made, tuple(final))
