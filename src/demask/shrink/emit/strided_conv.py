"""Convolutions that compute only every s-th window: a progression of positions, absorbed as a
stride.

    conv(x, stride=s)[first::step][:count] == conv(x[low:high], stride=s * step)

where x is padded or cropped to what these windows read. A slice after a convolution of stride 1,
hoisted to it through ops that carry positions, makes the convolution strided.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from demask.compat.dispatch import schema_of
from demask.ops import Relation, schema
from demask.ops.regions import Geometry, geometry
from demask.ops.schema import fake
from demask.shrink.emit.context import EmitContext
from demask.shrink.layout.cells import Layout, Positions, whole
from demask.shrink.layout.ties import strided_axes

aten = torch.ops.aten


def space_evenly(relation: Relation, layout: Layout) -> Layout:
    """The layout with every windowed axis evenly spaced: positions between are computed as well.

    A single window keeps the distance to the end of its axis.
    """
    axes = strided_axes(relation)
    sizes = fake(relation.node).shape
    return tuple(whole(_progression(p), sizes[k]) if k in axes and p else p for k, p in enumerate(layout))


def _progression(positions: tuple[int, ...]) -> range:
    steps = [b - a for a, b in itertools.pairwise(positions)]
    return range(positions[0], positions[-1] + 1, math.gcd(*steps) or 1)


def strided_arguments(
    context: EmitContext, relation: Relation, layout: Layout, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """The arguments of a convolution that computes only the windows in a layout."""
    node = relation.node
    target: Any = node.target
    arguments = {a.name: a.default_value for a in schema_of(target).arguments}
    arguments |= dict(zip(arguments, args, strict=False)) | kwargs
    axes = strided_axes(relation)
    windows = [_window(geometry(relation, 0, axis), layout[axis]) for axis in axes]
    steps, pads = [step for step, _ in windows], [pad for _, pad in windows]
    own = [_symmetric_padding(geometry(relation, 0, k), w, layout[k]) for k, w in zip(axes, windows, strict=True)]
    padding = [n or 0 for n in own]
    if None in own:
        edges = [(0, 0) if n is not None else pad for n, pad in zip(own, pads, strict=True)]
        flat = [n for pair in reversed(edges) for n in pair]
        arguments["input"] = context.editor.call(aten.constant_pad_nd.default, arguments["input"], flat, 0)
    return schema.bind_arguments(target, arguments | {"stride": steps, "padding": padding})


def _window(axis: Geometry, taken: Positions) -> tuple[int, tuple[int, int]]:
    """The stride of the convolution that computes some windows, and its padding before and after
    (negative: positions that no window reads)."""
    first, step, last = 0, 1, axis.output - 1
    if taken is not None:
        first, last = taken[0], taken[-1]
        step = taken[1] - taken[0] if len(taken) > 1 else max(axis.output, 1)
    before = axis.padding - first * axis.step
    after = last * axis.step - axis.padding + axis.reach + 1 - axis.input
    return axis.step * step, (before, after)


def _symmetric_padding(axis: Geometry, window: tuple[int, tuple[int, int]], taken: Positions) -> int | None:
    """The convolution's own padding, if equal on both sides and for as many windows; else None."""
    stride, (before, _) = window
    count = axis.output if taken is None else len(taken)
    windows = (axis.input + 2 * before - axis.reach - 1) // stride + 1
    return before if before >= 0 and windows == count else None
