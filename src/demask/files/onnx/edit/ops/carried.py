"""Ops that carry axes: pointwise ops, quantization, reductions and norms, ops on images. Operands are
cut at the output's positions; axes that are reduced, normalized or spatial are complete."""

from __future__ import annotations

from collections.abc import Sequence

from demask.files.onnx.edit.calls import HANDLERS, NodeEdit
from demask.files.onnx.edit.editor import require, scale_layout, union
from demask.files.onnx.edit.protos import is_standard
from demask.shrink.layout.cells import Layout

POOLS = "AveragePool GlobalAveragePool GlobalLpPool GlobalMaxPool LpPool MaxPool".split()
REDUCTIONS = (
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare"
).split()
ONE_AXIS = 13  # op set since which softmax is along one axis, not all axes from one on
POINTWISE = (
    "Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr "
    "BitwiseXor Cast CastLike Ceil Celu Clip Cos Cosh Div Dropout Elu Equal Erf Exp Floor Gelu "
    "Greater GreaterOrEqual HardSigmoid HardSwish Identity IsInf IsNaN LeakyRelu Less LessOrEqual "
    "Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pow Reciprocal Relu Round Selu Shrink Sigmoid "
    "Sign Sin Sinh Softplus Softsign Sqrt Sub Sum Swish Tan Tanh ThresholdedRelu Where Xor"
).split()
SAME_AXES = 7  # op set since which Add, Mul, … broadcast without an attribute


POINTWISE += [f"com.microsoft.{name}" for name in ("BiasGelu", "FastGelu", "Gelu", "QuickGelu")]


@HANDLERS(*POINTWISE)
def pointwise(edit: NodeEdit) -> Sequence[Layout | None]:
    """f(x, y)[p] == f(x[p], y[p])."""
    layout, editor = edit.layout, edit.editor
    require("broadcast" not in edit.attributes, f"broadcasting before op set {SAME_AXES}")
    computed = [name for name in edit.node.input if name in editor.layouts]
    require(computed, "every operand is known")  # constants of size 1 would not have its shape
    for k, name in enumerate(edit.node.input):
        if edit.node.op_type == "CastLike" and k:  # of which the type is read alone
            own = (None,) * len(edit.shape(k))
            edit.adapt(k, editor.layouts.get(name, own), broadcast=True)
        elif name and not (edit.node.op_type == "Dropout" and k):
            edit.adapt(k, edit.broadcast(k, layout), broadcast=is_standard(edit.node))
    require(_is_spanned(edit, computed), "a known operand alone has the size of an axis")
    return [layout, *([layout] * (len(edit.node.output) - 1))]


def _is_spanned(edit: NodeEdit, computed: Sequence[str]) -> bool:
    """Whether each axis of the output has its size in an operand that is computed or constant:
    known operands may be of size 1 where the output is not."""
    editor, rank = edit.editor, len(edit.layout)
    output = editor.shape(edit.node.output[0])
    names = {*computed, *(n for n in edit.node.input if n in editor.constants)}
    spanned = set()
    for name in names:
        shape = editor.shape(name)
        spanned |= {a + rank - len(shape) for a, n in enumerate(shape) if n != 1}
    return all(n == 1 or axis in spanned for axis, n in enumerate(output))


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


def _complete_along(layout: Layout, axes: set[int]) -> Layout:
    return tuple(None if k in axes else p for k, p in enumerate(layout))


@HANDLERS("BatchNormalization")
def batch_norm(edit: NodeEdit) -> Sequence[Layout | None]:
    """norm(x, s)[:, p] == norm(x[:, p], s[p])."""
    require(not any(edit.wanted[1:]) and not edit.attributes.get("training_mode"), "it trains")
    return _cut_norm(edit, edit.layout)


@HANDLERS("InstanceNormalization")
def instance_norm(edit: NodeEdit) -> Sequence[Layout | None]:
    """norm(x, s)[:, p] == norm(x[:, p], s[p]), along complete images."""
    return _cut_norm(edit, _without_image_axes(edit.layout))


def _cut_norm(edit: NodeEdit, layout: Layout) -> Sequence[Layout | None]:
    edit.adapt(0, layout)
    for k in range(1, len(edit.node.input)):
        edit.adapt(k, (layout[1],))
    return [layout, *([None] * (len(edit.node.output) - 1))]


@HANDLERS(*POOLS)
def pool(edit: NodeEdit) -> Sequence[Layout | None]:
    """pool(x)[:, p] == pool(x[:, p])."""
    require(not any(edit.wanted[1:]), "its indices are read")
    layout = _without_image_axes(edit.layout)
    edit.adapt(0, layout)
    return [layout, *([None] * (len(edit.node.output) - 1))]


@HANDLERS("Resize", "Upsample")
def resize(edit: NodeEdit) -> Sequence[Layout | None]:
    """resize(x)[:, p] == resize(x[:, p]); sizes of channels, where stated, follow."""
    layout = _without_image_axes(edit.layout, batch=False)
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


def _without_image_axes(layout: Layout, *, batch: bool = True) -> Layout:
    require(len(layout) > 1, "fewer than two axes")
    return (layout[0] if batch else None, layout[1], *([None] * (len(layout) - 2)))
