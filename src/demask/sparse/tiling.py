"""How a sparse layer is cut: tiles of positions, blocks of channels, parts for threads.

What a cut costs is estimated, in cycles of one core:

    nonzeros * (PRODUCT * T + NONZERO) + (rows * blocks) * (ROW + LINE * T)

for each tile of T vectors; products cost more where a block's inputs do not fit into the first
cache. The numbers are fitted to measurements (benchmarks/results/cpu_sparse.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

PRODUCT, NONZERO, ROW, LINE = 0.62, 1.1, 20.0, 2.5  # cycles
MISS = 0.7  # cycles more per product whose input comes from the second cache
CACHE = 40 * 1024  # bytes of the first cache that inputs may take
MAX_BLOCKS = 64
Rect = tuple[int, int, int, int]  # first row, first column, rows, columns


@dataclass(frozen=True, slots=True)
class Shape:
    """What is to be cut: positions of a tile of the image; products of a position; how far inputs
    of neighbours lie apart, and how many more rows and columns of them a kernel spans."""

    rows: int
    columns: int
    outputs: int
    channels: int
    nonzeros: int
    stride: tuple[int, int]
    reach: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows and columns of a tile at most, channels of a block, output rows side by side, and
    whether threads share positions or output rows."""

    tile: tuple[int, int]
    block: int
    side: int
    by_rows: bool


def rects(rows: tuple[int, int], columns: tuple[int, int], tile: tuple[int, int]) -> list[Rect]:
    """Tiles of about equal size that cover [rows) × [columns)."""
    return [(i, j, h, w) for i, h in _pieces(*rows, tile[0]) for j, w in _pieces(*columns, tile[1])]


def _pieces(begin: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    count = -(-(end - begin) // most)
    cuts = [begin + (end - begin) * k // count for k in range(count + 1)]
    yield from ((a, b - a) for a, b in pairwise(cuts))


def shares(shape: Shape, threads: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """The rows and columns of positions of each thread: along the longer side."""
    by_row = shape.rows >= shape.columns
    count = shape.rows if by_row else shape.columns
    cuts = [count * k // threads for k in range(threads + 1)]
    parts = list(pairwise(cuts))
    whole = (0, shape.columns) if by_row else (0, shape.rows)
    return [(part, whole) if by_row else (whole, part) for part in parts]


def cost(shape: Shape, cut: Cut, threads: int, line: int) -> float:
    """Cycles of the thread that has most to do."""
    blocks = -(-shape.channels // cut.block)
    rows, nonzeros = shape.outputs, float(shape.nonzeros)
    if cut.by_rows:
        parts = [((0, shape.rows), (0, shape.columns))]
        rows, nonzeros = -(-rows // threads), nonzeros / threads
    else:
        parts = shares(shape, threads)
    return max(sum(_tile(shape, cut, blocks, rows, nonzeros, h, w, line)
                   for _, _, h, w in rects(*part, cut.tile)) for part in parts)  # fmt: skip


def _tile(shape: Shape, cut: Cut, blocks: int, rows: int, nonzeros: float, h: int, w: int,
          line: int) -> float:  # fmt: skip
    lines = _read(shape, h, w)
    missed = max(0.0, 1 - CACHE / (lines * line * min(cut.block, shape.channels)))
    touched = rows * min(blocks, 1 + nonzeros / max(rows, 1) * 2)
    t = h * w
    padded = 1.0 if cut.side == 1 else 1.03
    product = (PRODUCT + MISS * missed) * max(t, 6 / cut.side) + NONZERO
    return nonzeros * padded * product + touched * (ROW / cut.side + LINE * t)


def _read(shape: Shape, h: int, w: int) -> int:
    """Lines of a channel that a tile reads."""
    high = (h - 1) * min(shape.stride[0], shape.reach[0] + 1) + 1 + shape.reach[0]
    wide = (w - 1) * min(shape.stride[1], shape.reach[1] + 1) + 1 + shape.reach[1]
    return high * wide


def best(shape: Shape, threads: int, line: int, registers: int) -> Cut:
    """The cut that costs least, by the estimate."""
    found = min((cost(shape, cut, threads, line), n, cut)
                for n, cut in enumerate(cuts(shape, threads, line, registers)))  # fmt: skip
    return found[2]


def cuts(shape: Shape, threads: int, line: int, registers: int) -> Iterator[Cut]:
    """The cuts worth a thought."""
    most = registers - 4
    splits = (True, False) if threads > 1 else (True,)
    for by_rows in splits:
        if not by_rows and max(shape.rows, shape.columns) < threads:
            continue
        for h, w in _tiles(shape, most):
            side = max(1, min(4, 8 // (h * w), most // (h * w)))
            for block in _blocks(shape, h, w, line):
                yield Cut((h, w), block, side, by_rows)


def _tiles(shape: Shape, most: int) -> Iterator[tuple[int, int]]:
    widths = {-(-shape.columns // n) for n in range(1, shape.columns + 1)}
    heights = {-(-shape.rows // n) for n in range(1, shape.rows + 1)}
    small = shape.rows * shape.columns < 4
    for w in widths:
        for h in heights:
            if h * w <= most and (h * w >= 4 or small or h == shape.rows or w == shape.columns):
                yield h, w


def _blocks(shape: Shape, h: int, w: int, line: int) -> Iterator[int]:
    fits = CACHE / (line * _read(shape, h, w))
    sizes = {shape.channels}
    for factor in (1.0, 1.6, 2.5):
        count = max(1, -(-shape.channels // max(1, int(fits * factor))))
        if count <= MAX_BLOCKS:
            sizes.add(-(-shape.channels // count))
    yield from sorted(sizes)


def balanced(counts: np.ndarray) -> float:
    """How much longer the longest part takes than the mean."""
    return float(counts.max() / max(counts.mean(), 1e-9))
