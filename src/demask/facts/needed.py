"""Positions that are read on a path to an output: one backward sweep over the relations.

    need_in = any over the letters the operand lacks of (need_out & not known_out & not zero(other))

A known position is not computed, so nothing is needed for it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, fx

from demask.facts.known import Facts, Key, Relations, key_of, operand_facts, over_letters, uniform_keys, window_mask
from demask.facts.masks import Fact, all_over, any_over, mixed, project, spread
from demask.facts.movement import moved_axis
from demask.facts.recurrent import add_recurrent_needs, deciding_output
from demask.failures import attributed
from demask.numerics import has_any, without_repeats
from demask.ops import Relation, schema
from demask.ops.schema import fake

Edge = tuple[fx.Node, int]  # a call and which of its operands


@dataclass(frozen=True, slots=True)
class Needs:
    """Masks of the positions that are read: of each value (by any call), and of each operand of
    each call.

    live: per value, needed and not known: the positions that must be computed.
    """

    value: dict[Key, Tensor]
    edge: dict[Edge, Tensor]
    live: dict[Key, Tensor]


def needed(
    graph: fx.Graph,
    relations: Relations,
    facts: Facts,
    computed: Mapping[fx.Node, Sequence[Tensor]] = MappingProxyType({}),
    carried: Mapping[Edge, Tensor] = MappingProxyType({}),
) -> Needs:
    """What the graph's outputs need of every value.

    computed: of calls that are not finite for all operands, masks per output of what is computed,
    needed or not. There they need their true operands instead of fills. carried: positions of
    operands that a call can do without, if others carry them. Raises CallFailed where a rule
    fails.
    """
    nothing = {k: torch.zeros([1] * f.known.ndim, dtype=torch.bool) for k, f in facts.items()}
    needs = Needs(nothing, {}, {})
    for node in reversed(list(graph.nodes)):
        if node.op == "output":
            for source in node.all_input_nodes:
                _need_whole(needs, source)
        elif node.op == "call_function" and node.target is not operator.getitem:
            with attributed(node):
                _add_needs_of_operands(node, relations.get(node), facts, needs, computed.get(node), carried)
    for key, need in needs.value.items():
        needs.live[key] = need & ~without_repeats(facts[key].known)
    return needs


def _need_whole(needs: Needs, node: fx.Node) -> None:
    key = key_of(node)
    if key in needs.value:
        needs.value[key] = torch.ones_like(needs.value[key])


def _add_needs_of_operands(
    node: fx.Node,
    relation: object,
    facts: Facts,
    needs: Needs,
    computed: Sequence[Tensor] | None,
    carried: Mapping[Edge, Tensor],
) -> None:
    keys = [(node, k) for k in range(len(schema.outputs(node))) if (node, k) in facts]
    if not keys:
        # A size is read from a tensor's shape, any other number (item) from its values.
        if node.target is not torch.ops.aten.sym_size.int:
            for source in node.all_input_nodes:
                _need_whole(needs, source)
        return
    if schema.draws_random_numbers(node):  # the numbers drawn later depend on how many it draws
        _need_whole(needs, node)
    live = [needs.value[key] & ~facts[key].known for key in keys]
    if isinstance(relation, Relation) and relation.back and any(map(has_any, live)):
        live = add_recurrent_needs(relation, operand_facts(relation, facts), live)
        for key, mask in zip(keys, live, strict=True):
            needs.value[key] = needs.value[key] | mask
    if not any(map(has_any, live)):
        return
    if not isinstance(relation, Relation):
        for source in node.all_input_nodes:
            _need_whole(needs, source)
        return
    for k, operand in enumerate(relation.operands):
        if not isinstance(operand.value, fx.Node) or relation.entry.free:
            continue
        edge = operand_need(relation, k, live, facts)
        if (node, k) in carried:
            edge = edge & ~carried[node, k]
        if computed is not None:
            edge = edge | operand_need(relation, k, computed, facts, hidden=False)
        needs.edge[node, k] = edge
        key = key_of(operand.value)
        needs.value[key] = needs.value[key] | edge


def operand_need(
    relation: Relation, operand: int, live: Sequence[Tensor], facts: Facts, *, hidden: bool = True
) -> Tensor:
    """What the live outputs need of one operand. hidden: whether zeros of others remove needs."""
    if relation.moved:
        masks = [_need_by_index_map(relation, k, operand, mask) for k, mask in enumerate(live)]
    elif relation.back:
        out = deciding_output(relation, operand)
        masks = [_need_by_letters(relation, out, operand, live[out], facts, hidden)]
    else:
        masks = [_need_by_letters(relation, k, operand, mask, facts, hidden) for k, mask in enumerate(live)]
    total = masks[0]
    for mask in masks[1:]:
        total = total | mask
    return total


def _need_by_letters(relation: Relation, out: int, operand: int, live: Tensor, facts: Facts, hidden: bool) -> Tensor:
    order, axes = list(relation.size), relation.ins[operand]
    mask = spread(live, relation.outs[out], order, relation.size)
    # One needed position of a complete axis needs the axis; so do dynamic composites.
    mask = any_over(mask, order, relation.complete | mixed(axes, relation.size))
    if hidden:
        mask = mask & ~_hidden_mask(relation, operand, operand_facts(relation, facts))
    absent = set(order) - relation.letters(axes)
    return project(any_over(mask, order, absent), axes, order, relation.size)


def _hidden_mask(relation: Relation, operand: int, inputs: list[Fact]) -> Tensor:
    """Over letters: where a zero of another operand makes this one irrelevant."""
    mask = torch.zeros([1] * len(relation.size), dtype=torch.bool)
    if relation.entry.fill in ("sum", "mix", "recur") and operand in relation.factors:
        others = [k for k in relation.factors if k != operand]
    else:
        others = {"": [], "any": range(len(inputs)), "first": [0]}[relation.entry.zero]
    for k in others:
        if k != operand:
            mask = mask | window_mask(relation, k, inputs[k], zero=True)
    if operand == relation.factors[0]:
        mask = mask | uniform_keys(relation, inputs)
    if relation.entry.affine:
        mask = mask | _scaled_away_mask(relation, operand, inputs)
    return mask


def _scaled_away_mask(relation: Relation, operand: int, inputs: list) -> Tensor:
    """Where a zero scale makes the operand irrelevant (operands other than scale and shift)."""
    names = [o.name for o in relation.operands]
    if "weight" not in names or operand != 0:
        return torch.zeros((), dtype=torch.bool)
    zero = over_letters(relation, names.index("weight"), inputs[names.index("weight")]).zero
    return all_over(zero, list(relation.size), relation.complete)


def _need_by_index_map(relation: Relation, out: int, operand: int, live: Tensor) -> Tensor:
    """Along moved axes: the positions that the live ones were taken from."""
    bases = sorted({a.partition("<")[0] for a in relation.moved if "<" in a})
    output_letters = {letter.partition(">")[0] for letter in relation.letters(relation.outs[out])}
    for axis in sorted(moved_axis(relation, base) for base in bases if base not in output_letters):
        live = live.unsqueeze(axis)
    for base in bases:
        axis, move = moved_axis(relation, base), relation.moves[out].get(base)
        if move is None:
            live = live.any(axis, keepdim=True)
            continue
        real = fake(relation.operands[operand].value).shape[axis]
        full = live.expand([len(move.source) if k == axis else n for k, n in enumerate(live.shape)])
        ours = (move.source == operand).nonzero().squeeze(1)
        shape = [real if k == axis else n for k, n in enumerate(live.shape)]
        result = torch.zeros(shape, dtype=torch.int32)
        taken = full.index_select(axis, ours).to(torch.int32)
        live = result.index_add(axis, move.position[ours], taken) > 0
    return live
