"""Ops along complete axes: reductions, softmax, norms of features. Other axes are cut freely."""

from __future__ import annotations

from collections.abc import Sequence

from demask.files.onnx.edit.calls import HANDLERS, NodeEdit
from demask.files.onnx.edit.refusals import require
from demask.shrink.layout.cells import Layout

REDUCTIONS = (
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare"
).split()
ONE_AXIS = 13  # op set since which softmax is along one axis, not all axes from one on


def _complete_along(layout: Layout, axes: set[int]) -> Layout:
    return tuple(None if k in axes else p for k, p in enumerate(layout))


@HANDLERS("Softmax", "LogSoftmax", "Hardmax")
def softmax(edit: NodeEdit) -> Sequence[Layout | None]:
    """softmax(x)[p] == softmax(x[p]), for p on the other axes."""
    rank, is_new = len(edit.layout), edit.opset >= ONE_AXIS
    axis = edit.attributes.get("axis", -1 if is_new else 1) % rank
    layout = _complete_along(edit.layout, {axis} if is_new else set(range(axis, rank)))
    edit.adapt(0, layout)
    return [layout]


@HANDLERS("LpNormalization", "CumSum")
def along_axis(edit: NodeEdit) -> Sequence[Layout | None]:
    """f(x)[p] == f(x[p]), for p on the other axes."""
    axis = edit.attributes.get("axis", -1)
    if edit.node.op_type == "CumSum":
        axis = int(edit.constant(1).item())
    layout = _complete_along(edit.layout, {axis % len(edit.layout)})
    edit.adapt(0, layout)
    return [layout]


@HANDLERS("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
def layer_norm(edit: NodeEdit) -> Sequence[Layout | None]:
    """norm(x)[p] == norm(x[p]), for p on the axes before the normalized ones."""
    require(not any(edit.wanted[1:]), "its mean or deviation is read")
    axis = edit.attributes.get("axis", -1) % len(edit.layout)
    layout = _complete_along(edit.layout, set(range(axis, len(edit.layout))))
    edit.adapt(0, layout)
    return [layout, *([None] * (len(edit.node.output) - 1))]


@HANDLERS("com.microsoft.SkipLayerNormalization", "com.microsoft.SkipSimplifiedLayerNormalization")
def skip_norm(edit: NodeEdit) -> Sequence[Layout | None]:
    """norm(x + y)[p] == norm(x[p] + y[p]), for p on the axes before the last."""
    require(not any(edit.wanted[1:3]), "its mean or deviation is read")
    axes = zip(*(layout for layout in edit.wanted if layout is not None), strict=True)
    layout = (*(p[0] if len(set(p)) == 1 else None for p in list(axes)[:-1]), None)
    for k in (0, 1):
        edit.adapt(k, edit.broadcast(k, layout))
    return [layout, None, None, layout][: len(edit.node.output)]


@HANDLERS(*REDUCTIONS, "ArgMax", "ArgMin")
def reduction(edit: NodeEdit) -> Sequence[Layout | None]:
    """reduce(x)[p] == reduce(x[p]), for p on the axes that stay."""
    rank = len(edit.shape(0))
    if edit.node.op_type.startswith("Arg"):
        axes = [edit.attributes.get("axis", 0) % rank]
    else:
        axes = edit.axes(1, rank)
    if not axes:
        axes = [] if edit.attributes.get("noop_with_empty_axes") else list(range(rank))
    reduced, keeps = set(axes), edit.attributes.get("keepdims", 1)
    if keeps:
        layout = operand = _complete_along(edit.layout, reduced)
    else:
        layout, rest = edit.layout, iter(edit.layout)
        operand = tuple(None if k in reduced else next(rest) for k in range(rank))
    edit.adapt(0, operand)
    return [layout]
