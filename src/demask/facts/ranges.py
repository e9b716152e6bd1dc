"""Bounds of the values of a graph: one forward sweep of intervals, for every op by its entry.

The `range` column of an entry states how bounds propagate. Without one, values that only move keep
their bounds, and all others are unbounded. Bounds are those of the numbers computed, in the dtype
in which they are computed: rounding preserves order, so an op run on the ends of bounds bounds the
op. Bounds say nothing about NaN. Symbols of dynamic sizes do not matter here.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Mapping
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from demask.compat.dispatch import OpOverload
from demask.ops import Declined, Entry, op_name, schema
from demask.ops.schema import Operand, fake

_LARGEST_INTEGER = 2.0**53  # float64 represents all integers up to here
_ULPS = 16  # largest difference between vectorized functions of one op and those run here


class Range(NamedTuple):
    """Bounds of every element of a value, except NaN: low <= x <= high."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"


ANY = Range(-inf, inf)
Ranges = dict[fx.Node, Range]


def compute_ranges(nodes: Iterable[fx.Node], constants: Mapping[str, Tensor], table: Mapping[str, Entry]) -> Ranges:
    """The range of every tensor that a graph computes.

    Args:
        nodes: of a functional graph with fake values, operands before the calls that read them.
        constants: by get_attr target; read only where a rule needs them.
        table: the op table, or the entries of the ops that are called.

    Calls of several outputs have one range for all outputs of their dtype; other values have none.

    Example:
        >>> from demask.graph.capture.capture import capture
        >>> from demask.ops import TABLE
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU6())
        >>> program = capture(net, (torch.ones(1, 2),))
        >>> print(*compute_ranges(program.graph.nodes, {}, TABLE).values(), sep=", ")
        -inf to inf, -inf to inf, -inf to inf, -inf to inf, 0 to 6
    """
    bounds: Ranges = {}
    for node in nodes:
        if node.op == "call_function" and _dtype(node) is not None:
            bounds[node] = _call_range(node, bounds, constants, table)
        elif isinstance(node.meta.get("val"), Tensor):
            bounds[node] = dtype_range(fake(node).dtype)
    return bounds


def dtype_range(dtype: torch.dtype) -> Range:
    """The range of all values of a dtype."""
    if dtype is torch.bool:
        return Range(0, 1)
    if dtype.is_floating_point or dtype.is_complex:
        return ANY
    limits = torch.iinfo(dtype)
    return Range(limits.min, limits.max)


def tensor_range(tensor: Tensor) -> Range:
    """The least and the largest element of a tensor, ignoring NaN; for a tensor without elements,
    the range of its dtype."""
    values = tensor.detach()
    if values.is_complex() or not values.numel():
        return dtype_range(values.dtype)
    if values.is_floating_point():
        values = values[~values.isnan()]
    else:
        values = values.long() if values.dtype is torch.bool else values
    if not values.numel():
        return dtype_range(tensor.dtype)
    least, most = values.aminmax()
    return Range(float(least), float(most))


def _dtype(node: fx.Node) -> torch.dtype | None:
    """The dtype of a call's output; of the first one if there are several."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return next((leaf.dtype for leaf in leaves if isinstance(leaf, Tensor)), None)


def _call_range(node: fx.Node, bounds: Ranges, constants: Mapping[str, Tensor], table: Mapping[str, Entry]) -> Range:
    """The range of the output of a call, within that of its dtype."""
    dtype = _dtype(node)
    assert dtype is not None
    widest = dtype_range(dtype)
    if node.target is operator.getitem:
        source = schema.source_of(node)
        return bounds.get(source, widest) if _dtype(source) == dtype else widest
    entry = table.get(op_name(node.target))
    if entry is None or dtype.is_complex or not isinstance(node.target, OpOverload):
        return widest
    rule = range_rule(entry)
    if rule == "" or (callable(entry.line) and isinstance(entry.line(node), Declined)):
        return widest
    which = schema.operands(node, entry.indices)
    known = [_operand_range(o, bounds, constants) for o in which]
    if not which or any(_is_complex(o) for o in which):
        return widest
    computed = _apply_rule(node, entry, rule, which, known, dtype)
    if computed is None or math.isnan(computed.low) or math.isnan(computed.high):
        return widest
    if not dtype.is_floating_point and (computed.low < widest.low or computed.high > widest.high):
        return widest  # integers wrap around
    return Range(computed.low + 0.0, computed.high + 0.0)  # no bound is -0.0


def range_rule(entry: Entry) -> str | float | tuple[float, float]:
    """The range rule of an entry: its column, or the one that its other columns imply."""
    if entry.range != "":
        return entry.range
    if entry.rest == "softmax":
        return (0.0, 1.0)
    if entry.fill == "mix" or entry.rest in ("sum", "mean"):
        return "sign"
    moves = entry.fill == "same" and not entry.region
    return "hull" if moves or entry.rest in ("max", "min") else ""


def _operand_range(operand: Operand, bounds: Ranges, constants: Mapping[str, Tensor]) -> Range:
    value = operand.value
    if not isinstance(value, fx.Node):
        number = isinstance(value, (int, float))
        return Range(float(value), float(value)) if number else ANY
    tensor = constants.get(str(value.target)) if value.op == "get_attr" else None
    if tensor is not None:
        bounds[value] = tensor_range(tensor)
    return bounds.get(value, ANY)


def _is_complex(operand: Operand) -> bool:
    value = operand.value
    dtype = _dtype(value) if isinstance(value, fx.Node) else None
    return dtype is not None and dtype.is_complex


def _apply_rule(
    node: fx.Node, entry: Entry, rule: Any, which: tuple[Operand, ...], known: list[Range], dtype: torch.dtype
) -> Range | None:
    """The range by a rule; None where the rule does not apply."""
    if isinstance(rule, tuple):
        return Range(*rule)
    if rule == "hull":
        return _union(node, which, known, dtype)
    if rule == "sign":
        return _sign_range(node, known[min(entry.main, len(known) - 1)], dtype)
    if rule in ("ends", "about"):
        return _range_at_ends(node, which, known, dtype, rounds=rule == "about")
    return _activation_range(float(rule), known[0], dtype)


def _activation_range(least: float, known: Range, dtype: torch.dtype) -> Range:
    """The range of a function between `least` and 0 for x < 0, and between 0 and x for x > 0."""
    limits = torch.finfo(dtype)
    room = known.high < limits.max / 8  # intermediate results must not overflow
    most = known.high * (1 + _ULPS * limits.eps) if room else inf
    return Range(least if known.low < 0 else 0.0, max(most, 0.0))


def _union(node: fx.Node, which: tuple[Operand, ...], known: list[Range], dtype: torch.dtype) -> Range | None:
    """The union of the ranges of all operands with values (not positions), and of padding."""
    bounds = [r for o, r in zip(which, known, strict=True) if isinstance(o.value, fx.Node) and _dtype(o.value) == dtype]
    arguments = schema.arguments(node)
    if "value" in arguments and "pad" in arguments:
        fill = 0.0 if arguments["value"] is None else arguments["value"]
        if not isinstance(fill, (int, float)):
            return None
        bounds.append(Range(float(fill), float(fill)))
    if not bounds:
        return None
    return Range(min(r.low for r in bounds), max(r.high for r in bounds))


def _sign_range(node: fx.Node, known: Range, dtype: torch.dtype) -> Range | None:
    """The range of sums and averages: numbers of one sign have results of that sign."""
    divisor = schema.arguments(node).get("divisor_override")
    if not dtype.is_floating_point or (divisor is not None and divisor < 0):
        return None
    return Range(0.0 if known.low >= 0 else -inf, 0.0 if known.high <= 0 else inf)


def _range_at_ends(
    node: fx.Node, which: tuple[Operand, ...], known: list[Range], dtype: torch.dtype, *, rounds: bool
) -> Range | None:
    """The range of the op run on all combinations of the ends of its operands' bounds, and on 0
    within them.

    None where a function that rounds returns NaN at one of them: its domain ends between them. NaN
    of sums and products is ignored.
    """
    arguments = schema.arguments(node)
    names = {o.name for o in which}
    rest = {name: value for name, value in arguments.items() if name not in names}
    if schema.is_dynamic(list(rest.values())) or rest.get("alpha", 1) != 1:
        return None  # processors differ: with a factor, they round once or twice
    varying = {o.value: r for o, r in zip(which, known, strict=True) if isinstance(o.value, fx.Node)}
    points = [_points(r, _dtype(value)) for value, r in varying.items()]
    columns = list(zip(*itertools.product(*points), strict=True))
    tensors = {value: _as_vector(column, _dtype(value)) for value, column in zip(varying, columns, strict=True)}
    values = [tensors.get(o.value, o.value) if isinstance(o.value, fx.Node) else o.value for o in which]
    call_arguments = schema.replace_operands(arguments, which, values)
    if "memory_format" in call_arguments:
        call_arguments["memory_format"] = None
    try:
        output = schema.call_with(node, call_arguments)
    except (RuntimeError, TypeError, IndexError):
        return None  # the op does not accept tensors with one axis
    if rounds and isinstance(output, Tensor) and bool(output.isnan().any()):
        return None
    return _output_range(output, dtype, tuple(tensors.values()), rounds=rounds)


def _points(known: Range, dtype: torch.dtype | None) -> list[float]:
    inside = [0.0, -0.0] if known.low <= 0 <= known.high else []
    if dtype is torch.bool:
        return sorted({min(max(round(x), 0), 1) for x in known if math.isfinite(x)}) or [0, 1]
    return list(dict.fromkeys(known)) + inside


def _as_vector(column: tuple[float, ...], dtype: torch.dtype | None) -> Tensor:
    """The numbers as a tensor; integers as float64, in which nothing wraps around."""
    assert dtype is not None
    exact = dtype is torch.bool or dtype.is_floating_point
    return torch.tensor(column, dtype=dtype if exact else torch.float64)


def _output_range(output: Any, dtype: torch.dtype, inputs: tuple[Tensor, ...], *, rounds: bool) -> Range | None:
    """The range of an output; None where it does not bound the op."""
    if not isinstance(output, Tensor) or output.is_complex():
        return None
    integral = not dtype.is_floating_point and dtype is not torch.bool
    numbers = [t.double() for t in inputs if t.dtype is not torch.bool]
    if integral and any(bool((t.abs() > _LARGEST_INTEGER).any()) for t in [*numbers, output.double()]):
        return None
    values = (output if integral else output.to(dtype)).double()
    slack = torch.zeros_like(values)
    if rounds and dtype.is_floating_point:
        # At infinity a function returns its limit, without rounding.
        finite = torch.stack([t.isfinite() for t in inputs]).any(0)
        slack = values.abs() * (_ULPS * torch.finfo(dtype).eps) * finite
    low, high = values - slack.nan_to_num(posinf=0), values + slack.nan_to_num(posinf=0)
    low, high = low[~low.isnan()], high[~high.isnan()]
    return Range(float(low.min()), float(high.max())) if low.numel() else None


__all__ = ["ANY", "Range", "Ranges", "compute_ranges", "dtype_range", "range_rule", "tensor_range"]
