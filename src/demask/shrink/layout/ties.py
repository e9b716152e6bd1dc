"""Constraints of a call on the axes of its operands and outputs: full axes and ties."""

from __future__ import annotations

from torch import Tensor

from demask.facts.known import Facts, contributions, operand_facts
from demask.facts.masks import any_over, mixed, spread
from demask.facts.needed import Needs
from demask.ops import Relation, schema


def is_join(relation: Relation) -> bool:
    """Whether a call is pointwise over several values, which may have different layouts."""
    if relation.moved or relation.contracted or relation.complete or relation.window:
        return False
    return len([o for o in relation.operands if not schema.is_constant(o.value)]) > 1


def strided_axes(relation: Relation) -> list[int]:
    """The output axes along which a call could compute only every s-th position: the windows of a
    convolution, by its stride."""
    arguments = schema.arguments(relation.node)
    strided = relation.entry.fill == "sum" and "stride" in arguments and "output_padding" not in arguments
    if not strided or isinstance(arguments["padding"], str) or "pads" in arguments:
        return []
    return [k for k, letters in enumerate(relation.outs[0]) if len(letters) == 1 and set(letters) & relation.window]


def needed_products(relation: Relation, facts: Facts, needs: Needs) -> Tensor:
    """Over letters: the products of a contraction that a live output needs at run time.

    Products of two known factors are constants, which a bias or a border map absorbs (weights of a
    mix have neither); those of carried channels are not needed.
    """
    order = list(relation.size)
    inputs = operand_facts(relation, facts)
    live = spread(needs.live[relation.node, 0], relation.outs[0], order, relation.size)
    mask = any_over(live, order, relation.window) & contributions(relation, inputs, absorb=relation.entry.fill == "sum")
    if (edge := needs.edge.get((relation.node, relation.factors[0]))) is not None:
        mask = mask & spread(edge, relation.ins[relation.factors[0]], order, relation.size)
    return any_over(mask, order, relation.window)


def whole_letters(relation: Relation) -> set[str]:
    """Letters that stay whole: windows, complete axes, positions moved by an unknown map, and those
    that share an axis with a dynamic size."""
    letters = set(relation.window | relation.complete)
    for axes in [*relation.ins, *relation.outs]:
        letters |= mixed(axes, relation.size)
    if relation.moved and not any(relation.moves):
        letters |= relation.moved
    return letters
