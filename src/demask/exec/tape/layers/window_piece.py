"""The weight of a layer, its windows with their buffers, and how threads and tiles share them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from demask.exec.steps.segment_steps import Conv
from demask.exec.tape.layers.layer_windows import OutputWindow, first_read, windows, written
from demask.exec.tape.layers.pack_weights import Csr, DenseBlock, LineOffsets, dense_blocks, full_block, read
from demask.exec.tape.layers.tiling import TilingProblem, rects
from demask.exec.tape.tape import Buffer, NoPlan, Tape, by_thread
from demask.exec.tape.tile_layout import Area, At, TileGrid, at_array
from demask.kernels.cpu.tiles.sparse_tile import TILE

DEPTHWISE = 0.5  # share of nonzeros from which a depthwise weight is multiplied with its zeros
UNREAD = 2**30  # instead of a position that a window does not read

Size = tuple[int, int]  # rows and columns of a tile
#: work of a thread on a dense layer: an area of each of its parts, and a block to compute there
Share = tuple[int, Mapping[int, Area], DenseBlock]


@dataclass(frozen=True, slots=True)
class StepWeight:
    """The weight of a layer. channels: input channel of each nonzero. depthwise: whether the
    depthwise kernel computes the layer; blocks: those that the dense kernel computes, if it does.
    """

    matrix: Csr
    channels: np.ndarray
    depthwise: bool
    blocks: Sequence[DenseBlock]


def read_weight(step: Conv, weights: Sequence[Tensor], channels: int) -> StepWeight:
    """The weight of a layer with this many input channels. Raises BadInput if it is invalid."""
    if channels % step.fields.groups:
        raise NoPlan(f"{channels} channels in {step.fields.groups} groups")
    matrix = read(step, weights, channels // step.fields.groups * math.prod(step.fields.kernel))
    group = matrix.rows // (step.fields.out // step.fields.groups)
    of = group * (channels // step.fields.groups) + matrix.columns // math.prod(step.fields.kernel)
    depthwise = is_depthwise(step, channels, weights)
    is_dense = not depthwise and matrix.kind == "float32"
    blocks = _dense_blocks(step, matrix, of, channels) if is_dense else ()
    return StepWeight(matrix, of, depthwise, blocks)


def _dense_blocks(step: Conv, matrix: Csr, of: np.ndarray, channels: int) -> Sequence[DenseBlock]:
    """The dense blocks of a weight. of: input channel of each nonzero."""
    taps = math.prod(step.fields.kernel)
    is_whole = step.weight.csr is None and len(matrix) == matrix.count * channels * taps
    if is_whole and len(matrix):
        return (full_block(matrix, channels, taps),)
    return dense_blocks(matrix, of, channels, taps)


def is_depthwise(step: Conv, channels: int, weights: Sequence[Tensor]) -> bool:
    """Whether the depthwise kernel computes a layer: each output channel reads one of several input
    channels, with few zeros."""
    if step.fields.transposed or not step.fields.groups == channels > 1:
        return False
    number, begin, end = step.weight.values
    if number >= len(weights) or weights[number].dtype is not torch.float32:
        return False
    return end - begin >= DEPTHWISE * step.fields.out * math.prod(step.fields.kernel)


@dataclass(frozen=True, slots=True)
class WindowPiece:
    """A window of a layer with its buffers: nonzeros, their input channels, tiling problem."""

    step: Conv
    window: OutputWindow
    layer: StepWeight
    weight: Csr
    channels: np.ndarray
    shape: TilingProblem
    x: Buffer
    add: Buffer
    out: Buffer


def pieces(step: Conv, layer: StepWeight, x: Buffer, add: Buffer | None, out: Buffer) -> list[WindowPiece]:
    """The windows of a layer."""
    return [_window_nonzeros(step, window, layer, x, add or x, out) for window in windows(step.fields)]


def _window_nonzeros(
    step: Conv, window: OutputWindow, layer: StepWeight, x: Buffer, add: Buffer, out: Buffer
) -> WindowPiece:
    """The nonzeros that a window reads."""
    weight, channels = layer.matrix, layer.channels
    if any(tap is None for taps in window.taps for tap in taps):
        dy, dx = _tap_of_nonzeros(step, window, weight)
        is_used = (dy < UNREAD) & (dx < UNREAD)
        weight = replace(
            weight, rows=weight.rows[is_used], columns=weight.columns[is_used], values=weight.values[is_used]
        )
        channels = channels[is_used]
    shape = shape_of(step, window, out.layout.grid, x.layout.size[1], len(weight))
    return WindowPiece(step, window, layer, weight, channels, shape, x, add, out)


def _tap_of_nonzeros(step: Conv, window: OutputWindow, weight: Csr) -> list[np.ndarray]:
    """The row and column of the window that each nonzero reads; UNREAD for none."""
    kernel, width = math.prod(step.fields.kernel), step.fields.kernel[1]
    positions = weight.columns % kernel // width, weight.columns % width
    return [
        np.array([UNREAD if tap is None else tap for tap in taps], np.int32)[position]
        for taps, position in zip(window.taps, positions, strict=True)
    ]


def line_offsets_of(piece: WindowPiece) -> LineOffsets:
    """Where the nonzeros and rows of a window are, for the kernels of sparse weights."""
    x, out, add = piece.x.layout, piece.out.layout, piece.add.layout
    dy, dx = _tap_of_nonzeros(piece.step, piece.window, piece.weight)
    lines = (dy + x.border[0]) * x.row + dx + x.border[2]
    rows = np.arange(piece.weight.count)
    return LineOffsets(piece.channels, lines, rows * out.pitch, rows * add.pitch, x.pitch)


def shape_of(step: Conv, window: OutputWindow, grid: TileGrid, channels: int, nonzeros: int) -> TilingProblem:
    """The tiling problem for an output in `grid`."""
    spans = [[tap for tap in taps if tap is not None] or [0] for taps in window.taps]
    areas = [grid.part(part) for part in range(grid.parts)]
    parts = tuple((h // window.step[0], w // window.step[1]) for _, _, h, w in areas)
    return TilingProblem(
        parts,
        step.fields.out,
        channels,
        step.fields.groups,
        nonzeros,
        window.stride,
        (max(spans[0]) - min(spans[0]), max(spans[1]) - min(spans[1])),
    )


def shares(
    tape: Tape, piece: WindowPiece, channels: int, step: int = 1
) -> list[tuple[int, dict[int, Area], tuple[int, int]]]:
    """The share of each thread: its number, an area of each of its parts, range of its channels,
    which begins at a multiple of `step`."""
    areas = full_parts(piece)
    if len(areas) == tape.threads:
        return [(part, {part: area}, (0, channels)) for part, area in areas.items()]
    ranges = [(begin * step, min(end * step, channels)) for begin, end in by_thread(-(-channels // step), tape.threads)]
    return [(thread, areas, share) for thread, share in enumerate(ranges) if share[0] < share[1]]


def full_parts(piece: WindowPiece) -> dict[int, Area]:
    """The area of all of each part."""
    return {part: (0, 0, *size) for part, size in enumerate(piece.shape.parts)}


def tiles_by_size(areas: Mapping[int, Area], tile: Size) -> list[tuple[Size, list[At]]]:
    """The tiles of one area of each part, by their size."""
    sizes: dict[Size, list[At]] = {}
    for part, area in areas.items():
        for i, j, height, width in rects(area, tile):
            sizes.setdefault((height, width), []).append((part, i, j))
    return list(sizes.items())


def tile_lines(
    piece: WindowPiece, tiles: Iterable[At], size: tuple[int, int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None, np.ndarray]:
    """The lines of the positions of a tile in x, out and the added tensor, relative to its first;
    and the table of the first lines of all tiles."""
    x, out, add = piece.x.layout, piece.out.layout, piece.add.layout
    (sy, sx), (oy, ox) = piece.window.stride, piece.window.step
    positions = [(i, j) for i in range(size[0]) for j in range(size[1])]
    has_add = piece.step.add is not None
    at = at_array(tiles)
    table = np.zeros(len(at), TILE)
    out_positions = written(piece.window, at).T
    table["x"], table["out"] = first_read(piece.window, x, out, at), out.line(*out_positions)
    if has_add:
        table["add"] = add.line(*out_positions)
    adds = tuple(oy * i * add.row + ox * j for i, j in positions) if has_add else None
    return (
        tuple(sy * i * x.row + sx * j for i, j in positions),
        tuple(oy * i * out.row + ox * j for i, j in positions),
        adds,
        table,
    )


def tap_lines(piece: WindowPiece) -> tuple[int, tuple[int, ...], int, int]:
    """The line of the first tap in x, relative to `first_read`; the taps of a row relative to it;
    the number of rows of taps, and the lines from row to row."""
    x = piece.x.layout
    ys, xs = ([tap for tap in taps if tap is not None] or [0] for taps in piece.window.taps)
    first = (ys[0] + x.border[0]) * x.row + xs[0] + x.border[2]
    pitch = (ys[1] - ys[0]) * x.row if len(ys) > 1 else 0
    return first, tuple(z - xs[0] for z in xs), len(ys), pitch
