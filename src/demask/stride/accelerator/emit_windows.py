"""Rules of ATen calls that read windows or whole rows: pools, norms, softmax, sums.

A sum, mean or maximum over rows is a pool with one window per row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from demask.ops import traits
from demask.stride.accelerator.emit_layout import every_step, rows_of, undo_rows
from demask.stride.accelerator.emitter import CannotEmit, InstructionEmitter, NodeRefs, Rule, ValueRef, shape_of

aten = torch.ops.aten
_AXES = traits.POOLS | traits.ADAPTIVE_MAX_POOLS
Arguments = dict[str, Any]


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
    x, y = e.ref(a["self"]), shape_of(node)
    axes = _AXES[node.target]
    window, before = each(a["kernel_size"], axes), each(a["padding"], axes)
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
        values, axes = node.meta["val"], _AXES[node.target]
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
