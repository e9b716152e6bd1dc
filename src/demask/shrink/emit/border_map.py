"""Constants that known inputs add to a contraction: a bias, or under zero padding a border map.

A constant channel that enters a zero-padded convolution is not constant after it: near the border,
part of its window reads zeros. The exact result at any size is the convolution of ones with the
kernel sum_c fill_c · W[:, c], added to the output: one map of one image, for the full batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from demask.facts.carriers import one_value
from demask.facts.known import Facts, constant_sums, contributions, is_absorbing, operand_facts, sum_products
from demask.facts.masks import Fact, project, spread
from demask.ops import Relation
from demask.ops.schema import fake
from demask.shrink.layout.cells import Layout


@dataclass(frozen=True, slots=True)
class Absorbed:
    """Constants to add to a contraction.

    bias: over the output's axes (dimensions of 1 where uniform), or None where it is 0. kernel: a
    convolution weight for one channel of ones, [out, 1, *k] ([1, out, *k] transposed), or None.
    """

    bias: Tensor | None
    kernel: Tensor | None


def absorb_constants(relation: Relation, facts: Facts, layout: Layout) -> Absorbed:
    """The sum of the products of known factors at positions that the layout of the first
    factor drops. Everything is over the original positions."""
    if not is_absorbing(relation):
        return Absorbed(None, None)
    first, second = relation.factors
    inputs = operand_facts(relation, facts)
    fact, weight = _dropped_fact(relation, inputs[first], first, layout), inputs[second].fill
    if fact is None:
        return Absorbed(None, None)
    return _sum_constants(relation, fact, weight)


def constants_alone(relation: Relation, facts: Facts, layout: Layout) -> Absorbed:
    """The constants that a call computes if, at the output positions in `layout`, no product
    depends on the input; nothing if one does."""
    if constant_sums(relation) or not is_absorbing(relation):
        return Absorbed(None, None)
    first, second = relation.factors
    inputs, order = operand_facts(relation, facts), list(relation.size)
    inside = torch.ones([1] * len(layout), dtype=torch.bool)
    for axis, positions in enumerate(layout):
        if positions is not None:
            mask = torch.zeros(fake(relation.node).shape[axis], dtype=torch.bool)
            mask[list(positions)] = True
            inside = inside & mask.view([-1 if k == axis else 1 for k in range(len(layout))])
    live = contributions(relation, inputs, absorb=True)
    live = live & spread(inside, relation.outs[0], order, relation.size)
    if bool(live.any()):
        return Absorbed(None, None)
    return _sum_constants(relation, one_value(relation, inputs[first]), inputs[second].fill)


def _sum_constants(relation: Relation, fact: Fact, weight: Tensor) -> Absorbed:
    """The sum of the products of an operand's known values with the weight."""
    first, second = relation.factors
    order = list(relation.size)
    a = spread(fact.fill, relation.ins[first], order, relation.size)
    b = spread(weight, relation.ins[second], order, relation.size)
    windows = relation.window & relation.letters(relation.ins[second])
    if constant_sums(relation):
        over = set(relation.contracted | windows)
        total = sum_products(a.double(), b.double(), order, over, relation.size)
        bias = project(total, relation.outs[0], order, relation.size)
        return Absorbed(bias if bool((bias != 0).any()) else None, None)
    total = sum_products(a.double(), b.double(), order, set(relation.contracted), relation.size)
    return Absorbed(None, _kernel(relation, total, second))


def _dropped_fact(relation: Relation, fact: Fact, operand: int, layout: Layout) -> Fact | None:
    """The fact with fills only where the operand's contracted positions are dropped."""
    axes = relation.ins[operand]
    drop = torch.zeros([1] * len(axes), dtype=torch.bool)
    for axis, positions in enumerate(layout):
        if positions is None or not set(axes[axis]) & relation.contracted:
            continue
        size = 1
        for letter in axes[axis]:
            size *= relation.size[letter] or 1
        gone = torch.ones(size, dtype=torch.bool)
        gone[list(positions)] = False
        drop = drop | gone.view([-1 if k == axis else 1 for k in range(len(axes))])
    plain = one_value(relation, fact)
    fill = torch.where(drop & plain.known, plain.fill, torch.zeros((), dtype=plain.fill.dtype))
    if not bool((fill != 0).any()):
        return None
    return Fact(drop & plain.known, fill)


def _kernel(relation: Relation, total: Tensor, weight: int) -> Tensor | None:
    """The summed kernel, in the axes of the weight with its input axis of size one."""
    if not bool((total != 0).any()):
        return None
    order = list(relation.size)
    axes = relation.ins[weight]
    # Transposed grouped weights are [(g i), o, ...]: their output letters are joined first.
    out = next(axis for axis in relation.outs[0] if set(axis) & relation.letters(axes))
    taken = tuple(axis for axis in axes if set(axis) & relation.window)
    flat = project(total, (out, *taken), order, relation.size)
    transposed = bool(set(axes[0]) & relation.contracted)
    return flat.unsqueeze(0) if transposed else flat.unsqueeze(1)
