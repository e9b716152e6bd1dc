"""The law of flow: changed values at a position of a part change outputs at that position only.

    f(x)[p] == f(y)[p]      wherever x == y at the positions of the part that p belongs to

It holds along every axis that continues in an output and is not mixed, for the axis and for each
part of a composite axis. The region law covers windows and moves.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from demask.ops import schema
from demask.ops.entry import Case, Declined, Table
from demask.ops.flow import Part, carry, carry_back, follow, is_mixed
from demask.ops.laws import call_with, draw_call, garbage
from demask.ops.relation import Relation, bind
from demask.ops.schema import fake


def check_flow_law(name: str, case: Case, seed: int, table: Table) -> list[str] | Declined:
    """Violations of the law, and axes whose tags disagree with `follow`; Declined if the case has
    no relation."""
    generator = torch.Generator().manual_seed(seed)
    leaves, spec = pytree.tree_flatten((case.args, dict(case.kwargs)))
    relation = bind(draw_call(name, leaves, spec, generator), table)
    if isinstance(relation, Declined):
        return relation
    broken = []
    for out, axes in enumerate(relation.outs):
        for operand, value in _tensor_operands(relation):
            broken += [
                f"{name}: {part} of operand {operand} in output {out}"
                for part in _parts(relation, operand, value)
                if not _holds(relation, operand, part, out, generator)
            ]
            broken += [
                f"{name}: tag of axis {axis} of operand {operand} in output {out}"
                for axis in range(value.ndim)
                if not _tags_agree(relation, operand, axis, out, len(axes))
            ]
    return broken


def _tensor_operands(relation: Relation) -> Iterator[tuple[int, Tensor]]:
    """The operands that are tensors: number and value."""
    for k, operand in enumerate(relation.operands):
        value = getattr(operand.value, "meta", {}).get("val")
        if isinstance(value, Tensor):
            yield k, value


def _parts(relation: Relation, operand: int, value: Tensor) -> Iterator[Part]:
    """Each axis of an operand, and each part that divides a composite axis, including letters."""
    for axis, letters in enumerate(relation.ins[operand]):
        length = value.shape[axis]
        yield Part(axis, 1, length)
        if len(letters) > 1:
            sizes = [n for n in range(1, length + 1) if length % n == 0]
            yield from (
                Part(axis, inner, size)
                for inner in sizes
                for size in sizes
                if 1 < size < length and length % (inner * size) == 0
            )


def _holds(relation: Relation, operand: int, part: Part, out: int, generator: torch.Generator) -> bool:
    """Whether changed values at one position of a part change the output there only."""
    after = follow(relation, operand, part, out=out)
    if after is None or is_mixed(relation, operand, part.axis):
        return True
    value = fake(relation.operands[operand].value)
    before = schema.outputs(relation.node)[out]
    if not value.numel() or not before.numel():
        return True
    position = int(torch.randint(after.size, (), generator=generator))
    step = part.size // after.size  # positions of the part per position of the output's part
    positions = _positions(part, value.shape[part.axis]) // step
    other = value.clone()
    where = (positions == position).nonzero().flatten()
    other.index_copy_(part.axis, where, garbage(value, part.axis, where.tolist(), generator))
    changed = call_with(relation, operand, other)[out]
    rest = (_positions(after, before.shape[after.axis]) != position).nonzero().flatten()
    a, b = before.index_select(after.axis, rest), changed.index_select(after.axis, rest)
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _positions(part: Part, length: int) -> Tensor:
    return torch.arange(length) // part.inner % part.size


def _tags_agree(relation: Relation, operand: int, axis: int, out: int, rank: int) -> bool:
    """Whether `carry` and `carry_back` propagate tags of full axes as `follow` does."""
    size = fake(relation.operands[operand].value).shape[axis]
    tags = [{axis: "tag"} if k == operand else None for k in range(len(relation.operands))]
    carried = carry(relation, tags, max)[out]
    after = follow(relation, operand, Part(axis, 1, size), out=out)
    back = [axis in carry_back(relation, {k: "tag"}, out=out)[operand] for k in range(rank)]
    return set(carried) == {k for k, is_carried in enumerate(back) if is_carried} and all(
        after == Part(k, 1, size) and not is_mixed(relation, operand, axis) for k in carried
    )


__all__ = ["check_flow_law"]
