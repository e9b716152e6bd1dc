"""Quantization of computed values, and layers of integers: scales and zero points are cut with
their axis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from demask.files.onnx.edit.calls import HANDLERS, NodeEdit
from demask.files.onnx.edit.editor import scale_layout
from demask.files.onnx.edit.ops.contraction import contracted
from demask.files.onnx.edit.refusals import all_positions, require
from demask.shrink.layout.cells import Layout, whole


@HANDLERS("QuantizeLinear", "DequantizeLinear")
def quantize(edit: NodeEdit) -> Sequence[Layout | None]:
    """q(x, s)[p] == q(x[p], s[p])."""
    layout = edit.layout
    edit.adapt(0, layout)
    for k in range(1, len(edit.node.input)):
        if not edit.name(k):
            continue
        require(edit.name(k) in edit.editor.constants, "its scale is computed")
        cut = scale_layout(edit.editor, edit.node, k, layout)
        require(cut != (), "blocks of positions share a scale")
        if cut is not None:
            edit.adapt(k, cut)
    return [layout]


@HANDLERS("DynamicQuantizeLinear")
def quantize_dynamically(edit: NodeEdit) -> Sequence[Layout | None]:
    """q(x)[p] == q(x[p]) where x is 0 at the other positions: the range always contains 0. There,
    q(x) is the zero point, which a product with integers subtracts; other readers have it computed.
    """
    editor, name = edit.editor, edit.name(0)
    require(name in editor.layouts and not editor.fill(name).any(), "known values other than 0")
    layout = editor.overridden.get(edit.node.output[0], editor.layouts[name])
    for axis, (positions, size) in enumerate(zip(layout, editor.shape(name), strict=True)):
        if positions is not None:
            others = tuple(set(range(size)) - set(positions))
            editor.is_known(name, tuple(others if k == axis else None for k in range(len(layout))))
    edit.adapt(0, layout)
    return [layout, (), ()]


@HANDLERS("QLinearConv", "ConvInteger")
def quantized_convolution(edit: NodeEdit) -> Sequence[Layout | None]:
    """conv(x, w)[:, p] == conv(x[:, q], w[p, q]) where x is its zero point at the others."""
    is_integer, layout, rank = edit.node.op_type == "ConvInteger", edit.layout, len(edit.shape(0))
    w, points = (1, (2, 3)) if is_integer else (3, (2, 5))
    weights, images = edit.constant(w), (None,) * (rank - 2)
    groups, (batch, rows) = edit.attributes.get("group", 1), layout[:2]
    count = len(weights)
    for k in (4, points[1]) if not is_integer else points[1:]:
        if edit.name(k) and edit.constant(k).size > 1:
            edit.adapt(k, (rows,))
    if edit.name(8):
        edit.adapt(8, (rows,))
    if groups > 1:
        is_depthwise = groups == count == edit.shape(0)[1]
        require(is_depthwise or rows is None, "groups of several channels")
        edit.adapt(0, (batch, rows, *images))
        edit.adapt(w, (rows, *[None] * (rank - 1)))
        if is_depthwise:
            edit.set("group", len(all_positions(rows, count)))
        return [(batch, rows, *images)]
    centered = weights.astype(np.float64)
    if edit.name(points[1]):
        centered -= edit.constant(points[1]).astype(np.float64).reshape(-1, *[1] * (rank - 1))
    centered = centered[all_positions(rows, count)]
    swapped = np.moveaxis(centered, 1, 0)
    if is_integer:
        read, _ = contracted(edit, 0, 1, swapped, integers=True)
    else:
        read, lost = contracted(edit, 0, 1, swapped, zero=float(edit.constant(2).item()))
        require(not lost, "known values other than the zero point")
    columns = whole(read, weights.shape[1])
    edit.adapt(0, (batch, columns, *images))
    edit.adapt(w, (rows, columns, *images))
    return [(batch, rows, *images)]


@HANDLERS("QLinearMatMul")
def quantized_product(edit: NodeEdit) -> Sequence[Layout | None]:
    """(x @ w)[..., p] == x[..., q] @ w[q, p] where x is its zero point at the other positions."""
    layout, weights, axis = edit.layout, edit.constant(3), len(edit.shape(0)) - 1
    require(weights.ndim > 1 and axis > 0, "vectors")
    require(all(edit.constant(k).size == 1 for k in (1, 2, 6, 7)), "scales of rows")
    centered = weights.astype(np.float64) - edit.constant(5).astype(np.float64)
    w_io = centered[..., all_positions(layout[-1], centered.shape[-1])]
    zero = float(edit.constant(2).item())
    read, lost = contracted(edit, 0, axis, np.moveaxis(w_io, -2, 0), zero=zero)
    require(not lost, "known values other than the zero point")
    columns = whole(read, weights.shape[-2])
    edit.adapt(0, (*edit.broadcast(0, layout)[:-1], columns))
    edit.adapt(3, (*edit.broadcast(3, layout)[:-2], columns, layout[-1]))
    for k in (4, 5):
        if edit.constant(k).size > 1:
            require(edit.constant(k).ndim == 1, "scales of several axes")
            edit.adapt(k, (layout[-1],))
    return [layout]
