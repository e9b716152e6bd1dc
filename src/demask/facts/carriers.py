"""Carriers: channels whose constant represents those of dropped channels.

A constant channel that enters a zero-padded convolution is not constant after it, as windows at the
border read zeros. A border map adds what dropped channels contributed. A carrier needs no added
call: one constant channel p stays (of each group), and its kernel takes the products of all dropped
ones,

    W'[:, p] = W[:, p] + Σ_c (fill_c / fill_p) · W[:, c]

which is exact at the border, too: fill_p is read wherever each fill_c was.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from demask.facts.known import Facts, operand_facts, uniform_letters
from demask.facts.masks import Fact, uniform_over
from demask.ops import Relation


def carries_constants(relation: Relation) -> bool:
    """Whether a call is a padded convolution in which one constant channel (of each group) can
    stand for others: not depthwise, and of a weight that no other call reads."""
    if relation.entry.fill != "sum" or relation.complete:
        return False
    first, second = relation.factors
    channels = any(set(axis) & relation.contracted for axis in relation.ins[first])
    weight = relation.operands[second].value
    if not channels or not relation.entry.reads_padding(relation.node):
        return False
    return isinstance(weight, fx.Node) and weight.op == "get_attr" and _has_one_reader(weight)


def _has_one_reader(weight: fx.Node) -> bool:
    """Whether one call reads the tensor of a get_attr node."""
    reads = weight.graph.find_nodes(op="get_attr")
    return sum(len(read.users) for read in reads if read.target == weight.target) == 1


def constant_channels(relation: Relation, facts: Facts) -> tuple[int, Tensor, Tensor]:
    """The axis of channels of the first factor, which of them are one constant other than 0 (bool
    [channels]), and the constants."""
    first = relation.factors[0]
    fact = one_value(relation, operand_facts(relation, facts)[first])
    axis = next(d for d, a in enumerate(relation.ins[first]) if set(a) & relation.contracted)
    size = 1
    for letter in relation.ins[first][axis]:
        size *= relation.size[letter] or 1
    known, fill = torch.broadcast_tensors(fact.known, fact.fill)
    if any(n != 1 for d, n in enumerate(known.shape) if d != axis):
        return axis, torch.zeros(size, dtype=torch.bool), torch.zeros(size)
    known, fill = known.reshape(-1).expand(size), fill.reshape(-1).expand(size)
    return axis, known & (fill != 0), fill


def output_channels(relation: Relation) -> int:
    """The output axis of the weight's output letter."""
    letters = relation.letters(relation.ins[relation.factors[1]])
    return next(k for k, axis in enumerate(relation.outs[0])
                if set(axis) & letters and not set(axis) & relation.window)  # fmt: skip


def one_value(relation: Relation, fact: Fact) -> Fact:
    """The fact of the first factor, known where it is uniform along all letters that a sum, or a
    border map, needs it to be."""
    axes, letters = relation.ins[relation.factors[0]], uniform_letters(relation)
    order = [str(k) for k in range(len(axes))]
    return uniform_over(fact, order, {str(k) for k, a in enumerate(axes) if set(a) & letters})
