"""Quantization of computed values, and layers of integers: scales and zero points are cut with
their axis."""

from __future__ import annotations

from collections.abc import Sequence

from demask.files.onnx.edit.calls import HANDLERS, NodeEdit
from demask.files.onnx.edit.editor import scale_layout, union
from demask.files.onnx.edit.refusals import require
from demask.shrink.layout.cells import Layout


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
    more = editor.overridden.get(edit.node.output[0], editor.layouts[name])
    layout = union(more, editor.layouts[name], editor.shape(name))
    for axis, (positions, size) in enumerate(zip(layout, editor.shape(name), strict=True)):
        if positions is not None:
            others = tuple(set(range(size)) - set(positions))
            editor.is_known(name, tuple(others if k == axis else None for k in range(len(layout))))
    edit.adapt(0, layout)
    return [layout, (), ()]
