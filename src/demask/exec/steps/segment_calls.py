"""Calls of single ATen ops as steps of segments: one table, with an entry per op.

An entry states the op, its arguments, which calls of graphs it is, and how plans compute it
(`exec.tape.write_call`). Moves need no code for that: the op itself, applied to the numbers of
the elements of its operands, tells where each element of the result is.

**Recurrent layers** (LSTM, GRU). An op of segments has one result, so theirs are rows: the outputs of
all time steps, in the order of time, and after them the last state, the cell state of an LSTM.

    rows = cat([outputs, last state], time)

Operands: the input [time, batch, features], or [batch, time, features]; then the initial states
[1, batch, hidden], unless they are zero. Numbers: hidden units; flags: whether there are biases,
whether the axis of batches is first, whether time runs backwards. Parameters in torch's order.

**Resizes** of images and signals. Their numbers: 1 or 0 for `align_corners` of ops that have it, then
per axis the new size, an integer, or the factor, a float, from which torch computes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import inf, prod
from typing import Any

import torch
from torch import fx

from demask.errors import BadInput
from demask.exec.steps.called_op import (
    FACTORS,
    MOVED,
    OVER_CHANNELS,
    PARAMETERS,
    POINTWISE,
    POSITIONS,
    PRODUCT,
    RECURRENT,
    RESIZED,
    CalledOp,
    Match,
    Numbers,
    Shape,
    axis_of,
    same_shape,
    with_size,
)
from demask.exec.steps.recurrent_rows import initial_states, recurrence_of
from demask.exec.steps.segment_steps import CHANNELS_LAST, SPATIAL
from demask.graph.queries import has_shape
from demask.ops.entries.recurrent import GATES
from demask.ops.schema import fake, same_size
from demask.ops.traits import PADS, PRODUCTS_OF_VALUES, RESHAPES, TRANSPOSES

aten = torch.ops.aten


MATRICES = ("matrices",)


def _match_softmax(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    """A softmax over channels of tokens, in the dtype of its operand."""
    rank = fake(node).ndim
    is_last = arguments["dim"] % rank == rank - 1 and arguments["dtype"] is None
    return ((arguments["self"],), (), ()) if is_last else None


def _match_norm(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    """A norm over channels of tokens, by constants if by any."""
    x, eps = arguments["input"], arguments["eps"]
    sizes, factors = list(arguments["normalized_shape"]), [arguments["weight"]]
    if "bias" in arguments:
        factors.append(arguments["bias"])
    while factors and factors[-1] is None:
        factors.pop()
    is_plain = len(sizes) == 1 and type(sizes[0]) is int and type(eps) is float
    return ((x,), (sizes[0], eps), tuple(factors)) if is_plain and None not in factors else None


def _norm_shape(shapes: Sequence[Shape], n: Numbers, count: int) -> Shape:
    channels = shapes[0][-1]
    if type(n[0]) is not int or n[0] < 1 or channels != n[0]:
        raise BadInput(f"expected a norm of {channels} channels, got {n}")
    if count % n[0] or count // n[0] > 2 or n[1] < 0:
        raise BadInput(f"expected factors of {channels} channels, got {count}, and {n}")
    return shapes[0]


def _rms_shape(shapes: Sequence[Shape], n: Numbers, count: int) -> Shape:
    if count not in (0, n[0]):
        raise BadInput(f"expected a factor for each of {n[0]} channels, got {count}")
    return _norm_shape(shapes, n, count)


def _match_product(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    """A product of matrices; one per item of a batch, the same for both operands."""
    left, right = (arguments[key] for key in ("self", "mat2" if "mat2" in arguments else "other"))
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return None
    shapes = fake(left).shape, fake(right).shape
    is_batched = min(map(len, shapes)) >= 2 and _same_sizes(shapes[0][:-2], shapes[1][:-2])
    return ((left, right), (), ()) if is_batched else None


def _product_shape(shapes: Sequence[Shape], n: Numbers, count: int) -> Shape:
    left, right = (tuple(shape) for shape in shapes)
    if left[:-2] != right[:-2] or left[-1] != right[-2]:
        raise BadInput(f"expected matrices that can be multiplied, got {left} and {right}")
    return (*left[:-1], right[-1])


def _match_attention(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    """An attention with its usual scale, without dropout and mask, or with a mask that is added to
    the scores of each head (`rewrites/segment.py`)."""
    names = "query", "key", "value", "attn_mask"
    query, key, value, mask = (arguments[name] for name in names)
    if any(arguments[name] for name in ("dropout_p", "is_causal", "scale", "enable_gqa")):
        return None
    operands = (query, key, value) if mask is None else (query, key, value, mask)
    shapes = [fake(x).shape for x in operands]
    batch = shapes[0][:-2]
    if not batch or not all(_same_sizes(shape[:-2], batch) for shape in shapes):
        return None
    if mask is not None and not _same_sizes(shapes[3][-2:], (shapes[0][-2], shapes[1][-2])):
        return None
    return operands, (), ()


def _attention_shape(shapes: Sequence[Shape], n: Numbers, count: int) -> Shape:
    if len(shapes) not in (3, 4):
        raise BadInput(f"expected query, key, value and perhaps a mask, got {shapes}")
    batch, (rows, width) = shapes[0][:-2], shapes[0][-2:]
    columns, last = shapes[1][-2], shapes[2][-1]
    fits = len(shapes[0]) > 2 and all(shape[:-2] == batch for shape in shapes)
    wanted = (rows, width), (columns, width), (columns, last), (rows, columns)
    if not fits or any(s[-2:] != w for s, w in zip(shapes, wanted, strict=False)):
        raise BadInput(f"expected operands of one attention, got {shapes}")
    return (*batch, rows, last)


def _same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(same_size, a, b))


def _match_prelu(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    """A PReLU of an image or a signal, with a weight for each channel."""
    x, weight = arguments["self"], arguments["weight"]
    has_each = fake(node).ndim in (3, 4) and same_size(fake(weight).numel(), fake(node).shape[1])
    return ((x,), (), (weight,)) if has_each else None


def _prelu_shape(shapes: Sequence[Shape], n: Numbers, count: int) -> Shape:
    if count != shapes[0][1]:
        raise BadInput(f"expected a weight for each of {shapes[0][1]} channels, got {count}")
    return shapes[0]


#: entries of `segment_calls.CALLED`
TOKEN_CALLS: dict[str, CalledOp] = {
    "softmax": CalledOp(
        aten.softmax.int, lambda xs, n, c: (xs[0], -1), (aten.softmax.int,), _match_softmax, same_shape,
        OVER_CHANNELS, numbers=0, kinds=CHANNELS_LAST),
    "norm": CalledOp(
        aten.layer_norm.default, lambda xs, n, c: (xs[0], [n[0]], *(*c, None, None)[:2], n[1]),
        (aten.layer_norm.default,), _match_norm, _norm_shape, OVER_CHANNELS, numbers=2,
        constants=FACTORS, optional=True, kinds=CHANNELS_LAST),
    "rms": CalledOp(
        aten.rms_norm.default, lambda xs, n, c: (xs[0], [n[0]], *(*c, None)[:1], n[1]),
        (aten.rms_norm.default,), _match_norm, _rms_shape, OVER_CHANNELS, numbers=2,
        constants=FACTORS, optional=True, kinds=CHANNELS_LAST),
    "matmul": CalledOp(
        aten.matmul.default, lambda xs, n, c: (xs[0], xs[1]),
        tuple(PRODUCTS_OF_VALUES), _match_product, _product_shape, PRODUCT, operands=2,
        numbers=0, kinds=MATRICES),
    "attention": CalledOp(
        aten.scaled_dot_product_attention.default, lambda xs, n, c: tuple(xs),
        (aten.scaled_dot_product_attention.default,), _match_attention, _attention_shape, PRODUCT,
        operands=None, numbers=0, kinds=MATRICES),
}  # fmt: skip


LARGEST_SIZE = 2**24  # of an axis, as in plans
EXACT_FACTORS = (2.0, 4.0, 8.0, 16.0)  # torch reads the same pixels for such a factor and its sizes


def sizes_and_factors(numbers: Numbers, flags: int) -> tuple[list[int] | None, list[float] | None]:
    """New sizes, or factors. flags: how many numbers come before them."""
    rest = list(numbers[flags:])
    return (rest, None) if type(rest[0]) is int else (None, rest)


def resized_sizes(sizes: Sequence[Any], numbers: Numbers, flags: int) -> list[Any]:
    """The new size of each axis, from the old ones, which may be symbolic."""
    return [n if type(n) is int else torch.sym_int(size * n) for size, n in zip(sizes, numbers[flags:], strict=True)]


def _resize_arguments(flags: int, xs: Sequence[Any], n: Numbers, c: Any) -> tuple[Any, ...]:
    sizes, factors = sizes_and_factors(n, flags)
    return (xs[0], sizes, *map(bool, n[:flags]), factors)


def _match_resize(flags: int, arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    x, sizes, factors = (arguments[key] for key in ("input", "output_size", "scale_factors"))
    value = fake(node)
    numbers: list[Any]
    if sizes is None:
        numbers = [float(factor) for factor in factors or ()]
    elif all(type(size) is int for size in sizes):
        numbers = list(sizes)
    else:
        numbers = _resize_factors(fake(x).shape[2:], value.shape[2:])
    flag = [int(arguments["align_corners"])] if flags else []
    return ((x,), (*flag, *numbers), ()) if len(numbers) == value.ndim - 2 else None


def _resize_factors(before: Shape, after: Shape) -> list[float]:
    """The factors of sizes that are known only at run time; none unless they are powers of two."""
    factors = []
    for old, new in zip(before, after, strict=True):
        same = [f for f in EXACT_FACTORS if same_size(new, old * int(f))]
        factors += same[:1] or ([1.0] if same_size(new, old) else [])
    return factors


def _resized_shape(axes: int, flags: int, shapes: Sequence[Shape], n: Numbers, count: int) -> Shape:
    x, rest = shapes[0], n[flags:]
    one_type = len({type(value) for value in rest}) == 1
    if len(x) != axes + 2 or len(rest) != axes or not one_type:
        raise BadInput(f"expected {axes} sizes or factors of an image or a signal, got {n!r:.80}")
    if any(flag not in (0, 1) for flag in n[:flags]) or not all(0 < v < inf for v in rest):
        raise BadInput(f"expected positive sizes or factors, after a flag, got {n!r:.80}")
    sizes = resized_sizes(x[2:], n, flags)
    if any(type(size) is int and not 1 <= size < LARGEST_SIZE for size in sizes):
        raise BadInput(f"expected new sizes of 1 to {LARGEST_SIZE - 1}, got {sizes}")
    return (*x[:2], *sizes)


def _resize(op: Any, axes: int, lowering: str, flags: int = 0) -> CalledOp:
    """The entry of an op. flags: whether it has `align_corners`."""
    return CalledOp(
        op,
        partial(_resize_arguments, flags),
        (op,),
        partial(_match_resize, flags),
        partial(_resized_shape, axes, flags),
        lowering,
        numbers=axes + flags,
        reals=True,
        kinds=SPATIAL,
    )


#: name in the texts of programs -> the op
RESIZES: dict[str, CalledOp] = {
    "nearest": _resize(aten.upsample_nearest2d.vec, 2, MOVED),
    "nearest exact": _resize(aten._upsample_nearest_exact2d.vec, 2, MOVED),
    "nearest of a signal": _resize(aten.upsample_nearest1d.vec, 1, MOVED),
    "nearest exact of a signal": _resize(aten._upsample_nearest_exact1d.vec, 1, MOVED),
    "linear of a signal": _resize(aten.upsample_linear1d.vec, 1, RESIZED, 1),
    "bilinear": _resize(aten.upsample_bilinear2d.vec, 2, RESIZED, 1),
    "bicubic": _resize(aten.upsample_bicubic2d.vec, 2, RESIZED, 1),
}


LARGEST_HIDDEN = 2**16


def _recurrent_rows(op: Any, states: int, operands: Sequence[Any], params: Sequence[Any], numbers: Numbers) -> Any:
    """The rows of a layer. states: how many the op has. Operands may be tensors or proxies."""
    hidden, biases, batch_first, backwards = numbers
    x, time = operands[0], int(batch_first)
    initial = list(operands[1:]) or [_zero_state(x, time, hidden)] * states
    if backwards:
        x = aten.flip.default(x, [time])
    hx = initial if states > 1 else initial[0]
    results = op(x, hx, list(params), bool(biases), 1, 0.0, False, False, bool(batch_first))
    out, last = results[0], results[states]
    if backwards:
        out = aten.flip.default(out, [time])
    last = aten.transpose.int(last, 0, 1) if batch_first else last
    return aten.cat.default([out, last], time)


def _zero_state(x: Any, time: int, hidden: int) -> Any:
    """Zeros [1, batch, hidden], without reading sizes, which proxies do not have; x may have no channels."""
    first = aten.sum.dim_IntList(aten.slice.Tensor(x, time, 0, 1), [2], True)
    first = aten.transpose.int(first, 0, 1) if time else first
    return aten.expand.default(aten.zeros_like.default(first), [1, -1, hidden])


def _match_recurrence(op: Any, arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    """The rows that `prepare_recurrent` writes."""
    call = recurrence_of(node)
    if call is None or call.node.target is not op:
        return None
    states = initial_states(call.node)
    numbers = call.hidden, int(call.has_biases), call.time, int(call.backwards)
    return (call.x, *states), numbers, tuple(call.params)


def _parameter_shapes(gates: int, channels: int, numbers: Numbers) -> list[tuple[int, ...]]:
    rows = gates * numbers[0]
    return [(rows, channels), (rows, numbers[0]), *[(rows,)] * (2 * numbers[1])]


def _shape_of_rows(gates: int, states: int, shapes: Sequence[Shape], n: Numbers, count: int) -> Shape:
    x, hidden = shapes[0], n[0]
    is_valid = 1 <= hidden < LARGEST_HIDDEN and all(flag in (0, 1) for flag in n[1:])
    if len(x) != 3 or not is_valid:
        raise BadInput(f"expected a recurrent layer of three axes, got {x} and {n!r:.80}")
    rows = gates * hidden
    if count != rows * (x[2] + hidden + 2 * n[1]):
        raise BadInput(f"expected parameters of {hidden} units for {x}, got {count}")
    if len(shapes) not in (1, 1 + states):
        raise BadInput(f"expected {states} initial states or none, got {len(shapes) - 1}")
    wanted = (1, x[0] if n[2] else x[1], hidden)
    if any(tuple(shape) != wanted for shape in shapes[1:]):
        raise BadInput(f"expected initial states of the shape {wanted}, got {shapes[1:]}")
    time = n[2]
    return (*with_size(x, time, x[time] + 1)[:2], hidden)


def _recurrence(op: Any, states: int) -> CalledOp:
    """The entry of an op. states: how many it has."""
    gates = GATES[str(op)]
    return CalledOp(
        partial(_recurrent_rows, op, states),
        lambda xs, n, c: (list(xs), list(c), n),
        (aten.cat.default,),
        partial(_match_recurrence, op),
        partial(_shape_of_rows, gates, states),
        RECURRENT,
        operands=None,
        numbers=4,
        constants=PARAMETERS,
        parts=partial(_parameter_shapes, gates),
        kinds=("tokens",),
    )


#: name in the texts of programs -> the op
RECURRENCES: dict[str, CalledOp] = {"lstm": _recurrence(aten.lstm.input, 2), "gru": _recurrence(aten.gru.input, 1)}


LAST = 2**63 - 1  # end of a slice without an end
MODES = ("reflect", "replicate", "circular")  # of pads


def _as_integers(values: Sequence[Any]) -> Numbers | None:
    return tuple(values) if all(type(n) is int for n in values) else None


def _match_permute(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    rank = fake(node).ndim
    order = list(range(rank))
    if "dims" in arguments:
        order = [n % rank for n in arguments["dims"]]
    else:
        a, b = arguments["dim0"] % rank, arguments["dim1"] % rank
        order[a], order[b] = order[b], order[a]
    return (arguments["self"],), tuple(order), ()


def _match_reshape(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
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


def _match_slice(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    start, end, step = (arguments[key] for key in ("start", "end", "step"))
    numbers = arguments["dim"], 0 if start is None else start, LAST if end is None else end, step
    size = fake(arguments["self"]).shape[arguments["dim"]]
    is_known = _as_integers(numbers) is not None and type(size) is int
    return ((arguments["self"],), numbers, ()) if is_known else None


def _match_take(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    return (arguments["self"],), (arguments["dim"],), (arguments["index"],)


def _match_pick(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    axis, index = arguments["dim"], arguments["index"]
    size = fake(arguments["self"]).shape[axis]
    return ((arguments["self"],), (axis, index), ()) if _as_integers((index, size)) else None


def _match_expand(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    """A value repeated along axes of known sizes; for any number of images, if it keeps that."""
    before, after = fake(arguments["self"]).shape, fake(node).shape
    first = len(after) - len(before)
    sizes = [-1 if k >= first and same_size(n, before[k - first]) else n for k, n in enumerate(after)]
    return ((arguments["self"],), tuple(sizes), ()) if _as_integers(sizes) else None


def _match_pads(arguments: Mapping[str, Any]) -> Match | None:
    pads = _as_integers(arguments["pad"])
    is_plain = pads is not None and min(pads, default=-1) >= 0
    return ((arguments["self"],), pads, ()) if is_plain and pads else None


def _match_zero_pad(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    is_zero = arguments.get("mode", "constant") == "constant" and arguments["value"] in (None, 0)
    return _match_pads(arguments) if is_zero else None


def _pad_with_mode(mode: str) -> CalledOp:
    """Elements of a value around it."""

    def match(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
        return _match_pads(arguments) if arguments["mode"] == mode else None

    return CalledOp(
        aten.pad.default, lambda xs, n, c: (xs[0], list(n), mode), (aten.pad.default,), match, _padded_shape
    )


def _match_join(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    parts = tuple(arguments["tensors"])
    has_rank = all(fake(part).ndim == fake(node).ndim for part in parts)
    return (parts, (arguments["dim"],), ()) if has_rank else None


def _match_with_number(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    x, number = arguments["self"], arguments["other"]
    is_plain = arguments.get("alpha", 1) == 1 and arguments.get("rounding_mode") is None
    is_number = type(number) in (int, float) and isinstance(x, fx.Node)
    return ((x,), (number,), ()) if is_number and is_plain else None


def _match_two_values(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    """A call with two tensors of the shape of the result."""
    sides = arguments["self"], arguments["other"]
    if arguments.get("alpha", 1) != 1 or not all(isinstance(side, fx.Node) for side in sides):
        return None
    shape = fake(node).shape
    return (sides, (), ()) if all(has_shape(side, shape) for side in sides) else None


def _match_one_value(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
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


def _pointwise_with_number(op: Any, *targets: Any) -> CalledOp:
    return CalledOp(op, lambda xs, n, c: (xs[0], n[0]), targets, _match_with_number, same_shape, POINTWISE, numbers=1)


def _pointwise_of_two(op: Any) -> CalledOp:
    return CalledOp(
        op, lambda xs, n, c: tuple(xs), (op,), _match_two_values, same_shape, POINTWISE, operands=2, numbers=0
    )


#: name in the texts of programs -> the op. Entries for the same calls are tried in this order.
CALLED: dict[str, CalledOp] = {
    "permute": CalledOp(
        aten.permute.default, lambda xs, n, c: (xs[0], list(n)),
        tuple(TRANSPOSES), _match_permute, _permuted_shape),
    "reshape": CalledOp(
        aten.reshape.default, lambda xs, n, c: (xs[0], list(n)),
        (*RESHAPES, aten.unsqueeze.default), _match_reshape, _reshaped_shape),
    "slice": CalledOp(
        aten.slice.Tensor, lambda xs, n, c: (xs[0], *n), (aten.slice.Tensor,), _match_slice,
        _sliced_shape, numbers=4),
    "take": CalledOp(
        aten.index_select.default, lambda xs, n, c: (xs[0], n[0], c[0]),
        (aten.index_select.default,), _match_take, _taken_shape, numbers=1, constants=POSITIONS),
    "pick": CalledOp(
        aten.select.int, lambda xs, n, c: (xs[0], n[0], n[1]), (aten.select.int,), _match_pick,
        _picked_shape, numbers=2),
    "expand": CalledOp(
        aten.expand.default, lambda xs, n, c: (xs[0], list(n)), (aten.expand.default,), _match_expand,
        _expanded_shape),
    "pad": CalledOp(
        aten.constant_pad_nd.default, lambda xs, n, c: (xs[0], list(n)),
        tuple(PADS), _match_zero_pad, _padded_shape),
    **{mode: _pad_with_mode(mode) for mode in MODES},
    **RESIZES,
    **RECURRENCES,
    "join": CalledOp(
        aten.cat.default, lambda xs, n, c: (list(xs), n[0]), (aten.cat.default,), _match_join,
        _joined_shape, operands=None, numbers=1),
    "times": _pointwise_with_number(aten.mul.Tensor, aten.mul.Tensor, aten.mul.Scalar),
    "over": _pointwise_with_number(aten.div.Tensor, aten.div.Tensor, aten.div.Scalar),
    "plus": _pointwise_with_number(aten.add.Tensor, aten.add.Tensor, aten.add.Scalar),
    "product": _pointwise_of_two(aten.mul.Tensor),
    "difference": _pointwise_of_two(aten.sub.Tensor),
    "exp": CalledOp(
        aten.exp.default, lambda xs, n, c: (xs[0],), (aten.exp.default,), _match_one_value, same_shape,
        POINTWISE, numbers=0),
    "prelu": CalledOp(
        aten.prelu.default, lambda xs, n, c: (xs[0], c[0]), (aten.prelu.default,), _match_prelu, _prelu_shape,
        OVER_CHANNELS, numbers=0, constants=FACTORS, kinds=SPATIAL),
    **TOKEN_CALLS,
}  # fmt: skip


def called_by_target() -> dict[Any, list[str]]:
    """The names of the entries that calls of an op of graphs may be."""
    names: dict[Any, list[str]] = {}
    for name, entry in CALLED.items():
        for target in entry.targets:
            names.setdefault(target, []).append(name)
    return names
