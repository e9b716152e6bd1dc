"""Calls of single ATen ops as steps of segments: one table, with an entry per op.

An entry states the op, its arguments, which calls of graphs it is, and how plans compute it
(`sparse.plan.call_steps`). Moves need no code for that: the op itself, applied to the numbers of
the elements of its operands, tells where each element of the result is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from demask.errors import BadInput
from demask.graph.queries import has_shape
from demask.ops.schema import fake, same_size
from demask.ops.traits import PADS, RESHAPES, TRANSPOSES
from demask.sparse.calls.called_op import (
    POINTWISE,
    POSITIONS,
    CalledOp,
    Match,
    Numbers,
    Shape,
    axis_of,
    same_shape,
    with_size,
)
from demask.sparse.calls.recurrent_calls import RECURRENCES
from demask.sparse.calls.resize_calls import RESIZES
from demask.sparse.calls.token_calls import TOKEN_CALLS
from demask.sparse.segment_steps import CallStep

aten = torch.ops.aten
LAST = 2**63 - 1  # end of a slice without an end
MODES = ("reflect", "replicate", "circular")  # of pads


def _ints(values: Sequence[Any]) -> Numbers | None:
    return tuple(values) if all(type(n) is int for n in values) else None


def _permuted(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    rank = fake(node).ndim
    order = list(range(rank))
    if "dims" in arguments:
        order = [n % rank for n in arguments["dims"]]
    else:
        a, b = arguments["dim0"] % rank, arguments["dim1"] % rank
        order[a], order[b] = order[b], order[a]
    return (arguments["self"],), tuple(order), ()


def _reshaped(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    """A reshape with at most one size that is known only at run time; for any number of images, if
    it keeps that."""
    sizes = sizes_of_reshape(fake(arguments["self"]).shape, fake(node).shape)
    return None if sizes is None else ((arguments["self"],), sizes, ())


def sizes_of_reshape(before: Shape, after: Shape) -> Numbers | None:
    """The numbers of a reshape; None if there are none."""
    sizes = [n if type(n) is int else -1 for n in after]
    if len(before) > 1 and len(after) > 1 and -1 not in sizes and before[0] == after[0]:
        sizes[0] = -1
    return tuple(sizes) if sizes.count(-1) < 2 else None


def _sliced(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    start, end, step = (arguments[key] for key in ("start", "end", "step"))
    numbers = arguments["dim"], 0 if start is None else start, LAST if end is None else end, step
    size = fake(arguments["self"]).shape[arguments["dim"]]
    is_known = _ints(numbers) is not None and type(size) is int
    return ((arguments["self"],), numbers, ()) if is_known else None


def _taken(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    return (arguments["self"],), (arguments["dim"],), (arguments["index"],)


def _picked(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    """One position along an axis."""
    axis, index = arguments["dim"], arguments["index"]
    size = fake(arguments["self"]).shape[axis]
    return ((arguments["self"],), (axis, index), ()) if _ints((index, size)) else None


def _expanded(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    """A value repeated along axes of known sizes; for any number of images, if it keeps that."""
    before, after = fake(arguments["self"]).shape, fake(node).shape
    first = len(after) - len(before)
    sizes = [-1 if k >= first and same_size(n, before[k - first]) else n for k, n in enumerate(after)]
    return ((arguments["self"],), tuple(sizes), ()) if _ints(sizes) else None


def _pads(arguments: Mapping[str, Any]) -> Match | None:
    pads = _ints(arguments["pad"])
    is_plain = pads is not None and min(pads, default=-1) >= 0
    return ((arguments["self"],), pads, ()) if is_plain and pads else None


def _padded(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    """Zeros around a value."""
    is_zero = arguments.get("mode", "constant") == "constant" and arguments["value"] in (None, 0)
    return _pads(arguments) if is_zero else None


def _bordered(mode: str) -> CalledOp:
    """Elements of a value around it."""

    def match(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
        return _pads(arguments) if arguments["mode"] == mode else None

    return CalledOp(
        aten.pad.default, lambda xs, n, c: (xs[0], list(n), mode), (aten.pad.default,), match, _padded_shape
    )


def _joined(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    parts = tuple(arguments["tensors"])
    has_rank = all(fake(part).ndim == fake(node).ndim for part in parts)
    return (parts, (arguments["dim"],), ()) if has_rank else None


def _of_number(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    """A call with a tensor and a number."""
    x, number = arguments["self"], arguments["other"]
    is_plain = arguments.get("alpha", 1) == 1 and arguments.get("rounding_mode") is None
    is_number = type(number) in (int, float) and isinstance(x, fx.Node)
    return ((x,), (number,), ()) if is_number and is_plain else None


def _of_two(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    """A call with two tensors of the shape of the result."""
    sides = arguments["self"], arguments["other"]
    if arguments.get("alpha", 1) != 1 or not all(isinstance(side, fx.Node) for side in sides):
        return None
    shape = fake(node).shape
    return (sides, (), ()) if all(has_shape(side, shape) for side in sides) else None


def _of_one(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    return (arguments["self"],), (), ()


def _permuted_shape(shapes: Sequence[Shape], n: Numbers, count: int) -> Shape:
    if sorted(n) != list(range(len(shapes[0]))):
        raise BadInput(f"expected an order of {len(shapes[0])} axes, got {n!r:.80}")
    return tuple(shapes[0][axis] for axis in n)


def _reshaped_shape(shapes: Sequence[Shape], n: Numbers, count: int) -> Shape:
    total, rest = prod(shapes[0]), prod(size for size in n if size != -1)
    if n.count(-1) > 1 or min(n, default=1) < -1 or 0 in n:
        raise BadInput(f"expected positive sizes and at most one of -1, got {n!r:.80}")
    unknown = total // rest
    if type(total) is int and rest * (unknown if -1 in n else 1) != total:
        raise BadInput(f"expected {total} elements, got the shape {n!r:.80}")
    return tuple(unknown if size == -1 else size for size in n)


def _sliced_shape(shapes: Sequence[Shape], n: Numbers, count: int) -> Shape:
    axis, size = axis_of(shapes[0], n[0]), shapes[0][axis_of(shapes[0], n[0])]
    if n[3] < 1:
        raise BadInput(f"expected a positive step of a slice, got {n!r:.80}")
    if type(size) is not int:
        raise BadInput(f"expected a slice of an axis of known size, got {n!r:.80}")
    return with_size(shapes[0], axis, len(range(*slice(*n[1:]).indices(size))))


def _taken_shape(shapes: Sequence[Shape], n: Numbers, count: int) -> Shape:
    return with_size(shapes[0], axis_of(shapes[0], n[0]), count)


def _picked_shape(shapes: Sequence[Shape], n: Numbers, count: int) -> Shape:
    axis = axis_of(shapes[0], n[0])
    if not -shapes[0][axis] <= n[1] < shapes[0][axis]:
        raise BadInput(f"expected a position along axis {axis} of {shapes[0]}, got {n[1]!r:.40}")
    return (*shapes[0][:axis], *shapes[0][axis + 1 :])


def _expanded_shape(shapes: Sequence[Shape], n: Numbers, count: int) -> Shape:
    before = (1,) * (len(n) - len(shapes[0])) + tuple(shapes[0])
    first = len(n) - len(shapes[0])
    if first < 0 or any(
        k < first if new == -1 else new < 1 or (new != old and old != 1)
        for k, (new, old) in enumerate(zip(n, before, strict=True))
    ):
        raise BadInput(f"expected sizes to which {shapes[0]} can be expanded, got {n!r:.80}")
    return tuple(old if new == -1 else new for new, old in zip(n, before, strict=True))


def _padded_shape(shapes: Sequence[Shape], n: Numbers, count: int) -> Shape:
    shape = list(shapes[0])
    if len(n) % 2 or len(n) > 2 * len(shape) or min(n, default=0) < 0:
        raise BadInput(f"expected padding before and after axes of {shapes[0]}, got {n!r:.80}")
    for k in range(len(n) // 2):
        shape[-1 - k] = shape[-1 - k] + n[2 * k] + n[2 * k + 1]
    return tuple(shape)


def _joined_shape(shapes: Sequence[Shape], n: Numbers, count: int) -> Shape:
    axis = axis_of(shapes[0], n[0])
    same = [with_size(shape, axis, 0) for shape in shapes if len(shape) == len(shapes[0])]
    if len(same) < len(shapes) or any(shape != same[0] for shape in same):
        raise BadInput(f"expected shapes that differ only in axis {axis}, got {shapes}")
    total = shapes[0][axis]
    for shape in shapes[1:]:
        total = total + shape[axis]
    return with_size(shapes[0], axis, total)


def _number(op: Any, *targets: Any) -> CalledOp:
    """A pointwise call of a value and a number."""
    return CalledOp(op, lambda xs, n, c: (xs[0], n[0]), targets, _of_number, same_shape, POINTWISE, numbers=1)


def _two(op: Any) -> CalledOp:
    """A pointwise call of two values."""
    return CalledOp(op, lambda xs, n, c: tuple(xs), (op,), _of_two, same_shape, POINTWISE, operands=2, numbers=0)


#: name in the texts of programs -> the op. Entries for the same calls are tried in this order.
CALLED: dict[str, CalledOp] = {
    "permute": CalledOp(
        aten.permute.default, lambda xs, n, c: (xs[0], list(n)),
        tuple(TRANSPOSES), _permuted, _permuted_shape),
    "reshape": CalledOp(
        aten.reshape.default, lambda xs, n, c: (xs[0], list(n)),
        (*RESHAPES, aten.unsqueeze.default), _reshaped, _reshaped_shape),
    "slice": CalledOp(
        aten.slice.Tensor, lambda xs, n, c: (xs[0], *n), (aten.slice.Tensor,), _sliced,
        _sliced_shape, numbers=4),
    "take": CalledOp(
        aten.index_select.default, lambda xs, n, c: (xs[0], n[0], c[0]),
        (aten.index_select.default,), _taken, _taken_shape, numbers=1, constants=POSITIONS),
    "pick": CalledOp(
        aten.select.int, lambda xs, n, c: (xs[0], n[0], n[1]), (aten.select.int,), _picked,
        _picked_shape, numbers=2),
    "expand": CalledOp(
        aten.expand.default, lambda xs, n, c: (xs[0], list(n)), (aten.expand.default,), _expanded,
        _expanded_shape),
    "pad": CalledOp(
        aten.constant_pad_nd.default, lambda xs, n, c: (xs[0], list(n)),
        tuple(PADS), _padded, _padded_shape),
    **{mode: _bordered(mode) for mode in MODES},
    **RESIZES,
    **RECURRENCES,
    "join": CalledOp(
        aten.cat.default, lambda xs, n, c: (list(xs), n[0]), (aten.cat.default,), _joined,
        _joined_shape, operands=None, numbers=1),
    "times": _number(aten.mul.Tensor, aten.mul.Tensor, aten.mul.Scalar),
    "over": _number(aten.div.Tensor, aten.div.Tensor, aten.div.Scalar),
    "plus": _number(aten.add.Tensor, aten.add.Tensor, aten.add.Scalar),
    "product": _two(aten.mul.Tensor),
    "difference": _two(aten.sub.Tensor),
    "exp": CalledOp(
        aten.exp.default, lambda xs, n, c: (xs[0],), (aten.exp.default,), _of_one, same_shape,
        POINTWISE, numbers=0),
    **TOKEN_CALLS,
}  # fmt: skip


def lowering_of(step: Any) -> str:
    """How plans compute the op that a step calls; "" for other steps."""
    return CALLED[step.call].lowering if isinstance(step, CallStep) else ""


def called_by_target() -> dict[Any, list[str]]:
    """The names of the entries that calls of an op of graphs may be."""
    names: dict[Any, list[str]] = {}
    for name, entry in CALLED.items():
        for target in entry.targets:
            names.setdefault(target, []).append(name)
    return names
