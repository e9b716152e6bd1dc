"""Recurrent calls on fewer units and input features; b_ih absorbs constant features."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from demask.facts.known import operand_facts
from demask.facts.recurrent import constant_features, has_plain_biases, roles
from demask.graph.provenance import Cut
from demask.ops import Relation
from demask.ops.schema import fake
from demask.shrink.emit.constant_store import cut
from demask.shrink.emit.context import EmitContext

aten = torch.ops.aten


def emit_recurrent(context: EmitContext, relation: Relation, *, zeros: bool = True) -> None:
    """Emit the same call, every operand in the layout of its letters. zeros: whether operands that
    are known to be 0 are created anew."""
    node, role = relation.node, roles(relation)
    layouts = [context.placement.value.get((node, k)) for k in range(len(relation.outs))]
    full = [tuple(None for _ in axes) for axes in relation.outs]
    facts = operand_facts(relation, context.facts)
    shift = _shift(context, relation)
    weight = context.operand(relation, role.w_ih)
    values: list[fx.Node] = []
    created: dict[str, fx.Node] = {}
    for k, fact in enumerate(facts):
        if zeros and k in (0, *role.states) and _is_read_as_zero(context, relation, k, fact.zero):
            sizes = _sizes_as_arguments(context, relation, k)
            if str(sizes) not in created:
                # Dtype and device are those of a weight, which may be moved.
                created[str(sizes)] = context.editor.call(aten.new_zeros.default, weight, sizes)
            values.append(created[str(sizes)])
        elif shift is not None and k == role.biases[0]:
            values.append(_shifted_bias(context, relation, k, shift))
        else:
            values.append(context.operand(relation, k))
    output_layouts = [full[k] if layout is None else layout for k, layout in enumerate(layouts)]
    args, kwargs = context.arguments(relation, values, output_layouts)
    context.finish(node, node.target, args, kwargs, layouts)


def _is_read_as_zero(context: EmitContext, relation: Relation, operand: int, zero: Tensor) -> bool:
    """Whether all that the call reads of an operand is known to be 0 (or it reads nothing)."""
    for axis, positions in enumerate(context.placement.slot[relation.node, operand]):
        if positions is not None and (zero.shape[axis] != 1 or not positions):
            zero = zero.index_select(axis, torch.tensor(positions, dtype=torch.long)[: zero.shape[axis]])
    return bool(zero.all())


def _sizes_as_arguments(context: EmitContext, relation: Relation, operand: int) -> list[Any]:
    slot = context.placement.slot[relation.node, operand]
    shape = fake(relation.operands[operand].value).shape
    return [context.store.size(n) if p is None else len(p) for n, p in zip(shape, slot, strict=True)]


def _shift(context: EmitContext, relation: Relation) -> Tensor | None:
    """What cut constant features add to every gate: Σ w_ih · fill, float64; None if 0."""
    if not has_plain_biases(relation):
        return None
    role = roles(relation)
    inputs = operand_facts(relation, context.facts)
    features = context.placement.slot[relation.node, 0][-1]
    fill = torch.where(constant_features(relation, inputs)[1], inputs[0].fill[0, 0], 0).double()
    removed = torch.ones(fake(relation.operands[0].value).shape[-1], dtype=torch.float64)
    removed[slice(None) if features is None else list(features)] = 0
    weight = context.store.source[str(relation.operands[role.w_ih].value.target)].tensor
    taken = fill * removed
    rows = taken.nonzero().squeeze(1)
    shift = weight.double()[:, rows] @ taken[rows]
    return shift if bool((shift != 0).any()) else None


def _shifted_bias(context: EmitContext, relation: Relation, operand: int, shift: Tensor) -> fx.Node:
    """b_ih with a shift added; a parameter of the same name."""
    old = context.store.source[str(relation.operands[operand].value.target)]
    slot = context.placement.slot[relation.node, operand]
    total = cut((old.tensor.double() + shift).to(old.tensor.dtype), slot)
    constant = old.moved(lambda tensor: cut(tensor, slot))
    name = context.store.add(replace(constant, tensor=total))
    context.store.cuts[name] = Cut(old.name, tuple(old.tensor.shape), slot)
    return context.store.read(name)
