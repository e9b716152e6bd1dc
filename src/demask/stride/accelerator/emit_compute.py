"""Rules of ATen calls that compute: convolutions, products, attention, functions.

`RULES` also contains the rules of windows and layouts: one entry per op.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from demask.ops.activations import ACTIVATIONS
from demask.ops.traits import CONVOLUTIONS_ANY_PADDING
from demask.stride.accelerator.emit_layout import SHAPES
from demask.stride.accelerator.emit_windows import WINDOWS, each, per_channel, softmax_of
from demask.stride.accelerator.emitter import CannotEmit, InstructionEmitter, NodeRefs, Rule, ValueRef, shape_of

aten = torch.ops.aten
Arguments = dict[str, Any]


def convolution(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    """A convolution of stride 1 by the matrix unit; the vector unit adds the bias."""
    w = e.ref(a["weight"])
    axes, x = len(w.shape) - 2, e.ref(a["input"])
    if any(step != 1 for step in a["stride"]):
        raise CannotEmit(f"its stride is {list(a['stride'])}; the matrix unit only has steps of one")
    dilation = each(a["dilation"], axes)
    before = after = (0,) * axes
    if a["padding"] == "same":
        spans = [d * (k - 1) for d, k in zip(dilation, w.shape[2:], strict=True)]
        before = tuple(span // 2 for span in spans)
        after = tuple(span - span // 2 for span in spans)
    elif a["padding"] != "valid":
        before = after = each(a["padding"], axes)
    x = x.view(1, *x.shape) if len(x.shape) == axes + 1 else x
    sizes = shape_of(node)[-axes:]
    y = e.put(
        "convolve",
        [x, w],
        (x.shape[0], w.shape[0], *sizes),
        before=before,
        after=after,
        dilation=dilation,
        groups=a["groups"],
    )
    if a["bias"] is not None:
        y = e.put("add", [y, per_channel(e.ref(a["bias"]), axes)], y.shape)
    return y.view(*shape_of(node))


def linear(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    x, w = e.ref(a["input"]), e.ref(a["weight"])
    w = w if len(w.shape) == 2 else w.view(1, w.shape[0])
    rows = x.view(math.prod(x.shape[:-1]), x.shape[-1])
    y = e.put("product", [rows, w], (rows.shape[0], w.shape[0]), transposed=1)
    if a["bias"] is not None:
        y = e.put("add", [y, e.ref(a["bias"])], y.shape)
    return y.view(*shape_of(node))


def addmm(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    if a["beta"] != 1 or a["alpha"] != 1:
        raise CannotEmit(f"expected factors of 1, got beta {a['beta']} and alpha {a['alpha']}")
    x, w = e.ref(a["mat1"]), e.ref(a["mat2"])
    y = e.put("product", [x, w], shape_of(node), transposed=0)
    return e.put("add", [y, e.ref(a["self"])], y.shape)


def matmul(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    x, w = (e.ref(a[name]) for name in list(a)[:2])
    x = x if len(x.shape) > 1 else x.view(1, math.prod(x.shape))
    w = w if len(w.shape) > 1 else w.view(math.prod(w.shape), 1)
    return product(e, x, w, transposed=0).view(*shape_of(node))


def product(e: InstructionEmitter, x: ValueRef, w: ValueRef, transposed: int) -> ValueRef:
    """Products of pairs of matrices; one matrix of either side may be shared by all pairs."""
    if math.prod(w.shape[:-2]) == 1:
        rows, w = x.view(math.prod(x.shape[:-1]), x.shape[-1]), w.view(*w.shape[-2:])
        channels = w.shape[0] if transposed else w.shape[1]
        y = e.put("product", [rows, w], (rows.shape[0], channels), transposed=transposed)
        return y.view(*x.shape[:-1], channels)
    pairs = torch.broadcast_shapes(x.shape[:-2], w.shape[:-2])
    x, w = (s if s.shape[:-2] == pairs else e.put("repeat", [s], (*pairs, *s.shape[-2:])) for s in (x, w))
    channels = w.shape[-2] if transposed else w.shape[-1]
    return e.put("product", [x, w], (*x.shape[:-1], channels), transposed=transposed)


def attention(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    """softmax(q k' scale + mask) v, step by step."""
    q, k, v = (e.ref(a[name]) for name in ("query", "key", "value"))
    if a.get("enable_gqa") or a["dropout_p"]:
        raise CannotEmit("heads that share keys, or dropout; expected plain attention")
    scale = a["scale"] if a["scale"] is not None else 1 / math.sqrt(q.shape[-1])
    scores = product(e, e.put("multiply", [q], q.shape, immediate=float(scale)), k, transposed=1)
    if a["is_causal"]:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = e.put("add", [scores, e.constant("causal", _additive(allowed))], scores.shape)
    if a["attn_mask"] is not None:
        known = e.fixed.get(a["attn_mask"])
        bools = isinstance(known, Tensor) and known.dtype == torch.bool
        mask = e.constant("mask", _additive(known)) if bools else e.ref(a["attn_mask"])
        scores = e.put("add", [scores, mask], scores.shape)
    return product(e, softmax_of(e, scores, len(scores.shape) - 1), v, 0).view(*shape_of(node))


def _additive(allowed: Any) -> Tensor:
    """A boolean mask as numbers to add: 0 or -inf."""
    return torch.zeros(allowed.shape).masked_fill(~allowed, -math.inf)


def function(op: str, **settings: str) -> Rule:
    """The rule of a function of the vector unit. settings: by name, the call's argument."""

    def rule(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
        numbers: Arguments = {k: float(a[name]) for k, name in settings.items()}
        return e.put(op, [e.ref(a[next(iter(a))])], shape_of(node), **numbers)

    return rule


def binary(op: str) -> Rule:
    """The rule of a function of two operands; the second one may be a number. `alpha` multiplies
    it."""

    def rule(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
        x, other = (a[name] for name in list(a)[:2])
        if a.get("rounding_mode") is not None:
            raise CannotEmit("it rounds the quotient")
        alpha, x = a.get("alpha", 1), e.ref(x)
        if isinstance(other, int | float):
            return e.put(op, [x], shape_of(node), immediate=float(other * alpha))
        other = e.ref(other)
        if alpha != 1:
            other = e.put("multiply", [other], other.shape, immediate=float(alpha))
        return e.put(op, [x, other], shape_of(node))

    return rule


def reversed_subtract(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    x = e.ref(a["self"])
    x = e.put("multiply", [x], x.shape, immediate=-float(a["alpha"]))
    if isinstance(a["other"], int | float):
        return e.put("add", [x], shape_of(node), immediate=float(a["other"]))
    return e.put("add", [x, e.ref(a["other"])], shape_of(node))


def clamp(low: str | float | None, high: str | float | None) -> Rule:
    """The rule of a clamp. low, high: bounds as numbers or as names of the call's arguments; None
    for no bound."""

    def rule(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
        ends = [a[bound] if isinstance(bound, str) else bound for bound in (low, high)]
        bounds: Arguments = {}
        for name, end in zip(("low", "high"), ends, strict=True):
            if end is not None:
                bounds[name] = float(end)
        return e.put("clamp", [e.ref(a["self"])], shape_of(node), **bounds)

    return rule


def power(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    x, exponent = e.ref(a["self"]), a["exponent"]
    if exponent == 2:
        return e.put("multiply", [x, x], x.shape)
    return e.put("power", [x], x.shape, immediate=float(exponent))


def square(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    x = e.ref(a["self"])
    return e.put("multiply", [x, x], x.shape)


def elu(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    if a["scale"] != 1 or a["input_scale"] != 1:
        raise CannotEmit("its scales are not 1")
    return e.put("elu", [e.ref(a["self"])], shape_of(node), alpha=float(a["alpha"]))


def softplus(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    if a["beta"] != 1 or a["threshold"] != 20:
        raise CannotEmit("its beta is not 1, or its threshold not 20")
    return e.put("softplus", [e.ref(a["self"])], shape_of(node))


def gelu(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    op = "gelu_tanh" if a["approximate"] == "tanh" else "gelu"
    return e.put(op, [e.ref(a["self"])], shape_of(node))


def prelu(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    """max(x, 0) + w min(x, 0)."""
    x, w = e.ref(a["self"]), e.ref(a["weight"])
    gradient = per_channel(w, len(x.shape) - 2) if math.prod(w.shape) > 1 else w
    low = e.put("minimum", [x], x.shape, immediate=0.0)
    low = e.put("multiply", [low, gradient], x.shape)
    return e.put("add", [e.put("relu", [x], x.shape), low], x.shape)


def select(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    """A selection by a constant mask."""
    mask = a.get("condition", a.get("mask"))
    if not e.is_fixed(mask):
        raise CannotEmit("its condition depends on the input; expected a constant mask")
    first, second = (a["self"], a["other"]) if "condition" in a else (a["value"], a["self"])
    return e.put("select", [e.ref(mask), e.ref(first), e.ref(second)], shape_of(node))


_UNARY: Mapping[str, str] = {
    "relu": "relu", "sigmoid": "sigmoid", "tanh": "tanh", "silu": "silu", "mish": "mish",
    "hardswish": "hard_swish", "hardsigmoid": "hard_sigmoid", "erf": "erf", "exp": "exp",
    "log": "log", "sqrt": "sqrt", "rsqrt": "rsqrt", "reciprocal": "reciprocal", "neg": "negate",
    "abs": "abs", "sin": "sin", "cos": "cos", "floor": "floor",
}  # fmt: skip
_BINARY: Mapping[str, str] = {"add": "add", "sub": "subtract", "mul": "multiply", "div": "divide"}

RULES: dict[Any, Rule] = {
    **SHAPES, **WINDOWS,
    **dict.fromkeys(CONVOLUTIONS_ANY_PADDING, convolution),
    aten.linear.default: linear, aten.addmm.default: addmm, aten.mm.default: matmul,
    aten.bmm.default: matmul, aten.matmul.default: matmul,
    aten.scaled_dot_product_attention.default: attention,
    **{getattr(aten, name).default: function(op) for name, op in _UNARY.items()},
    **{overload: binary(op) for name, op in _BINARY.items()
       for overload in (getattr(aten, name).Tensor, getattr(aten, name).Scalar)},
    aten.rsub.Scalar: reversed_subtract, aten.rsub.Tensor: reversed_subtract,
    aten.maximum.default: binary("maximum"), aten.minimum.default: binary("minimum"),
    **{op.target: clamp(*op.numbers) for op in ACTIVATIONS["clamp"].ops},
    aten.clamp_min.default: clamp("min", None), aten.clamp_max.default: clamp(None, "max"),
    aten.leaky_relu.default: function("leaky_relu", slope="negative_slope"),
    aten.pow.Tensor_Scalar: power, aten.square.default: square, aten.elu.default: elu,
    aten.softplus.default: softplus, aten.gelu.default: gelu, aten.prelu.default: prelu,
    aten.where.self: select, aten.where.ScalarOther: select, aten.where.ScalarSelf: select,
    aten.where.Scalar: select, aten.masked_fill.Scalar: select, aten.masked_fill.Tensor: select,
}  # fmt: skip
