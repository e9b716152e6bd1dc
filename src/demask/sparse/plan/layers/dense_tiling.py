"""Tiling of dense layers: tiles of positions, blocks of output and of input channels.

The cost of a tiling is estimated in cycles of one core, like that of sparse layers (`tiling`). The
constants were set by hand; they rank tilings, but do not predict time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from demask.kernels.llvm.isa import Isa
from demask.sparse.plan.layers.tiling import rect_counts

INPUTS = 28 * 1024  # bytes of inputs that a tile reads from a block of input channels
UNROLLED = 4  # input channels per iteration of a kernel of one position
MOST_ROWS = 16  # output channels of a block
# Cycles: of a multiply-add and of a load of a vector; of a block of output channels, of each of its
# sums, and of an iteration over input channels.
PRODUCT, LOAD, BLOCK, SUM, STEP = 0.5, 0.5, 12.0, 1.5, 1.0
LONG = 6  # vectors of a tile: with more and few rows, kernels take up to twice as long
WAIT = 8  # sums that hide the latency of a multiply-add


@dataclass(frozen=True, slots=True)
class DenseProblem:
    """A dense layer to tile.

    parts: rows and columns of each part of the positions. outputs, channels: output and input
    channels. taps: positions of the kernel. stride: distance of the inputs of neighboring
    positions; reach: additional rows and columns that a kernel spans.
    """

    parts: tuple[tuple[int, int], ...]
    outputs: int
    channels: int
    taps: int
    stride: tuple[int, int]
    reach: tuple[int, int]


@dataclass(frozen=True, slots=True)
class DenseTiling:
    """tile: largest rows and columns of a tile; rows: output channels of a wide block; inner: input
    channels of a block."""

    tile: tuple[int, int]
    rows: int
    inner: int


def split_outputs(outputs: int, rows: int) -> tuple[int, int] | None:
    """Numbers of blocks of `rows` and of `rows` - 1 channels that cover all outputs without
    padding; None where there are none.

    >>> split_outputs(64, 6), split_outputs(5, 4), split_outputs(5, 5)
    ((9, 2), None, (1, 0))
    """
    blocks = -(-outputs // rows)
    thin = blocks * rows - outputs
    return (blocks - thin, thin) if thin <= blocks and (rows > 1 or not thin) else None


@functools.cache
def best_tiling(problem: DenseProblem, isa: Isa) -> DenseTiling:
    """The tiling of least estimated cost."""
    tilings = [DenseTiling(tile, rows, _inner(problem, tile, isa))
               for tile, rows in _tilings(problem, isa)]  # fmt: skip
    return min(tilings, key=functools.partial(_cost, problem))


def _tilings(problem: DenseProblem, isa: Isa) -> Iterator[tuple[tuple[int, int], int]]:
    """Tiles that are parts of one row or whole rows, and rows of blocks whose sums, vectors and
    weight fit in the registers."""
    height, width = problem.parts[0]
    tiles = {(1, -(-width // n)) for n in range(1, width + 1)}
    tiles |= {(-(-height // n), width) for n in range(1, height + 1)}
    for h, w in sorted(tiles):
        for rows in range(1, min(problem.outputs, MOST_ROWS) + 1):
            fits = rows * h * w + min(rows, h * w) + 1 < isa.registers
            fits = fits and not (h * w > LONG and 1 < rows <= h * w // 2)
            if fits and split_outputs(problem.outputs, rows) is not None:
                yield (h, w), rows


def _inner(problem: DenseProblem, tile: tuple[int, int], isa: Isa) -> int:
    """Input channels of a block: about equal blocks whose inputs fit in the L1 cache."""
    lines = 1
    for size, stride, reach in zip(tile, problem.stride, problem.reach, strict=True):
        lines *= (size - 1) * min(stride, reach + 1) + 1 + reach
    blocks = -(-problem.channels // max(1, INPUTS // (isa.line * lines)))
    return -(-problem.channels // blocks)


def _cost(problem: DenseProblem, tiling: DenseTiling) -> float:
    """Estimated cycles of the largest part."""
    blocks = split_outputs(problem.outputs, tiling.rows) or (0, 0)
    passes = -(-problem.channels // tiling.inner)

    def tile_cost(positions: int) -> float:
        cycles = 0.0
        for rows, count in zip((tiling.rows, tiling.rows - 1), blocks, strict=True):
            sums = rows * positions
            tap = max(PRODUCT * max(sums, WAIT), LOAD * (rows + positions))
            channel = problem.taps * tap + STEP
            cycles += count * (problem.channels * channel + passes * (BLOCK + SUM * sums))
        return cycles

    return max(
        sum(count * tile_cost(h * w) for h, w, count in rect_counts(*part, tiling.tile))
        for part in problem.parts
    )


def pack(weight: np.ndarray, tiling: DenseTiling) -> np.ndarray:
    """Float32 weights [outputs, channels, taps] in the order in which the kernel reads them."""
    outputs, channels, _ = weight.shape
    wide, thin = split_outputs(outputs, tiling.rows) or (0, 0)
    ends = np.cumsum([0] + [tiling.rows] * wide + [tiling.rows - 1] * thin)
    blocks = [weight[a:b, c : c + tiling.inner].transpose(1, 2, 0).ravel()
              for c in range(0, channels, tiling.inner) for a, b in pairwise(ends)]  # fmt: skip
    return np.concatenate(blocks) if blocks else np.zeros(1, np.float32)
