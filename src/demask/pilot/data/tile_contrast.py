"""The activity of an image: one magnitude per tile.

A map of activity may have any size; its positions cover the image in proportion, and a tile has the
largest value of those that it touches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from demask.errors import BadInput

BLOCK = 8  # pixels a side of the blocks of `contrast`


def contrast(x: Tensor, block: int = BLOCK) -> Tensor:
    """The largest range of values in each block, over the channels: [n, c, h, w] -> [n, ceil(h /
    block), ceil(w / block)].

    A block includes one row and one column of the next, so that an edge between two blocks counts.
    Cost: one or two comparisons per value.

    >>> x = torch.zeros(1, 1, 16, 16)
    >>> x[..., 8:, :] = 1.0
    >>> contrast(x)
    tensor([[[1., 1.],
             [0., 0.]]])
    """
    padding = [-n % block for n in x.shape[2:]]
    if any(padding):
        x = F.pad(x.float(), (0, padding[1], 0, padding[0]), mode="replicate")
    largest = _extreme(x, block, torch.amax, torch.maximum)
    return (largest - _extreme(x, block, torch.amin, torch.minimum)).amax(1)


def _extreme(x: Tensor, block: int, of: Callable[..., Tensor], two: Callable[..., Tensor]) -> Tensor:
    """The largest or the smallest value of each block and of the first positions after it; rows
    first, whose values are contiguous."""
    for axis in (2, 3):
        count = x.shape[axis] // block
        extremes = of(x.unflatten(axis, (count, block)), axis + 1)
        if count > 1:
            following = x.narrow(axis, block, x.shape[axis] - block)
            firsts = following.unflatten(axis, (count - 1, block)).select(axis + 1, 0)
            inner = extremes.narrow(axis, 0, count - 1)
            inner.copy_(two(inner, firsts))
        x = extremes
    return x


def per_tile(activity: Tensor, size: tuple[int, int], tile: int, grow: int = 0) -> Tensor:
    """The largest activity that each tile of an image of `size` touches, with `grow` positions
    around it: [n, h, w] -> [n, ceil(rows / tile), ceil(columns / tile)]. NaN counts as infinite, so
    that unknown tiles are run.

    >>> per_tile(torch.arange(4.0).reshape(1, 2, 2), (8, 8), 4)
    tensor([[[0., 1.],
             [2., 3.]]])
    >>> per_tile(torch.arange(4.0).reshape(1, 2, 2), (8, 8), 4, grow=1)
    tensor([[[3., 3.],
             [3., 3.]]])
    """
    if activity.ndim != 3 or not activity.numel():
        raise BadInput(f"expected a map of activity [images, rows, columns], got {list(activity.shape)}")
    maxima = activity.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    for axis in (1, 2):
        spans = _spans(size[axis - 1], maxima.shape[axis], tile, grow)
        maxima = torch.stack([maxima.narrow(axis, low, high - low).amax(axis) for low, high in spans], axis)
    return maxima


def _spans(length: int, map_size: int, tile: int, grow: int) -> list[tuple[int, int]]:
    """Per tile, the range of positions that it touches on a map of `map_size` positions over
    `length`.

    Positions that are no whole number of the image's may be one off: of blocks of eight the last is
    often smaller.
    """
    slack = int(length % map_size != 0)
    ends = ((max(k - grow, 0), min(k + tile + grow, length)) for k in range(0, length, tile))
    ranges = ((low * map_size // length, -(-high * map_size // length)) for low, high in ends)
    return [(max(low - slack, 0), min(high + slack, map_size)) for low, high in ranges]


def differences(answers: Sequence[Tensor], fills: Sequence[Tensor]) -> Tensor:
    """The distance of a pilot's answers from the fills, the largest over channels and outputs,
    which have one size: [n, c, h, w] each -> [n, h, w]."""
    return together([(a - b).abs().amax(1) for a, b in zip(answers, fills, strict=True)])


def contrasts(answers: Sequence[Tensor]) -> Tensor:
    """The contrast of a pilot's answers, at most over outputs: [n, c, h, w] each -> a map."""
    return together([contrast(answer) for answer in answers])


def together(maps: Sequence[Tensor]) -> Tensor:
    """One map of several, of the size of the largest: the largest value at each place."""
    largest = max(maps, key=lambda one: one.shape[1] * one.shape[2])
    size = (largest.shape[1], largest.shape[2])
    spread = [F.adaptive_max_pool2d(one, size) if one.shape != largest.shape else one for one in maps]
    return torch.stack(spread).amax(0)


__all__ = ["contrast", "contrasts", "differences", "per_tile", "together"]
