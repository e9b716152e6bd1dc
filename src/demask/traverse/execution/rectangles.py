"""Cover selected tiles with few rectangles.

Every rectangle runs with a halo and has the overhead of its calls; a rectangle around two others
also covers the positions between them. Rectangles are merged, the best pair first, while merging
reduces the cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch.nn.functional as F
from torch import Tensor

# Cost of rectangles by their heights and widths, in positions: arrays of one shape -> another.
Cost = Callable[[np.ndarray, np.ndarray], np.ndarray]
MANY = 512  # rectangles to merge at most; for more, four tiles become one


class Rectangle(NamedTuple):
    """Rows `top` to `bottom` and columns `left` to `right` of an image, ends excluded."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def pixels(self) -> int:
        """The number of positions."""
        return (self.bottom - self.top) * (self.right - self.left)


def rectangles(selected: Tensor, tile: int, size: tuple[int, int], cost: Cost) -> tuple[Rectangle, ...]:
    """Rectangles that cover all selected tiles of an image of `size`, sorted by their top; they may
    overlap.

    selected: bool [rows, columns] of tiles of `tile` x `tile` positions; the last ones may be
    smaller.

    >>> corner = Tensor([[1, 0], [1, 1]]).bool()
    >>> for area in rectangles(corner, 8, (16, 12), lambda h, w: h * w + 1.0): print(*area)
    0 8 0 8
    8 16 0 12
    >>> for area in rectangles(corner, 8, (16, 12), lambda h, w: (h + 4) * (w + 4)): print(*area)
    0 16 0 12
    """
    tiles = runs(selected)
    while len(tiles) > MANY:
        selected, tile = _coarser(selected), 2 * tile
        tiles = runs(selected)
    if not tiles:
        return ()
    bounds = np.minimum(np.array(tiles) * tile, [size[0], size[0], size[1], size[1]])
    return tuple(sorted(Rectangle(*map(int, row)) for row in merge(bounds, cost)))


def runs(selected: Tensor) -> list[tuple[int, int, int, int]]:
    """Runs of selected tiles in a row, extended over rows below with the same run: (top, bottom,
    left, right) in tiles. They cover each selected tile once, and no other tile."""
    result: list[tuple[int, int, int, int]] = []
    above: dict[tuple[int, int], int] = {}
    for row, line in enumerate(F.pad(selected, (1, 1)).diff(dim=1).tolist()):
        edges = [k for k, change in enumerate(line) if change]
        current: dict[tuple[int, int], int] = {}
        for left, right in zip(edges[::2], edges[1::2], strict=True):
            k = above.get((left, right))
            if k is None:
                k = len(result)
                result.append((row, row, left, right))
            result[k] = (result[k][0], row + 1, left, right)
            current[left, right] = k
        above = current
    return result


def merge(bounds: np.ndarray, cost: Cost) -> np.ndarray:
    """Rectangles merged while that reduces the cost; or the one around all, where that is cheaper.

    bounds: int [count, (top, bottom, left, right)], as is the result.
    """
    result = bounds.astype(np.int64)
    gain = _gain(result[:, None], result[None], cost)
    np.fill_diagonal(gain, -np.inf)
    while len(result) > 1:
        i, j = np.unravel_index(np.argmax(gain), gain.shape)
        if gain[i, j] <= 0:
            break
        result[i] = _around(result[i], result[j])
        keep = ~_inside(result, result[i])
        keep[i] = True
        i = int(keep[:i].sum())
        result, gain = result[keep], gain[np.ix_(keep, keep)]
        gain[i] = gain[:, i] = _gain(result[i], result, cost)
        gain[i, i] = -np.inf
    whole = np.array([[*result.min(0)[[0]], *result.max(0)[[1]], *result.min(0)[[2]], *result.max(0)[[3]]]])
    return whole if _costs(whole, cost).sum() <= _costs(result, cost).sum() else result


def _coarser(selected: Tensor) -> Tensor:
    """Tiles of twice the size, selected where one of their four tiles is."""
    return F.max_pool2d(selected[None].float(), 2, ceil_mode=True)[0] > 0


def _around(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    low, high = np.minimum(a, b), np.maximum(a, b)
    return np.stack([low[..., 0], high[..., 1], low[..., 2], high[..., 3]], -1)


def _inside(inner: np.ndarray, outer: np.ndarray) -> np.ndarray:
    return (_around(inner, outer) == outer).all(-1)


def _costs(bounds: np.ndarray, cost: Cost) -> np.ndarray:
    costs = cost(bounds[..., 1] - bounds[..., 0], bounds[..., 3] - bounds[..., 2])
    return np.asarray(costs, np.float64)


def _gain(a: np.ndarray, b: np.ndarray, cost: Cost) -> np.ndarray:
    """The cost that one rectangle saves over two."""
    return _costs(a, cost) + _costs(b, cost) - _costs(_around(a, b), cost)


__all__ = ["Cost", "Rectangle", "rectangles"]
