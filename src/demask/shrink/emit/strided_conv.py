"""Convolutions that make every s-th window alone: a progression of positions, absorbed as a stride.

    conv(x, stride=s)[first::step][:count] == conv(x[low:high], stride=s * step)

where x is padded or cropped to what these windows read. A slice behind a convolution of stride 1,
hoisted to it through whatever carries positions, makes it strided (rows 002).
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from demask.compat.dispatch import schema_of
from demask.ops import Relation, schema
from demask.ops.regions import Geometry, geometry
from demask.shrink.emit.context import EmitContext
from demask.shrink.layout.cells import Layout, Positions, whole
from demask.shrink.layout.ties import sampling

aten = torch.ops.aten


def spaced(relation: Relation, layout: Layout) -> Layout:
    """The layout with every windowed axis evenly spaced: positions between are made as well.

    A window that is left alone keeps the distance to the end of its axis.
    """
    axes = sampling(relation)
    sizes = relation.node.meta["val"].shape
    return tuple(
        whole(_spaced(p), sizes[k]) if k in axes and p else p for k, p in enumerate(layout)
    )


def _spaced(positions: tuple[int, ...]) -> range:
    apart = [b - a for a, b in itertools.pairwise(positions)]
    return range(positions[0], positions[-1] + 1, math.gcd(*apart) or 1)


def sampled(
    walk: EmitContext, relation: Relation, layout: Layout, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """The arguments of a convolution that makes the windows of a layout alone."""
    node = relation.node
    target: Any = node.target
    found = {a.name: a.default_value for a in schema_of(target).arguments}
    found |= dict(zip(found, args, strict=False)) | kwargs
    axes = sampling(relation)
    windows = [_window(geometry(relation, 0, axis), layout[axis]) for axis in axes]
    steps, pads = [step for step, _ in windows], [pad for _, pad in windows]
    own = [_own(geometry(relation, 0, k), w, layout[k]) for k, w in zip(axes, windows, strict=True)]
    padding = [n or 0 for n in own]
    if None in own:
        edges = [(0, 0) if n is not None else pad for n, pad in zip(own, pads, strict=True)]
        flat = [n for pair in reversed(edges) for n in pair]
        found["input"] = walk.editor.call(aten.constant_pad_nd.default, found["input"], flat, 0)
    return schema.call(target, found | {"stride": steps, "padding": padding})


def _window(axis: Geometry, taken: Positions) -> tuple[int, tuple[int, int]]:
    """The stride that makes the windows taken, and the padding before and behind (less than none:
    positions that they do not read)."""
    first, step, last = 0, 1, axis.output - 1
    if taken is not None:
        first, last = taken[0], taken[-1]
        step = taken[1] - taken[0] if len(taken) > 1 else max(axis.output, 1)
    before = axis.padding - first * axis.step
    behind = last * axis.step - axis.padding + axis.reach + 1 - axis.input
    return axis.step * step, (before, behind)


def _own(axis: Geometry, window: tuple[int, tuple[int, int]], taken: Positions) -> int | None:
    """The convolution's own padding, the same on both sides, if it makes as many windows."""
    stride, (before, _) = window
    count = axis.output if taken is None else len(taken)
    made = (axis.input + 2 * before - axis.reach - 1) // stride + 1
    return before if before >= 0 and made == count else None
