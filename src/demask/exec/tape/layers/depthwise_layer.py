"""Depthwise layers on a tape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from demask.exec.steps.segment_steps import Window
from demask.exec.tape.layers.layer_windows import first_position, reach
from demask.exec.tape.layers.tiling import rects
from demask.exec.tape.layers.window_piece import Size, WindowPiece, shares, tile_lines, tiles_by_size
from demask.exec.tape.tape import KernelCall, Tape
from demask.exec.tape.tile_layout import At, Border, GridLayout, TileGrid, at_array, permutations, widened
from demask.kernels.cpu.tiles.depthwise_tile import CALL, DepthwiseTileKernel, Edge
from demask.kernels.llvm.isa import Isa

UNROLLED_PRODUCTS = 600  # most products of an area of a depthwise kernel
EDGE_PRODUCTS = 700  # the same where it permutes lines over the edges of tiles
EDGE_SHARE = 0.4  # smallest share of these lines to lines of a tile
OTHER = 6  # registers that a depthwise kernel needs for more than sums and weights
LEAST_SUMS = 4  # sums of a block that hide the latency of multiply-adds with those of the next


def permutes_edges(window: Window, x: GridLayout, out: TileGrid) -> bool:
    """Whether a depthwise layer permutes lines over the edges of tiles as it reads them, so that
    its input `x` needs no stored border.

    It pays where these lines are many, in small tiles; the kernel unrolls all products of a tile.
    Pixels outside of all tiles are in the stored border only.
    """
    grid, (_, _, height, width) = x.grid, x.size
    if grid.rows * grid.height < height or grid.columns * grid.width < width:
        return False
    sizes = [[grid_.part(part)[2:] for part in range(grid_.parts)] for grid_ in (grid, out)]
    lines, positions = (max(h * w for h, w in grid_sizes) for grid_sizes in sizes)
    edges = x.pitch - lines
    return positions * math.prod(window.kernel) <= EDGE_PRODUCTS and edges >= EDGE_SHARE * lines


def emit_depthwise(tape: Tape, isa: Isa, piece: WindowPiece) -> None:
    """Write a depthwise layer as a phase of its own.

    Threads share positions where the layout has a part for each, otherwise channels.
    """
    x, taps = piece.x.layout, math.prod(piece.step.fields.kernel)
    needed = reach(x.grid, piece.out.layout.grid, [piece.window])
    has_border = widened(x.border, needed) == x.border
    block = _depthwise_block(piece.shape.parts[0], piece.step.fields.kernel[1], isa)
    most = max(block[1], UNROLLED_PRODUCTS // (block[0] * taps))  # columns of an area
    weight = np.zeros((piece.weight.count, taps), np.float32)
    weight[piece.weight.rows, piece.weight.columns] = piece.weight.values
    for thread, areas, share in shares(tape, piece, x.size[1]):
        if has_border:
            for size, tiles in tiles_by_size(areas, (block[0], most)):
                kernel = _depthwise_kernel(piece, size, block)
                tape.add(thread, _depthwise_call(kernel, piece, weight, share, tiles, isa))
            continue
        for part, (_, _, height, width) in areas.items():
            edges, lanes = _permuted_edges(piece, needed, part)
            kernel = _depthwise_kernel(piece, (height, width), block)
            kernel = replace(kernel, edges=edges, lanes=lanes)
            tape.add(thread, _depthwise_call(kernel, piece, weight, share, [(part, 0, 0)], isa))


def _depthwise_block(size: Size, taps: int, isa: Isa) -> Size:
    """Rows and columns of the positions whose sums stay in registers; taps: in a row.

    Positions of one row: the loads of the next block then overlap its products. Of several rows
    only where these are short, to hide the latency of products.
    """
    most = max(1, isa.registers - taps - OTHER)
    columns = -(-size[1] // -(-size[1] // most))
    return (1 if columns >= LEAST_SUMS else min(size[0], LEAST_SUMS // columns)), columns


def _depthwise_kernel(piece: WindowPiece, size: Size, block: Size) -> DepthwiseTileKernel:
    buffers = (piece.x, piece.out, piece.add)[: 2 if piece.step.add is None else 3]
    rows = tuple(buffer.layout.row for buffer in buffers)
    taps = tuple(tuple(tap for tap in axis if tap is not None) for axis in piece.window.taps)
    blocks = tuple(rects((0, 0, *size), block))
    return DepthwiseTileKernel(blocks, taps, piece.window.stride, rows, piece.step.act)


def _permuted_edges(
    piece: WindowPiece, border: Border, part: int
) -> tuple[tuple[Edge, ...], tuple[tuple[int, ...], ...]]:
    """The rows and columns around a part of an input that are permuted; the permutations."""
    x, at = piece.x.layout, at_array([(part, 0, 0)])
    top, left = first_position(piece.window, x.grid, piece.out.layout.grid, at)[0].tolist()
    first, edges = x.line(part, top, left), []
    moves = permutations(replace(x, border=border), x)
    for number, positions in enumerate(moves.values()):
        edges += [(i - top, j - left, line - first, number) for (of, i, j), line, _ in positions if of == part]
    return tuple(edges), tuple(moves)


def _depthwise_call(
    kernel: DepthwiseTileKernel,
    piece: WindowPiece,
    weight: np.ndarray,
    share: tuple[int, int],
    tiles: Sequence[At],
    isa: Isa,
) -> KernelCall:
    """The call of the depthwise kernel for some areas and channels share[0]:share[1]."""
    x, out, add = piece.x.layout, piece.out.layout, piece.add.layout
    table = tile_lines(piece, tiles, (1, 1))[3]
    table["x"] += x.border[0] * x.row + x.border[2]
    pitches = [layout.pitch * isa.line for layout in (x, out, add)]
    outputs = piece.weight.count // x.size[1]
    first, rows = share[0] * outputs, slice(share[0] * outputs, share[1] * outputs)
    buffers = {
        "x": (piece.x, share[0] * pitches[0]),
        "out": (piece.out, first * pitches[1]),
        "add": (piece.add, first * pitches[2] if len(kernel.rows) > 2 else 0),
    }
    return KernelCall(
        kernel,
        CALL,
        buffers,
        {
            "x_pitch": pitches[0],
            "out_pitch": pitches[1],
            "add_pitch": pitches[2],
            "channels": share[1] - share[0],
            "outputs": outputs,
            "weights": weight[rows].ravel(),
            "biases": piece.weight.bias[rows].astype(np.float32),
            "tiles": table,
            "tile_begin": 0,
            "tile_end": len(table),
        },
    )
