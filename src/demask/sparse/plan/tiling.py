"""How a sparse layer is cut: tiles of positions, blocks of channels, parts for threads.

What a cut costs is estimated, in cycles of one core:

    nonzeros * (PRODUCT * T + NONZERO) + (rows * blocks) * (ROW + LINE * T)

for each tile of T vectors. Products cost more where inputs of a block do not fit the first cache
(MISS) and where there are few sums to keep the adders busy (WAIT); inputs cost more where another
thread made them (FAR, NEAR). The numbers were fitted by hand on the layers of a ResNet-50, on one
machine with AVX-512: they rank cuts, and promise no time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from demask.kernels.llvm.isa import Isa
from demask.sparse.plan.tile_layout import Area

PRODUCT, NONZERO, ROW, LINE = 0.68, 2.0, 4.5, 5.4  # cycles
MISS = 1.0  # cycles more per product whose input comes from the second cache
WAIT = 0.25  # per nonzero and missing chain
FAR, NEAR = 12.0, 0.6  # per vector of inputs: made by the other thread, or by this one
CACHE = 48 * 1024  # bytes of the first cache
MAX_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class TilingProblem:
    """What is to be cut: rows and columns of each part of the positions; nonzeros of the weight;
    how far inputs of neighbours lie apart, and how many more rows and columns a kernel spans."""

    parts: tuple[tuple[int, int], ...]
    outputs: int
    channels: int
    groups: int
    nonzeros: int
    stride: tuple[int, int]
    reach: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Tiling:
    """Rows and columns of a tile at most, channels of a block, output rows side by side, and
    whether threads share positions or output rows."""

    tile: tuple[int, int]
    block: int
    side: int
    by_rows: bool


def rects(area: Area, tile: tuple[int, int]) -> list[Area]:
    """Tiles of about equal size that cover an area."""
    i, j, rows, columns = area
    return [(y, x, h, w) for y, h in _pieces(i, i + rows, tile[0])
            for x, w in _pieces(j, j + columns, tile[1])]  # fmt: skip


def _pieces(begin: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    count = -(-(end - begin) // most)
    cuts = [begin + (end - begin) * k // count for k in range(count + 1)]
    yield from ((a, b - a) for a, b in pairwise(cuts))


def strips(rows: int, columns: int, most: int, tile: int) -> Iterator[Area]:
    """Pieces of whole rows with about `most` positions, but no lower than a tile."""
    yield from ((i, 0, h, columns) for i, h in _pieces(0, rows, max(tile, most // columns)))


def cost(shape: TilingProblem, cut: Tiling, threads: int, line: int) -> float:
    """Cycles of the thread that has most to do."""
    blocks = -(-shape.channels // cut.block)
    rows, nonzeros = shape.outputs, float(shape.nonzeros)
    each = [sum(_tile(shape, cut, blocks, rows, nonzeros, *rect[2:], line)
                for rect in rects((0, 0, *part), cut.tile)) for part in shape.parts]  # fmt: skip
    lines = sum(_read(shape, *part) for part in shape.parts) * shape.channels
    if len(shape.parts) == threads and not cut.by_rows:
        return lines * NEAR + max(each)
    return lines * (FAR if threads > 1 else NEAR) + sum(each) / threads


def _tile(shape: TilingProblem, cut: Tiling, blocks: int, rows: int, nonzeros: float, h: int, w: int,
          line: int) -> float:  # fmt: skip
    """Cycles for one tile: of a row, and of a row's part in a block where it has one."""
    lines, t = _read(shape, h, w), h * w
    missed = max(0.0, 1 - CACHE / (lines * line * min(cut.block, shape.channels)))
    in_block = nonzeros * shape.groups / max(rows * blocks, 1)
    touched = rows * max(1.0, blocks / shape.groups * (1 - math.exp(-in_block)))
    few = max(0, 8 - t * cut.side) / cut.side  # chains of sums that wait for themselves
    product = (PRODUCT + MISS * missed) * t + NONZERO + WAIT * few
    return nonzeros * product + touched * (ROW / cut.side + LINE * t)


def _read(shape: TilingProblem, h: int, w: int) -> int:
    """Lines of a channel that a tile reads."""
    high = (h - 1) * min(shape.stride[0], shape.reach[0] + 1) + 1 + shape.reach[0]
    wide = (w - 1) * min(shape.stride[1], shape.reach[1] + 1) + 1 + shape.reach[1]
    return high * wide


@functools.cache
def best(
    shape: TilingProblem, threads: int, isa: Isa, by_rows: bool | None = None
) -> tuple[float, Tiling]:
    """The cut that costs least, and its cycles, by the estimate. by_rows: how threads share."""
    found = [(cost(shape, cut, threads, isa.line), n, cut)
             for n, cut in enumerate(cuts(shape, threads, isa))
             if by_rows in (None, cut.by_rows)]  # fmt: skip
    return min(found)[::2]  # type: ignore[return-value]


def cuts(shape: TilingProblem, threads: int, isa: Isa) -> Iterator[Tiling]:
    """The cuts worth a thought: tiles of one row, or of all positions where there are few."""
    most = isa.registers - 4
    own = len(shape.parts) == threads
    for by_rows in (True, False) if own and threads > 1 else (not own,):
        for h, w in _tiles(shape, most):
            for side in _sides(h * w, most):
                for block in _blocks(shape, h, w, isa.line):
                    yield Tiling((h, w), block, side, by_rows)


def _sides(positions: int, most: int) -> Iterator[int]:
    """How many rows may go side by side: enough to keep the adders busy."""
    least = max(1, 4 // positions)
    for side in (least, 2 * least):
        if positions * side <= most:
            yield side


def _tiles(shape: TilingProblem, most: int) -> Iterator[tuple[int, int]]:
    """Parts of a row; whole rows, where these are short."""
    rows, columns = shape.parts[0]
    for count in range(1, columns + 1):
        w = -(-columns // count)
        if w <= most and (w >= 4 or w == columns):
            yield 1, w
    if columns <= 4:
        heights = {-(-rows // count) for count in range(1, rows)} | {7}
        for h in sorted(heights):
            if 1 < h <= rows and h * columns <= most:
                yield h, columns


def _blocks(shape: TilingProblem, h: int, w: int, line: int) -> Iterator[int]:
    fits = CACHE / (line * _read(shape, h, w))
    sizes = {shape.channels}
    for factor in (1.0, 1.6, 2.5, 4.0):
        count = max(1, -(-shape.channels // max(1, int(fits * factor))))
        if count <= MAX_BLOCKS:
            sizes.add(-(-shape.channels // count))
    yield from sorted(sizes)
