"""Dense layers on a tape: their blocks, tilings and kernel calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from demask.kernels.cpu.tiles.dense_tile import CALL, DenseTileKernel
from demask.kernels.llvm.isa import Isa
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
from demask.sparse.plan.layers.window_piece import WindowPiece, shares, tile_lines, tiles_by_size
from demask.sparse.plan.tape import KernelCall, Tape
from demask.sparse.plan.tile_layout import Area, At


@dataclass(frozen=True, slots=True)
class PackedBlock:
    """A dense block, its tiling, and its weight in the order of use: one copy for all calls."""

    block: DenseBlock
    tiling: DenseTiling
    weight: np.ndarray


def emit_dense(tape: Tape, isa: Isa, piece: WindowPiece) -> Tiling:
    """Write a dense layer as a phase of its own; returns the tiling of its first block."""
    packs: dict[tuple[int, ...], PackedBlock] = {}
    for thread, areas, block in _blocks(tape, piece):
        key = tuple(block.rows.tolist())
        if key not in packs:
            tiling = best_tiling(_problem(piece, block), isa)
            packs[key] = PackedBlock(block, tiling, pack(block.weight, tiling))
        for size, tiles in tiles_by_size(areas, packs[key].tiling.tile):
            tape.add(thread, _call(piece, packs[key], tiles, size, isa))
    first = next(iter(packs.values())).tiling
    return Tiling(first.tile, first.inner, first.rows, len(piece.shape.parts) != tape.threads)


def _blocks(tape: Tape, piece: WindowPiece) -> Iterator[tuple[int, dict[int, Area], DenseBlock]]:
    """The share of each thread: an area of each of its parts, and a block to compute there.

    Threads share positions where the layout has a part for each, otherwise whole blocks if there
    are many, otherwise the rows of each.
    """
    blocks = [_of_window(piece, block) for block in piece.layer.blocks]
    deals = len(piece.shape.parts) != tape.threads and len(blocks) >= 2 * tape.threads
    busy = [0] * tape.threads
    for block in blocks:
        if deals:
            thread = busy.index(min(busy))
            busy[thread] += block.weight.size + len(block.rows)
            yield (
                thread,
                {part: (0, 0, *size) for part, size in enumerate(piece.shape.parts)},
                block,
            )
            continue
        for thread, areas, (begin, end) in shares(tape, piece, len(block.rows)):
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
    ys, xs = ([tap for tap in taps if tap is not None] or [0] for taps in piece.window.taps)
    x, out, add = piece.x.layout, piece.out.layout, piece.add.layout
    x_lines, out_lines, add_lines, table = tile_lines(piece, tiles, size)
    table["x"] += (ys[0] + x.border[0]) * x.row + xs[0] + x.border[2]
    taps = tuple(z - xs[0] for z in xs)
    tap_pitch = (ys[1] - ys[0]) * x.row * isa.line if len(ys) > 1 else 0
    unroll = UNROLLED if len(ys) * len(xs) == 1 else 0
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
        "tap_rows": len(ys), "tap_pitch": tap_pitch,
        "channels": len(block.channels), "inner": tiling.inner, "wide": wide, "thin": thin,
        "weights": packed.weight,
        "biases": piece.weight.bias[block.rows].astype(np.float32),
        "tiles": table, "tile_begin": 0, "tile_end": len(table)})  # fmt: skip
