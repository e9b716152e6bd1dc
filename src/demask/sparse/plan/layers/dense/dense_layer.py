"""Dense layers on a tape: their blocks, tilings and kernel calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from demask.kernels.cpu.tiles.dense_tile import CALL, DenseTileKernel
from demask.kernels.llvm.isa import Isa
from demask.sparse.plan.layers.dense.channels_layer import channels_cost, emit_channels
from demask.sparse.plan.layers.dense.dense_blocks import DenseBlock
from demask.sparse.plan.layers.dense.dense_tiling import (
    UNROLLED,
    DenseProblem,
    DenseTiling,
    best_tiling,
    pack,
    split_outputs,
)
from demask.sparse.plan.layers.tiling import Tiling
from demask.sparse.plan.layers.window_piece import (
    Share,
    WindowPiece,
    shares,
    tap_lines,
    tile_lines,
    tiles_by_size,
    whole_parts,
)
from demask.sparse.plan.tape import KernelCall, Tape
from demask.sparse.plan.tile_layout import At

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


def emit_dense(tape: Tape, isa: Isa, piece: WindowPiece) -> Tiling:
    """Write a dense layer as a phase of its own; returns the tiling of its first block.

    Lanes are tiles of positions, or output channels where many lanes would be empty; all of them,
    or as many as fill whole vectors.
    """
    blocks = [_of_window(piece, block) for block in piece.layer.blocks]
    counts = [len(block.rows) for block in blocks]
    cuts = ([0] * len(blocks), counts, [count // isa.lanes * isa.lanes for count in counts])
    choices = [_choice(tape, isa, piece, blocks, cut) for cut in cuts]
    costs = [choice.cost * factor for choice, factor in zip(choices, (TILES, 1, BOTH), strict=True)]
    choice = choices[costs.index(min(costs))]
    tilings = [
        emit(tape, isa, piece, own)
        for emit, own in ((emit_channels, choice.channels), (_emit_tiles, choice.tiles))
        if own
    ]
    return tilings[0]


def _choice(tape: Tape, isa: Isa, piece: WindowPiece, blocks: Sequence[DenseBlock], cut: Sequence[int]) -> LaneChoice:
    """The choice of channels in lanes for the first rows of each block, `cut` gives how many."""
    pairs = list(zip(blocks, cut, strict=True))
    channels = list(_shares(tape, piece, [_rows(b, 0, n) for b, n in pairs if n], isa.lanes))
    rest = [_rows(b, n, len(b.rows)) for b, n in pairs if n < len(b.rows)]
    tiles = list(_shares(tape, piece, rest, 1))
    costs = [0.0] * tape.threads
    for share in channels:
        costs[share[0]] += channels_cost(piece, share, isa)
    for thread, _, block in tiles:
        costs[thread] += best_tiling(_problem(piece, block), isa)[0]
    return LaneChoice(channels, tiles, max(costs))


def _rows(block: DenseBlock, begin: int, end: int) -> DenseBlock:
    """Some rows of a block."""
    return DenseBlock(block.rows[begin:end], block.channels, block.weight[begin:end])


def _emit_tiles(tape: Tape, isa: Isa, piece: WindowPiece, shares: Sequence[Share]) -> Tiling:
    """The same with tiles of positions in lanes."""
    packs: dict[tuple[int, ...], PackedBlock] = {}
    for thread, areas, block in shares:
        key = tuple(block.rows.tolist())
        if key not in packs:
            tiling = best_tiling(_problem(piece, block), isa)[1]
            packs[key] = PackedBlock(block, tiling, pack(block.weight, tiling))
        for size, tiles in tiles_by_size(areas, packs[key].tiling.tile):
            tape.add(thread, _call(piece, packs[key], tiles, size, isa))
    first = next(iter(packs.values())).tiling
    return Tiling(first.tile, first.inner, first.rows, len(piece.shape.parts) != tape.threads)


def _shares(tape: Tape, piece: WindowPiece, blocks: Sequence[DenseBlock], step: int) -> Iterator[Share]:
    """The shares of all threads of some blocks.

    Threads share positions where the layout has a part for each, otherwise whole blocks if there
    are many, otherwise the rows of each, in multiples of `step`.
    """
    deals = len(piece.shape.parts) != tape.threads and len(blocks) >= 2 * tape.threads
    busy = [0] * tape.threads
    for block in blocks:
        if deals:
            thread = busy.index(min(busy))
            busy[thread] += block.weight.size + len(block.rows)
            yield thread, whole_parts(piece), block
            continue
        for thread, areas, share in shares(tape, piece, len(block.rows), step):
            yield thread, areas, _rows(block, *share)


def _of_window(piece: WindowPiece, block: DenseBlock) -> DenseBlock:
    """The block with those positions of the kernel that the window reads."""
    used = [y is not None and x is not None for y in piece.window.taps[0] for x in piece.window.taps[1]]
    if not any(used):
        return DenseBlock(block.rows, block.channels[:0], block.weight[:, :0, :1])
    return DenseBlock(block.rows, block.channels, block.weight[:, :, used])


def _problem(piece: WindowPiece, block: DenseBlock) -> DenseProblem:
    outputs, channels, taps = block.weight.shape
    shape = piece.shape
    return DenseProblem(shape.parts, outputs, max(channels, 1), taps, shape.stride, shape.reach)


def _call(piece: WindowPiece, packed: PackedBlock, tiles: Sequence[At], size: tuple[int, int], isa: Isa) -> KernelCall:
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
