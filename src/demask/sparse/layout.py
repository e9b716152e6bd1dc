"""Where the numbers of a value lie while a segment runs: vectors whose lanes are tiles.

An image is cut into a grid of equal tiles, and lane k of every vector belongs to tile k, so
position (i, j) of all tiles is one vector. A neighbour in the image is then a neighbouring vector,
always aligned, whatever the kernel, stride or dilation; only across the border of a tile it is a
neighbouring lane: `border` lines around the tiles hold those, filled by permuting lanes. Several
images are further tiles. Tokens are an image of one row.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

Size = tuple[int, int, int, int]  # batch, channels, height, width
Border = tuple[int, int, int, int]  # lines above, below, left, right
NO_BORDER: Border = (0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Grid:
    """Tiles: images, rows and columns of them; height and width of one, in pixels."""

    images: int
    rows: int
    columns: int
    height: int
    width: int

    @property
    def positions(self) -> int:
        return self.height * self.width

    def scaled(self, by: tuple[int, int]) -> Grid:
        """The grid of an image that many times as large."""
        return replace(self, height=self.height * by[0], width=self.width * by[1])


@functools.cache
def grid_for(batch: int, height: int, width: int, lanes: int) -> Grid:
    """The grid that computes least beyond the image, and then has the smallest borders."""
    best: tuple[tuple[int, int, int], Grid] | None = None
    for rows in range(1, lanes // batch + 1):
        columns = lanes // batch // rows
        tile = -(-height // rows), -(-width // columns)
        used = -(-height // tile[0]), -(-width // tile[1])  # no lane for nothing
        grid = Grid(batch, *used, *tile)
        cost = (grid.positions, (tile[0] + 2) * (tile[1] + 2), abs(rows - columns))
        if best is None or cost < best[0]:
            best = cost, grid
    if best is None:
        raise ValueError(f"expected at most {lanes} images at once, got {batch}")
    return best[1]


@dataclass(frozen=True, slots=True)
class Layout:
    """A value of `size` in a grid. Bytes of channel c, line (i, j): (c * pitch + line(i, j)) *
    4 * lanes."""

    size: Size
    grid: Grid
    border: Border
    lanes: int

    @property
    def row(self) -> int:
        """Lines from a row of a tile to the next."""
        return self.grid.width + self.border[2] + self.border[3]

    @property
    def pitch(self) -> int:
        """Lines from channel to channel: an odd number, so that the same position of many channels
        is spread over all sets of a cache."""
        lines = self.row * (self.grid.height + self.border[0] + self.border[1])
        return lines | 1

    @property
    def bytes(self) -> int:
        return self.size[1] * self.pitch * 4 * self.lanes

    def line(self, i: int, j: int) -> int:
        """The line of a position, borders included (negative ones are above and left)."""
        return (i + self.border[0]) * self.row + j + self.border[2]

    def inside(self) -> Iterator[tuple[int, int]]:
        """Positions without borders."""
        for i in range(self.grid.height):
            for j in range(self.grid.width):
                yield i, j

    def around(self) -> Iterator[tuple[int, int]]:
        """Positions with borders."""
        above, below, left, right = self.border
        for i in range(-above, self.grid.height + below):
            for j in range(-left, self.grid.width + right):
                yield i, j

    def pixels(self, i: int, j: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Image, y and x of each lane at a position, and whether it is in the image."""
        grid, lane = self.grid, np.arange(self.lanes)
        per = grid.rows * grid.columns
        image, tile = lane // per, lane % per
        y = tile // grid.columns * grid.height + i
        x = tile % grid.columns * grid.width + j
        batch, _, height, width = self.size
        real = (image < grid.images) & (image < batch)
        return image, y, x, real & (y >= 0) & (y < height) & (x >= 0) & (x < width)

    def element(self, image: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
        """The element of a channel (floats from its beginning) that holds a pixel."""
        grid = self.grid
        tile = y // grid.height * grid.columns + x // grid.width
        lane = image * (grid.rows * grid.columns) + tile
        line = (y % grid.height + self.border[0]) * self.row + x % grid.width + self.border[2]
        return line * self.lanes + lane


def widened(a: Border, b: Border) -> Border:
    """Borders that hold both."""
    return max(a[0], b[0]), max(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3])


def permutations(layout: Layout) -> dict[tuple[int, ...], list[tuple[int, int]]]:
    """How borders are filled: for each permutation of lanes (-1: outside of the image) the pairs
    (from, to) of lines. Positions that the last tiles have beyond the image are among them."""
    found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    grid = layout.grid
    for i, j in layout.around():
        image, y, x, real = layout.pixels(i, j)
        inside = 0 <= i < grid.height and 0 <= j < grid.width
        if inside and bool(real[: grid.images * grid.rows * grid.columns].all()):
            continue
        lane = layout.element(image, np.maximum(y, 0), np.maximum(x, 0)) % layout.lanes
        lanes = tuple(np.where(real, lane, -1).tolist())
        source = layout.line(i % grid.height, j % grid.width)
        found.setdefault(lanes, []).append((source, layout.line(i, j)))
    return found
