"""Tiling of dense layers: positions computed together, blocks of output and of input channels.

Lanes are either tiles of positions (`DenseTiling`) or output channels (`ChannelTiling`). The cost
of a tiling is estimated in cycles of one core, like that of sparse layers (`tiling`). The constants
were set by hand; they rank tilings, but do not predict time.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from demask.kernels.llvm.isa import Isa
from demask.sparse.plan.layers.tiling import rect_counts
from demask.sparse.plan.tape import aligned

# Bytes of the cache lines that a tile reads from a block of input channels. With twice as many a
# layer of 384 x 768 took 1.2 times as long: weights pass through the L1 cache, too.
INPUTS, CACHE_LINE = 16 * 1024, 64
WEIGHTS = 128 * 1024  # bytes of weights that all positions read before the next, from the L2 cache
UNROLLED = 4  # input channels per iteration of a kernel of one position
MOST_ROWS = 16  # output channels of a block
MOST_VECTORS = 4  # the same in vectors, where output channels are lanes
# Cycles: of a multiply-add and of a load of a vector; of a block of output channels, of each of its
# sums, and of an iteration over input channels; of as many vectors as lanes, transposed.
PRODUCT, LOAD, BLOCK, SUM, STEP, TRANSPOSED = 0.5, 0.65, 12.0, 1.5, 1.0, 55.0
LONG = 6  # vectors of a tile: with more and few rows, kernels of taps take up to twice as long
TIE = 1.02  # factor of cycles to the least at which tilings are as good
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


@dataclass(frozen=True, slots=True)
class ChannelProblem:
    """A dense layer to tile with output channels in lanes.

    lines: positions of the image in each line of the layout of values. outputs, channels: output
    and input channels. taps: positions of the kernel. add: whether a value is added.
    """

    lines: tuple[int, ...]
    outputs: int
    channels: int
    taps: int
    add: bool


@dataclass(frozen=True, slots=True)
class ChannelTiling:
    """most: positions of a group; vectors: of output channels of a wide block; inner: input
    channels of a block."""

    most: int
    vectors: int
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
def best_tiling(problem: DenseProblem, isa: Isa) -> tuple[float, DenseTiling]:
    """The tiling of least estimated cost with tiles of positions in lanes, and its cycles."""
    tilings = [DenseTiling(tile, rows, _inner(problem, tile, isa)) for tile, rows in _tilings(problem, isa)]
    costs = [_cost(problem, tiling) for tiling in tilings]
    least = min(range(len(costs)), key=costs.__getitem__)
    return costs[least], tilings[least]


def _tilings(problem: DenseProblem, isa: Isa) -> Iterator[tuple[tuple[int, int], int]]:
    """Tiles that are parts of one row or whole rows, and rows of blocks whose sums, vectors and
    weight fit in the registers."""
    height, width = problem.parts[0]
    tiles = {(1, -(-width // n)) for n in range(1, width + 1)}
    tiles |= {(-(-height // n), width) for n in range(1, height + 1)}
    for h, w in sorted(tiles):
        for rows in range(1, min(problem.outputs, MOST_ROWS) + 1):
            fits = rows * h * w + min(rows, h * w) + 1 < isa.registers
            is_slow = problem.taps > 1 and h * w > LONG and 1 < rows <= h * w // 2
            fits = fits and not is_slow
            if fits and split_outputs(problem.outputs, rows) is not None:
                yield (h, w), rows


def _inner(problem: DenseProblem, tile: tuple[int, int], isa: Isa) -> int:
    """Input channels of a block: about equal blocks whose inputs stay in the L1 cache."""
    rows, columns = (
        (size - 1) * min(stride, reach + 1) + 1 + reach
        for size, stride, reach in zip(tile, problem.stride, problem.reach, strict=True)
    )
    touched = rows * (isa.line * columns + CACHE_LINE - isa.line)  # any line may begin a row
    blocks = -(-problem.channels // max(1, INPUTS // touched))
    return -(-problem.channels // blocks)


def _cost(problem: DenseProblem, tiling: DenseTiling) -> float:
    """Estimated cycles of the largest part."""
    blocks = split_outputs(problem.outputs, tiling.rows) or (0, 0)

    def tile_cost(positions: int) -> float:
        sizes = zip((tiling.rows, tiling.rows - 1), blocks, strict=True)
        return sum(count * _block_cost(problem, (rows, positions), tiling.inner) for rows, count in sizes)

    return max(
        sum(count * tile_cost(h * w) for h, w, count in rect_counts(*part, tiling.tile)) for part in problem.parts
    )


def _block_cost(problem: DenseProblem | ChannelProblem, sums: tuple[int, int], inner: int) -> float:
    """Estimated cycles of a block of output channels at some positions.

    sums: how many values are read from either operand for each tap; inner: input channels that are
    added at once.
    """
    count = sums[0] * sums[1]
    tap = max(PRODUCT * max(count, WAIT), LOAD * sum(sums))
    passes = -(-problem.channels // inner)
    return problem.channels * (problem.taps * tap + STEP) + passes * (BLOCK + SUM * count)


@functools.cache
def best_channels(problem: ChannelProblem, isa: Isa) -> tuple[float, ChannelTiling]:
    """A tiling of little estimated cost with output channels in lanes, and its cycles: the one of
    fewest vectors, which compiles fastest, among those of about the least."""
    tilings = []
    for vectors in range(1, MOST_VECTORS + 1):
        if split_outputs(-(-problem.outputs // isa.lanes), vectors) is not None:
            most = max(1, min((isa.registers - 2 - vectors) // vectors, max(problem.lines)))
            block = vectors * isa.line * problem.taps
            passes = -(-problem.channels // max(1, WEIGHTS // block))
            tiling = ChannelTiling(most, vectors, -(-problem.channels // passes))
            tilings.append((_channels_cost(problem, tiling, isa), tiling))
    least = min(cycles for cycles, _ in tilings)
    return next(one for one in tilings if one[0] <= TIE * least)


def _channels_cost(problem: ChannelProblem, tiling: ChannelTiling, isa: Isa) -> float:
    """Estimated cycles with output channels in lanes."""
    count = -(-problem.outputs // isa.lanes)
    cycles = count * len(problem.lines) * TRANSPOSED * (1 + problem.add)
    blocks = split_outputs(count, tiling.vectors) or (0, 0)
    groups = Counter(len(own) for line in problem.lines for own in groups_of(line, tiling.most))
    for vectors, of in zip((tiling.vectors, tiling.vectors - 1), blocks, strict=True):
        for positions, times in groups.items():
            cycles += of * times * _block_cost(problem, (vectors, positions), tiling.inner)
    return cycles


def groups_of(positions: int, most: int) -> list[range]:
    """The fewest ranges of at most `most` of these positions, about equal.

    >>> groups_of(16, 14), groups_of(0, 4)
    ([range(0, 8), range(8, 16)], [])
    """
    count = -(-positions // most)
    ends = [positions * k // count for k in range(count + 1)] if count else []
    return [range(a, b) for a, b in pairwise(ends)]


def pack(weight: np.ndarray, tiling: DenseTiling) -> np.ndarray:
    """Float32 weights [outputs, channels, taps] in the order in which the kernel reads them."""
    blocks = [
        weight[a:b, c : c + tiling.inner].transpose(1, 2, 0).ravel()
        for c in range(0, weight.shape[1], tiling.inner)
        for a, b in _ends(len(weight), tiling.rows)
    ]
    return np.concatenate(blocks) if blocks else np.zeros(1, np.float32)


def pack_channels(weight: np.ndarray, tiling: ChannelTiling, lanes: int) -> np.ndarray:
    """Float32 weights [outputs, channels, taps], whose outputs fill whole vectors, in the order in
    which the kernel reads them; they start at a cache line."""
    ends = _ends(len(weight) // lanes, tiling.vectors)
    blocks = [weight[a * lanes : b * lanes].transpose(1, 2, 0).ravel() for a, b in ends]
    return aligned(np.concatenate(blocks))


def _ends(outputs: int, rows: int) -> list[tuple[int, int]]:
    """(first, end) of each block of outputs."""
    wide, thin = split_outputs(outputs, rows) or (0, 0)
    return list(pairwise(np.cumsum([0] + [rows] * wide + [rows - 1] * thin).tolist()))
