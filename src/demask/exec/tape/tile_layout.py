"""The layout of values while a segment runs: vectors whose lanes are tiles.

An image is split into a grid of equal tiles, and lane k of every vector belongs to tile k, so
position (i, j) of all tiles is one vector. A neighbor in the image is then a neighboring vector,
always aligned, for any kernel size, stride or dilation. Only across the border of a tile it is in
another lane: `border` lines around the tiles store these neighbors, filled by permuting lanes.
Further images are further tiles. Tokens are an image of one row.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

Size = tuple[int, int, int, int]  # batch, channels, height, width
Border = tuple[int, int, int, int]  # lines above, below, left, right
Area = tuple[int, int, int, int]  # first row, first column, rows, columns
At = tuple[int, int, int]  # part, row, column
NO_BORDER: Border = (0, 0, 0, 0)
USED = 0.8  # smallest share of lanes in use
WASTE = 1.2  # largest factor of positions computed to positions needed
LEAST = 6  # positions of a part; with fewer, threads should share rows


@dataclass(frozen=True, slots=True)
class TileGrid:
    """Numbers of images, rows and columns of tiles; height and width of a tile in pixels.

    Each tile is split into `parts`, one per thread, along its rows or columns. A part has its own
    memory, including borders: threads that write to neighboring lines would invalidate each other's
    caches (processors also fetch the next line). Rows and columns of tiles and of their parts are
    multiples of `unit`.
    """

    images: int
    rows: int
    columns: int
    height: int
    width: int
    parts: int = 1
    unit: int = 1

    @property
    def positions(self) -> int:
        """Positions of a tile."""
        return self.height * self.width

    def scaled(self, factors: tuple[int, int]) -> TileGrid:
        """The grid of an image that is larger by these factors."""
        return replace(self, height=self.height * factors[0], width=self.width * factors[1])

    def rounded_up(self, factors: tuple[int, int]) -> TileGrid:
        """The grid with height and width of tiles rounded up to multiples."""
        return replace(
            self, height=-(-self.height // factors[0]) * factors[0], width=-(-self.width // factors[1]) * factors[1]
        )

    @property
    def by_rows(self) -> bool:
        """Whether tiles are split along their rows."""
        height, width = self.height // self.unit, self.width // self.unit
        even = height % self.parts == 0 or width % self.parts != 0
        return height >= self.parts and even

    def part(self, number: int) -> Area:
        """First row, first column, rows and columns of a part of a tile."""
        return areas_of(self)[number]


@functools.cache
def areas_of(grid: TileGrid) -> tuple[Area, ...]:
    """First row, first column, rows and columns of each part of a tile."""
    count = (grid.height if grid.by_rows else grid.width) // grid.unit
    ends = [count * k // grid.parts * grid.unit for k in range(grid.parts + 1)]
    spans = list(pairwise(ends))
    if grid.by_rows:
        return tuple((begin, 0, end - begin, grid.width) for begin, end in spans)
    return tuple((0, begin, grid.height, end - begin) for begin, end in spans)


def commons(lanes: int) -> Iterator[tuple[int, int]]:
    """Rows and columns of tiles that use most of the lanes."""
    for rows in range(1, lanes + 1):
        for columns in range(1, lanes // rows + 1):
            if rows * columns > USED * lanes:
                yield rows, columns


@functools.cache
def grid_for(
    batch: int, height: int, width: int, lanes: int, threads: int, common: tuple[int, int] | None = None, unit: int = 1
) -> TileGrid:
    """The grid with the fewest positions outside of the image, then with the smallest borders.

    common: rows and columns of tiles to use instead, unless they compute many more positions.
    unit: of the grid.
    """
    if batch > lanes:
        raise ValueError(f"expected at most {lanes} images at once, got {batch}")
    tiles = lanes // batch
    all_ = [(r, tiles // r) for r in range(1, tiles + 1)]
    best = _best_grid(batch, height, width, all_, threads, unit)
    if common is None or common[0] * common[1] > tiles:
        return best
    common_grid = _best_grid(batch, height, width, [common], threads, unit)
    return common_grid if common_grid.positions <= WASTE * best.positions else best


def _best_grid(batch: int, height: int, width: int, tiles: list[tuple[int, int]], threads: int, unit: int) -> TileGrid:
    """The best grid among these numbers of tile rows and columns."""
    best: tuple[tuple[int, int, int], TileGrid] | None = None
    for rows, columns in tiles:
        tile = tuple(-(-size // (count * unit)) * unit for size, count in ((height, rows), (width, columns)))
        used = -(-height // tile[0]), -(-width // tile[1])  # without empty tiles
        unsplit = TileGrid(batch, *used, *tile, unit=unit)
        grid = replace(unsplit, parts=threads) if unsplit.positions >= LEAST * threads else unsplit
        if grid.parts > 1 and max(tile) < grid.parts * unit:
            grid = unsplit
        sizes = [grid.part(k)[2:] for k in range(grid.parts)]
        computed = max(h * w for h, w in sizes) * grid.parts
        cost = (computed, max((h + 2) * (w + 2) for h, w in sizes), abs(rows - columns))
        if best is None or cost < best[0]:
            best = cost, grid
    assert best is not None
    return best[1]


@dataclass(frozen=True, slots=True)
class GridLayout:
    """A value of `size` in a grid.

    Position (i, j) is relative to the first row and column of a part; negative ones are in its
    border.
    Byte offset of channel c at a position: (c * pitch + line(part, i, j)) * 4 * lanes.
    """

    size: Size
    grid: TileGrid
    border: Border
    lanes: int
    part_pitch: int = 0  # lines from part to part

    @property
    def row(self) -> int:
        """Lines from a row of a part to the next row."""
        width = max(area[3] for area in areas_of(self.grid))
        return width + self.border[2] + self.border[3]

    @property
    def pitch(self) -> int:
        """Lines from channel to channel.

        An odd number, so that one position of many channels is spread over all sets of a cache.
        """
        height = max(area[2] for area in areas_of(self.grid))
        return (self.row * (height + self.border[0] + self.border[1])) | 1

    @property
    def bytes(self) -> int:
        """Bytes of one part."""
        return self.size[1] * self.pitch * 4 * self.lanes

    def line(self, part: Any, i: Any, j: Any) -> Any:
        """The line of a position of channel 0; numbers, or arrays of them."""
        return part * self.part_pitch + (i + self.border[0]) * self.row + j + self.border[2]

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

    def pixels(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Image, y and x of each lane at positions [n, 3], and whether they are inside of the
        image. Images are [lanes], the others [n, lanes]."""
        grid, lane = self.grid, np.arange(self.lanes)
        part, i, j = (numbers[:, None] for numbers in at.T)
        first_i, first_j, _, _ = (numbers[part] for numbers in np.array(areas_of(grid)).T)
        tiles_per_image = grid.rows * grid.columns
        image, tile = lane // tiles_per_image, lane % tiles_per_image
        y = tile // grid.columns * grid.height + first_i + i
        x = tile % grid.columns * grid.width + first_j + j
        batch, _, height, width = self.size
        is_inside = (image < grid.images) & (image < batch)
        return image, y, x, is_inside & (y >= 0) & (y < height) & (x >= 0) & (x < width)

    def element(self, image: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
        """The element number of a pixel within a channel."""
        grid = self.grid
        tile = y // grid.height * grid.columns + x // grid.width
        lane = image * (grid.rows * grid.columns) + tile
        return self._line_numbers(y % grid.height, x % grid.width) * self.lanes + lane

    def _line_numbers(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        """Lines of positions relative to the first row and column of the tile."""
        grid = self.grid
        firsts = np.array([area[0 if grid.by_rows else 1] for area in areas_of(grid)])
        split_position = i if grid.by_rows else j
        part = np.searchsorted(firsts, split_position, side="right") - 1
        part_i, part_j = (i - firsts[part], j) if grid.by_rows else (i, j - firsts[part])
        return part * self.part_pitch + (part_i + self.border[0]) * self.row + part_j + self.border[2]


def widened(a: Border, b: Border) -> Border:
    """The smallest border that includes both."""
    return max(a[0], b[0]), max(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3])


def permutations(
    layout: GridLayout, stored: GridLayout | None = None
) -> dict[tuple[int, ...], list[tuple[At, int, int]]]:
    """How to fill borders: lane permutation -> (position, source line, target line).

    A lane is -1 outside of the image. Positions of the last tiles outside of the image are
    included. stored: the layout of source lines, if it has another border.
    """
    moves: dict[tuple[int, ...], list[tuple[At, int, int]]] = {}
    grid, at = layout.grid, at_array(layout.around())
    used = grid.images * grid.rows * grid.columns
    image, y, x, is_inside = layout.pixels(at)
    first_i, first_j, height, width = np.array(areas_of(grid)).T[:, at[:, 0]]
    part, i, j = at.T
    is_own = (i >= 0) & (i < height) & (j >= 0) & (j < width) & is_inside[:, :used].all(1)
    lanes = layout.element(image, np.maximum(y, 0), np.maximum(x, 0)) % layout.lanes
    lanes = np.where(is_inside, lanes, -1)
    sources = (stored or layout)._line_numbers((first_i + i) % grid.height, (first_j + j) % grid.width)
    targets = layout.line(part, i, j)
    for k in np.flatnonzero(~is_own):
        move = tuple(at[k].tolist()), int(sources[k]), int(targets[k])
        moves.setdefault(tuple(lanes[k].tolist()), []).append(move)
    return moves


def at_array(positions: Iterable[At]) -> np.ndarray:
    """Positions as an array [n, 3] of int64."""
    return np.array(list(positions), np.int64).reshape(-1, 3)
