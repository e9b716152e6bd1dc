"""The error of a tile as a function of its padding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from demask.errors import BadInput
from demask.graph.module_copy import structural_copy

SHARES = tuple(Fraction(k, 8) for k in (*range(9), 10))  # of the halo
TILE = 4  # the tile is this part of the image a side, in its middle


@dataclass(frozen=True, slots=True)
class Point:
    """The error of a tile with one padding.

    Attributes:
        padding: positions of the first input added at each side, per image axis.
        share: `padding` divided by the halo, before rounding to strides.
        max_abs: largest absolute error of the tile's outputs.
        changed: share of the tile's output values that differ after rounding to 8 bits.
    """

    padding: tuple[int, ...]
    share: float
    max_abs: float
    changed: float

    def __str__(self) -> str:
        sizes = " x ".join(map(str, self.padding))
        return (
            f"{sizes} ({self.share:.0%} of the halo): largest error {self.max_abs:.2g}, "
            f"{self.changed:.2%} of the 8-bit values change"
        )


@dataclass(frozen=True, slots=True)
class Leaf:
    """An image axis of an input or output. scale: positions of the first input per position."""

    axis: int
    scale: Fraction


@dataclass(frozen=True, slots=True)
class TileCut:
    """Tiles along one image axis.

    inputs, outputs: the leaves of the call and of its result; None: not cut. halo, grid: in
    positions of the first input; crops begin and end on the grid.
    """

    inputs: tuple[Leaf | None, ...]
    outputs: tuple[Leaf | None, ...]
    halo: int
    grid: int


Range = tuple[int, int]  # of positions of the first input


def curve_of(
    model: Any,
    call: tuple[tuple[Any, ...], Mapping[str, Any]],
    cuts: Sequence[TileCut],
    levels: tuple[float, float],
    progress: Callable[[str, float], object] | None,
) -> tuple[Point, ...]:
    """The errors of the tile in the middle of the image for distinct, growing paddings.

    Paddings are multiples of the grid of the network's strides, and smaller than the image.

    Raises:
        BadInput: if the model does not run on tiles, or no output is cut along every axis.
    """
    if not isinstance(model, nn.Module):
        raise BadInput(
            f"a curve needs a model that runs, got {type(model).__name__}: give the nn.Module that was exported"
        )
    tell = progress or (lambda title, share: None)
    work = structural_copy(model, share=True).eval()
    leaves, spec = pytree.tree_flatten(call)
    tell("whole image", 0.0)
    whole = _outputs(work, leaves, spec)
    sizes = [_length(cut, leaves) for cut in cuts]
    tile = [_middle(size, cut.grid) for size, cut in zip(sizes, cuts, strict=True)]
    points: dict[tuple[int, ...], Point] = {}
    for k, share in enumerate(SHARES):
        tell(f"tile with {float(share):.0%} of the halo", (k + 1) / (len(SHARES) + 1))
        crops = [_padded(one, cut, share, size) for one, cut, size in zip(tile, cuts, sizes, strict=True)]
        padding = tuple(max(one[0] - crop[0], crop[1] - one[1]) for one, crop in zip(tile, crops, strict=True))
        if padding in points or crops == [(0, size) for size in sizes]:
            continue  # a crop that is the whole image is no tile
        parts = [_part(leaf, cuts, k, crops) for k, leaf in enumerate(leaves)]
        outputs = _outputs(work, parts, spec)
        pairs = _tiles(outputs, whole, cuts, tile, crops)
        points[padding] = Point(padding, float(share), *_errors(pairs, levels))
    tell("compared", 1.0)
    return tuple(points.values())


def _outputs(work: nn.Module, leaves: Sequence[Any], spec: Any) -> list[Any]:
    args, kwargs = pytree.tree_unflatten(list(leaves), spec)
    try:
        with torch.no_grad():
            return pytree.tree_leaves(work(*args, **kwargs))
    except RuntimeError as error:
        shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
        raise BadInput(f"the model does not run on inputs of shapes {shapes}, so it has no curve: {error}") from error


def _length(cut: TileCut, leaves: Sequence[Any]) -> int:
    """The number of positions of the first input that is cut."""
    k, leaf = next((k, leaf) for k, leaf in enumerate(cut.inputs) if leaf is not None)
    return leaves[k].shape[leaf.axis]


def _middle(size: int, grid: int) -> Range:
    length = max(size // TILE // grid, 1) * grid
    start = (size - length) // 2 // grid * grid
    return start, start + length


def _padded(tile: Range, cut: TileCut, share: Fraction, size: int) -> Range:
    """A tile padded by a share of the halo, rounded up to the grid, within the image."""
    pad = math.ceil(share * cut.halo / cut.grid) * cut.grid
    return max(tile[0] - pad, 0), min(tile[1] + pad, size)


def _part(leaf: Any, cuts: Sequence[TileCut], k: int, crops: Sequence[Range]) -> Any:
    for cut, (start, end) in zip(cuts, crops, strict=True):
        leaf_cut = cut.inputs[k]
        if leaf_cut is not None:
            first, last = int(start / leaf_cut.scale), int(end / leaf_cut.scale)
            leaf = leaf.narrow(leaf_cut.axis, first, last - first)
    return leaf


def _tiles(
    outputs: Sequence[Any], whole: Sequence[Any], cuts: Sequence[TileCut], tile: Sequence[Range], crops: Sequence[Range]
) -> list[tuple[Tensor, Tensor]]:
    """The tile of each output: computed from a crop, and cut from the whole output."""
    pairs = []
    for k, (part, image) in enumerate(zip(outputs, whole, strict=True)):
        leaves = [cut.outputs[k] for cut in cuts]
        if any(leaf is None for leaf in leaves):
            continue
        for leaf, (start, end), (first, _) in zip(leaves, tile, crops, strict=True):
            length = int((end - start) / leaf.scale)  # type: ignore[union-attr]
            part = part.narrow(leaf.axis, int((start - first) / leaf.scale), length)  # type: ignore[union-attr]
            image = image.narrow(leaf.axis, int(start / leaf.scale), length)  # type: ignore[union-attr]
        pairs.append((part, image))
    if not pairs:
        raise BadInput("no output has positions along the image's axes, so tiles have no curve")
    return pairs


def _errors(pairs: Sequence[tuple[Tensor, Tensor]], levels: tuple[float, float]) -> tuple[float, float]:
    """The largest absolute difference, and the share of 8-bit values that differ."""
    low, high = levels
    worst = max(float((a.double() - b.double()).abs().max()) for a, b in pairs)
    bits = [[((v - low) / (high - low)).clamp(0, 1).mul(255).round() for v in pair] for pair in pairs]
    changed = sum(int((a != b).sum()) for a, b in bits)
    return worst, changed / sum(a.numel() for a, _ in pairs)
