"""Ops that compute each element from those at its position: operands get the output's layout."""

from __future__ import annotations

from collections.abc import Sequence

from demask.files.onnx.edit.calls import HANDLERS, NodeEdit
from demask.files.onnx.edit.protos import is_standard
from demask.files.onnx.edit.refusals import require
from demask.shrink.layout.cells import Layout

POINTWISE = (
    "Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr "
    "BitwiseXor Cast CastLike Ceil Celu Clip Cos Cosh Div Dropout Elu Equal Erf Exp Floor Gelu "
    "Greater GreaterOrEqual HardSigmoid HardSwish Identity IsInf IsNaN LeakyRelu Less LessOrEqual "
    "Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pow Reciprocal Relu Round Selu Shrink Sigmoid "
    "Sign Sin Sinh Softplus Softsign Sqrt Sub Sum Swish Tan Tanh ThresholdedRelu Where Xor"
).split()
POINTWISE += [f"com.microsoft.{name}" for name in ("BiasGelu", "FastGelu", "Gelu", "QuickGelu")]
SAME_AXES = 7  # op set since which Add, Mul, … broadcast without an attribute


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
