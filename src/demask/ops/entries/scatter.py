"""Entries of ops that combine values at positions chosen at run time: sums over edges, segments.

    "!n c, !e, !e c -> !n c"        x.index_add(0, index, y): of nodes n, edges e, channels c

How many values reach a position is known only at run time. So an output is known where it is the
same for any number of them: a sum of zeros into zeros, a maximum that the first value exceeds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from demask.ops import schema
from demask.ops.entry import Case, Declined, Entry
from demask.ops.entry import Shape as S
from demask.ops.schema import fake


def _mark_dim(rank: int, dim: int, letter: str) -> str:
    """Axes of which `dim` is complete, under another letter."""
    return " ".join(f"!{letter}" if k == dim else f"a{k}" for k in range(rank))


def _along_index(node: fx.Node) -> str | Declined:
    """An index along one axis: self, index, source."""
    call_arguments = schema.arguments(node)
    rank = fake(call_arguments["self"]).ndim
    if not rank or fake(call_arguments["index"]).ndim != 1:
        return Declined("values combined at one position without an axis")
    nodes, edges = (_mark_dim(rank, call_arguments["dim"] % rank, letter) for letter in "ne")
    return f"{nodes}, !e, {edges} -> {nodes}"


def _by_element(node: fx.Node) -> str | Declined:
    """An index per element of the source. Both have the sizes of self along all axes but `dim`."""
    call_arguments = schema.arguments(node)
    x, index = (fake(call_arguments[name]) for name in ("self", "index"))
    source = call_arguments.get("src")
    if not x.ndim or not index.ndim:
        return Declined("values combined at one position without an axis")
    dim = call_arguments["dim"] % x.ndim
    values = [index] if source is None else [index, fake(source)]
    sizes = [(k, x.shape[k], value.shape[k]) for value in values for k in range(x.ndim)]
    if any(k != dim and not schema.same_size(a, b) for k, a, b in sizes):
        return Declined("a scatter to a part of its other axes, or of a part of its source")
    # The index may be shorter than the source.
    nodes, *edges = (_mark_dim(x.ndim, dim, letter) for letter in ("n", "e", "s")[: len(values) + 1])
    return f"{nodes}, {', '.join(edges)} -> {nodes}"


def _put(node: fx.Node) -> str | Declined:
    """x[i, :, j] = values, or += with `accumulate`: self, indices, values."""
    call_arguments = schema.arguments(node)
    indexed = [k for k, index in enumerate(call_arguments["indices"]) if index is not None]
    indices = [fake(call_arguments["indices"][k]) for k in indexed]
    if any(index.dtype not in (torch.int64, torch.int32) for index in indices):
        return Declined("positions selected by a mask")
    ranks = [index.ndim for index in indices]
    if not ranks or not max(ranks):
        return Declined("values combined at one position without an axis")
    edges = [f"!e{k}" for k in range(max(ranks))]
    rank = fake(call_arguments["self"]).ndim
    x = [f"!n{k}" if k in indexed else f"a{k}" for k in range(rank)]
    values = [axis for axis in x if not axis.startswith("!")]
    is_adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    first = indexed[0] if is_adjacent else 0
    values[first:first] = edges
    values = values[len(values) - fake(call_arguments["values"]).ndim :]
    operands = [x, *(edges[len(edges) - n :] for n in ranks), values]
    return f"{', '.join(map(' '.join, operands))} -> {' '.join(x)}"


def _segments(node: fx.Node) -> str | Declined:
    """Segments of the first axis, by their lengths."""
    call_arguments = schema.arguments(node)
    others = (call_arguments[name] for name in ("indices", "offsets"))
    if call_arguments["lengths"] is None or any(value is not None for value in others):
        return Declined("segments by other than their lengths")
    if call_arguments["axis"] or fake(call_arguments["lengths"]).ndim != 1:
        return Declined("segments of an axis other than the first")
    rest = " ".join(f"a{k}" for k in range(1, fake(call_arguments["data"]).ndim))
    return f"!e {rest}, !n -> !n {rest}"


_X, _Y = S((4, 3)), S((6, 3))
_INDEX, _EACH = S((6,), of=4), S((6, 3), of=4)
_REDUCE = ("sum", "prod", "mean", "amax", "amin")


def _draw_operand(rows: int, how: str) -> S:
    """An operand of a case. Factors of products are not 0: then others would not matter."""
    return S((rows, 3), of="positive" if how == "prod" else "normal")


_CASES: dict[str, Any] = {
    "index_add.default": (_along_index, [((_X, 0, _INDEX, _Y), {}), (
        (S((2, 4, 3)), 1, _INDEX, S((2, 6, 3))), {"alpha": 2})]),
    "index_reduce.default": (_along_index, [
        ((_draw_operand(4, how), 0, _INDEX, _draw_operand(6, how), how), {"include_self": include})
        for how in _REDUCE[1:] for include in (True, False)]),
    "index_copy.default": (_along_index, [((_X, 0, S((3,), True, of=4), S((3, 3))), {})]),
    "scatter_add.default": (_by_element, [((_X, 0, _EACH, _Y), {}), (
        (S((3, 4)), 1, S((3, 6), of=4), S((3, 6))), {})]),
    "scatter_reduce.two": (_by_element, [
        ((_draw_operand(4, how), 0, _EACH, _draw_operand(6, how), how), {"include_self": include})
        for how in _REDUCE for include in (True, False)]),
    "scatter.src": (_by_element, [((_X, 0, S((1, 3), of=4), S((1, 3))), {})]),
    "scatter.value": (_by_element, [((_X, 0, _EACH, 0.5), {})]),
    "index_put.default": (_put, [
        ((_X, [_INDEX], _Y, True), {}),
        ((S((3, 4)), [None, _INDEX], S((3, 6)), True), {}),
        ((S((4, 3, 5)), [_INDEX, None, S((6,), of=5)], S((6, 3)), True), {}),
        ((S((4, 3)), [S((2, 6), of=4)], S((3,)), True), {}),
        ((_X, [_INDEX], S((), True)), {})]),
}  # fmt: skip
ENTRIES = [
    *(
        (f"aten.{name}", Entry(line, fill="scatter", cases=tuple(Case(*case) for case in cases)))
        for name, (line, cases) in _CASES.items()
    ),
    (
        "aten.segment_reduce.default",
        Entry(
            _segments,
            fill="scatter",
            cases=tuple(
                Case((_Y, how), {"lengths": S((4,), of=2), "unsafe": True, "initial": 0.5})
                for how in ("sum", "mean", "max", "min")
            ),
        ),
    ),
]
