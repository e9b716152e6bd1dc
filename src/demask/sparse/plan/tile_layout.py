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
Area = tuple[int, int, int, int]  # first row, first column, rows, columns
At = tuple[int, int, int]  # part, row, column
NO_BORDER: Border = (0, 0, 0, 0)
USED = 0.8  # of the lanes
WASTE = 1.2  # times the positions that need be computed
LEAST = 6  # positions of a part: fewer are slower than rows dealt to threads


@dataclass(frozen=True, slots=True)
class TileGrid:
    """Tiles: images, rows and columns of them; height and width of one, in pixels.

    Each tile is cut into `parts`, one for each thread, along its rows or columns. A part has memory
    of its own, borders too: two threads that wrote to neighbouring lines would take them from each
    other (processors fetch the line behind the one that is asked for).
    """

    images: int
    rows: int
    columns: int
    height: int
    width: int
    parts: int = 1

    @property
    def positions(self) -> int:
        return self.height * self.width

    def scaled(self, by: tuple[int, int]) -> TileGrid:
        """The grid of an image that many times as large."""
        return replace(self, height=self.height * by[0], width=self.width * by[1])

    @property
    def by_rows(self) -> bool:
        """Are tiles cut along their rows?"""
        even = self.height % self.parts == 0 or self.width % self.parts != 0
        return self.height >= self.parts and even

    def part(self, number: int) -> Area:
        """First row, first column, rows and columns of a part of a tile."""
        length = self.height if self.by_rows else self.width
        begin, end = (length * k // self.parts for k in (number, number + 1))
        if self.by_rows:
            return begin, 0, end - begin, self.width
        return 0, begin, self.height, end - begin


def commons(lanes: int) -> Iterator[tuple[int, int]]:
    """Rows and columns of tiles that use most of the lanes."""
    for rows in range(1, lanes + 1):
        for columns in range(1, lanes // rows + 1):
            if rows * columns > USED * lanes:
                yield rows, columns


@functools.cache
def grid_for(batch: int, height: int, width: int, lanes: int, threads: int,
             common: tuple[int, int] | None = None) -> TileGrid:  # fmt: skip
    """The grid that computes least beyond the image, and then has the smallest borders; that with
    `common` rows and columns of tiles, if it computes not much more."""
    if batch > lanes:
        raise ValueError(f"expected at most {lanes} images at once, got {batch}")
    own = lanes // batch
    best = _best(batch, height, width, [(r, own // r) for r in range(1, own + 1)], threads)
    if common is None or common[0] * common[1] > own:
        return best
    found = _best(batch, height, width, [common], threads)
    return found if found.positions <= WASTE * best.positions else best


def _best(
    batch: int, height: int, width: int, tiles: list[tuple[int, int]], threads: int
) -> TileGrid:
    best: tuple[tuple[int, int, int], TileGrid] | None = None
    for rows, columns in tiles:
        tile = -(-height // rows), -(-width // columns)
        used = -(-height // tile[0]), -(-width // tile[1])  # no lane for nothing
        whole = TileGrid(batch, *used, *tile)
        grid = replace(whole, parts=threads) if whole.positions >= LEAST * threads else whole
        if grid.parts > 1 and max(tile) < grid.parts:
            grid = whole
        sizes = [grid.part(k)[2:] for k in range(grid.parts)]
        most = max(h * w for h, w in sizes) * grid.parts
        cost = (most, max((h + 2) * (w + 2) for h, w in sizes), abs(rows - columns))
        if best is None or cost < best[0]:
            best = cost, grid
    assert best is not None
    return best[1]


@dataclass(frozen=True, slots=True)
class GridLayout:
    """A value of `size` in a grid. Position (i, j) counts from a part's own first row and column;
    negative ones are in its border. Bytes of channel c at such a position: (c * pitch +
    line(part, i, j)) * 4 * lanes."""

    size: Size
    grid: TileGrid
    border: Border
    lanes: int
    apart: int = 0  # lines from a part to the next

    @property
    def row(self) -> int:
        """Lines from a row of a part to the next."""
        width = max(self.grid.part(k)[3] for k in range(self.grid.parts))
        return width + self.border[2] + self.border[3]

    @property
    def pitch(self) -> int:
        """Lines from channel to channel: an odd number, so that the same position of many channels
        is spread over all sets of a cache."""
        height = max(self.grid.part(k)[2] for k in range(self.grid.parts))
        return (self.row * (height + self.border[0] + self.border[1])) | 1

    @property
    def bytes(self) -> int:
        """Of one part."""
        return self.size[1] * self.pitch * 4 * self.lanes

    def line(self, part: int, i: int, j: int) -> int:
        """The line of a position of channel 0."""
        return part * self.apart + (i + self.border[0]) * self.row + j + self.border[2]

    def inside(self) -> Iterator[At]:
        """Positions (part, i, j) without borders."""
        for part in range(self.grid.parts):
            _, _, height, width = self.grid.part(part)
            yield from ((part, i, j) for i in range(height) for j in range(width))

    def around(self) -> Iterator[At]:
        """Positions with borders."""
        above, below, left, right = self.border
        for part in range(self.grid.parts):
            _, _, height, width = self.grid.part(part)
            for i in range(-above, height + below):
                yield from ((part, i, j) for j in range(-left, width + right))

    def pixels(self, at: At) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Image, y and x of each lane at a position, and whether it is in the image."""
        grid, lane = self.grid, np.arange(self.lanes)
        part, i, j = at
        first_i, first_j, _, _ = grid.part(part)
        per = grid.rows * grid.columns
        image, tile = lane // per, lane % per
        y = tile // grid.columns * grid.height + first_i + i
        x = tile % grid.columns * grid.width + first_j + j
        batch, _, height, width = self.size
        real = (image < grid.images) & (image < batch)
        return image, y, x, real & (y >= 0) & (y < height) & (x >= 0) & (x < width)

    def element(self, image: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
        """The element of a channel (floats from its beginning) that holds a pixel."""
        grid = self.grid
        tile = y // grid.height * grid.columns + x // grid.width
        lane = image * (grid.rows * grid.columns) + tile
        return self._lines(y % grid.height, x % grid.width) * self.lanes + lane

    def _lines(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        """Lines of positions that count from the tile's first row and column."""
        grid = self.grid
        firsts = np.array([grid.part(k)[0 if grid.by_rows else 1] for k in range(grid.parts)])
        along = i if grid.by_rows else j
        part = np.searchsorted(firsts, along, side="right") - 1
        own_i, own_j = (i - firsts[part], j) if grid.by_rows else (i, j - firsts[part])
        return part * self.apart + (own_i + self.border[0]) * self.row + own_j + self.border[2]


def widened(a: Border, b: Border) -> Border:
    """Borders that hold both."""
    return max(a[0], b[0]), max(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3])


def permutations(layout: GridLayout) -> dict[tuple[int, ...], list[tuple[At, int, int]]]:
    """How borders are filled: for each permutation of lanes (-1: outside of the image) where, and
    from which line to which. Positions that the last tiles have beyond the image are among them."""
    found: dict[tuple[int, ...], list[tuple[At, int, int]]] = {}
    grid = layout.grid
    used = grid.images * grid.rows * grid.columns
    for at in layout.around():
        part, i, j = at
        image, y, x, real = layout.pixels(at)
        first_i, first_j, height, width = grid.part(part)
        if 0 <= i < height and 0 <= j < width and bool(real[:used].all()):
            continue
        lane = layout.element(image, np.maximum(y, 0), np.maximum(x, 0)) % layout.lanes
        lanes = tuple(np.where(real, lane, -1).tolist())
        place = np.array([(first_i + i) % grid.height]), np.array([(first_j + j) % grid.width])
        source = int(layout._lines(*place)[0])
        found.setdefault(lanes, []).append((at, source, layout.line(*at)))
    return found
