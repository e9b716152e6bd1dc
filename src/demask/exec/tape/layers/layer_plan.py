"""Layers on a tape: by the depthwise, the dense or the sparse kernel.

Consecutive layers in which each pixel depends only on the same pixel, and whose threads share
positions rather than rows, run without a barrier (a *chain*): a thread computes all of them for
some of its positions, so that intermediate values stay in its cache.

`LayerKinds` says by which kernels the layers of a program are computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from demask.exec.steps.segment_program import SegmentProgram
from demask.exec.steps.segment_steps import AnyStep, Layer, as_conv, is_conv, is_layer
from demask.exec.tape.layers.dense_layer import emit_dense
from demask.exec.tape.layers.depthwise_layer import emit_depthwise
from demask.exec.tape.layers.narrow_layer import emit_narrow, is_narrow
from demask.exec.tape.layers.pack_weights import DenseBlock, Stream, dealt, packed
from demask.exec.tape.layers.tiling import Tiling, TilingProblem, best, strips
from demask.exec.tape.layers.window_piece import (
    StepWeight,
    WindowPiece,
    is_depthwise,
    line_offsets_of,
    read_weight,
    tile_lines,
    tiles_by_size,
)
from demask.exec.tape.layers.winograd_layer import filtered_block, filtered_sizes
from demask.exec.tape.tape import KernelCall, Tape
from demask.exec.tape.tile_layout import Area, At, Size
from demask.kernels.cpu.tiles.sparse_tile import CALL, SparseTileKernel
from demask.kernels.llvm.isa import Isa

Weights = dict[int, StepWeight]  # of layers, by the numbers of their values


@dataclass(frozen=True, slots=True)
class LayerKinds:
    """The layers of a program whose values have these sizes.

    read: weights, read when they are needed. filtered: sizes of images, (rows, columns), at which
    layers are computed by minimal filtering.
    """

    program: SegmentProgram
    weights: Sequence[Tensor]
    shapes: Sequence[Size]
    read: Weights
    filtered: frozenset[tuple[int, int]] = frozenset()

    def with_filters(self, lanes: int) -> LayerKinds:
        """The same with minimal filtering where it pays with this many lanes."""
        layers = [
            (step, self.weight(value), self.shapes[value][2:])
            for value, step in enumerate(self.program.steps, len(self.program.inputs))
            if is_layer(step)
        ]
        return replace(self, filtered=filtered_sizes(layers, lanes))

    def step(self, value: int) -> Layer:
        """The layer that computes a value."""
        step = self.program.steps[value - len(self.program.inputs)]
        assert is_layer(step)
        return step

    def weight(self, value: int) -> StepWeight:
        """The weight of the layer that computes a value."""
        if value not in self.read:
            step = self.step(value)
            self.read[value] = read_weight(as_conv(step), self.weights, self.shapes[step.x][1])
        return self.read[value]

    def has_own_kernel(self, value: int) -> bool:
        """Whether a layer is dense or depthwise: the kernels of chains are for sparse ones."""
        weight = self.weight(value)
        return weight.depthwise or bool(weight.blocks)

    def filtered_block(self, value: int) -> DenseBlock | None:
        """The block of a layer that is computed by minimal filtering, if there is one."""
        if self.shapes[value][2:] not in self.filtered:
            return None
        return filtered_block(self.step(value), self.weight(value).blocks)

    def is_depthwise(self, step: AnyStep) -> bool:
        """Whether the depthwise kernel computes a step."""
        return is_conv(step) and is_depthwise(step, self.shapes[step.x][1], self.weights)


BARRIER = 3000.0  # cycles of a barrier
CACHE = 128 * 1024  # bytes that the layers of a chain compute for one strip of positions


def emit_alone(tape: Tape, isa: Isa, window_pieces: Sequence[WindowPiece]) -> None:
    """Write a layer as a phase of its own."""
    for piece in window_pieces:
        if piece.layer.blocks:
            emit_dense(tape, isa, piece)
            continue
        if is_narrow(piece):
            emit_narrow(tape, isa, piece)
            continue
        if piece.layer.depthwise:
            emit_depthwise(tape, isa, piece)
            continue
        tiling = best(piece.shape, tape.threads, isa)[1]
        areas = [(0, 0, *part) for part in piece.shape.parts]
        if not tiling.by_rows:
            stream = _stream_of_rows(piece, np.arange(piece.weight.count), tiling, isa)
            for part, area in enumerate(areas):
                _emit_areas(tape, part, piece, tiling, stream, {part: area})
            continue
        for thread, rows in enumerate(dealt(piece.weight.per_row() + 1, tape.threads)):
            if len(rows):
                stream = _stream_of_rows(piece, rows, tiling, isa)
                _emit_areas(tape, thread, piece, tiling, stream, dict(enumerate(areas)))


def emit_chain(tape: Tape, isa: Isa, window_pieces: Sequence[WindowPiece]) -> None:
    """Write layers of one grid as one phase, strip by strip."""
    tilings = [best(piece.shape, tape.threads, isa, by_rows=False)[1] for piece in window_pieces]
    streams = [
        _stream_of_rows(piece, np.arange(piece.weight.count), tiling, isa)
        for piece, tiling in zip(window_pieces, tilings, strict=True)
    ]
    position_bytes = sum(piece.weight.count for piece in window_pieces) * isa.line
    for part, size in enumerate(window_pieces[0].shape.parts):
        for area in strips(*size, CACHE // position_bytes, max(tiling.tile[0] for tiling in tilings)):
            for piece, tiling, stream in zip(window_pieces, tilings, streams, strict=True):
                _emit_areas(tape, part, piece, tiling, stream, {part: area})


def chain_pays(shapes: Sequence[TilingProblem], threads: int, isa: Isa) -> bool:
    """Whether a chain of layers is estimated to be faster than separate phases."""
    if any(len(shape.parts) != threads for shape in shapes):
        return False
    together = sum(best(shape, threads, isa, by_rows=False)[0] for shape in shapes)
    alone = sum(best(shape, threads, isa)[0] for shape in shapes)
    return together <= alone + BARRIER * (len(shapes) - 1) * (threads > 1)


def _stream_of_rows(piece: WindowPiece, rows: np.ndarray, tiling: Tiling, isa: Isa) -> Stream:
    return packed(piece.weight, line_offsets_of(piece), rows, tiling.block, tiling.side, isa.line)


def _emit_areas(
    tape: Tape, thread: int, piece: WindowPiece, tiling: Tiling, stream: Stream, areas: Mapping[int, Area]
) -> None:
    """Write the calls for one area of each part, one call per tile size."""
    for size, tiles in tiles_by_size(areas, tiling.tile):
        tape.add(thread, _tile_call(piece, stream, tiles, size, tiling.side))


def _tile_call(piece: WindowPiece, stream: Stream, tiles: Sequence[At], size: tuple[int, int], side: int) -> KernelCall:
    """The call for tiles of one size."""
    x_lines, out_lines, add_lines, table = tile_lines(piece, tiles, size)
    kernel = SparseTileKernel(
        x_lines, out_lines, add_lines, side, piece.step.act, piece.weight.kind, stream.offsets.dtype == np.uint32
    )
    buffers = {"x": (piece.x, 0), "out": (piece.out, 0), "add": (piece.add, 0)}
    return KernelCall(
        kernel,
        CALL,
        buffers,
        {
            "blocks": stream.blocks,
            "block_count": len(stream.blocks),
            "records": stream.records,
            "offsets": stream.offsets,
            "values": stream.values,
            "first": 0,
            "tiles": table,
            "tile_begin": 0,
            "tile_end": len(table),
        },
    )
