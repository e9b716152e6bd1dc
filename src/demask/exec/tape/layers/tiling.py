"""Tiling of sparse layers: tiles of positions, blocks of channels, shares of threads.

The cost of a tiling is estimated in cycles of one core:

    nonzeros * (PRODUCT * T + NONZERO) + (rows * blocks) * (ROW + LINE * T)

for each tile of T vectors. Products cost more if the inputs of a block do not fit in the L1 cache
(MISS) and if there are too few sums to hide FMA latency (WAIT); inputs cost more if another thread
wrote them (FAR, NEAR). The constants were fitted by hand to the layers of a ResNet-50 on one
machine with AVX-512: they rank tilings, but do not predict time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from demask.exec.tape.tile_layout import Area
from demask.kernels.llvm.isa import Isa

PRODUCT, NONZERO, ROW, LINE = 0.68, 2.0, 4.5, 5.4  # cycles
MISS = 1.0  # additional cycles per product with an input from the L2 cache
WAIT = 0.25  # cycles per nonzero and missing chain of sums
FAR, NEAR = 12.0, 0.6  # per vector of inputs: written by another thread, or by this one
CACHE = 48 * 1024  # bytes of the L1 cache
MAX_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class TilingProblem:
    """A layer to tile.

    parts: rows and columns of each part of the positions; nonzeros: of the weight; stride: distance
    of the inputs of neighboring positions; reach: additional rows and columns that a kernel spans.
    """

    parts: tuple[tuple[int, int], ...]
    outputs: int
    channels: int
    groups: int
    nonzeros: int
    stride: tuple[int, int]
    reach: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Tiling:
    """tile: largest rows and columns of a tile; block: channels per block; side: output rows
    computed together; by_rows: whether threads share output rows instead of positions.
    """

    tile: tuple[int, int]
    block: int
    side: int
    by_rows: bool


def rects(area: Area, tile: tuple[int, int]) -> list[Area]:
    """Tiles of about equal size that cover an area."""
    i, j, rows, columns = area
    return [
        (y, x, h, w) for y, h in _even_pieces(i, i + rows, tile[0]) for x, w in _even_pieces(j, j + columns, tile[1])
    ]


def _even_pieces(begin: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    """(begin, length) of the fewest pieces of at most `most`, about equal in size."""
    count = -(-(end - begin) // most)
    bounds = [begin + (end - begin) * k // count for k in range(count + 1)]
    yield from ((a, b - a) for a, b in pairwise(bounds))


def rect_counts(rows: int, columns: int, tile: tuple[int, int]) -> Iterator[tuple[int, int, int]]:
    """(rows, columns, number) of tiles of each size that `rects` yields.

    >>> list(rect_counts(5, 4, (2, 4)))
    [(1, 4, 1), (2, 4, 2)]
    """
    for h, high in _piece_lengths(rows, tile[0]):
        for w, wide in _piece_lengths(columns, tile[1]):
            yield h, w, high * wide


def _piece_lengths(size: int, most: int) -> list[tuple[int, int]]:
    """(length, number) of the pieces of a size."""
    count = -(-size // most)
    shorter, longer = size // count, size % count
    return [(n, k) for n, k in ((shorter, count - longer), (shorter + 1, longer)) if k]


def strips(rows: int, columns: int, most: int, tile: int) -> Iterator[Area]:
    """Strips of full rows with about `most` positions, at least as high as a tile."""
    yield from ((i, 0, h, columns) for i, h in _even_pieces(0, rows, max(tile, most // columns)))


def cost(shape: TilingProblem, tiling: Tiling, threads: int, line: int) -> float:
    """Cycles of the thread with the most work."""
    blocks = -(-shape.channels // tiling.block)
    rows, nonzeros = shape.outputs, float(shape.nonzeros)
    part_cycles = [
        sum(
            count * _tile_cycles(shape, tiling, blocks, rows, nonzeros, h, w, line)
            for h, w, count in rect_counts(*part, tiling.tile)
        )
        for part in shape.parts
    ]
    input_lines = sum(_lines_read(shape, *part) for part in shape.parts) * shape.channels
    if len(shape.parts) == threads and not tiling.by_rows:
        return input_lines * NEAR + max(part_cycles)
    return input_lines * (FAR if threads > 1 else NEAR) + sum(part_cycles) / threads


def _tile_cycles(
    shape: TilingProblem, tiling: Tiling, blocks: int, rows: int, nonzeros: float, h: int, w: int, line: int
) -> float:
    """Cycles of one tile: for its nonzeros, and for its rows in each block that they occur in."""
    input_lines, t = _lines_read(shape, h, w), h * w
    miss_share = max(0.0, 1 - CACHE / (input_lines * line * min(tiling.block, shape.channels)))
    in_block = nonzeros * shape.groups / max(rows * blocks, 1)
    row_blocks = rows * max(1.0, blocks / shape.groups * (1 - math.exp(-in_block)))
    missing_chains = max(0, 8 - t * tiling.side) / tiling.side  # chains of sums needed to hide latency
    product = (PRODUCT + MISS * miss_share) * t + NONZERO + WAIT * missing_chains
    return nonzeros * product + row_blocks * (ROW / tiling.side + LINE * t)


def _lines_read(shape: TilingProblem, h: int, w: int) -> int:
    high = (h - 1) * min(shape.stride[0], shape.reach[0] + 1) + 1 + shape.reach[0]
    wide = (w - 1) * min(shape.stride[1], shape.reach[1] + 1) + 1 + shape.reach[1]
    return high * wide


@functools.cache
def best(shape: TilingProblem, threads: int, isa: Isa, by_rows: bool | None = None) -> tuple[float, Tiling]:
    """The tiling with the lowest estimated cost, and its cycles. by_rows: how work is shared."""
    candidates = [
        (cost(shape, tiling, threads, isa.line), n, tiling)
        for n, tiling in enumerate(cuts(shape, threads, isa))
        if by_rows in (None, tiling.by_rows)
    ]
    cycles, _, tiling = min(candidates)
    return cycles, tiling


def cuts(shape: TilingProblem, threads: int, isa: Isa) -> Iterator[Tiling]:
    """Candidate tilings: tiles of one row, or of several full rows if these are short."""
    registers = isa.registers - 4
    is_split = len(shape.parts) == threads
    for by_rows in (True, False) if is_split and threads > 1 else (not is_split,):
        for h, w in _tile_sizes(shape, registers):
            for side in _row_counts(h * w, registers):
                for block in _block_sizes(shape, h, w, isa.line):
                    yield Tiling((h, w), block, side, by_rows)


def _row_counts(positions: int, most: int) -> Iterator[int]:
    """Numbers of rows to compute together: enough to hide FMA latency."""
    least = max(1, 4 // positions)
    for side in (least, 2 * least):
        if positions * side <= most:
            yield side


def _tile_sizes(shape: TilingProblem, most: int) -> Iterator[tuple[int, int]]:
    """Sizes of tiles: parts of a row, or several full rows if these are short."""
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


def _block_sizes(shape: TilingProblem, h: int, w: int, line: int) -> Iterator[int]:
    """Numbers of channels per block."""
    channels_in_cache = CACHE / (line * _lines_read(shape, h, w))
    sizes = {shape.channels}
    for factor in (1.0, 1.6, 2.5, 4.0):
        count = max(1, -(-shape.channels // max(1, int(channels_in_cache * factor))))
        if count <= MAX_BLOCKS:
            sizes.add(-(-shape.channels // count))
    yield from sorted(sizes)
