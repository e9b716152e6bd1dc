"""Convolutions that write into the arena, by adding to zeros stored there.

    conv(x) == zeros + conv(x)

oneDNN's fused convolution has no `out` argument, but it can add to a tensor in place. So the memory
of its result can be planned. The allocator might return large blocks to the kernel, whose pages
would then fault again in each call. The price is writing the zeros.
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
SMALL = 2**17  # bytes: glibc maps only larger blocks separately (its M_MMAP_THRESHOLD)


def move_convs_into_arena(program: Program, example: ExampleSizes) -> Program | None:
    """The fused program with its large convolutions in the arena; None if it has none."""
    editor, count = GraphEditor(program), 0
    live = input_dependent(editor.graph)
    for node in editor.calls(ops()._convolution_pointwise.default):
        arguments, value = schema.arguments(node), node.meta["val"]
        static = all(isinstance(n, int) for n in value.shape[1:])
        large = math.prod(example.shape(node)) * value.dtype.itemsize >= SMALL
        if node in live and static and large and arguments["attr"] in ("none", "relu"):
            _prefill(editor, node)
            count += 1
    return editor.finish() if count else None


def _prefill(editor: GraphEditor, node: fx.Node) -> None:
    arguments, shape = schema.arguments(node), node.meta["val"].shape
    zeros = editor.insert(node, None, aten.new_zeros.default, arguments["X"], [1, *shape[1:]])
    batch = editor.insert(node, None, aten.sym_size.int, arguments["X"], 0)
    spread = editor.insert(
        node, node, aten.expand.default, zeros, [batch, *[-1] * (len(shape) - 1)]
    )
    other = editor.insert(node, node, COPY, spread)
    geometry = (
        arguments["padding"],
        arguments["stride"],
        arguments["dilation"],
        arguments["groups"],
    )
    target, args = convolution(
        arguments["X"], arguments["W"], arguments["B"], geometry, Epilogue(arguments["attr"]), other
    )
    editor.replace(node, editor.insert(node, node, target, *args))
