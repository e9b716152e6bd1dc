"""Dense layers on a tape: their blocks, tilings and kernel calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from demask.kernels.cpu.tiles.dense_tile import CALL, DenseTileKernel
from demask.kernels.llvm.isa import Isa
from demask.sparse.plan.layers.channels_layer import channels_cost, emit_channels
from demask.sparse.plan.layers.dense_blocks import DenseBlock
from demask.sparse.plan.layers.dense_tiling import (
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

CLEAR = (
    0.97  # largest share of the cost of tiles at which channels are in lanes: they compile longer
)


@dataclass(frozen=True, slots=True)
class PackedBlock:
    """A dense block, its tiling, and its weight in the order of use: one copy for all calls."""

    block: DenseBlock
    tiling: DenseTiling
    weight: np.ndarray


def emit_dense(tape: Tape, isa: Isa, piece: WindowPiece) -> Tiling:
    """Write a dense layer as a phase of its own; returns the tiling of its first block.

    Lanes are tiles of positions, or output channels where many lanes would be empty.
    """
    tiles, channels = (list(_shares(tape, piece, step)) for step in (1, isa.lanes))

    def tiles_cost(share: Share) -> float:
        return best_tiling(_problem(piece, share[2]), isa)[0]

    by_tiles = _busiest(tape, tiles, tiles_cost)
    if _busiest(tape, channels, lambda share: channels_cost(piece, share, isa)) < CLEAR * by_tiles:
        return emit_channels(tape, isa, piece, channels)
    return _emit_tiles(tape, isa, piece, tiles)


def _busiest(tape: Tape, shares: Sequence[Share], cost: Callable[[Share], float]) -> float:
    """The cost of the shares of the thread with the most."""
    costs = [0.0] * tape.threads
    for share in shares:
        costs[share[0]] += cost(share)
    return max(costs)


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


def _shares(tape: Tape, piece: WindowPiece, step: int) -> Iterator[Share]:
    """The shares of all threads.

    Threads share positions where the layout has a part for each, otherwise whole blocks if there
    are many, otherwise the rows of each, in multiples of `step`.
    """
    blocks = [_of_window(piece, block) for block in piece.layer.blocks]
    deals = len(piece.shape.parts) != tape.threads and len(blocks) >= 2 * tape.threads
    busy = [0] * tape.threads
    for block in blocks:
        if deals:
            thread = busy.index(min(busy))
            busy[thread] += block.weight.size + len(block.rows)
            yield thread, whole_parts(piece), block
            continue
        for thread, areas, (begin, end) in shares(tape, piece, len(block.rows), step):
            own = slice(begin, end)
            yield thread, areas, DenseBlock(block.rows[own], block.channels, block.weight[own])


def _of_window(piece: WindowPiece, block: DenseBlock) -> DenseBlock:
    """The block with those positions of the kernel that the window reads."""
    used = [y is not None and x is not None for y in piece.window.taps[0]
            for x in piece.window.taps[1]]  # fmt: skip
    if not any(used):
        return DenseBlock(block.rows, block.channels[:0], block.weight[:, :0, :1])
    return DenseBlock(block.rows, block.channels, block.weight[:, :, used])


def _problem(piece: WindowPiece, block: DenseBlock) -> DenseProblem:
    outputs, channels, taps = block.weight.shape
    shape = piece.shape
    return DenseProblem(shape.parts, outputs, max(channels, 1), taps, shape.stride, shape.reach)


def _call(piece: WindowPiece, packed: PackedBlock, tiles: Sequence[At], size: tuple[int, int],
          isa: Isa) -> KernelCall:  # fmt: skip
    """The call of the dense kernel for tiles of one size."""
    block, tiling = packed.block, packed.tiling
    x, out, add = piece.x.layout, piece.out.layout, piece.add.layout
    x_lines, out_lines, add_lines, table = tile_lines(piece, tiles, size)
    first, taps, tap_rows, tap_pitch = tap_lines(piece)
    table["x"] += first
    unroll = UNROLLED if tap_rows * len(taps) == 1 else 0
    kernel = DenseTileKernel(
        x_lines, out_lines, add_lines, taps, tiling.rows, piece.step.act, unroll
    )
    wide, thin = split_outputs(len(block.rows), tiling.rows) or (0, 0)
    pitches = [layout.pitch * isa.line for layout in (x, out, add)]
    buffers = {"x": (piece.x, 0), "out": (piece.out, 0), "add": (piece.add, 0)}
    return KernelCall(kernel, CALL, buffers, {
        "x_offsets": block.channels.astype(np.int64) * pitches[0],
        "out_offsets": block.rows.astype(np.int64) * pitches[1],
        "add_offsets": block.rows.astype(np.int64) * pitches[2],
        "tap_rows": tap_rows, "tap_pitch": tap_pitch * isa.line,
        "channels": len(block.channels), "inner": tiling.inner, "wide": wide, "thin": thin,
        "weights": packed.weight,
        "biases": piece.weight.bias[block.rows].astype(np.float32),
        "tiles": table, "tile_begin": 0, "tile_end": len(table)})  # fmt: skip
