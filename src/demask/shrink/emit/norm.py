"""Norms that read whole axes, of which only the needed positions are scaled and shifted."""

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


def emit_cut_norm(context: EmitContext, relation: Relation, want: Layout) -> fx.Node:
    """The norm without scale and shift over whole axes, cut to the wanted positions, then scaled
    and shifted: scales and shifts of other positions are removed.

        norm(x)[want] * weight[want] + bias[want] == norm(x, weight, bias)[want]
    """
    node, whole = relation.node, context.placement.slot[relation.node, 0]
    arguments = schema.arguments(node)
    bare: dict[str, Any] = {name: None for name in ("weight", "bias") if name in arguments}
    values = [context.operand(relation, 0), *[None] * (len(relation.operands) - 1)]
    args, kwargs = context.arguments(relation, values, [whole], bare)
    value = context.editor.call(node.target, *args, **kwargs)
    for axis, (have, positions) in enumerate(zip(whole, want, strict=True)):
        if have == positions:
            continue
        size = node.meta["val"].shape[axis]
        offsets = {p: k for k, p in enumerate(range(size) if have is None else have)}
        rows = range(size) if positions is None else positions
        value = context.adapter.select(value, axis, [offsets[p] for p in rows])
    for name, op in (("weight", aten.mul.Tensor), ("bias", aten.add.Tensor)):
        if arguments.get(name) is not None:
            value = context.editor.call(op, value, _vector(context, relation, name, want))
    return value


def _vector(context: EmitContext, relation: Relation, name: str, want: Layout) -> fx.Node:
    """A scale or shift cut to the wanted positions, shaped to broadcast over the output."""
    k = next(k for k, operand in enumerate(relation.operands) if operand.name == name)
    source, outs = relation.operands[k].value, relation.outs[0]
    axes = [next(d for d, a in enumerate(outs) if a == mine) for mine in relation.ins[k]]
    part = tuple(want[d] for d in axes)
    if axes == list(range(len(outs) - len(axes), len(outs))):
        return context.adapter.adapt(source, part)
    if source.op != "get_attr":
        vector = context.adapter.adapt(source, part)
        for d in range(min(axes), len(outs)):
            if d not in axes:
                vector = context.editor.call(aten.unsqueeze.default, vector, d - min(axes))
        return vector
    old = context.store.source[str(source.target)]
    sizes = cut(old.tensor, part).shape
    shape = [sizes[axes.index(d)] if d in axes else 1 for d in range(min(axes), len(outs))]
    vector = context.store.add(old.moved(lambda tensor: cut(tensor, part).reshape(shape)))
    context.store.cuts[vector] = Cut(old.name, tuple(old.tensor.shape), part)
    return context.store.read(vector)
