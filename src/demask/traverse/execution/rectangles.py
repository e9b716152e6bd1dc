"""Selected tiles as few rectangles.

Every rectangle is run with a halo, and small calls cost what calling costs; a rectangle over two
costs what lies between them. So rectangles are merged, the best pair first, while that is cheaper.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch.nn.functional as F
from torch import Tensor

# Cost of rectangles by their heights and widths, in positions: arrays of one shape -> another.
Cost = Callable[[np.ndarray, np.ndarray], np.ndarray]
MANY = 512  # rectangles to merge at most; of more, four tiles become one


class Rectangle(NamedTuple):
    """Rows `top` to `bottom` and columns `left` to `right` of an image, ends excluded."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def pixels(self) -> int:
        return (self.bottom - self.top) * (self.right - self.left)


def rectangles(
    selected: Tensor, tile: int, size: tuple[int, int], cost: Cost
) -> tuple[Rectangle, ...]:
    """Rectangles that hold all selected tiles of an image of `size`, top to bottom; they may
    overlap. selected: bool [rows, columns] of tiles of `tile` x `tile` positions, those at the end
    of the image perhaps smaller.

    >>> corner = Tensor([[1, 0], [1, 1]]).bool()
    >>> for found in rectangles(corner, 8, (16, 12), lambda h, w: h * w + 1.0): print(*found)
    0 8 0 8
    8 16 0 12
    >>> for found in rectangles(corner, 8, (16, 12), lambda h, w: (h + 4) * (w + 4)): print(*found)
    0 16 0 12
    """
    found = runs(selected)
    while len(found) > MANY:
        selected, tile = _coarser(selected), 2 * tile
        found = runs(selected)
    if not found:
        return ()
    places = np.minimum(np.array(found) * tile, [size[0], size[0], size[1], size[1]])
    return tuple(sorted(Rectangle(*map(int, row)) for row in merged(places, cost)))


def runs(selected: Tensor) -> list[tuple[int, int, int, int]]:
    """Runs of selected tiles in a row, and in rows below that have the very same run: top, bottom,
    left, right in tiles. They cover each selected tile once, and no other."""
    found: list[tuple[int, int, int, int]] = []
    above: dict[tuple[int, int], int] = {}
    for row, line in enumerate(F.pad(selected, (1, 1)).diff(dim=1).tolist()):
        edges = [k for k, change in enumerate(line) if change]
        here: dict[tuple[int, int], int] = {}
        for left, right in zip(edges[::2], edges[1::2], strict=True):
            k = above.get((left, right))
            if k is None:
                k = len(found)
                found.append((row, row, left, right))
            found[k] = (found[k][0], row + 1, left, right)
            here[left, right] = k
        above = here
    return found


def merged(places: np.ndarray, cost: Cost) -> np.ndarray:
    """Rectangles of which no two are cheaper as one; or the one around all, where that is cheaper.
    places: [count, (top, bottom, left, right)]."""
    found = places.astype(np.int64)
    gain = _gain(found[:, None], found[None], cost)
    np.fill_diagonal(gain, -np.inf)
    while len(found) > 1:
        i, j = np.unravel_index(np.argmax(gain), gain.shape)
        if gain[i, j] <= 0:
            break
        found[i] = _around(found[i], found[j])
        keep = ~_inside(found, found[i])
        keep[i] = True
        i = int(keep[:i].sum())
        found, gain = found[keep], gain[np.ix_(keep, keep)]
        gain[i] = gain[:, i] = _gain(found[i], found, cost)
        gain[i, i] = -np.inf
    whole = np.array([[*found.min(0)[[0]], *found.max(0)[[1]], *found.min(0)[[2]],
                       *found.max(0)[[3]]]])  # fmt: skip
    return whole if _costs(whole, cost).sum() <= _costs(found, cost).sum() else found


def _coarser(selected: Tensor) -> Tensor:
    """Four tiles as one, which is selected if one of them is."""
    return F.max_pool2d(selected[None].float(), 2, ceil_mode=True)[0] > 0


def _around(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    low, high = np.minimum(a, b), np.maximum(a, b)
    return np.stack([low[..., 0], high[..., 1], low[..., 2], high[..., 3]], -1)


def _inside(inner: np.ndarray, outer: np.ndarray) -> np.ndarray:
    return (_around(inner, outer) == outer).all(-1)


def _costs(places: np.ndarray, cost: Cost) -> np.ndarray:
    found = cost(places[..., 1] - places[..., 0], places[..., 3] - places[..., 2])
    return np.asarray(found, np.float64)


def _gain(a: np.ndarray, b: np.ndarray, cost: Cost) -> np.ndarray:
    """What one rectangle saves over two."""
    return _costs(a, cost) + _costs(b, cost) - _costs(_around(a, b), cost)


__all__ = ["Cost", "Rectangle", "rectangles"]
