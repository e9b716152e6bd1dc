"""Between which bounds values lie: one forward sweep of intervals, for every op by its entry.

An entry's column `range` says how bounds follow; without one, values that only move keep theirs,
and nothing is known of the rest. Bounds are those of the numbers that are computed, in the dtype in
which they are: rounding keeps order, so an op run on the ends of bounds bounds the op. NaN aside:
no bound says that a value is a number. Symbols of dynamic sizes do not matter here.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from demask.compat.dispatch import OpOverload
from demask.ops import Declined, Entry, Table, op_name, schema
from demask.ops.schema import Operand

_LARGEST_INTEGER = 2.0**53  # float64 holds all up to here
_ULPS = 16  # what vectorised functions of one op may differ by from those run here


class Range(NamedTuple):
    """Bounds of every element of a value, NaN aside: low <= x <= high."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"


ANY = Range(-inf, inf)
Ranges = dict[fx.Node, Range]


def ranges(graph: fx.Graph, constants: Mapping[str, Tensor], table: Table) -> Ranges:
    """The range of every value that the graph makes.

    constants: by get_attr target; looked at where a rule asks for them. Calls of several outputs
    have one range for all of their dtype; values that are no tensors have none.

    >>> from demask.graph.capture.capture import capture
    >>> from demask.ops import TABLE
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU6())
    >>> program = capture(net, (torch.ones(1, 2),))
    >>> print(*ranges(program.graph, {}, TABLE).values(), sep=", ")
    -inf to inf, -inf to inf, -inf to inf, -inf to inf, 0 to 6
    """
    found: Ranges = {}
    for node in graph.nodes:
        if node.op == "call_function" and _dtype(node) is not None:
            found[node] = _call(node, found, constants, table)
        elif isinstance(node.meta.get("val"), Tensor):
            found[node] = of_dtype(node.meta["val"].dtype)
    return found


def of_dtype(dtype: torch.dtype) -> Range:
    """All that a dtype can hold."""
    if dtype is torch.bool:
        return Range(0, 1)
    if dtype.is_floating_point or dtype.is_complex:
        return ANY
    limits = torch.iinfo(dtype)
    return Range(limits.min, limits.max)


def of_tensor(tensor: Tensor) -> Range:
    """The least and the largest element of a tensor, NaN aside; of none, all that it can hold."""
    values = tensor.detach()
    if values.is_complex() or not values.numel():
        return of_dtype(values.dtype)
    if values.is_floating_point():
        values = values[~values.isnan()]
    else:
        values = values.long() if values.dtype is torch.bool else values
    if not values.numel():
        return of_dtype(tensor.dtype)
    least, most = values.aminmax()
    return Range(float(least), float(most))


def _dtype(node: fx.Node) -> torch.dtype | None:
    """The dtype of what a call makes, of its first output if there are several."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return next((leaf.dtype for leaf in leaves if isinstance(leaf, Tensor)), None)


def _call(node: fx.Node, found: Ranges, constants: Mapping[str, Tensor], table: Table) -> Range:
    """The range of what a call makes, within what its dtype can hold."""
    dtype = _dtype(node)
    assert dtype is not None
    whole = of_dtype(dtype)
    if node.target is operator.getitem:
        source = node.args[0]
        same = isinstance(source, fx.Node) and _dtype(source) == dtype
        return found.get(source, whole) if same else whole  # type: ignore[arg-type]
    entry = table.get(op_name(node.target))
    if entry is None or dtype.is_complex or not isinstance(node.target, OpOverload):
        return whole
    rule = rule_of(entry)
    if rule == "" or (callable(entry.line) and isinstance(entry.line(node), Declined)):
        return whole
    which = schema.operands(node, entry.indices)
    known = [_operand(o, found, constants) for o in which]
    if not which or any(_is_complex(o) for o in which):
        return whole
    made = _bounds(node, entry, rule, which, known, dtype)
    if made is None or math.isnan(made.low) or math.isnan(made.high):
        return whole
    if not dtype.is_floating_point and (made.low < whole.low or made.high > whole.high):
        return whole  # it wraps around
    return Range(made.low + 0.0, made.high + 0.0)  # no bound is -0.0


def rule_of(entry: Entry) -> str | float | tuple[float, float]:
    """The rule of an entry: its column, or what its other columns tell."""
    if entry.range != "":
        return entry.range
    if entry.rest == "softmax":
        return (0.0, 1.0)
    if entry.fill == "mix" or entry.rest in ("sum", "mean"):
        return "sign"
    moves = entry.fill == "same" and not entry.region
    return "hull" if moves or entry.rest in ("max", "min") else ""


def _operand(operand: Operand, found: Ranges, constants: Mapping[str, Tensor]) -> Range:
    value = operand.value
    if not isinstance(value, fx.Node):
        number = isinstance(value, (int, float))
        return Range(float(value), float(value)) if number else ANY
    tensor = constants.get(str(value.target)) if value.op == "get_attr" else None
    if tensor is not None:
        found[value] = of_tensor(tensor)
    return found.get(value, ANY)


def _is_complex(operand: Operand) -> bool:
    value = operand.value
    dtype = _dtype(value) if isinstance(value, fx.Node) else None
    return dtype is not None and dtype.is_complex


def _bounds(
    node: fx.Node, entry: Entry, rule: Any, which: tuple[Operand, ...], known: list[Range],
    dtype: torch.dtype,
) -> Range | None:  # fmt: skip
    """What a rule says; None where it says nothing."""
    if isinstance(rule, tuple):
        return Range(*rule)
    if rule == "hull":
        return _hull(node, which, known, dtype)
    if rule == "sign":
        return _sign(node, known[min(entry.main, len(known) - 1)], dtype)
    if rule in ("ends", "about"):
        return _ends(node, which, known, dtype, rounds=rule == "about")
    return _least(float(rule), known[0], dtype)


def _least(least: float, known: Range, dtype: torch.dtype) -> Range:
    """Of a function that is between `least` and zero below zero, and above between zero and x."""
    limits = torch.finfo(dtype)
    room = known.high < limits.max / 8  # what is computed between must not overflow
    most = known.high * (1 + _ULPS * limits.eps) if room else inf
    return Range(least if known.low < 0 else 0.0, max(most, 0.0))


def _hull(
    node: fx.Node, which: tuple[Operand, ...], known: list[Range], dtype: torch.dtype
) -> Range | None:
    """All operands that hold values (not positions), and what is filled in beside them."""
    held = [r for o, r in zip(which, known, strict=True)
            if isinstance(o.value, fx.Node) and _dtype(o.value) == dtype]  # fmt: skip
    found = schema.arguments(node)
    if "value" in found and "pad" in found:
        filled = 0.0 if found["value"] is None else found["value"]
        if not isinstance(filled, (int, float)):
            return None
        held.append(Range(float(filled), float(filled)))
    if not held:
        return None
    return Range(min(r.low for r in held), max(r.high for r in held))


def _sign(node: fx.Node, known: Range, dtype: torch.dtype) -> Range | None:
    """Sums and averages of numbers of one sign have it; how large they are is not told."""
    divisor = schema.arguments(node).get("divisor_override")
    if not dtype.is_floating_point or (divisor is not None and divisor < 0):
        return None
    return Range(0.0 if known.low >= 0 else -inf, 0.0 if known.high <= 0 else inf)


def _ends(
    node: fx.Node, which: tuple[Operand, ...], known: list[Range], dtype: torch.dtype, *,
    rounds: bool,
) -> Range | None:  # fmt: skip
    """The op run on all combinations of the ends of its operands' bounds, and zero within them.

    Where a function that rounds is no number at one of them nothing is told: its domain ends
    between them. Of sums and products NaN says nothing, and is left out.
    """
    found = schema.arguments(node)
    names = {o.name for o in which}
    rest = {name: value for name, value in found.items() if name not in names}
    if schema.is_dynamic(list(rest.values())) or rest.get("alpha", 1) != 1:
        return None  # with a factor, some processors round once and others twice
    varying = {
        o.value: r for o, r in zip(which, known, strict=True) if isinstance(o.value, fx.Node)
    }
    points = [_points(r, _dtype(value)) for value, r in varying.items()]
    columns = list(zip(*itertools.product(*points), strict=True))
    drawn = {value: _vector(column, _dtype(value))
             for value, column in zip(varying, columns, strict=True)}  # fmt: skip
    values = [drawn.get(o.value, o.value) if isinstance(o.value, fx.Node) else o.value
              for o in which]  # fmt: skip
    given = schema.replaced(found, which, values)
    if "memory_format" in given:
        given["memory_format"] = None
    args, kwargs = schema.call(node.target, given)
    try:
        made = node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, TypeError, IndexError):
        return None  # not made for values of one axis: nothing is told
    if rounds and isinstance(made, Tensor) and bool(made.isnan().any()):
        return None
    return _told(made, dtype, tuple(drawn.values()), rounds=rounds)


def _points(known: Range, dtype: torch.dtype | None) -> list[float]:
    inside = [0.0, -0.0] if known.low <= 0 <= known.high else []
    if dtype is torch.bool:
        return sorted({min(max(round(x), 0), 1) for x in known if math.isfinite(x)}) or [0, 1]
    return list(dict.fromkeys(known)) + inside


def _vector(column: tuple[float, ...], dtype: torch.dtype | None) -> Tensor:
    """Whole numbers as float64, in which nothing wraps around."""
    assert dtype is not None
    exact = dtype is torch.bool or dtype.is_floating_point
    return torch.tensor(column, dtype=dtype if exact else torch.float64)


def _told(
    made: Any, dtype: torch.dtype, drawn: tuple[Tensor, ...], *, rounds: bool
) -> Range | None:
    """The bounds of what came out; None where that does not bound the op."""
    if not isinstance(made, Tensor) or made.is_complex():
        return None
    whole = not dtype.is_floating_point and dtype is not torch.bool
    numbers = [t.double() for t in drawn if t.dtype is not torch.bool]
    if whole and any(bool((t.abs() > _LARGEST_INTEGER).any()) for t in [*numbers, made.double()]):
        return None
    values = (made if whole else made.to(dtype)).double()
    slack = torch.zeros_like(values)
    if rounds and dtype.is_floating_point:
        # Of infinity a function takes its limit, without rounding.
        finite = torch.stack([t.isfinite() for t in drawn]).any(0)
        slack = values.abs() * (_ULPS * torch.finfo(dtype).eps) * finite
    low, high = values - slack.nan_to_num(posinf=0), values + slack.nan_to_num(posinf=0)
    low, high = low[~low.isnan()], high[~high.isnan()]
    return Range(float(low.min()), float(high.max())) if low.numel() else None


__all__ = ["ANY", "Range", "Ranges", "of_dtype", "of_tensor", "ranges", "rule_of"]
