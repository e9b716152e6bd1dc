"""Rules of ATen calls that compute: convolutions, products, attention, functions.

`RULES` also contains the rules of windows and layouts: one entry per op.

Rules of ATen calls that read windows or full rows: pools, norms, softmax, sums.

A sum, mean or maximum over rows is a pool with one window per row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from demask.ops import traits
from demask.ops.activations import ACTIVATIONS
from demask.ops.schema import fake
from demask.ops.traits import CONVOLUTIONS_ANY_PADDING
from demask.stride.accelerator.emit_layout import SHAPES, every_step, rows_of, undo_rows, unpadded
from demask.stride.accelerator.emitter import CannotEmit, InstructionEmitter, NodeRefs, Rule, ValueRef, shape_of

aten = torch.ops.aten

_AXES = traits.POOLS | traits.ADAPTIVE_MAX_POOLS


def each(value: Any, axes: int) -> tuple[int, ...]:
    """An argument as one number per axis."""
    numbers = [value] if isinstance(value, int) else list(value)
    return tuple(numbers * axes if len(numbers) == 1 else numbers)


def per_channel(vector: ValueRef, axes: int) -> ValueRef:
    """A vector of channels that broadcasts over the `axes` axes after them."""
    return vector.view(math.prod(vector.shape), *(1,) * axes)


def softmax(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    x = e.ref(a["self"])
    return softmax_of(e, x, a["dim"] % max(len(x.shape), 1))


def softmax_of(e: InstructionEmitter, x: ValueRef, axis: int, *, logarithm: bool = False) -> ValueRef:
    """exp(x - max) divided by its sum, or the logarithm of that. Sums are pools."""
    rows, order = rows_of(e, x, [axis])
    top = pool_rows(e, "max_pool", rows)
    low = e.put("subtract", [rows, top], rows.shape)
    exponents = e.put("exp", [low], rows.shape)
    total = pool_rows(e, "sum_pool", exponents)
    if logarithm:
        y = e.put("subtract", [low, e.put("log", [total], total.shape)], rows.shape)
    else:
        y = e.put("divide", [exponents, total], rows.shape)
    return undo_rows(e, y, x.shape, order)


def log_softmax(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    x = e.ref(a["self"])
    return softmax_of(e, x, a["dim"] % max(len(x.shape), 1), logarithm=True)


def pool_rows(e: InstructionEmitter, op: str, rows: ValueRef) -> ValueRef:
    """One pool over each row: (rows, elements) -> (rows, 1)."""
    return e.put(op, [rows], (rows.shape[0], 1), window=(rows.shape[1],), step=(1,), before=(0,), dilation=(1,))


def reduction(op: str) -> Rule:
    """The rule of a sum, mean or maximum over some axes, or all."""

    def rule(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
        x, dims = e.ref(a["self"]), a.get("dim")
        dims = [dims] if isinstance(dims, int) else list(dims or range(len(x.shape)))
        rows, _ = rows_of(e, x, sorted(axis % max(len(x.shape), 1) for axis in dims))
        return pool_rows(e, op, rows).view(*shape_of(node))

    return rule


def batch_norm(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    """A scale and a shift per channel, computed before the run."""
    names = ("weight", "bias", "running_mean", "running_var")
    tensors = [None if a[name] is None else e.fixed.get(a[name]) for name in names]
    weight, bias, mean, var = (None if t is None else t.double() for t in tensors)
    if a["training"] or mean is None or var is None:
        raise CannotEmit("it computes statistics of the batch; expected eval mode")
    scale = torch.rsqrt(var + a["eps"]) * (1 if weight is None else weight)
    shift = (0 if bias is None else bias) - mean * scale
    x = e.ref(a["input"])
    y = x
    for op, vector in (("multiply", scale), ("add", shift)):
        constant = e.constant(f"{node.name}.{'scale' if op == 'multiply' else 'shift'}", vector)
        y = e.put(op, [y, per_channel(constant, len(x.shape) - 2)], x.shape)
    return y


def normalize(e: InstructionEmitter, rows: ValueRef, eps: float, *, centred: bool = True) -> ValueRef:
    """(x - mean) / sqrt(var + eps) of each row."""
    if centred:
        rows = e.put("subtract", [rows, pool_rows(e, "average_pool", rows)], rows.shape)
    squares = e.put("multiply", [rows, rows], rows.shape)
    var = pool_rows(e, "average_pool", squares)
    scale = e.put("rsqrt", [e.put("add", [var], var.shape, immediate=float(eps))], var.shape)
    return e.put("multiply", [rows, scale], rows.shape)


def layer_norm(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    x, count = e.ref(a["input"]), math.prod(a["normalized_shape"])
    y = normalize(e, x.view(math.prod(x.shape) // count, count), _eps(a))
    return affine(e, y.view(*x.shape), a, 0)


def rms_norm(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    x, count = e.ref(a["input"]), math.prod(a["normalized_shape"])
    y = normalize(e, x.view(math.prod(x.shape) // count, count), _eps(a), centred=False)
    return affine(e, y.view(*x.shape), a, 0)


def _eps(a: Arguments) -> float:
    return torch.finfo(torch.float32).eps if a["eps"] is None else a["eps"]


def group_norm(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    x = e.ref(a["input"])
    if a.get("running_mean") is not None and not a["use_input_stats"]:
        raise CannotEmit("it uses tracked statistics; expected those of the input")
    groups = a.get("num_groups", x.shape[1])
    rows = x.view(x.shape[0] * groups, math.prod(x.shape[1:]) // groups)
    return affine(e, normalize(e, rows, a["eps"]).view(*x.shape), a, len(x.shape) - 2)


def affine(e: InstructionEmitter, y: ValueRef, a: Arguments, axes: int) -> ValueRef:
    """A normalized value times the norm's weight, plus its bias, if it has them. axes: number of
    axes after the channels."""
    for op, name in (("multiply", "weight"), ("add", "bias")):
        if a.get(name) is not None:
            parameter = e.ref(a[name])
            y = e.put(op, [y, parameter.view(*parameter.shape, *(1,) * axes)], y.shape)
    return y


def max_pool(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    axes, y = _AXES[node.target], shape_of(node)
    source, borders = unpadded(a["self"], axes, -math.inf)
    x, window = e.ref(source), each(a["kernel_size"], axes)
    before = tuple(n + low for n, (low, _) in zip(each(a["padding"], axes), borders, strict=True))
    step, dilation = each(a["stride"] or window, axes), each(a["dilation"], axes)
    return pool(e, "max_pool", x, y, window, step, before, dilation)


def pool(
    e: InstructionEmitter,
    op: str,
    x: ValueRef,
    shape: tuple[int, ...],
    window: Sequence[int],
    step: Sequence[int],
    before: Sequence[int],
    dilation: Sequence[int],
) -> ValueRef:
    """A pool. Windows of the pooling unit cover all positions: if those of the call do not, the
    unit computes windows of stride 1, and every step-th one is selected."""
    spans = [(k - 1) * d + 1 for k, d in zip(window, dilation, strict=True)]
    steps, sizes = list(step), list(shape)
    for k, (by, span) in enumerate(zip(step, spans, strict=True), len(shape) - len(spans)):
        if by > span:
            steps[k - len(shape)], sizes[k] = 1, (sizes[k] - 1) * by + 1
    x = e.put(op, [x], sizes, window=tuple(window), step=tuple(steps), before=tuple(before), dilation=tuple(dilation))
    for axis, (size, by) in enumerate(zip(shape, (1,) * (len(shape) - len(step)) + tuple(step), strict=True)):
        x = every_step(e, x, axis, by) if x.shape[axis] != size else x
    return x


def average_pool(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    """An average pool if all windows have the same count, else a sum divided by the counts."""
    x, y, axes = e.ref(a["self"]), shape_of(node), _AXES[node.target]
    window, before = each(a["kernel_size"], axes), each(a["padding"], axes)
    step = each(a["stride"] or window, axes)
    counts = _counts(x.shape[-axes:], y[-axes:], window, step, before, a)
    ones = (1,) * axes
    if bool((counts == math.prod(window)).all()):
        return pool(e, "average_pool", x, y, window, step, before, ones)
    total = pool(e, "sum_pool", x, y, window, step, before, ones)
    first = float(counts.flatten()[0])
    if bool((counts == first).all()):
        return total if first == 1 else e.put("divide", [total], y, immediate=first)
    return e.put("divide", [total, e.constant(f"{node.name}.counts", counts)], y)


def _counts(
    sizes: Sequence[int],
    output_sizes: Sequence[int],
    window: Sequence[int],
    step: Sequence[int],
    before: Sequence[int],
    a: Arguments,
) -> Tensor:
    """The divisor of each window, with the output's spatial shape."""
    if a.get("divisor_override"):
        return torch.full(tuple(output_sizes), float(a["divisor_override"]))
    counts = torch.ones(())
    for n, m, k, by, pad in zip(sizes, output_sizes, window, step, before, strict=True):
        start = torch.arange(m) * by - pad
        end = (start + k).clamp(max=n + pad)
        if not a["count_include_pad"]:
            start, end = start.clamp(min=0), end.clamp(max=n)
        counts = counts[..., None] * (end - start)
    return counts


def adaptive_pool(op: str) -> Rule:
    """The rule of an adaptive pool with disjoint windows of one size. Indices of maxima are not
    computed."""

    def rule(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
        values, axes = fake(node), _AXES[node.target]
        x, several = e.ref(a["self"]), isinstance(values, tuple)
        y = tuple((values[0] if several else values).shape)
        if any(n % m for n, m in zip(x.shape[-axes:], y[-axes:], strict=True)):
            raise CannotEmit(f"its windows differ: {x.shape[-axes:]} is no multiple of {y[-axes:]}")
        window = tuple(n // m for n, m in zip(x.shape[-axes:], y[-axes:], strict=True))
        value = pool(e, op, x, y, window, window, (0,) * axes, (1,) * axes)
        return (value,) if several else value

    return rule


WINDOWS: dict[Any, Rule] = {
    aten.softmax.int: softmax,
    aten._softmax.default: softmax,
    aten.log_softmax.int: log_softmax,
    aten._log_softmax.default: log_softmax,
    aten.mean.dim: reduction("average_pool"),
    aten.mean.default: reduction("average_pool"),
    aten.sum.dim_IntList: reduction("sum_pool"),
    aten.sum.default: reduction("sum_pool"),
    aten.amax.default: reduction("max_pool"),
    aten.batch_norm.default: batch_norm,
    aten.layer_norm.default: layer_norm,
    aten.rms_norm.default: rms_norm,
    aten.group_norm.default: group_norm,
    aten.instance_norm.default: group_norm,
    **dict.fromkeys(traits.MAX_POOLS, max_pool),
    **dict.fromkeys(traits.AVERAGE_POOLS, average_pool),
    **dict.fromkeys(traits.ADAPTIVE_AVERAGE_POOLS, adaptive_pool("average_pool")),
    **dict.fromkeys(traits.ADAPTIVE_MAX_POOLS, adaptive_pool("max_pool")),
}


Arguments = dict[str, Any]


def convolution(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    """A convolution of stride 1 by the matrix unit; the vector unit adds the bias."""
    w = e.ref(a["weight"])
    axes = len(w.shape) - 2
    source, borders = unpadded(a["input"], axes, 0.0)
    x = e.ref(source)
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
    before = tuple(n + low for n, (low, _) in zip(before, borders, strict=True))
    after = tuple(n + high for n, (_, high) in zip(after, borders, strict=True))
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
