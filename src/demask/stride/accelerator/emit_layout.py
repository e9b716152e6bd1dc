"""Rules of ATen calls that change the layout of values: views, moves, slices.

Values are stored in row-major order, so that another shape with as many elements is free.
Everything else moves blocks: a cat moves each part, a pad fills a value and moves one block into
it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from demask.ops.schema import fake
from demask.ops.traits import IDENTITIES, PADS, RESHAPES
from demask.stride.accelerator.emitter import (
    CannotEmit,
    HostBlock,
    InstructionEmitter,
    NodeRefs,
    Rule,
    ValueRef,
    arguments,
    shape_of,
)

aten = torch.ops.aten
Arguments = dict[str, Any]


def view(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    """The same elements, in the same order: no step."""
    return e.ref(a[next(iter(a))]).view(*shape_of(node))


def dropout(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    if a["train"]:
        raise CannotEmit("it drops at random; expected eval mode")
    return view(e, node, a)


def getitem(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    results = e.refs.get(a["0"])
    if not isinstance(results, tuple):
        raise CannotEmit("it reads one of several results of a call that the machine does not have")
    return results[a["1"]]


def expand(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    x, shape = e.ref(a["self"]), shape_of(node)
    if math.prod(x.shape) == math.prod(shape):
        return x.view(*shape)
    return e.put("repeat", [x], shape)


def permute_axes(e: InstructionEmitter, x: ValueRef, order: Sequence[int]) -> ValueRef:
    """The axes in another order; free if only axes of size 1 move."""
    shape = [x.shape[axis] for axis in order]
    long = [axis for axis in order if x.shape[axis] > 1]
    return x.view(*shape) if long == sorted(long) else e.move(x, order)


def permute(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    x = e.ref(a["self"])
    return permute_axes(e, x, [axis % len(x.shape) for axis in a["dims"]])


def transpose(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    x = e.ref(a["self"])
    order = list(range(len(x.shape)))
    first, second = (a.get(name, k) for k, name in enumerate(("dim0", "dim1")))
    if len(order) > 1:
        order[first], order[second] = order[second], order[first]
    return permute_axes(e, x, order)


def movedim(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    x = e.ref(a["self"])
    lists = ([a[name]] if isinstance(a[name], int) else a[name] for name in ("source", "destination"))
    sources, destinations = ([axis % len(x.shape) for axis in axes] for axes in lists)
    rest = iter(axis for axis in range(len(x.shape)) if axis not in sources)
    moved = dict(zip(destinations, sources, strict=True))
    return permute_axes(e, x, [moved[k] if k in moved else next(rest) for k in range(len(x.shape))])


def matrix_transpose(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    return transpose(e, node, {**a, "dim0": -2, "dim1": -1})


def rows_of(e: InstructionEmitter, x: ValueRef, axes: Sequence[int]) -> tuple[ValueRef, list[int]]:
    """A value as (rows, elements), where `axes` are merged into elements and the others into rows;
    and the order of all axes."""
    rest = [axis for axis in range(len(x.shape)) if axis not in axes]
    order = [*rest, *axes]
    count = math.prod(x.shape[axis] for axis in axes)
    return permute_axes(e, x, order).view(math.prod(x.shape) // count, count), order


def undo_rows(e: InstructionEmitter, rows: ValueRef, shape: Sequence[int], order: Sequence[int]) -> ValueRef:
    """The inverse of `rows_of`: the value in its original shape and order."""
    moved = rows.view(*(shape[axis] for axis in order))
    return permute_axes(e, moved, [order.index(axis) for axis in range(len(shape))])


def cat(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    """A concatenation: each part is moved to its position."""
    shape = shape_of(node)
    axis, offset, result = a["dim"] % len(shape), 0, None
    for part in (e.ref(value) for value in a["tensors"]):
        if len(part.shape) != len(shape):
            raise CannotEmit("it joins values of different ranks")
        start = [offset if k == axis else 0 for k in range(len(shape))]
        if result is None:
            result = e.put(
                "move",
                [part],
                shape,
                start=(0,) * len(shape),
                size=part.shape,
                order=tuple(range(len(shape))),
                at=tuple(start),
            )
        else:
            e.move(part, into=result, at=start)
        offset += part.shape[axis]
    assert result is not None
    return result


def pad_ends(node: fx.Node) -> list[tuple[int, int]]:
    """The positions that a pad adds before and after each axis."""
    pads = list(arguments(node)["pad"])
    axes = len(shape_of(node))
    ends = [(pads[2 * k], pads[2 * k + 1]) if 2 * k < len(pads) else (0, 0) for k in range(axes)]
    return ends[::-1]


def unpadded(value: Any, axes: int, number: float) -> tuple[Any, list[tuple[int, int]]]:
    """The operand of pads of the last `axes` axes by a number, and the positions that these add before and after each:
    the units read them as positions outside of the image."""
    total = [(0, 0)] * axes
    while isinstance(value, fx.Node) and value.target in PADS:
        a = arguments(value)
        ends = pad_ends(value)
        is_border = all(min(pair) >= 0 for pair in ends) and not any(map(any, ends[:-axes]))
        if a.get("mode", "constant") != "constant" or float(a.get("value") or 0) != number or not is_border:
            break
        total = [(low + more[0], high + more[1]) for (low, high), more in zip(total, ends[-axes:], strict=True)]
        value = a["self"]
    return value, total


def pad(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    """A pad: a block is moved into a value filled with one number. Negative padding crops."""
    x, shape, ends = e.ref(a["self"]), shape_of(node), pad_ends(node)
    if a.get("mode", "constant") != "constant":
        return pad_by_mode(e, x, ends, a["mode"])
    start = [max(0, -low) for low, _ in ends]
    size = [n - max(0, -low) - max(0, -high) for n, (low, high) in zip(x.shape, ends, strict=True)]
    if min(size) <= 0:
        raise CannotEmit("its padding removes all positions")
    offsets = [max(0, low) for low, _ in ends]
    if tuple(size) == shape:
        return x if tuple(size) == x.shape else e.move(x, start=start, size=size)
    filled = e.put("fill", [], shape, value=float(a.get("value") or 0))
    return e.move(x, into=filled, start=start, size=size, at=offsets)


def block(e: InstructionEmitter, x: ValueRef, axis: int, start: int, end: int) -> ValueRef:
    """Positions start, ..., end - 1 of one axis."""
    if (start, end) == (0, x.shape[axis]):
        return x
    return e.move(x, **_block(x.shape, axis, start, end - start, 0))


def every_step(e: InstructionEmitter, x: ValueRef, axis: int, step: int) -> ValueRef:
    """Every step-th position of one axis: others are multiplied by 0, then adjacent windows are
    summed."""
    size = x.shape[axis]
    if step == 1 or size == 1:
        return x
    count, inner = -(-size // step), math.prod(x.shape[axis + 1 :])
    outer = math.prod(x.shape) // (size * inner)
    mask = (torch.arange(size) % step == 0).float()[:, None]
    flat = x.view(outer, size, inner)
    flat = e.put("multiply", [flat, e.constant(f"every_{step}", mask)], flat.shape)
    sums = e.put(
        "sum_pool", [flat], (outer, count, inner), window=(step, 1), step=(step, 1), before=(0, 0), dilation=(1, 1)
    )
    return sums.view(*x.shape[:axis], count, *x.shape[axis + 1 :])


def slice_axis(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    on_host = e.refs.get(a["self"])
    shape = on_host.size if isinstance(on_host, HostBlock) else e.ref(a["self"]).shape
    axis = a["dim"] % len(shape)
    start, end, _ = slice(a["start"], a["end"]).indices(shape[axis])
    if isinstance(on_host, HostBlock) and a["step"] == 1:
        return on_host.narrow(axis, start, end)
    x = e.ref(a["self"])
    return every_step(e, block(e, x, axis, start, end), axis, a["step"])


def narrow(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    x = e.ref(a["self"])
    axis = a["dim"] % len(x.shape)
    start = a["start"] % x.shape[axis]
    return block(e, x, axis, start, start + a["length"])


def select(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    x = e.ref(a["self"])
    axis = a["dim"] % len(x.shape)
    at = a["index"] % x.shape[axis]
    return block(e, x, axis, at, at + 1).view(*shape_of(node))


def split(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    """Consecutive blocks along one axis."""
    x = e.ref(a["self"])
    axis, offset, parts = a["dim"] % len(x.shape), 0, list[ValueRef]()
    for value in fake(node):
        shape = tuple(value.shape)
        size = shape[axis] if len(shape) == len(x.shape) else 1  # unbind drops the axis
        parts.append(block(e, x, axis, offset, offset + size).view(*shape))
        offset += size
    return tuple(parts)


def gather(e: InstructionEmitter, x: ValueRef, axis: int, positions: Sequence[int]) -> ValueRef:
    """A gather of positions of one axis: each run of consecutive positions is one move."""
    shape = tuple(len(positions) if k == axis else n for k, n in enumerate(x.shape))
    offset, result = 0, None
    while offset < len(positions):
        end = offset + 1
        while end < len(positions) and positions[end] == positions[end - 1] + 1:
            end += 1
        run = _block(x.shape, axis, positions[offset], end - offset, offset)
        result = e.put("move", [x], shape, result, order=tuple(range(len(shape))), **run)
        offset = end
    assert result is not None
    return result


def _block(shape: Sequence[int], axis: int, start: int, size: int, at: int) -> dict[str, Any]:
    """Settings of a move of `size` positions of one axis from `start` to `at`."""
    rest = [0] * len(shape)
    return {
        "start": tuple(_with(rest, axis, start)),
        "size": tuple(_with(shape, axis, size)),
        "at": tuple(_with(rest, axis, at)),
    }


def _with(sizes: Sequence[int], axis: int, value: int) -> list[int]:
    return [value if k == axis else n for k, n in enumerate(sizes)]


def index_select(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    index, x = e.fixed.get(a["index"]), e.ref(a["self"])
    if not isinstance(index, Tensor):
        raise CannotEmit("its positions depend on the input; expected constants")
    axis = a["dim"] % len(x.shape)
    return gather(e, x, axis, [n % x.shape[axis] for n in index.reshape(-1).tolist()])


def flip(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    x = e.ref(a["self"])
    for axis in (axis % len(x.shape) for axis in a["dims"]):
        x = gather(e, x, axis, range(x.shape[axis])[::-1])
    return x


def pad_by_mode(e: InstructionEmitter, x: ValueRef, ends: Sequence[tuple[int, int]], mode: str) -> ValueRef:
    """A pad by the value's own positions. mode: "reflect", "replicate" or "circular"."""
    for axis, (low, high) in enumerate(ends):
        size = x.shape[axis]
        wide = range(-low, size + high)
        source_of = {
            "reflect": lambda k, last=size - 1: abs(last - abs(last - k)),
            "replicate": lambda k, last=size - 1: min(max(k, 0), last),
            "circular": lambda k, count=size: k % count,
        }[mode]
        if (low, high) != (0, 0):
            x = gather(e, x, axis, [source_of(k) for k in wide])
    return x


def roll(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    """A cyclic shift: two blocks per axis, exchanged."""
    x = e.ref(a["self"])
    if not a["dims"]:
        raise CannotEmit("it rolls without axes")
    for axis, shift in zip(a["dims"], a["shifts"], strict=True):
        size = x.shape[axis]
        positions = [(k - shift) % size for k in range(size)]
        x = gather(e, x, axis % len(x.shape), positions) if shift % size else x
    return x


def cast(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    x = a[next(iter(a))]
    if isinstance(x, fx.Node) and fake(x).dtype != fake(node).dtype:
        raise CannotEmit(f"it casts from {fake(x).dtype}")
    return view(e, node, a)


def upsample_nearest(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    """Nearest-neighbor upsampling by integer factors."""
    x, y = e.ref(a["input"]), shape_of(node)
    if any(m % n for n, m in zip(x.shape[2:], y[2:], strict=True)):
        raise CannotEmit(f"{y[2:]} is no multiple of {x.shape[2:]}")
    single = [size for n in x.shape[2:] for size in (n, 1)]
    repeated = [size for n, m in zip(x.shape[2:], y[2:], strict=True) for size in (n, m // n)]
    return e.put("repeat", [x.view(*x.shape[:2], *single)], (*x.shape[:2], *repeated)).view(*y)


def pixel_unshuffle(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    """(…, c, h r, w r) -> (…, c r r, h, w)."""
    x, r = e.ref(a["self"]), a["downscale_factor"]
    *_, c, h, w = x.shape
    blocks = x.view(math.prod(x.shape) // (c * h * w), c, h // r, r, w // r, r)
    return permute_axes(e, blocks, (0, 1, 3, 5, 2, 4)).view(*shape_of(node))


def pixel_shuffle(e: InstructionEmitter, node: fx.Node, a: Arguments) -> NodeRefs:
    """(…, c r r, h, w) -> (…, c, h r, w r)."""
    x, r = e.ref(a["self"]), a["upscale_factor"]
    *_, c, h, w = x.shape
    blocks = x.view(math.prod(x.shape) // (c * h * w), c // r**2, r, r, h, w)
    return permute_axes(e, blocks, (0, 1, 4, 2, 5, 3)).view(*shape_of(node))


SHAPES: dict[Any, Rule] = {
    **dict.fromkeys(RESHAPES | IDENTITIES, view),
    aten.unsqueeze.default: view, aten.lift_fresh_copy.default: view,
    operator.getitem: getitem, aten.dropout.default: dropout, aten.expand.default: expand,
    aten.permute.default: permute, aten.transpose.int: transpose, aten.t.default: transpose,
    aten.mT.default: matrix_transpose, aten.movedim.int: movedim,
    aten.movedim.intlist: movedim, aten.narrow.default: narrow, aten.flip.default: flip,

    aten.cat.default: cat, **dict.fromkeys(PADS, pad),
    aten.slice.Tensor: slice_axis, aten.select.int: select, aten.split.Tensor: split,
    aten.split_with_sizes.default: split, aten.chunk.default: split, aten.unbind.int: split,
    aten.index_select.default: index_select, aten.roll.default: roll,
    aten.to.dtype: cast, aten.to.dtype_layout: cast, aten.to.device: cast,
    aten._to_copy.default: cast, aten.upsample_nearest2d.vec: upsample_nearest,
    aten.upsample_nearest1d.vec: upsample_nearest, aten.upsample_nearest3d.vec: upsample_nearest,
    aten.pixel_unshuffle.default: pixel_unshuffle, aten.pixel_shuffle.default: pixel_shuffle,
}  # fmt: skip
