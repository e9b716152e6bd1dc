"""Convolutions of one-pixel images as linear layers (in squeeze-and-excitation blocks).

    conv(x)[n, :, 0, 0] == W x[n, :, 0, 0] + b

Pointwise calls after such a layer run on rows, too, so that the next layer can read them.
"""

from __future__ import annotations

import torch
from torch import fx

from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.graph.queries import POINTWISE, only_reader
from demask.ops import Table, op_name, schema
from demask.ops.schema import fake
from demask.ops.traits import CONVOLUTIONS
from demask.tune.passes.fold_affine import contraction_weight

aten = torch.ops.aten


def convert_one_pixel_convs(program: Program, table: Table) -> Program:
    """The program with such convolutions as linear layers."""
    editor = GraphEditor(program)
    rows: dict[fx.Node, fx.Node] = {}  # one-pixel images as (batch, channels), by image
    for node in editor.calls(*CONVOLUTIONS):
        if _has_one_pixel(editor, node):
            _flatten(editor, node, rows, table)
    return editor.finish() if rows else program


def _has_one_pixel(editor: GraphEditor, node: fx.Node) -> bool:
    """Whether input and kernel of an ungrouped, unpadded convolution have one pixel."""
    weight = contraction_weight(editor, node)
    if weight is None:
        return False
    arguments = schema.arguments(node)
    sizes = [*fake(arguments["input"]).shape[2:], *weight.shape[2:]]
    plain = all(isinstance(n, int) and n == 1 for n in sizes)
    return plain and arguments["groups"] == 1 and not any(arguments["padding"])


def _flatten(editor: GraphEditor, node: fx.Node, rows: dict[fx.Node, fx.Node], table: Table) -> None:
    arguments = schema.arguments(node)
    x, axes = arguments["input"], fake(node).ndim - 2
    weight = editor.tensor(arguments["weight"])
    assert weight is not None
    kernel = editor.replace_constant(arguments["weight"], weight.flatten(1), node)
    row = rows.get(x) or editor.insert(node, None, aten.flatten.using_ints, x, 1)
    row = editor.insert(node, None, aten.linear.default, row, kernel, arguments["bias"])
    while (reader := only_reader(node)) is not None and _is_pointwise(reader, table):
        row = editor.insert(reader, None, reader.target, row, *reader.args[1:], **reader.kwargs)
        editor.replace(node, row)
        node = reader
    image = row
    for _ in range(axes):
        image = editor.insert(node, None, aten.unsqueeze.default, image, -1)
    rows[image] = row
    editor.replace(node, image)


def _is_pointwise(node: fx.Node, table: Table) -> bool:
    """Whether a call computes each element from the same element of its only tensor."""
    entry = table.get(op_name(node.target)) if node.op == "call_function" else None
    return entry is not None and entry.line in POINTWISE and len(node.all_input_nodes) == 1
