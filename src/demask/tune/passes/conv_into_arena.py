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
from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.graph.queries import COPY, ExampleSizes, input_dependent
from demask.ops import schema
from demask.tune.epilogue import Epilogue, convolution

aten = torch.ops.aten
SMALL = 2**17  # bytes: what glibc never maps on its own (its M_MMAP_THRESHOLD)


def prefilled(program: Program, example: ExampleSizes) -> Program | None:
    """The program (fused) with its larger convolutions in the arena; None if it has none."""
    editor, count = GraphEditor(program), 0
    live = input_dependent(editor.graph)
    for node in editor.calls(ops()._convolution_pointwise.default):
        found, value = schema.arguments(node), node.meta["val"]
        static = all(isinstance(n, int) for n in value.shape[1:])
        large = math.prod(example.shape(node)) * value.dtype.itemsize >= SMALL
        if node in live and static and large and found["attr"] in ("none", "relu"):
            _prefill(editor, node)
            count += 1
    return editor.finish() if count else None


def _prefill(editor: GraphEditor, node: fx.Node) -> None:
    found, shape = schema.arguments(node), node.meta["val"].shape
    zeros = editor.insert(node, None, aten.new_zeros.default, found["X"], [1, *shape[1:]])
    batch = editor.insert(node, None, aten.sym_size.int, found["X"], 0)
    spread = editor.insert(
        node, node, aten.expand.default, zeros, [batch, *[-1] * (len(shape) - 1)]
    )
    other = editor.insert(node, node, COPY, spread)
    geometry = (found["padding"], found["stride"], found["dilation"], found["groups"])
    target, args = convolution(
        found["X"], found["W"], found["B"], *geometry, Epilogue(found["attr"]), other
    )
    editor.replace(node, editor.insert(node, node, target, *args))
