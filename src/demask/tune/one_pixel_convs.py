"""Convolutions of one-pixel images (in squeeze-and-excitation blocks) as linear layers.

    conv(x)[n, :, 0, 0] == W x[n, :, 0, 0] + b

Pointwise calls after such a layer run on rows, too, so that the next layer can read them.
"""

from __future__ import annotations

from torch import nn

from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.graph.queries import is_pointwise
from demask.graph.value import Value, aten
from demask.ops import Table
from demask.ops.traits import CONVOLUTIONS
from demask.rewrites.rule import Pass, case
from demask.tune.fold_affine import contraction_weight


def convert_one_pixel_convs(program: Program, table: Table) -> Program:
    """The program with such convolutions as linear layers."""
    editor = GraphEditor(program)
    rows: dict[Value, Value] = {}  # one-pixel images as (batch, channels), by image
    for node in editor.calls(*CONVOLUTIONS):
        if _has_one_pixel(Value(node, editor)):
            _flatten(Value(node, editor), rows, table)
    return editor.finish() if rows else program


def _has_one_pixel(conv: Value) -> bool:
    """Whether input and kernel of an ungrouped, unpadded convolution have one pixel."""
    weight = contraction_weight(conv)
    if weight is None:
        return False
    sizes = [*conv.arg("input").shape[2:], *weight.shape[2:]]
    plain = all(isinstance(n, int) and n == 1 for n in sizes)
    return plain and conv.arg("groups") == 1 and not any(conv.arg("padding"))


def _flatten(conv: Value, rows: dict[Value, Value], table: Table) -> None:
    editor, image = conv.editor, conv
    x, weight, bias = (conv.arg(name) for name in ("input", "weight", "bias"))
    axes = weight.rank - 2
    kernel = editor.replace_constant(weight.node, weight.constant.flatten(1), conv.node)
    with editor.graph.inserting_before(conv.node):
        row = conv.call(aten.linear.default, rows.get(x) or x.flatten(1), Value(kernel, editor), bias)
    while (reader := image.only_user) is not None and _is_pointwise(reader, table):
        with editor.graph.inserting_before(reader.node):
            row = row.call(reader.target, row, *reader.node.args[1:], **reader.node.kwargs)
        editor.replace(image.node, row.node)
        image = reader
    with editor.graph.inserting_before(image.node):
        result = row
        for _ in range(axes):
            result = result.unsqueeze(-1)
    rows[result] = row
    editor.replace(image.node, result.node)


def _is_pointwise(call: Value, table: Table) -> bool:
    """Whether a call computes each element from the same element of its only tensor."""
    return is_pointwise(call.node, table) and len(call.operands) == 1


ONE_PIXEL = Pass(
    "convolutions of one pixel",
    convert_one_pixel_convs,
    "conv(x)[n, :, 0, 0] == W x[n, :, 0, 0] + b, if the image has one pixel",
    cases=(
        case(nn.Sequential(nn.Conv2d(6, 3, 1), nn.ReLU(), nn.Conv2d(3, 6, 1), nn.Hardsigmoid()), (2, 6, 1, 1)),
        case(nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Conv1d(6, 3, 1)), (2, 6, 5), dynamic={0: (0,)}),
    ),
    exact=False,
)
