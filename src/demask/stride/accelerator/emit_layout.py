"""How ATen calls that lay values out become steps: what is free, what is moved, what is left out.

Values lie in row-major order, so another shape of as many elements is free. Everything else is
blocks that are moved: a cat is one per part, a pad is a fill and one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from demask.ops.traits import IDENTITIES, RESHAPES
from demask.stride.accelerator.emitter import (
    CannotEmit,
    InstructionEmitter,
    Made,
    Rule,
    ValueRef,
    shape_of,
)

aten = torch.ops.aten
Arguments = dict[str, Any]


def view(e: InstructionEmitter, node: fx.Node, a: Arguments) -> Made:
    """The same elements, in the same order: no step."""
    return e.ref(a[next(iter(a))]).view(*shape_of(node))


def dropout(e: InstructionEmitter, node: fx.Node, a: Arguments) -> Made:
    if a["train"]:
        raise CannotEmit("it drops at random; expected eval mode")
    return view(e, node, a)


def getitem(e: InstructionEmitter, node: fx.Node, a: Arguments) -> Made:
    made = e.refs.get(a["0"])
    if not isinstance(made, tuple):
        raise CannotEmit("it reads one of several results of a call that the machine does not have")
    return made[a["1"]]


def expand(e: InstructionEmitter, node: fx.Node, a: Arguments) -> Made:
    x, shape = e.ref(a["self"]), shape_of(node)
    if math.prod(x.shape) == math.prod(shape):
        return x.view(*shape)
    return e.put("repeat", [x], shape)


def permuted(e: InstructionEmitter, x: ValueRef, order: Sequence[int]) -> ValueRef:
    """The axes in another order; where only axes of size 1 move, that is free."""
    shape = [x.shape[axis] for axis in order]
    long = [axis for axis in order if x.shape[axis] > 1]
    return x.view(*shape) if long == sorted(long) else e.move(x, order)


def permute(e: InstructionEmitter, node: fx.Node, a: Arguments) -> Made:
    x = e.ref(a["self"])
    return permuted(e, x, [axis % len(x.shape) for axis in a["dims"]])


def transpose(e: InstructionEmitter, node: fx.Node, a: Arguments) -> Made:
    x = e.ref(a["self"])
    order = list(range(len(x.shape)))
    first, second = (a.get(name, k) for k, name in enumerate(("dim0", "dim1")))
    if len(order) > 1:
        order[first], order[second] = order[second], order[first]
    return permuted(e, x, order)


def movedim(e: InstructionEmitter, node: fx.Node, a: Arguments) -> Made:
    x = e.ref(a["self"])
    given = ([a[name]] if isinstance(a[name], int) else a[name]
             for name in ("source", "destination"))  # fmt: skip
    sources, places = ([axis % len(x.shape) for axis in axes] for axes in given)
    rest = iter(axis for axis in range(len(x.shape)) if axis not in sources)
    found = dict(zip(places, sources, strict=True))
    return permuted(e, x, [found[k] if k in found else next(rest) for k in range(len(x.shape))])


def matrix_transpose(e: InstructionEmitter, node: fx.Node, a: Arguments) -> Made:
    return transpose(e, node, {**a, "dim0": -2, "dim1": -1})


def rows_of(e: InstructionEmitter, x: ValueRef, axes: Sequence[int]) -> tuple[ValueRef, list[int]]:
    """(rows, elements): the given axes merged behind all others, and the order in which they came
    to lie."""
    rest = [axis for axis in range(len(x.shape)) if axis not in axes]
    order = [*rest, *axes]
    count = math.prod(x.shape[axis] for axis in axes)
    return permuted(e, x, order).view(math.prod(x.shape) // count, count), order


def moved_back(
    e: InstructionEmitter, rows: ValueRef, shape: Sequence[int], order: Sequence[int]
) -> ValueRef:
    """What `rows_of` merged, in its first shape and order."""
    moved = rows.view(*(shape[axis] for axis in order))
    return permuted(e, moved, [order.index(axis) for axis in range(len(shape))])


def cat(e: InstructionEmitter, node: fx.Node, a: Arguments) -> Made:
    """Each part is moved to its place."""
    shape = shape_of(node)
    axis, place, made = a["dim"] % len(shape), 0, None
    for part in (e.ref(value) for value in a["tensors"]):
        if len(part.shape) != len(shape):
            raise CannotEmit("it joins values of different ranks")
        at = [place if k == axis else 0 for k in range(len(shape))]
        if made is None:
            made = e.put("move", [part], shape, start=(0,) * len(shape), size=part.shape,
                         order=tuple(range(len(shape))), at=tuple(at))  # fmt: skip
        else:
            e.move(part, into=made, at=at)
        place += part.shape[axis]
    assert made is not None
    return made


def pad(e: InstructionEmitter, node: fx.Node, a: Arguments) -> Made:
    """A value full of one number, the middle of it moved in; negative padding cuts."""
    x, shape = e.ref(a["self"]), shape_of(node)
    axes, pads = len(shape), list(a["pad"])
    ends = [(pads[2 * k], pads[2 * k + 1]) if 2 * k < len(pads) else (0, 0) for k in range(axes)]
    ends.reverse()
    if a.get("mode", "constant") != "constant":
        return around(e, x, ends, a["mode"])
    start = [max(0, -low) for low, _ in ends]
    size = [n - max(0, -low) - max(0, -high)
            for n, (low, high) in zip(x.shape, ends, strict=True)]  # fmt: skip
    if min(size) <= 0:
        raise CannotEmit("it keeps nothing of what it pads")
    at = [max(0, low) for low, _ in ends]
    if tuple(size) == shape:
        return x if tuple(size) == x.shape else e.move(x, start=start, size=size)
    made = e.put("fill", [], shape, value=float(a.get("value") or 0))
    return e.move(x, into=made, start=start, size=size, at=at)


def block(e: InstructionEmitter, x: ValueRef, axis: int, start: int, end: int) -> ValueRef:
    """Positions start to end - 1 of one axis."""
    if (start, end) == (0, x.shape[axis]):
        return x
    return e.move(x, **_block(x.shape, axis, start, end - start, 0))


def every(e: InstructionEmitter, x: ValueRef, axis: int, step: int) -> ValueRef:
    """Every step-th position of one axis: the others times 0, then sums of windows that touch."""
    size = x.shape[axis]
    if step == 1 or size == 1:
        return x
    count, inner = -(-size // step), math.prod(x.shape[axis + 1 :])
    outer = math.prod(x.shape) // (size * inner)
    kept = (torch.arange(size) % step == 0).float()[:, None]
    flat = x.view(outer, size, inner)
    flat = e.put("multiply", [flat, e.constant(f"every_{step}", kept)], flat.shape)
    made = e.put("sum_pool", [flat], (outer, count, inner), window=(step, 1), step=(step, 1),
                 before=(0, 0), dilation=(1, 1))  # fmt: skip
    return made.view(*x.shape[:axis], count, *x.shape[axis + 1 :])


def cut(e: InstructionEmitter, node: fx.Node, a: Arguments) -> Made:
    x = e.ref(a["self"])
    axis = a["dim"] % len(x.shape)
    start, end, _ = slice(a["start"], a["end"]).indices(x.shape[axis])
    return every(e, block(e, x, axis, start, end), axis, a["step"])


def narrow(e: InstructionEmitter, node: fx.Node, a: Arguments) -> Made:
    x = e.ref(a["self"])
    axis = a["dim"] % len(x.shape)
    start = a["start"] % x.shape[axis]
    return block(e, x, axis, start, start + a["length"])


def select(e: InstructionEmitter, node: fx.Node, a: Arguments) -> Made:
    x = e.ref(a["self"])
    axis = a["dim"] % len(x.shape)
    at = a["index"] % x.shape[axis]
    return block(e, x, axis, at, at + 1).view(*shape_of(node))


def split(e: InstructionEmitter, node: fx.Node, a: Arguments) -> Made:
    """Its parts, as they follow each other along one axis."""
    x = e.ref(a["self"])
    axis, place, parts = a["dim"] % len(x.shape), 0, list[ValueRef]()
    for value in node.meta["val"]:
        shape = tuple(value.shape)
        size = shape[axis] if len(shape) == len(x.shape) else 1  # unbind drops the axis
        parts.append(block(e, x, axis, place, place + size).view(*shape))
        place += size
    return tuple(parts)


def gathered(e: InstructionEmitter, x: ValueRef, axis: int, places: Sequence[int]) -> ValueRef:
    """These positions of one axis: each run of them is moved to its place."""
    shape = tuple(len(places) if k == axis else n for k, n in enumerate(x.shape))
    at, made = 0, None
    while at < len(places):
        end = at + 1
        while end < len(places) and places[end] == places[end - 1] + 1:
            end += 1
        run = _block(x.shape, axis, places[at], end - at, at)
        made = e.put("move", [x], shape, made, order=tuple(range(len(shape))), **run)
        at = end
    assert made is not None
    return made


def _block(shape: Sequence[int], axis: int, start: int, size: int, at: int) -> dict[str, Any]:
    """What a move is told to take positions of one axis to others."""
    rest = [0] * len(shape)
    return {"start": tuple(_with(rest, axis, start)), "size": tuple(_with(shape, axis, size)),
            "at": tuple(_with(rest, axis, at))}  # fmt: skip


def _with(sizes: Sequence[int], axis: int, value: int) -> list[int]:
    return [value if k == axis else n for k, n in enumerate(sizes)]


def index_select(e: InstructionEmitter, node: fx.Node, a: Arguments) -> Made:
    index, x = e.fixed.get(a["index"]), e.ref(a["self"])
    if not isinstance(index, Tensor):
        raise CannotEmit("its positions depend on the input; expected constants")
    axis = a["dim"] % len(x.shape)
    return gathered(e, x, axis, [n % x.shape[axis] for n in index.reshape(-1).tolist()])


def flip(e: InstructionEmitter, node: fx.Node, a: Arguments) -> Made:
    x = e.ref(a["self"])
    for axis in (axis % len(x.shape) for axis in a["dims"]):
        x = gathered(e, x, axis, range(x.shape[axis])[::-1])
    return x


def around(
    e: InstructionEmitter, x: ValueRef, ends: Sequence[tuple[int, int]], mode: str
) -> ValueRef:
    """Padded by what is inside: reflected, repeated, or from the other end."""
    for axis, (low, high) in enumerate(ends):
        size = x.shape[axis]
        wide = range(-low, size + high)
        places = {"reflect": lambda k, last=size - 1: abs(last - abs(last - k)),
                  "replicate": lambda k, last=size - 1: min(max(k, 0), last),
                  "circular": lambda k, count=size: k % count}[mode]  # fmt: skip
        if (low, high) != (0, 0):
            x = gathered(e, x, axis, [places(k) for k in wide])
    return x


def roll(e: InstructionEmitter, node: fx.Node, a: Arguments) -> Made:
    """Two blocks per axis, in the other order."""
    x = e.ref(a["self"])
    if not a["dims"]:
        raise CannotEmit("it rolls without axes")
    for axis, shift in zip(a["dims"], a["shifts"], strict=True):
        size = x.shape[axis]
        places = [(k - shift) % size for k in range(size)]
        x = gathered(e, x, axis % len(x.shape), places) if shift % size else x
    return x


def cast(e: InstructionEmitter, node: fx.Node, a: Arguments) -> Made:
    x = a[next(iter(a))]
    if isinstance(x, fx.Node) and x.meta["val"].dtype != node.meta["val"].dtype:
        raise CannotEmit(f"it casts from {x.meta['val'].dtype}")
    return view(e, node, a)


def upsample_nearest(e: InstructionEmitter, node: fx.Node, a: Arguments) -> Made:
    """Every pixel a whole number of times."""
    x, y = e.ref(a["input"]), shape_of(node)
    if any(m % n for n, m in zip(x.shape[2:], y[2:], strict=True)):
        raise CannotEmit(f"{y[2:]} is no multiple of {x.shape[2:]}")
    apart = [size for n in x.shape[2:] for size in (n, 1)]
    wide = [size for n, m in zip(x.shape[2:], y[2:], strict=True) for size in (n, m // n)]
    return e.put("repeat", [x.view(*x.shape[:2], *apart)], (*x.shape[:2], *wide)).view(*y)


def pixel_unshuffle(e: InstructionEmitter, node: fx.Node, a: Arguments) -> Made:
    """(…, c, h r, w r) -> (…, c r r, h, w)."""
    x, r = e.ref(a["self"]), a["downscale_factor"]
    *_, c, h, w = x.shape
    apart = x.view(math.prod(x.shape) // (c * h * w), c, h // r, r, w // r, r)
    return permuted(e, apart, (0, 1, 3, 5, 2, 4)).view(*shape_of(node))


def pixel_shuffle(e: InstructionEmitter, node: fx.Node, a: Arguments) -> Made:
    """(…, c r r, h, w) -> (…, c, h r, w r)."""
    x, r = e.ref(a["self"]), a["upscale_factor"]
    *_, c, h, w = x.shape
    apart = x.view(math.prod(x.shape) // (c * h * w), c // r**2, r, r, h, w)
    return permuted(e, apart, (0, 1, 4, 2, 5, 3)).view(*shape_of(node))


SHAPES: dict[Any, Rule] = {
    **dict.fromkeys(RESHAPES | IDENTITIES, view),
    aten.unsqueeze.default: view, aten.lift_fresh_copy.default: view,
    operator.getitem: getitem, aten.dropout.default: dropout, aten.expand.default: expand,
    aten.permute.default: permute, aten.transpose.int: transpose, aten.t.default: transpose,
    aten.mT.default: matrix_transpose, aten.movedim.int: movedim,
    aten.movedim.intlist: movedim, aten.narrow.default: narrow, aten.flip.default: flip,

    aten.cat.default: cat, aten.constant_pad_nd.default: pad, aten.pad.default: pad,
    aten.slice.Tensor: cut, aten.select.int: select, aten.split.Tensor: split,
    aten.split_with_sizes.default: split, aten.chunk.default: split, aten.unbind.int: split,
    aten.index_select.default: index_select, aten.roll.default: roll,
    aten.to.dtype: cast, aten.to.dtype_layout: cast, aten.to.device: cast,
    aten._to_copy.default: cast, aten.upsample_nearest2d.vec: upsample_nearest,
    aten.upsample_nearest1d.vec: upsample_nearest, aten.upsample_nearest3d.vec: upsample_nearest,
    aten.pixel_unshuffle.default: pixel_unshuffle, aten.pixel_shuffle.default: pixel_shuffle,
}  # fmt: skip
