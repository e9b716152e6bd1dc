"""Facts of calls that move positions: the index map, applied."""

from __future__ import annotations

import torch

from demask.facts.masks import Fact, uniform_over
from demask.numerics import is_all
from demask.ops import Relation, schema
from demask.ops.schema import fake


def moved_fact(relation: Relation, out: int, inputs: list[Fact]) -> Fact | None:
    """The fact of an output: positions follow the index map, and padded positions are known."""
    bases = sorted({a.partition("<")[0] for a in relation.moved if "<" in a})
    for base in bases:
        axis = moved_axis(relation, base)
        move = relation.moves[out].get(base)
        if move is None:
            inputs = [_unknown_map_fact(relation, inputs, axis)]
            continue
        whole = _widen(relation, inputs, axis)
        starts = torch.tensor([0, *(f.fill.shape[axis] for f in whole)]).cumsum(0)
        rows = starts[move.source.clamp(min=0)] + move.position
        mask = torch.cat([f.known for f in whole], axis).index_select(axis, rows)
        fill = torch.cat([f.fill for f in whole], axis).index_select(axis, rows)
        padded = (move.source < 0).view([-1 if k == axis else 1 for k in range(mask.ndim)])
        value = torch.tensor(move.value, dtype=torch.float64).to(fill.dtype)
        inputs = [shorten_axis(Fact(mask | padded, torch.where(padded, value, fill)), axis)]
    result = inputs[0]
    output_letters = {letter.partition(">")[0] for letter in relation.letters(relation.outs[out])}
    for axis in sorted((moved_axis(relation, b) for b in bases if b not in output_letters), reverse=True):
        result = Fact(result.known.squeeze(axis), result.fill.squeeze(axis))
    return result


def moved_axis(relation: Relation, base: str) -> int:
    """The axis of the operands that has the moved letter."""
    axes = relation.ins[0]
    return next(k for k, axis in enumerate(axes) if axis and axis[0].partition("<")[0] == base)


def _widen(relation: Relation, inputs: list[Fact], axis: int) -> list[Fact]:
    """The facts with the moved axis at full size, and the other axes broadcast to one another."""
    shapes = [[1 if k == axis else n for k, n in enumerate(f.fill.shape)] for f in inputs]
    shape = list(torch.broadcast_shapes(*shapes))
    result = []
    for k, fact in enumerate(inputs):
        real = fake(relation.operands[min(k, len(relation.operands) - 1)].value).shape[axis]
        full = [real if d == axis else n for d, n in enumerate(shape)]
        result.append(Fact(fact.known.expand(full), fact.fill.expand(full)))
    return result


def shorten_axis(fact: Fact, axis: int) -> Fact:
    """The fact with size 1 for an axis along which nothing varies."""
    if not fact.known.shape[axis] or not fact.fill.shape[axis]:
        return fact
    known, fill = fact.known.narrow(axis, 0, 1), fact.fill.narrow(axis, 0, 1)
    same = is_all(fact.known == known) and is_all(fact.fill == fill)
    return Fact(known, fill) if same else fact


def _unknown_map_fact(relation: Relation, inputs: list[Fact], axis: int) -> Fact:
    """The fact after an unknown index map: known where all is known with one value all along."""
    order = [str(k) for k in range(inputs[0].known.ndim)]
    first, *rest = [uniform_over(fact, order, {str(axis)}) for fact in inputs]
    mask, fill = first.known, first.fill
    for other in rest:
        mask = mask & other.known & (fill == other.fill)
    if relation.entry.reads_padding(relation.node):
        value = schema.arguments(relation.node).get("value")
        mask = mask & (fill == (value if isinstance(value, (int, float)) else 0))
    return Fact(*torch.broadcast_tensors(mask, fill))
