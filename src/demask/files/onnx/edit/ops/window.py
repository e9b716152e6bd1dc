"""Ops on images: batch and channels are cut, the other axes are complete. Norms of channels."""

from __future__ import annotations

from collections.abc import Sequence

from demask.files.onnx.edit.calls import HANDLERS, NodeEdit
from demask.files.onnx.edit.refusals import require
from demask.shrink.layout.cells import Layout

POOLS = "AveragePool GlobalAveragePool GlobalLpPool GlobalMaxPool LpPool MaxPool".split()


def _images(layout: Layout, *, batch: bool = True) -> Layout:
    require(len(layout) > 1, "fewer than two axes")
    return (layout[0] if batch else None, layout[1], *([None] * (len(layout) - 2)))


@HANDLERS("BatchNormalization")
def batch_norm(edit: NodeEdit) -> Sequence[Layout | None]:
    """norm(x, s)[:, p] == norm(x[:, p], s[p])."""
    require(not any(edit.wanted[1:]) and not edit.attributes.get("training_mode"), "it trains")
    return _norm(edit, edit.layout)


@HANDLERS("InstanceNormalization")
def instance_norm(edit: NodeEdit) -> Sequence[Layout | None]:
    """norm(x, s)[:, p] == norm(x[:, p], s[p]), along complete images."""
    return _norm(edit, _images(edit.layout))


def _norm(edit: NodeEdit, layout: Layout) -> Sequence[Layout | None]:
    edit.adapt(0, layout)
    for k in range(1, len(edit.node.input)):
        edit.adapt(k, (layout[1],))
    return [layout, *([None] * (len(edit.node.output) - 1))]


@HANDLERS(*POOLS)
def pool(edit: NodeEdit) -> Sequence[Layout | None]:
    """pool(x)[:, p] == pool(x[:, p])."""
    require(not any(edit.wanted[1:]), "its indices are read")
    layout = _images(edit.layout)
    edit.adapt(0, layout)
    return [layout, *([None] * (len(edit.node.output) - 1))]


@HANDLERS("Resize", "Upsample")
def resize(edit: NodeEdit) -> Sequence[Layout | None]:
    """resize(x)[:, p] == resize(x[:, p]); sizes of channels, where stated, follow."""
    layout = _images(edit.layout, batch=False)
    edit.adapt(0, layout)
    if edit.name(3) and layout[1] is not None:
        require("axes" not in edit.attributes, "axes of sizes")
        sizes, lost = edit.name(3), edit.shape(0)[1] - len(layout[1])
        if sizes in edit.editor.constants:
            new = edit.constant(3).copy()
            new[1] -= lost
            edit.replace(3, edit.editor.replacement(new, sizes))
        else:
            change = [0, -lost, *([0] * (len(layout) - 2))]
            edit.replace(3, edit.editor.emit("Add", [sizes, edit.editor.integers(change)], sizes))
    return [layout]


@HANDLERS("DepthToSpace", "SpaceToDepth")
def blocks(edit: NodeEdit) -> Sequence[Layout | None]:
    """Channels are not cut."""
    layout = (edit.layout[0], *([None] * (len(edit.layout) - 1)))
    edit.adapt(0, layout)
    return [layout]
