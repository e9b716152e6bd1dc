"""Dense layers on a tape: their tilings, and the calls of kernels.

A tiling says which positions are computed together, in blocks of output and of input channels. Lanes
are either tiles of positions (`DenseTiling`) or output channels (`ChannelTiling`). The cost of a tiling
is estimated in cycles of one core, like that of sparse layers (`tiling`). The constants were set by
hand; they rank tilings, but do not predict time.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from demask.exec.tape.layers.layer_windows import OutputWindow, positions_of, written
from demask.exec.tape.layers.narrow_layer import compacted, is_narrow
from demask.exec.tape.layers.pack_weights import DenseBlock
from demask.exec.tape.layers.tiling import rect_counts
from demask.exec.tape.layers.window_piece import (
    Share,
    WindowPiece,
    full_parts,
    shares,
    tap_lines,
    tile_lines,
    tiles_by_size,
)
from demask.exec.tape.tape import Buffer, KernelCall, Tape, aligned
from demask.exec.tape.tile_layout import NO_BORDER, At, GridLayout, TileGrid
from demask.kernels.cpu.tiles.dense_channels import CALL as CHANNELS_CALL
from demask.kernels.cpu.tiles.dense_channels import GROUP, DenseChannelsKernel, Lanes
from demask.kernels.cpu.tiles.dense_tile import CALL, DenseTileKernel
from demask.kernels.llvm.isa import Isa

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
FETCHED = 256 * 1024  # bytes of weights from which they are prefetched: they leave the L2 cache
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
    tilings = [
        DenseTiling(tile, rows, _block_channels(problem, tile, isa)) for tile, rows in _candidate_tilings(problem, isa)
    ]
    costs = [_tiling_cost(problem, tiling) for tiling in tilings]
    least = min(range(len(costs)), key=costs.__getitem__)
    return costs[least], tilings[least]


def _candidate_tilings(problem: DenseProblem, isa: Isa) -> Iterator[tuple[tuple[int, int], int]]:
    """Tiles that are parts of one row or full rows, and rows of blocks whose sums, vectors and
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


def _block_channels(problem: DenseProblem, tile: tuple[int, int], isa: Isa) -> int:
    """Input channels of a block: about equal blocks whose inputs stay in the L1 cache."""
    rows, columns = (
        (size - 1) * min(stride, reach + 1) + 1 + reach
        for size, stride, reach in zip(tile, problem.stride, problem.reach, strict=True)
    )
    touched = rows * (isa.line * columns + CACHE_LINE - isa.line)  # any line may begin a row
    blocks = -(-problem.channels // max(1, INPUTS // touched))
    return -(-problem.channels // blocks)


def _tiling_cost(problem: DenseProblem, tiling: DenseTiling) -> float:
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
        for a, b in _block_ends(len(weight), tiling.rows)
    ]
    return np.concatenate(blocks) if blocks else np.zeros(1, np.float32)


def pack_channels(weight: np.ndarray, tiling: ChannelTiling, lanes: int) -> np.ndarray:
    """Float32 weights [outputs, channels, taps], whose outputs fill full vectors, in the order in
    which the kernel reads them; they start at a cache line."""
    ends = _block_ends(len(weight) // lanes, tiling.vectors)
    blocks = [weight[a * lanes : b * lanes].transpose(1, 2, 0).ravel() for a, b in ends]
    return aligned(np.concatenate(blocks))


def _block_ends(outputs: int, rows: int) -> list[tuple[int, int]]:
    """(first, end) of each block of outputs."""
    wide, thin = split_outputs(outputs, rows) or (0, 0)
    return list(pairwise(np.cumsum([0] + [rows] * wide + [rows - 1] * thin).tolist()))


# Factors of estimated cycles: with tiles of positions in all lanes, whose kernels compile fastest,
# and with both kinds of lanes in one layer.
TILES, BOTH = 0.97, 1.03


@dataclass(frozen=True, slots=True)
class PackedBlock:
    """A dense block, its tiling, and its weight in the order of use: one copy for all calls."""

    block: DenseBlock
    tiling: DenseTiling
    weight: np.ndarray


@dataclass(frozen=True, slots=True)
class LaneChoice:
    """Shares of a layer with output channels in lanes, and those with tiles of positions in lanes;
    cost: estimated cycles of the thread with the most."""

    channels: list[Share]
    tiles: list[Share]
    cost: float


def emit_dense(tape: Tape, isa: Isa, piece: WindowPiece) -> None:
    """Write a dense layer as a phase of its own; returns the tiling of its first block.

    Lanes are tiles of positions, or output channels where many lanes would be empty; all of them,
    or as many as fill full vectors.
    """
    blocks = [_restrict_to_window(piece, block) for block in piece.layer.blocks]
    counts = [len(block.rows) for block in blocks]
    cuts = ([0] * len(blocks), counts, [count // isa.lanes * isa.lanes for count in counts])
    choices = [_choose_lanes(tape, isa, piece, blocks, cut) for cut in cuts]
    costs = [choice.cost * factor for choice, factor in zip(choices, (TILES, 1, BOTH), strict=True)]
    choice = choices[costs.index(min(costs))]
    tilings = [
        emit(tape, isa, piece, own)
        for emit, own in ((emit_channels, choice.channels), (_emit_tiles, choice.tiles))
        if own
    ]
    return tilings[0]


def _choose_lanes(
    tape: Tape, isa: Isa, piece: WindowPiece, blocks: Sequence[DenseBlock], cut: Sequence[int]
) -> LaneChoice:
    """The choice of channels in lanes for the first rows of each block, `cut` gives how many."""
    pairs = list(zip(blocks, cut, strict=True))
    channels = list(_thread_shares(tape, piece, [_block_rows(b, 0, n) for b, n in pairs if n], isa.lanes))
    rest = [_block_rows(b, n, len(b.rows)) for b, n in pairs if n < len(b.rows)]
    tiles = list(_thread_shares(tape, piece, rest, 1))
    costs = [0.0] * tape.threads
    for share in channels:
        costs[share[0]] += channels_cost(piece, share, isa)
    for thread, _, block in tiles:
        costs[thread] += best_tiling(_dense_problem(piece, block), isa)[0]
    return LaneChoice(channels, tiles, max(costs))


def _block_rows(block: DenseBlock, begin: int, end: int) -> DenseBlock:
    return DenseBlock(block.rows[begin:end], block.channels, block.weight[begin:end])


def _emit_tiles(tape: Tape, isa: Isa, piece: WindowPiece, shares: Sequence[Share]) -> None:
    """The same with tiles of positions in lanes."""
    packs: dict[tuple[int, ...], PackedBlock] = {}
    for thread, areas, block in shares:
        key = tuple(block.rows.tolist())
        if key not in packs:
            tiling = best_tiling(_dense_problem(piece, block), isa)[1]
            packs[key] = PackedBlock(block, tiling, pack(block.weight, tiling))
        for size, tiles in tiles_by_size(areas, packs[key].tiling.tile):
            tape.add(thread, _tile_call(piece, packs[key], tiles, size, isa))


def _thread_shares(tape: Tape, piece: WindowPiece, blocks: Sequence[DenseBlock], step: int) -> Iterator[Share]:
    """The shares of all threads of some blocks.

    Threads share positions where the layout has a part for each, otherwise full blocks if there
    are many, otherwise the rows of each, in multiples of `step`.
    """
    deals = len(piece.shape.parts) != tape.threads and len(blocks) >= 2 * tape.threads
    busy = [0] * tape.threads
    for block in blocks:
        if deals:
            thread = busy.index(min(busy))
            busy[thread] += block.weight.size + len(block.rows)
            yield thread, full_parts(piece), block
            continue
        for thread, areas, share in shares(tape, piece, len(block.rows), step):
            yield thread, areas, _block_rows(block, *share)


def _restrict_to_window(piece: WindowPiece, block: DenseBlock) -> DenseBlock:
    """The block with those positions of the kernel that the window reads."""
    used = [y is not None and x is not None for y in piece.window.taps[0] for x in piece.window.taps[1]]
    if not any(used):
        return DenseBlock(block.rows, block.channels[:0], block.weight[:, :0, :1])
    return DenseBlock(block.rows, block.channels, block.weight[:, :, used])


def _dense_problem(piece: WindowPiece, block: DenseBlock) -> DenseProblem:
    outputs, channels, taps = block.weight.shape
    shape = piece.shape
    return DenseProblem(shape.parts, outputs, max(channels, 1), taps, shape.stride, shape.reach)


def _tile_call(
    piece: WindowPiece, packed: PackedBlock, tiles: Sequence[At], size: tuple[int, int], isa: Isa
) -> KernelCall:
    """The call of the dense kernel for tiles of one size."""
    block, tiling = packed.block, packed.tiling
    x, out, add = piece.x.layout, piece.out.layout, piece.add.layout
    x_lines, out_lines, add_lines, table = tile_lines(piece, tiles, size)
    first, taps, tap_rows, tap_pitch = tap_lines(piece)
    table["x"] += first
    unroll = UNROLLED if tap_rows * len(taps) == 1 else 0
    kernel = DenseTileKernel(x_lines, out_lines, add_lines, taps, tiling.rows, piece.step.act, unroll)
    wide, thin = split_outputs(len(block.rows), tiling.rows) or (0, 0)
    pitches = [layout.pitch * isa.line for layout in (x, out, add)]
    buffers = {"x": (piece.x, 0), "out": (piece.out, 0), "add": (piece.add, 0)}
    return KernelCall(
        kernel,
        CALL,
        buffers,
        {
            "x_offsets": block.channels.astype(np.int64) * pitches[0],
            "out_offsets": block.rows.astype(np.int64) * pitches[1],
            "add_offsets": block.rows.astype(np.int64) * pitches[2],
            "tap_rows": tap_rows,
            "tap_pitch": tap_pitch * isa.line,
            "channels": len(block.channels),
            "inner": tiling.inner,
            "wide": wide,
            "thin": thin,
            "weights": packed.weight,
            "biases": piece.weight.bias[block.rows].astype(np.float32),
            "tiles": table,
            "tile_begin": 0,
            "tile_end": len(table),
        },
    )


@dataclass(frozen=True, slots=True)
class PositionLines:
    """Lines of positions with their numbers in x, out and the added tensor (a table of TILE), and
    those lanes of each that are positions of the image."""

    table: np.ndarray
    lanes: list[np.ndarray]


def lines_of(piece: WindowPiece, parts: Iterable[int]) -> PositionLines:
    """The lines of a window's positions in some parts."""
    at = positions_of(piece.shape.parts, parts)
    *_, table = tile_lines(piece, at, (1, 1))
    table["x"] += tap_lines(piece)[0]
    is_inside = piece.out.layout.pixels(written(piece.window, at))[3]
    return PositionLines(table, [np.flatnonzero(own) for own in is_inside])


@lru_cache(maxsize=1024)
def _positions_per_line(
    layout: GridLayout, window: OutputWindow, sizes: tuple[tuple[int, int], ...], parts: tuple
) -> tuple[int, ...]:
    is_inside = layout.pixels(written(window, positions_of(sizes, parts)))[3]
    return tuple(is_inside.sum(1).tolist())


def channels_cost(piece: WindowPiece, share: Share, isa: Isa) -> float:
    """Estimated cycles of a share of a layer."""
    _, areas, block = share
    return best_channels(_channel_problem(piece, block, areas), isa)[0]


def _channel_problem(piece: WindowPiece, block: DenseBlock, parts: Iterable[int]) -> ChannelProblem:
    outputs, channels, taps = block.weight.shape
    counts = _positions_per_line(piece.out.layout, piece.window, piece.shape.parts, tuple(parts))
    return ChannelProblem(counts, outputs, max(channels, 1), taps, piece.step.add is not None)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """What all calls for a block share: its tiling and number of input channels, and arrays by the
    fields of a call."""

    tiling: ChannelTiling
    channels: int
    arrays: dict[str, np.ndarray]


def emit_channels(tape: Tape, isa: Isa, piece: WindowPiece, shares: Sequence[Share]) -> None:
    """Write a dense layer as a phase of its own; returns the tiling of its first block."""
    packs: dict[tuple[int, ...], PackedRows] = {}
    for thread, areas, block in shares:
        lines = lines_of(piece, areas)
        key = tuple(block.rows.tolist())
        if key not in packs:
            tiling = best_channels(_channel_problem(piece, block, areas), isa)[1]
            packs[key] = _pack_rows(piece, block, tiling, isa)
        call = _channels_call(piece, packs[key], lines, isa)
        if is_narrow(piece):
            x = compacted(tape, isa, thread, piece.x, block.channels)
            fields = {"x_offsets": 4 * np.arange(len(block.channels)), "groups": np.array([(0, 0)], GROUP)}
            buffers = {**call.buffers, "x": (x, 0)}
            call = replace(call, buffers=buffers, fields={**call.fields, **fields})
        tape.add(thread, call)


def _pack_rows(piece: WindowPiece, block: DenseBlock, tiling: ChannelTiling, isa: Isa) -> PackedRows:
    """The arrays of a block, whose last row is repeated until rows fill full vectors."""
    count = -(-len(block.rows) // isa.lanes) * isa.lanes
    numbers = np.minimum(np.arange(count), len(block.rows) - 1)
    rows = block.rows[numbers].astype(np.int64)
    pitches = [buffer.layout.pitch * isa.line for buffer in (piece.x, piece.out, piece.add)]
    return PackedRows(
        tiling,
        len(block.channels),
        {
            "x_offsets": block.channels.astype(np.int64) * pitches[0],
            "out_offsets": rows * pitches[1],
            "add_offsets": rows * pitches[2],
            "weights": pack_channels(block.weight[numbers], tiling, isa.lanes),
            "biases": piece.weight.bias[rows].astype(np.float32),
        },
    )


def _channels_call(piece: WindowPiece, packed: PackedRows, lines: PositionLines, isa: Isa) -> KernelCall:
    """The call of the kernel for some lines."""
    tiling, arrays = packed.tiling, packed.arrays
    wide, thin = split_outputs(len(arrays["biases"]) // isa.lanes, tiling.vectors) or (0, 0)
    shapes = _position_groups(lines, tiling.most, isa)
    groups = [group for own in shapes.values() for group in own]
    _, taps, rows, pitch = tap_lines(piece)
    unroll = 0 if rows * len(taps) > 1 else UNROLLED if len(groups) > 1 else 1
    prefetches = arrays["weights"].nbytes >= FETCHED and len(groups) > 1
    read = tiling.vectors * isa.line * len(taps) * max(unroll, 1) / 64
    kernel = DenseChannelsKernel(
        tuple(shapes),
        max((int(own[-1]) + 1 for own in lines.lanes if len(own)), default=0),
        (tiling.vectors, tiling.vectors - 1)[: 2 if thin else 1],
        taps,
        piece.step.add is not None,
        piece.step.act,
        unroll,
        round(read / len(groups)) if prefetches else 0,
    )
    count = len(lines.table) * isa.lanes * tiling.vectors
    sums = GridLayout((1, count, 1, 1), TileGrid(1, 1, 1, 1, 1), NO_BORDER, isa.lanes)
    buffers = {"x": (piece.x, 0), "out": (piece.out, 0), "add": (piece.add, 0), "sums": (Buffer(sums), 0)}
    return KernelCall(
        kernel,
        CHANNELS_CALL,
        buffers,
        {
            **arrays,
            "tap_rows": rows,
            "tap_pitch": pitch * isa.line,
            "channels": packed.channels,
            "inner": tiling.inner,
            "wide": wide,
            "thin": thin,
            "groups": np.array(groups, GROUP),
            "ends": np.cumsum([len(own) for own in shapes.values()], dtype=np.int64),
            "lines": lines.table,
            "line_count": len(lines.table),
        },
    )


def _position_groups(lines: PositionLines, most: int, isa: Isa) -> dict[Lanes, list[tuple[int, int]]]:
    """Groups of at most `most` positions of one line, by their lanes relative to the first: (bytes
    of the first input, bytes of the first sum of one vector of outputs)."""
    shapes: dict[Lanes, list[tuple[int, int]]] = {}
    for number, (line, lanes) in enumerate(zip(lines.table["x"].tolist(), lines.lanes, strict=True)):
        for own in groups_of(len(lanes), most):
            first, group = int(lanes[own[0]]), lanes[own]
            starts = line * isa.line + 4 * first, (number * isa.lanes + first) * isa.line
            shapes.setdefault(tuple((group - first).tolist()), []).append(starts)
    return shapes
