"""The axes of values that correspond to the input's rows and columns, along which tiles are cut.

A value without such axes that depends on the input is *uncut*: a pooled vector, a count. Axes
follow the table from operand to output (`ops.flow`): a carried, moved or windowed axis continues;
one that is summed over ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, fx

from demask.ops import schema
from demask.ops.entry import Declined
from demask.ops.flow import Part, follow
from demask.ops.regions import Interval
from demask.ops.relation import Relation
from demask.ops.schema import fake

ROWS, COLUMNS = 0, 1
Axes = tuple[int | None, int | None]  # of a value: its axis of rows, its axis of columns
Window = tuple[Interval, Interval]  # positions along rows and columns; (0, 1) where there are none
NONE: Axes = (None, None)


class RowSource(Protocol):
    """A value whose parts can be read."""

    def read(self, window: Window, into: Tensor) -> None:
        """Fill `into`, in the layout of parts, with the positions of a window."""
        ...


def axes_of(
    graph: fx.Graph, relations: Mapping[fx.Node, Relation | Declined], inputs: Mapping[fx.Node, Axes]
) -> dict[fx.Node, Axes]:
    """The axes of each value that has rows.

    inputs: axes of placeholders, and of results of uncut calls that are cut anew. Calls with
    several outputs have none.
    """
    axes = dict(inputs)
    for node in graph.nodes:
        relation = None if node in inputs else relations.get(node)
        if not isinstance(relation, Relation) or not isinstance(node.meta.get("val"), Tensor):
            continue
        pair = (_axis(relation, axes, ROWS), _axis(relation, axes, COLUMNS))
        if pair[ROWS] is None or pair[ROWS] == pair[COLUMNS]:
            pair = (pair[ROWS], None)
        if pair != NONE:
            axes[node] = pair if pair[ROWS] is not None else NONE
    return {node: pair for node, pair in axes.items() if pair[ROWS] is not None}


def image_axes(node: fx.Node) -> Axes | None:
    """The axes of an input: the first two spatial axes of images and volumes, the last axis of
    sequences (N, C, L); None for other ranks."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.ndim < 3:
        return None
    return (2, None) if value.ndim == 3 else (2, 3)


def _axis(relation: Relation, axes: Mapping[fx.Node, Axes], dim: int) -> int | None:
    """The output's axis whose major part is the operands' rows or columns."""
    value = fake(relation.node)
    candidates = []
    for k, operand in enumerate(relation.operands):
        if (axis := axes.get(operand.value, NONE)[dim]) is None:
            continue
        size = schema.example_size(fake(operand.value).shape[axis])
        part = follow(relation, k, Part(axis, 1, size), single=True)
        if part is not None and part.covers(schema.example_size(value.shape[part.axis])):
            candidates.append(part.axis)
    return min(candidates, default=None)


def length(node: fx.Node, axes: Axes, dim: int) -> int:
    """The number of rows or columns of a value; 1 where it has none."""
    axis = axes[dim]
    return 1 if axis is None else schema.example_size(fake(node).shape[axis])


def full_window(node: fx.Node, axes: Axes) -> Window:
    """The window of a full value."""
    return (0, length(node, axes, ROWS)), (0, length(node, axes, COLUMNS))


def cut_shape(shape: Sequence[int], axes: Axes, window: Window) -> tuple[int, ...]:
    """The shape of a value's part in a window.

    >>> cut_shape((1, 8, 32, 32), (2, 3), ((4, 6), (0, 32)))
    (1, 8, 2, 32)
    """
    sizes = list(shape)
    for axis, (start, end) in zip(axes, window, strict=True):
        if axis is not None:
            sizes[axis] = end - start
    return tuple(sizes)


def order(rank: int, axes: Axes) -> tuple[int, ...]:
    """The dimensions of a part from outermost to innermost in memory: rows first, so that rows are
    contiguous; then columns; channels of images (axis 1) last.

    >>> order(4, (2, 3)), order(3, (1, None))
    ((2, 3, 0, 1), (1, 0, 2))
    """
    first = [axis for axis in axes if axis is not None]
    image = axes[COLUMNS] is not None
    inner = [k for k in range(rank) if k not in first and (k > 1 or not image)]
    return tuple(first + inner + ([k for k in range(min(rank, 2)) if k not in first] if image else []))


def strides(shape: Sequence[int], axes: Axes) -> tuple[int, ...]:
    """The strides, in elements, of a dense part of this shape in the order of `order`.

    The first axis of a single image has the stride of the full image, as in torch's channels_last.

    >>> strides((1, 8, 2, 32), (2, 3))
    (512, 1, 256, 8)
    """
    result, step = [0] * len(shape), 1
    for axis in reversed(order(len(shape), axes)):
        result[axis] = step
        step *= max(shape[axis], 1)
    if shape and shape[0] == 1:
        result[0] = step
    return tuple(result)


def part(tensor: Tensor, axes: Axes, window: Window, origin: tuple[int, int] = (0, 0)) -> Tensor:
    """A view of the positions of a window. origin: first row and column of the part `tensor`."""
    for axis, (start, end), first in zip(axes, window, origin, strict=True):
        if axis is not None:
            size = max(end - start, 0)
            tensor = tensor.narrow(axis, start - first if size else 0, size)
    return tensor


def empty(shape: Sequence[int], axes: Axes, dtype: torch.dtype) -> Tensor:
    """New memory for a part, in the layout of parts."""
    return torch.empty_strided(tuple(shape), strides(shape, axes), dtype=dtype)
