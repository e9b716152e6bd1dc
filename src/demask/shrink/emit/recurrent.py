"""Recurrent calls on fewer units and input features; what constant features give goes into b_ih."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from demask.facts.known import operand_facts
from demask.facts.recurrent import constant_features, has_plain_biases, roles
from demask.graph.provenance import Cut
from demask.ops import Relation
from demask.shrink.emit.constant_store import cut
from demask.shrink.emit.context import EmitContext

aten = torch.ops.aten


def emit_recurrent(walk: EmitContext, relation: Relation) -> None:
    """The same call, every operand in the layout of its letters."""
    node, who = relation.node, roles(relation)
    layouts = [walk.placement.value.get((node, k)) for k in range(len(relation.outs))]
    full = [tuple(None for _ in axes) for axes in relation.outs]
    facts = operand_facts(relation, walk.facts)
    shift = _shift(walk, relation)
    weight = walk.operand(relation, who.w_ih)
    values: list[fx.Node] = []
    zeros: dict[str, fx.Node] = {}
    for k, fact in enumerate(facts):
        if k in (0, *who.states) and _is_zero(walk, relation, k, fact.zero):
            sizes = _sizes(walk, relation, k)
            if str(sizes) not in zeros:
                # Of the dtype and on the device of a weight, wherever that is moved to.
                zeros[str(sizes)] = walk.editor.call(aten.new_zeros.default, weight, sizes)
            values.append(zeros[str(sizes)])
        elif shift is not None and k == who.biases[0]:
            values.append(_shifted(walk, relation, k, shift))
        else:
            values.append(walk.operand(relation, k))
    held = [full[k] if layout is None else layout for k, layout in enumerate(layouts)]
    args, kwargs = walk.arguments(relation, values, held)
    walk.finish(node, node.target, args, kwargs, layouts)


def _is_zero(walk: EmitContext, relation: Relation, operand: int, zero: Tensor) -> bool:
    """Is all that the call reads of an operand known to be 0 (or is there nothing to read)?"""
    for axis, positions in enumerate(walk.placement.slot[relation.node, operand]):
        if positions is not None and (zero.shape[axis] != 1 or not positions):
            zero = zero.index_select(
                axis, torch.tensor(positions, dtype=torch.long)[: zero.shape[axis]]
            )
    return bool(zero.all())


def _sizes(walk: EmitContext, relation: Relation, operand: int) -> list[Any]:
    """The sizes of an operand as it is read, as call arguments."""
    slot = walk.placement.slot[relation.node, operand]
    shape = relation.operands[operand].value.meta["val"].shape
    return [walk.pool.size(n) if p is None else len(p) for n, p in zip(shape, slot, strict=True)]


def _shift(walk: EmitContext, relation: Relation) -> Tensor | None:
    """What the constant features that are cut give to every gate: Σ w_ih · fill, float64."""
    if not has_plain_biases(relation):
        return None
    who = roles(relation)
    inputs = operand_facts(relation, walk.facts)
    kept = walk.placement.slot[relation.node, 0][-1]
    fill = torch.where(constant_features(relation, inputs)[1], inputs[0].fill[0, 0], 0).double()
    gone = torch.ones(relation.operands[0].value.meta["val"].shape[-1], dtype=torch.float64)
    gone[slice(None) if kept is None else list(kept)] = 0
    weight = walk.pool.source[str(relation.operands[who.w_ih].value.target)].tensor
    taken = fill * gone
    at = taken.nonzero().squeeze(1)
    shift = weight.double()[:, at] @ taken[at]
    return shift if bool((shift != 0).any()) else None


def _shifted(walk: EmitContext, relation: Relation, operand: int, shift: Tensor) -> fx.Node:
    """b_ih with constants in it; a parameter of the same name."""
    old = walk.pool.source[str(relation.operands[operand].value.target)]
    slot = walk.placement.slot[relation.node, operand]
    total = cut((old.tensor.double() + shift).to(old.tensor.dtype), slot)
    held = old.moved(lambda tensor: cut(tensor, slot))
    made = walk.pool.add(replace(held, tensor=total))
    walk.pool.cuts[made] = Cut(old.name, tuple(old.tensor.shape), slot)
    return walk.pool.read(made)
