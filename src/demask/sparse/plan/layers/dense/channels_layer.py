"""Dense layers on a tape whose kernel has output channels in its lanes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from demask.kernels.cpu.tiles.dense_channels import CALL, GROUP, DenseChannelsKernel, Lanes
from demask.kernels.llvm.isa import Isa
from demask.sparse.plan.layers.dense.dense_blocks import DenseBlock
from demask.sparse.plan.layers.dense.dense_tiling import (
    UNROLLED,
    ChannelProblem,
    ChannelTiling,
    best_channels,
    groups_of,
    pack_channels,
    split_outputs,
)
from demask.sparse.plan.layers.layer_windows import OutputWindow, positions_of, written
from demask.sparse.plan.layers.narrow_layer import compacted, is_narrow
from demask.sparse.plan.layers.tiling import Tiling
from demask.sparse.plan.layers.window_piece import Share, WindowPiece, tap_lines, tile_lines
from demask.sparse.plan.tape import Buffer, KernelCall, Tape
from demask.sparse.plan.tile_layout import NO_BORDER, GridLayout, TileGrid

FETCHED = 256 * 1024  # bytes of weights from which they are prefetched: they leave the L2 cache


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
def _counts(
    layout: GridLayout, window: OutputWindow, sizes: tuple[tuple[int, int], ...], parts: tuple
) -> tuple[int, ...]:
    """How many positions of the image each line of some parts has."""
    is_inside = layout.pixels(written(window, positions_of(sizes, parts)))[3]
    return tuple(is_inside.sum(1).tolist())


def channels_cost(piece: WindowPiece, share: Share, isa: Isa) -> float:
    """Estimated cycles of a share of a layer."""
    _, areas, block = share
    return best_channels(_problem(piece, block, areas), isa)[0]


def _problem(piece: WindowPiece, block: DenseBlock, parts: Iterable[int]) -> ChannelProblem:
    outputs, channels, taps = block.weight.shape
    counts = _counts(piece.out.layout, piece.window, piece.shape.parts, tuple(parts))
    return ChannelProblem(counts, outputs, max(channels, 1), taps, piece.step.add is not None)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """What all calls for a block share: its tiling and number of input channels, and arrays by the
    fields of a call."""

    tiling: ChannelTiling
    channels: int
    arrays: dict[str, np.ndarray]


def emit_channels(tape: Tape, isa: Isa, piece: WindowPiece, shares: Sequence[Share]) -> Tiling:
    """Write a dense layer as a phase of its own; returns the tiling of its first block."""
    packs: dict[tuple[int, ...], PackedRows] = {}
    for thread, areas, block in shares:
        lines = lines_of(piece, areas)
        key = tuple(block.rows.tolist())
        if key not in packs:
            tiling = best_channels(_problem(piece, block, areas), isa)[1]
            packs[key] = _packed(piece, block, tiling, isa)
        call = _call(piece, packs[key], lines, isa)
        if is_narrow(piece):
            x = compacted(tape, isa, thread, piece.x, block.channels)
            fields = {"x_offsets": 4 * np.arange(len(block.channels)), "groups": np.array([(0, 0)], GROUP)}
            buffers = {**call.buffers, "x": (x, 0)}
            call = replace(call, buffers=buffers, fields={**call.fields, **fields})
        tape.add(thread, call)
    first = next(iter(packs.values())).tiling
    return Tiling((1, first.most), first.inner, first.vectors * isa.lanes, len(piece.shape.parts) != tape.threads)


def _packed(piece: WindowPiece, block: DenseBlock, tiling: ChannelTiling, isa: Isa) -> PackedRows:
    """The arrays of a block, whose last row is repeated until rows fill whole vectors."""
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


def _call(piece: WindowPiece, packed: PackedRows, lines: PositionLines, isa: Isa) -> KernelCall:
    """The call of the kernel for some lines."""
    tiling, arrays = packed.tiling, packed.arrays
    wide, thin = split_outputs(len(arrays["biases"]) // isa.lanes, tiling.vectors) or (0, 0)
    shapes = _shapes(lines, tiling.most, isa)
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
        CALL,
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


def _shapes(lines: PositionLines, most: int, isa: Isa) -> dict[Lanes, list[tuple[int, int]]]:
    """Groups of at most `most` positions of one line, by their lanes relative to the first: (bytes
    of the first input, bytes of the first sum of one vector of outputs)."""
    shapes: dict[Lanes, list[tuple[int, int]]] = {}
    for number, (line, lanes) in enumerate(zip(lines.table["x"].tolist(), lines.lanes, strict=True)):
        for own in groups_of(len(lanes), most):
            first, group = int(lanes[own[0]]), lanes[own]
            place = line * isa.line + 4 * first, (number * isa.lanes + first) * isa.line
            shapes.setdefault(tuple((group - first).tolist()), []).append(place)
    return shapes
