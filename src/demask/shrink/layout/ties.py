"""What a call asks of the axes of its operands and outputs: which stay whole, which are tied."""

from __future__ import annotations

from torch import Tensor

from demask.facts.known import Facts, contributions, operand_facts
from demask.facts.masks import any_over, mixed, spread
from demask.facts.needed import Needs
from demask.ops import Relation, schema


def is_join(relation: Relation) -> bool:
    """A pointwise op over several values: its operands may come in any layout."""
    if relation.moved or relation.contracted or relation.complete or relation.window:
        return False
    return len([o for o in relation.operands if not schema.is_constant(o.value)]) > 1


def sampling(relation: Relation) -> list[int]:
    """The axes of an output along which a call could make every s-th position alone: windows of a
    convolution, which its stride says."""
    found = schema.arguments(relation.node)
    strided = relation.entry.fill == "sum" and "stride" in found and "output_padding" not in found
    if not strided or isinstance(found["padding"], str) or "pads" in found:
        return []
    return [k for k, letters in enumerate(relation.outs[0])
            if len(letters) == 1 and set(letters) & relation.window]  # fmt: skip


def kept_products(relation: Relation, facts: Facts, needs: Needs) -> Tensor:
    """Over letters: the products of a contraction that a live output really needs at run time.

    Products of two known factors are constants, which a bias or a border map takes (weights of a
    mix have neither).
    """
    order = list(relation.size)
    inputs = operand_facts(relation, facts)
    live = spread(needs.live[relation.node, 0], relation.outs[0], order, relation.size)
    mask = any_over(live, order, relation.window) & contributions(
        relation, inputs, absorb=relation.entry.fill == "sum"
    )
    return any_over(mask, order, relation.window)


def forced(relation: Relation) -> set[str]:
    """Letters that stay whole: windows, complete axes, positions moved by an unknown map, and what
    shares an axis with a dynamic size."""
    forced = set(relation.window | relation.complete)
    for axes in [*relation.ins, *relation.outs]:
        forced |= mixed(axes, relation.size)
    if relation.moved and not any(relation.moves):
        forced |= relation.moved
    return forced
