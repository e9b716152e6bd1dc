"""Norms: whole axes in, only what is read scaled, shifted and passed on."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from demask.graph.provenance import Cut
from demask.ops import Relation, schema
from demask.shrink.emit.constant_store import cut
from demask.shrink.emit.context import EmitContext
from demask.shrink.layout.cells import Layout

aten = torch.ops.aten


def emit_cut_norm(walk: EmitContext, relation: Relation, want: Layout) -> fx.Node:
    """The norm without scale and shift over whole axes, the wanted positions taken, then scaled and
    shifted: scales and shifts of positions nobody reads are gone.

        norm(x)[want] * weight[want] + bias[want] == norm(x, weight, bias)[want]
    """
    node, held = relation.node, walk.placement.slot[relation.node, 0]
    found = schema.arguments(node)
    bare: dict[str, Any] = {name: None for name in ("weight", "bias") if name in found}
    values = [walk.operand(relation, 0), *[None] * (len(relation.operands) - 1)]
    args, kwargs = walk.arguments(relation, values, [held], bare)
    made = walk.editor.call(node.target, *args, **kwargs)
    for axis, (have, positions) in enumerate(zip(held, want, strict=True)):
        if have == positions:
            continue
        size = node.meta["val"].shape[axis]
        at = {p: k for k, p in enumerate(range(size) if have is None else have)}
        rows = range(size) if positions is None else positions
        made = walk.adapter.select(made, axis, [at[p] for p in rows])
    for name, op in (("weight", aten.mul.Tensor), ("bias", aten.add.Tensor)):
        if found.get(name) is not None:
            made = walk.editor.call(op, made, _vector(walk, relation, name, want))
    return made


def _vector(walk: EmitContext, relation: Relation, name: str, want: Layout) -> fx.Node:
    """A scale or shift cut to the wanted positions, shaped to broadcast over the output."""
    k = next(k for k, operand in enumerate(relation.operands) if operand.name == name)
    source, outs = relation.operands[k].value, relation.outs[0]
    axes = [next(d for d, a in enumerate(outs) if a == mine) for mine in relation.ins[k]]
    part = tuple(want[d] for d in axes)
    if axes == list(range(len(outs) - len(axes), len(outs))):
        return walk.adapter.adapt(source, part)
    if source.op != "get_attr":
        made = walk.adapter.adapt(source, part)
        for d in range(min(axes), len(outs)):
            if d not in axes:
                made = walk.editor.call(aten.unsqueeze.default, made, d - min(axes))
        return made
    old = walk.pool.source[str(source.target)]
    sizes = cut(old.tensor, part).shape
    shape = [sizes[axes.index(d)] if d in axes else 1 for d in range(min(axes), len(outs))]
    made = walk.pool.add(old.moved(lambda tensor: cut(tensor, part).reshape(shape)))
    walk.pool.cuts[made] = Cut(old.name, tuple(old.tensor.shape), part)
    return walk.pool.read(made)
