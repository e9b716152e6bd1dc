"""Convolutions that write into the arena: they add onto zeros put there.

    conv(x) == zeros + conv(x)

oneDNN's fused convolution takes no `out`, but it adds onto what it is given, in place. So the
memory of its result can be planned, and the allocator, which may give large blocks back to the
kernel and fault them in again at each call, has no part in it. The price is to write the zeros.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from demask.compat.onednn import ops
from demask.graph.program import Program
from demask.ops import schema
from demask.tune.draft import COPY, Draft, Example, by_values
from demask.tune.epilogues import Epilogue, convolution

aten = torch.ops.aten
SMALL = 2**17  # bytes: what glibc never maps on its own (its M_MMAP_THRESHOLD)


def prefilled(program: Program, example: Example) -> Program | None:
    """The program (fused) with its larger convolutions in the arena; None if it has none."""
    draft, count = Draft(program), 0
    live = by_values(draft.graph)
    for node in draft.calls(ops()._convolution_pointwise.default):
        found, value = schema.arguments(node), node.meta["val"]
        static = all(isinstance(n, int) for n in value.shape[1:])
        large = math.prod(example.shape(node)) * value.dtype.itemsize >= SMALL
        if node in live and static and large and found["attr"] in ("none", "relu"):
            _prefill(draft, node)
            count += 1
    return draft.done() if count else None


def _prefill(draft: Draft, node: fx.Node) -> None:
    found, shape = schema.arguments(node), node.meta["val"].shape
    zeros = draft.call(node, None, aten.new_zeros.default, found["X"], [1, *shape[1:]])
    batch = draft.call(node, None, aten.sym_size.int, found["X"], 0)
    spread = draft.call(node, node, aten.expand.default, zeros, [batch, *[-1] * (len(shape) - 1)])
    other = draft.call(node, node, COPY, spread)
    geometry = (found["padding"], found["stride"], found["dilation"], found["groups"])
    target, args = convolution(
        found["X"], found["W"], found["B"], *geometry, Epilogue(found["attr"]), other
    )
    draft.put(node, draft.call(node, node, target, *args))
