"""Boxes: one interval per axis of a value or of an array."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from torch import Tensor

from demask.exec.axes import Axes, Window
from demask.ops.regions import Interval

Box = tuple[Interval, ...]  # one interval for each dimension
LIMIT = 1 << 20  # bytes of pieces; 256 KiB read 10 % slower, 4 MiB no faster


def box_of(shape: tuple[int, ...], axes: Axes, window: Window) -> Box:
    """A window as one interval per dimension.

    >>> box_of((1, 3, 8, 9), (2, 3), ((2, 4), (0, 9)))
    ((0, 1), (0, 3), (2, 4), (0, 9))
    """
    box: list[Interval] = [(0, size) for size in shape]
    for axis, interval in zip(axes, window, strict=True):
        if axis is not None:
            box[axis] = interval
    return tuple(box)


def extents(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(end - start for start, end in box)


def elements(box: Box) -> int:
    """The number of positions of a box."""
    return math.prod(extents(box))


def slices(box: Box) -> tuple[slice, ...]:
    """A box as an index of an array."""
    return tuple(slice(start, end) for start, end in box)


def box_at(index: tuple[slice, ...]) -> Box:
    """The inverse of `slices`."""
    return tuple((part.start, part.stop) for part in index)


def intersect(a: Box, b: Box) -> Box:
    """The positions that are in both boxes; an interval is empty where there are none."""
    pairs = zip(a, b, strict=True)
    return tuple((max(p[0], q[0]), max(min(p[1], q[1]), max(p[0], q[0]))) for p, q in pairs)


def relative(box: Box, to: Box) -> Box:
    """A box relative to the first position of another."""
    return tuple((a - first, b - first) for (a, b), (first, _) in zip(box, to, strict=True))


def pieces(box: Box, dims: tuple[int, ...], limit: int) -> Iterator[Box]:
    """A box cut into boxes of at most `limit` elements, first along the first of `dims`.

    Law: they cover each position of the box once, and none is larger than the first.

    >>> list(pieces(((0, 2), (0, 3)), (1, 0), 4))
    [((0, 2), (0, 2)), ((0, 2), (2, 3))]
    """
    if elements(box) == 0:
        return
    if elements(box) <= limit or not dims:
        yield box
        return
    axis, rest = dims[0], dims[1:]
    start, end = box[axis]
    step = max(1, limit * (end - start) // elements(box))
    for first in range(start, end, step):
        cut = (first, min(first + step, end))
        yield from pieces((*box[:axis], cut, *box[axis + 1 :]), rest, limit)


def chunks_in(box: Box, shape: Sequence[int], chunks: Sequence[int]) -> Iterator[Box]:
    """The chunks of an array that a box overlaps, cut at the array's end.

    >>> list(chunks_in(((3, 5), (0, 2)), (6, 5), (4, 4)))
    [((0, 4), (0, 4)), ((4, 6), (0, 4))]
    """
    if elements(box) == 0:
        return
    numbers = (range(a // n, -(-b // n)) for (a, b), n in zip(box, chunks, strict=True))
    for index in itertools.product(*numbers):
        yield tuple((k * n, min((k + 1) * n, size)) for k, n, size in zip(index, chunks, shape, strict=True))


def view(tensor: Tensor, box: Box) -> Tensor:
    """The positions of a box."""
    for axis, (start, end) in enumerate(box):
        if end - start != tensor.shape[axis]:
            tensor = tensor.narrow(axis, start, end - start)
    return tensor


def view_flat(buffer: Tensor, shape: Sequence[int], dims: Sequence[int]) -> Tensor:
    """A view of a flat buffer as a tensor of a shape, dense, its `dims` from outermost to innermost.

    >>> import torch
    >>> view_flat(torch.arange(6), (2, 3), (1, 0)).stride()
    (1, 2)
    """
    ordered = buffer[: math.prod(shape)].view([shape[axis] for axis in dims])
    return ordered.permute([dims.index(axis) for axis in range(len(dims))])
