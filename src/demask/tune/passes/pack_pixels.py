"""Packing of neighboring pixels into channels of narrow convolutions, to fill vector registers.

For oneDNN a layer of 8 output channels takes as long as one of 16: a vector register has 16 lanes.
In channels last, two neighboring pixels of 8 channels have the memory layout of one pixel of 16:

    conv(x, W)[pixels 2 j, 2 j + 1] == conv(x, [W 0; 0 W], stride 2)[pixel j]

[W 0; 0 W] contains the kernel twice, the second time one column to the right. The kernel is one
column wider (4 for 3), so there are 4/3 of the products, in vectors that were half empty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from demask.compat.onednn import ops
from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.ops import schema

aten = torch.ops.aten
GROUPS = (2, 4)  # pixels
# How many neighboring pixels a fused convolution should compute at once (1: unchanged).
Width = Callable[[GraphEditor, fx.Node], int]


def pack_pixels(program: Program, width: Width) -> Program:
    """The program (fused, in channels last) with narrow convolutions that compute `width` pixels at
    once."""
    editor = GraphEditor(program)
    pointwise = ops()._convolution_pointwise
    for node in editor.calls(pointwise.default, pointwise.binary):
        if can_pack(editor, node) and (count := width(editor, node)) > 1:
            _pair(editor, node, count)
    return editor.finish()


def can_pack(editor: GraphEditor, node: fx.Node) -> bool:
    """Whether a fused convolution can be computed for groups of pixels."""
    arguments = schema.arguments(node)
    weight, shape = packed_from(editor, arguments["W"]), node.meta["val"].shape
    if weight is None or len(shape) != 4 or arguments["groups"] != 1 or shape[1] > 16:
        return False
    if (
        arguments["stride"][1] != 1
        or arguments["dilation"][1] != 1
        or not isinstance(shape[3], int)
    ):
        return False
    other = arguments.get("other")
    static = other is None or all(isinstance(n, int) for n in other.meta["val"].shape[1:])
    return shape[3] % GROUPS[0] == 0 and isinstance(shape[2], int) and static


def packed_from(editor: GraphEditor, node: Any) -> torch.Tensor | None:
    """The constant weight that a call packs; None if it packs none."""
    if isinstance(node, fx.Node) and node.target is ops()._reorder_convolution_weight.default:
        return editor.tensor(node.args[0])
    return None


def _pair(editor: GraphEditor, node: fx.Node, count: int) -> None:
    """Replace a convolution by one that computes `count` pixels at once."""
    arguments = schema.arguments(node)
    pack, columns = arguments["W"], count - 1
    shifted = [editor.insert(node, None, aten.constant_pad_nd.default, pack.args[0],
                          [left, columns - left]) for left in range(count)]  # fmt: skip
    kernel = editor.insert(node, None, aten.cat.default, shifted, 0)
    stride = [arguments["stride"][0], count]
    _, padding, _, dilation, groups, sizes = pack.args
    weight = editor.insert(
        node, kernel, pack.target, kernel, padding, stride, dilation, groups, sizes
    )
    bias = arguments["B"]
    if bias is not None:
        bias = editor.insert(node, None, aten.cat.default, [bias] * count)
    changed = {"W": weight, "B": bias, "stride": stride}
    if arguments.get("other") is not None:
        changed["other"] = _grouped(editor, node, arguments["other"], count)
    args, kwargs = schema.bind_arguments(node.target, arguments | changed)
    with editor.graph.inserting_before(node):
        grouped = editor.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
    n, c, h, w = node.meta["val"].shape
    shape = (n, c * count, h, w // count)
    grouped.meta["val"] = editor.values.dense(shape, node.meta["val"])
    editor.replace(node, _ungrouped(editor, node, grouped, count))


def _grouped(editor: GraphEditor, reader: fx.Node, x: fx.Node, count: int) -> fx.Node:
    """(n, c, h, w) as (n, c * count, h, w / count): the same memory with channels last."""
    _, c, h, w = x.meta["val"].shape
    rows = editor.insert(reader, None, aten.permute.default, x, [0, 2, 3, 1])
    joined = editor.insert(reader, None, aten.reshape.default, rows, [-1, h, w // count, c * count])
    return editor.insert(reader, None, aten.permute.default, joined, [0, 3, 1, 2])


def _ungrouped(editor: GraphEditor, reader: fx.Node, x: fx.Node, count: int) -> fx.Node:
    """The inverse of `_grouped`."""
    _, c, h, w = x.meta["val"].shape
    rows = editor.insert(reader, None, aten.permute.default, x, [0, 2, 3, 1])
    spread = editor.insert(reader, None, aten.reshape.default, rows, [-1, h, w * count, c // count])
    return editor.insert(reader, reader, aten.permute.default, spread, [0, 3, 1, 2])
