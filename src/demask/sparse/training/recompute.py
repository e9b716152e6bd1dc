"""Parsed programs, and their gradients recomputed by ATen ops."""

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
    text: str, count: int, tensors: Sequence[Tensor], needed: Sequence[bool], grads: Sequence[Tensor]
) -> list[Tensor | None]:
    """Gradients of a program, as those of `reference.run`; None for tensors that need none.

    tensors: `count` inputs, then weights. needed: which of them need a gradient. grads: gradients
    of the outputs.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, since a tensor may be passed twice; leaves, unless second derivatives are needed.
        tensors = [t.view_as(t) if create_graph else t.detach() for t in tensors]
        differentiated = [
            t if create_graph else t.requires_grad_() for t, need in zip(tensors, needed, strict=True) if need
        ]
        outputs = dense.run(parsed(text), tensors[:count], tensors[count:])
        gradients = iter(
            torch.autograd.grad(outputs, differentiated, grads, create_graph=create_graph, allow_unused=True)
        )
    return [next(gradients) if need else None for need in needed]
