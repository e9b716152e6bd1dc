"""Sparse layers with one position on a tape: lanes are rows of the weight."""

from __future__ import annotations

import numpy as np

from demask.exec.tape.layers.pack_weights import dealt, sliced
from demask.exec.tape.layers.window_piece import WindowPiece
from demask.exec.tape.tape import Buffer, KernelCall, Tape
from demask.exec.tape.tile_layout import NO_BORDER, GridLayout, TileGrid
from demask.kernels.cpu.tiles import relayout as move
from demask.kernels.cpu.tiles.sparse_vector import CALL as NARROW
from demask.kernels.cpu.tiles.sparse_vector import SparseVectorKernel
from demask.kernels.llvm.isa import Isa


def is_narrow(piece: WindowPiece) -> bool:
    """Whether a layer has one position, so that lanes should be rows."""
    batch, _, height, width = piece.out.layout.size
    grid = piece.out.layout.grid
    return piece.step.fields.is_pixelwise and batch * height * width == 1 and grid.positions == 1


def emit_narrow(tape: Tape, isa: Isa, piece: WindowPiece) -> None:
    """Write a sparse layer with one position as a phase of its own; threads share its nonzeros."""
    weight, first = piece.weight, _first_bytes(piece)
    kernel = SparseVectorKernel(piece.step.add is not None, piece.step.act, weight.kind)
    for thread, rows in enumerate(dealt(weight.per_row() + 1, tape.threads)):
        if not len(rows):
            continue
        slices = sliced(weight, rows, isa.lanes)
        slice_rows, source = slices.rows, np.maximum(slices.source, 0)
        columns, values = (np.zeros(source.shape, np.int32), np.zeros(source.shape, weight.values.dtype))
        if len(weight):
            columns[:] = piece.channels[source]
            values[:] = np.where(slices.source >= 0, weight.values[source], 0)
        outs, adds = _row_elements(piece, slice_rows, isa)
        channels = np.arange(piece.x.layout.size[1])
        x = compacted(tape, isa, thread, piece.x, channels)
        buffers = {"x": (x, 0), "out": (piece.out, first[0]), "add": (piece.add, first[1])}
        tape.add(thread, KernelCall(kernel, NARROW, buffers, {
            "begin": 0, "end": len(slice_rows), "ends": slices.ends, "columns": columns,
            "values": values,
            "outs": outs, "adds": adds,
            "biases": weight.bias[slice_rows], "scales": weight.scale[slice_rows]}))  # fmt: skip


def _first_bytes(piece: WindowPiece) -> list[int]:
    """The byte of the only position of channel 0 in the output and the added value."""
    zero = np.zeros(1, np.int64)
    return [4 * int(b.layout.element(zero, zero, zero)[0]) for b in (piece.out, piece.add)]


def _row_elements(piece: WindowPiece, rows: np.ndarray, isa: Isa) -> list[np.ndarray]:
    """The elements of rows, relative to the first, in the output and the added value; -1 for -1."""
    return [
        np.where(rows >= 0, rows * buffer.layout.pitch * isa.lanes, -1).astype(np.int32)
        for buffer in (piece.out, piece.add)
    ]


def compacted(tape: Tape, isa: Isa, thread: int, x: Buffer, channels: np.ndarray) -> Buffer:
    """Write a copy of some channels of the only position, contiguous, for one thread.

    Reads from it stay in the L1 cache.
    """
    x_layout, zero = x.layout, np.zeros(1, np.int64)
    count = max(1, -(-len(channels) // isa.lanes))
    compact = Buffer(GridLayout((1, count, 1, 1), TileGrid(1, 1, 1, 1, 1), NO_BORDER, isa.lanes))
    table = np.full(count * isa.lanes, -1, np.int32)
    table[: len(channels)] = channels * x_layout.pitch * isa.lanes
    table[: len(channels)] += x_layout.element(zero, zero, zero).astype(np.int32)
    tape.add(
        thread,
        KernelCall(
            move.Gather(),
            move.CALL,
            {"x": (x, 0), "out": (compact, 0)},
            {"begin": 0, "end": 1, "count": count, "table": table, "lines": np.arange(count, dtype=np.int32)},
        ),
    )
    return compact
