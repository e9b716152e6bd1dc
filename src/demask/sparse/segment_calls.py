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
from torch import Tensor, fx

from demask.errors import BadInput
from demask.ops.schema import same_size
from demask.ops.traits import PADS, RESHAPES, TRANSPOSES
from demask.sparse.called_op import POINTWISE, SOFTMAX, CalledOp, Match, Numbers, Shape
from demask.sparse.segment_resizes import RESIZES

aten = torch.ops.aten
LAST = 2**63 - 1  # end of a slice without an end
MODES = ("reflect", "replicate", "circular")  # of pads


def _ints(values: Sequence[Any]) -> Numbers | None:
    return tuple(values) if all(type(n) is int for n in values) else None


def _permuted(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    rank = node.meta["val"].ndim
    order = list(range(rank))
    if "dims" in arguments:
        order = [n % rank for n in arguments["dims"]]
    else:
        a, b = arguments["dim0"] % rank, arguments["dim1"] % rank
        order[a], order[b] = order[b], order[a]
    return (arguments["self"],), tuple(order), None


def _reshaped(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    """A reshape with at most one size that is known only at run time; for any number of images, if
    it keeps that."""
    before, after = arguments["self"].meta["val"].shape, node.meta["val"].shape
    sizes = [n if type(n) is int else -1 for n in after]
    if len(before) > 1 and len(after) > 1 and -1 not in sizes and before[0] == after[0]:
        sizes[0] = -1
    return ((arguments["self"],), tuple(sizes), None) if sizes.count(-1) < 2 else None


def _sliced(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    start, end, step = (arguments[key] for key in ("start", "end", "step"))
    numbers = arguments["dim"], 0 if start is None else start, LAST if end is None else end, step
    size = arguments["self"].meta["val"].shape[arguments["dim"]]
    is_known = _ints(numbers) is not None and type(size) is int
    return ((arguments["self"],), numbers, None) if is_known else None


def _taken(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    return (arguments["self"],), (arguments["dim"],), arguments["index"]


def _pads(arguments: Mapping[str, Any]) -> Match | None:
    pads = _ints(arguments["pad"])
    is_plain = pads is not None and min(pads, default=-1) >= 0
    return ((arguments["self"],), pads, None) if is_plain and pads else None


def _padded(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    """Zeros around a value."""
    is_zero = arguments.get("mode", "constant") == "constant" and arguments["value"] in (None, 0)
    return _pads(arguments) if is_zero else None


def _bordered(mode: str) -> CalledOp:
    """Elements of a value around it."""

    def match(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
        return _pads(arguments) if arguments["mode"] == mode else None

    return CalledOp(
        aten.pad.default, lambda xs, n, index: (xs[0], list(n), mode), (aten.pad.default,), match,
        _padded_shape)  # fmt: skip


def _joined(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    parts = tuple(arguments["tensors"])
    has_rank = all(part.meta["val"].ndim == node.meta["val"].ndim for part in parts)
    return (parts, (arguments["dim"],), None) if has_rank else None


def _of_number(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    """A call with a tensor and a number."""
    x, number = arguments["self"], arguments["other"]
    is_plain = arguments.get("alpha", 1) == 1 and arguments.get("rounding_mode") is None
    is_number = type(number) in (int, float) and isinstance(x, fx.Node)
    return ((x,), (number,), None) if is_number and is_plain else None


def _of_two(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    """A call with two tensors of the shape of the result."""
    sides = arguments["self"], arguments["other"]
    if arguments.get("alpha", 1) != 1 or not all(isinstance(side, fx.Node) for side in sides):
        return None
    shape = node.meta["val"].shape
    return (sides, (), None) if all(_has_shape(side, shape) for side in sides) else None


def _has_shape(node: fx.Node, shape: Shape) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.ndim != len(shape):
        return False
    return all(map(same_size, value.shape, shape))


def _of_one(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    return (arguments["self"],), (), None


def _softmax(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    """A softmax over channels of tokens, in the dtype of its operand."""
    rank = node.meta["val"].ndim
    is_last = arguments["dim"] % rank == rank - 1 and arguments["dtype"] is None
    return ((arguments["self"],), (), None) if is_last else None


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


def _axis(shape: Shape, axis: Any) -> int:
    if not -len(shape) <= axis < len(shape):
        raise BadInput(f"expected an axis of {shape}, got {axis!r:.40}")
    return int(axis) % len(shape)


def _with_size(shape: Shape, axis: int, size: Any) -> Shape:
    return (*shape[:axis], size, *shape[axis + 1 :])


def _sliced_shape(shapes: Sequence[Shape], n: Numbers, count: int) -> Shape:
    axis, size = _axis(shapes[0], n[0]), shapes[0][_axis(shapes[0], n[0])]
    if n[3] < 1:
        raise BadInput(f"expected a positive step of a slice, got {n!r:.80}")
    if type(size) is not int:
        raise BadInput(f"expected a slice of an axis of known size, got {n!r:.80}")
    return _with_size(shapes[0], axis, len(range(*slice(*n[1:]).indices(size))))


def _taken_shape(shapes: Sequence[Shape], n: Numbers, count: int) -> Shape:
    return _with_size(shapes[0], _axis(shapes[0], n[0]), count)


def _padded_shape(shapes: Sequence[Shape], n: Numbers, count: int) -> Shape:
    shape = list(shapes[0])
    if len(n) % 2 or len(n) > 2 * len(shape) or min(n, default=0) < 0:
        raise BadInput(f"expected padding before and after axes of {shapes[0]}, got {n!r:.80}")
    for k in range(len(n) // 2):
        shape[-1 - k] = shape[-1 - k] + n[2 * k] + n[2 * k + 1]
    return tuple(shape)


def _joined_shape(shapes: Sequence[Shape], n: Numbers, count: int) -> Shape:
    axis = _axis(shapes[0], n[0])
    same = [_with_size(shape, axis, 0) for shape in shapes if len(shape) == len(shapes[0])]
    if len(same) < len(shapes) or any(shape != same[0] for shape in same):
        raise BadInput(f"expected shapes that differ only in axis {axis}, got {shapes}")
    total = shapes[0][axis]
    for shape in shapes[1:]:
        total = total + shape[axis]
    return _with_size(shapes[0], axis, total)


def _same_shape(shapes: Sequence[Shape], n: Numbers, count: int) -> Shape:
    if any(tuple(shape) != tuple(shapes[0]) for shape in shapes):
        raise BadInput(f"expected values of one shape, got {shapes}")
    return shapes[0]


def _number(op: Any, *targets: Any) -> CalledOp:
    """A pointwise call of a value and a number."""
    return CalledOp(op, lambda xs, n, index: (xs[0], n[0]), targets, _of_number, _same_shape,
                    POINTWISE, numbers=1)  # fmt: skip


def _two(op: Any) -> CalledOp:
    """A pointwise call of two values."""
    return CalledOp(op, lambda xs, n, index: tuple(xs), (op,), _of_two, _same_shape, POINTWISE,
                    operands=2, numbers=0)  # fmt: skip


#: name in the texts of programs -> the op. Entries for the same calls are tried in this order.
CALLED: dict[str, CalledOp] = {
    "permute": CalledOp(
        aten.permute.default, lambda xs, n, index: (xs[0], list(n)),
        tuple(TRANSPOSES), _permuted, _permuted_shape),
    "reshape": CalledOp(
        aten.reshape.default, lambda xs, n, index: (xs[0], list(n)),
        (*RESHAPES, aten.unsqueeze.default), _reshaped, _reshaped_shape),
    "slice": CalledOp(
        aten.slice.Tensor, lambda xs, n, index: (xs[0], *n), (aten.slice.Tensor,), _sliced,
        _sliced_shape, numbers=4),
    "take": CalledOp(
        aten.index_select.default, lambda xs, n, index: (xs[0], n[0], index),
        (aten.index_select.default,), _taken, _taken_shape, numbers=1, indexed=True),
    "pad": CalledOp(
        aten.constant_pad_nd.default, lambda xs, n, index: (xs[0], list(n)),
        tuple(PADS), _padded, _padded_shape),
    **{mode: _bordered(mode) for mode in MODES},
    **RESIZES,
    "join": CalledOp(
        aten.cat.default, lambda xs, n, index: (list(xs), n[0]), (aten.cat.default,), _joined,
        _joined_shape, operands=None, numbers=1),
    "times": _number(aten.mul.Tensor, aten.mul.Tensor, aten.mul.Scalar),
    "over": _number(aten.div.Tensor, aten.div.Tensor, aten.div.Scalar),
    "plus": _number(aten.add.Tensor, aten.add.Tensor, aten.add.Scalar),
    "product": _two(aten.mul.Tensor),
    "difference": _two(aten.sub.Tensor),
    "exp": CalledOp(
        aten.exp.default, lambda xs, n, index: (xs[0],), (aten.exp.default,), _of_one, _same_shape,
        POINTWISE, numbers=0),
    "softmax": CalledOp(
        aten.softmax.int, lambda xs, n, index: (xs[0], -1), (aten.softmax.int,), _softmax,
        _same_shape, SOFTMAX, numbers=0),
}  # fmt: skip


def called_by_target() -> dict[Any, list[str]]:
    """The names of the entries that calls of an op of graphs may be."""
    names: dict[Any, list[str]] = {}
    for name, entry in CALLED.items():
        for target in entry.targets:
            names.setdefault(target, []).append(name)
    return names
