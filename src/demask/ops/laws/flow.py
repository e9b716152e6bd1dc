"""The law of flow: other values at a position of a part change outputs at that position alone.

    f(x)[p] == f(y)[p]      wherever x == y at the positions of the part that p belongs to

Holds along every axis that goes on and is not mixed; for the axis as a whole, and for each
part of one of several letters. Along windows and moves the region law says what is read.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from demask.ops import schema
from demask.ops.entry import Case, Declined, Table
from demask.ops.flow import Part, carry, carry_back, follow, is_mixed
from demask.ops.laws import call_with, drawn_call, garbage
from demask.ops.relation import Relation, bind


def check_flow_law(name: str, case: Case, seed: int, table: Table) -> list[str] | Declined:
    """What breaks the law, or a call of the case where tags of whole axes say otherwise; or why
    the case has no relation."""
    generator = torch.Generator().manual_seed(seed)
    leaves, spec = pytree.tree_flatten((case.args, dict(case.kwargs)))
    relation = bind(drawn_call(name, leaves, spec, generator), table)
    if isinstance(relation, Declined):
        return relation
    broken = []
    for out, axes in enumerate(relation.outs):
        for operand, value in _tensors(relation):
            broken += [f"{name}: {part} of operand {operand} in output {out}"
                       for part in _parts(relation, operand, value)
                       if not _holds(relation, operand, part, out, generator)]  # fmt: skip
            broken += [f"{name}: tag of axis {axis} of operand {operand} in output {out}"
                       for axis in range(value.ndim)
                       if not _tags_agree(relation, operand, axis, out, len(axes))]  # fmt: skip
    return broken


def _tensors(relation: Relation) -> Iterator[tuple[int, Tensor]]:
    for k, operand in enumerate(relation.operands):
        value = getattr(operand.value, "meta", {}).get("val")
        if isinstance(value, Tensor):
            yield k, value


def _parts(relation: Relation, operand: int, value: Tensor) -> Iterator[Part]:
    """Each axis of an operand, and each part that fits in those of several letters: their letters
    are among these."""
    for axis, letters in enumerate(relation.ins[operand]):
        length = value.shape[axis]
        yield Part(axis, 1, length)
        if len(letters) > 1:
            sizes = [n for n in range(1, length + 1) if length % n == 0]
            yield from (Part(axis, inner, size) for inner in sizes for size in sizes
                        if 1 < size < length and length % (inner * size) == 0)  # fmt: skip


def _holds(
    relation: Relation, operand: int, part: Part, out: int, generator: torch.Generator
) -> bool:
    after = follow(relation, operand, part, out=out)
    if after is None or is_mixed(relation, operand, part.axis):
        return True
    value = relation.operands[operand].value.meta["val"]
    before = schema.outputs(relation.node)[out]
    if not value.numel() or not before.numel():
        return True
    at = int(torch.randint(after.size, (), generator=generator))
    step = part.size // after.size  # positions of the part per position of what goes on
    positions = _positions(part, value.shape[part.axis]) // step
    other = value.clone()
    where = (positions == at).nonzero().flatten()
    other.index_copy_(part.axis, where, garbage(value, part.axis, where.tolist(), generator))
    changed = call_with(relation, operand, other)[out]
    rest = (_positions(after, before.shape[after.axis]) != at).nonzero().flatten()
    a, b = before.index_select(after.axis, rest), changed.index_select(after.axis, rest)
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _positions(part: Part, length: int) -> Tensor:
    return torch.arange(length) // part.inner % part.size


def _tags_agree(relation: Relation, operand: int, axis: int, out: int, rank: int) -> bool:
    """Do tags of whole axes go where `follow` says, and back?"""
    size = relation.operands[operand].value.meta["val"].shape[axis]
    tags = [{axis: "tag"} if k == operand else None for k in range(len(relation.operands))]
    there = carry(relation, tags, max)[out]
    after = follow(relation, operand, Part(axis, 1, size), out=out)
    back = [axis in carry_back(relation, {k: "tag"}, out=out)[operand] for k in range(rank)]
    return set(there) == {k for k, found in enumerate(back) if found} and all(
        after == Part(k, 1, size) and not is_mixed(relation, operand, axis) for k in there
    )


__all__ = ["check_flow_law"]
