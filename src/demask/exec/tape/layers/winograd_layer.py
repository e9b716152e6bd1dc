"""Dense convolutions of 3 x 3 taps by minimal filtering: where it pays, its tilings and calls.

Whether a layer is computed so depends on nothing but the program, the sizes of its images and the
instruction set: results have the same bits for any number of threads and of images at once.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from demask.exec.steps.segment_steps import AnyStep, is_conv
from demask.exec.tape.layers.dense_layer import (
    BLOCK,
    LOAD,
    MOST_ROWS,
    PRODUCT,
    STEP,
    SUM,
    WAIT,
    emit_dense,
    split_outputs,
)
from demask.exec.tape.layers.pack_weights import DenseBlock
from demask.exec.tape.layers.window_piece import StepWeight, WindowPiece, shares, tap_lines, tile_lines
from demask.exec.tape.tape import INEXACT, Buffer, KernelCall, Tape, aligned
from demask.exec.tape.tile_layout import NO_BORDER, At, GridLayout, TileGrid, grid_for
from demask.kernels.cpu.tiles.winograd_tile import CALL, COMPONENTS, FILTER, WinogradTileKernel
from demask.kernels.llvm.isa import Isa

SIDE = 2  # rows and columns of the outputs of a square
# Cycles: of the products of a square and a pair of channels, by the definition and by minimal
# filtering; of transforming the inputs of a square in a channel, and its outputs.
DIRECT, FILTERED, IN, OUT = 36 * PRODUCT, 16 * PRODUCT, 32.0, 40.0
PAYS = 0.9  # largest ratio of estimated cycles with which layers are computed so
LEAST = 64  # pixels of an image: in smaller ones, weights take longer to read than to multiply
#: bytes of a weight from which it leaves the cache between calls, and bytes per cycle at which each
#: pass over it is then read
FAR, STREAM = 256 * 1024, 12.0
FAR_LOAD = 1.5  # cycles of a load of a vector from the L2 cache
COMPONENT = 20 * 1024  # bytes of a component of a block of squares, from the L1 cache
SCRATCH = 256 * 1024  # bytes of all components, from the L2 cache
FETCHED, MISSED = 0.4, 6.0  # factors of bytes: read one after the other, and in no order


def filtered_block(step: AnyStep, blocks: Sequence[DenseBlock]) -> DenseBlock | None:
    """The only block of a layer that reads channels, if minimal filtering saves some products of
    it; None for other layers."""
    if not is_conv(step):
        return None
    window, own = step.fields, [block for block in blocks if len(block.channels)]
    is_dense = window.stride == window.dilation == (1, 1) and not window.transposed
    if not is_dense or window.kernel != (3, 3) or len(own) != 1:
        return None
    return own[0] if _cycles_ratio(own[0]) < PAYS else None


def _cycles_ratio(block: DenseBlock) -> float:
    return (FILTERED + IN / len(block.rows) + OUT / len(block.channels)) / DIRECT


def filtered_sizes(
    layers: Sequence[tuple[AnyStep, StepWeight, tuple[int, int]]], lanes: int
) -> frozenset[tuple[int, int]]:
    """Sizes of images at which minimal filtering pays, though tiles of the grid are larger there.

    layers: each with the size of its output, (rows, columns).
    """
    direct: defaultdict[tuple[int, int], float] = defaultdict(float)
    filtered: defaultdict[tuple[int, int], float] = defaultdict(float)
    sizes = set()
    for step, weight, size in layers:
        block, products = None, float(len(weight.matrix))
        if math.prod(size) >= LEAST and min(size) > 1:
            block = filtered_block(step, weight.blocks)
        if block is not None:
            sizes.add(size)
        direct[size] += products
        filtered[size] += products * (1.0 if block is None else _cycles_ratio(block))
    grids = {size: [grid_for(1, *size, lanes, 1, unit=unit) for unit in (1, SIDE)] for size in sizes}
    return frozenset(
        size
        for size, (any_, even) in grids.items()
        if filtered[size] * even.positions < PAYS * direct[size] * any_.positions
    )


@dataclass(frozen=True, slots=True)
class WinogradTiling:
    """rows: output channels of a wide block; group: squares multiplied together; block: squares
    whose components are in the scratch memory at once, a multiple of `group`."""

    rows: int
    group: int
    block: int


@functools.cache
def best_winograd(squares: int, channels: int, outputs: int, isa: Isa) -> WinogradTiling:
    """The tiling of least estimated cost for this many squares of a thread."""
    best: tuple[float, WinogradTiling] | None = None
    most = min(MOST_ROWS, outputs)
    pairs = [(rows, group) for rows in range(1, most + 1) for group in range(1, min(squares, isa.registers) + 1)]
    for rows, group in pairs:
        fits = rows * group + min(rows, group) + 1 < isa.registers
        blocks = split_outputs(outputs, rows) if fits else None
        if blocks is None:
            continue
        for block in range(group, -(-squares // group) * group + 1, group):
            cost = _tiling_cost((squares, channels), blocks, WinogradTiling(rows, group, block), isa.line)
            if best is None or cost < best[0]:
                best = cost, WinogradTiling(rows, group, block)
    assert best is not None
    return best[1]


def _tiling_cost(sizes: tuple[int, int], blocks: tuple[int, int], tiling: WinogradTiling, line: int) -> float:
    """Estimated cycles. sizes: squares and input channels. blocks: wide and thin ones."""
    squares, channels = sizes
    passes, rest = divmod(squares, tiling.block)
    groups = passes * (tiling.block // tiling.group) + -(-rest // tiling.group)
    passes += rest > 0
    cycles, outputs = 0.0, 0
    load = LOAD if channels * tiling.block * line <= COMPONENT else FAR_LOAD
    for rows, count in zip((tiling.rows, tiling.rows - 1), blocks, strict=True):
        sums = rows * tiling.group
        product = max(PRODUCT * max(sums, WAIT), LOAD * rows + load * tiling.group)
        cycles += count * groups * COMPONENTS * (channels * (product + STEP) + BLOCK + SUM * sums)
        outputs += count * rows
    weight = 4 * COMPONENTS * outputs * channels
    scratch = COMPONENTS * (channels + outputs) * tiling.block * line
    moved = (FETCHED * weight if weight >= FAR else 0) + MISSED * max(scratch - SCRATCH, 0)
    return cycles + passes * moved / STREAM


def pack_winograd(weight: np.ndarray, rows: int) -> np.ndarray:
    """Float32 weights [outputs, channels, 9] transformed, in the order in which the kernel reads
    them, [component][output block][channel][output]. Computed in float64 and rounded once."""
    outputs, channels, _ = weight.shape
    taps = weight.reshape(outputs, channels, 3, 3).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):  # outputs are not finite then, either
        components = np.einsum("ny,ocyx,mx->nmoc", FILTER, taps, FILTER, optimize=True)
        components = components.reshape(COMPONENTS, outputs, channels).astype(np.float32)
    wide, thin = split_outputs(outputs, rows) or (0, 0)
    ends = np.cumsum([0] + [rows] * wide + [rows - 1] * thin)
    blocks = [components[:, a:b].transpose(0, 2, 1).reshape(COMPONENTS, -1) for a, b in pairwise(ends)]
    return aligned(np.concatenate(blocks, axis=1))


def emit_winograd(tape: Tape, isa: Isa, piece: WindowPiece, block: DenseBlock) -> None:
    """Write a layer as a phase of its own: this block by minimal filtering, rows of zeros by the
    dense kernel."""
    packs: dict[tuple[int, int], tuple[WinogradTiling, np.ndarray]] = {}
    for thread, areas, share in shares(tape, piece, len(block.rows)):
        squares = [
            (part, i, j)
            for part, area in areas.items()
            for i in range(area[0], area[0] + area[2], SIDE)
            for j in range(area[1], area[1] + area[3], SIDE)
        ]
        own = DenseBlock(block.rows[slice(*share)], block.channels, block.weight[slice(*share)])
        if share not in packs:
            tiling = best_winograd(len(squares), len(own.channels), len(own.rows), isa)
            packs[share] = tiling, pack_winograd(own.weight, tiling.rows)
        tape.add(thread, _thread_call(piece, own, squares, packs[share], isa))
    rest = [other for other in piece.layer.blocks if other is not block]
    if rest:
        layer = replace(piece.layer, blocks=rest)
        emit_dense(tape, isa, replace(piece, layer=layer))


def _thread_call(
    piece: WindowPiece, block: DenseBlock, squares: Sequence[At], packed: tuple[WinogradTiling, np.ndarray], isa: Isa
) -> KernelCall:
    """The call of a thread."""
    tiling, weight = packed
    x, out, add = piece.x.layout, piece.out.layout, piece.add.layout
    *_, table = tile_lines(piece, squares, (SIDE, SIDE))
    table["x"] += tap_lines(piece)[0]
    grid = out.grid
    kernel = WinogradTileKernel(
        tiling.rows,
        tiling.group,
        tiling.block,
        grid.images * grid.rows * grid.columns,
        piece.step.add is not None,
        piece.step.act,
    )
    counts = len(block.channels), len(block.rows)
    planes = [(tiling.block * count) | 1 for count in counts]  # lines
    scratch = GridLayout((1, COMPONENTS * sum(planes), 1, 1), TileGrid(1, 1, 1, 1, 1), NO_BORDER, isa.lanes)
    wide, thin = split_outputs(len(block.rows), tiling.rows) or (0, 0)
    pitches = [layout.pitch * isa.line for layout in (x, out, add)]
    buffers = {"x": (piece.x, 0), "out": (piece.out, 0), "add": (piece.add, 0), "scratch": (Buffer(scratch), 0)}
    return KernelCall(kernel, CALL, buffers, {
        "x_offsets": block.channels.astype(np.int64) * pitches[0],
        "out_offsets": block.rows.astype(np.int64) * pitches[1],
        "add_offsets": block.rows.astype(np.int64) * pitches[2],
        "x_pitch": x.row * isa.line, "out_pitch": out.row * isa.line,
        "add_pitch": add.row * isa.line,
        "input_plane": planes[0] * isa.line, "sum_plane": planes[1] * isa.line,
        "channels": counts[0], "outputs": counts[1], "wide": wide, "thin": thin, "weights": weight,
        "biases": piece.weight.bias[block.rows].astype(np.float32),
        "tiles": table, "tile_end": len(table), "inexact": INEXACT})  # fmt: skip
