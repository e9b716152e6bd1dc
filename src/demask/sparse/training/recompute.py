"""Programs from their texts, and their gradients computed again by ATen ops."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from demask.sparse import reference as dense
from demask.sparse.segment_program import SegmentProgram


@functools.lru_cache(maxsize=64)
def parsed(text: str) -> SegmentProgram:
    """The program of a text."""
    return SegmentProgram.parse(text)


def recomputed(
    text: str, count: int, given: Sequence[Tensor], needed: Sequence[bool], grads: Sequence[Tensor]
) -> list[Tensor | None]:
    """Gradients of a program, those of `dense.run`, of the tensors that need one. given: `count`
    inputs, then weights."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, since one tensor may be given twice; leaves, unless these gradients have some.
        given = [t.view_as(t) if again else t.detach() for t in given]
        wanted = [t if again else t.requires_grad_()
                  for t, need in zip(given, needed, strict=True) if need]  # fmt: skip
        found = dense.run(parsed(text), given[:count], given[count:])
        made = iter(torch.autograd.grad(
            found, wanted, grads, create_graph=again, allow_unused=True))  # fmt: skip
    return [next(made) if need else None for need in needed]
