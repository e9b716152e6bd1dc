"""Sparse layers on a tape: the input positions that they read, their tiling, and kernel calls.

Consecutive layers in which each pixel depends only on the same pixel, and whose threads share
positions rather than rows, run without a barrier (a *chain*): a thread computes all of them for
some of its positions, so that intermediate values stay in its cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from demask.kernels.cpu import relayout as move
from demask.kernels.cpu.dense_tile import CALL as DENSE_CALL
from demask.kernels.cpu.dense_tile import DenseTileKernel
from demask.kernels.cpu.depthwise_tile import CALL as DEPTHWISE_CALL
from demask.kernels.cpu.depthwise_tile import DepthwiseTileKernel, Edge
from demask.kernels.cpu.sparse_tile import CALL, TILE, SparseTileKernel
from demask.kernels.cpu.sparse_vector import CALL as NARROW
from demask.kernels.cpu.sparse_vector import SparseVectorKernel
from demask.kernels.llvm.isa import Isa
from demask.sparse.plan.dense_tiling import (
    UNROLLED,
    DenseProblem,
    DenseTiling,
    best_tiling,
    pack,
    split_outputs,
)
from demask.sparse.plan.layer_windows import (
    OutputWindow,
    first_position,
    first_read,
    is_pixelwise,
    reach,
    windows,
)
from demask.sparse.plan.pack_weights import Csr, Places, Stream, dealt, packed, read, sliced
from demask.sparse.plan.tape import Buffer, KernelCall, NoPlan, Tape, by_thread
from demask.sparse.plan.tile_layout import (
    NO_BORDER,
    Area,
    At,
    Border,
    GridLayout,
    TileGrid,
    permutations,
    widened,
)
from demask.sparse.plan.tiling import Tiling, TilingProblem, best, rects, strips
from demask.sparse.segment_program import ConvStep

BARRIER = 3000.0  # cycles of a barrier
DENSE = 0.9  # share of nonzeros from which a weight is multiplied with its zeros
DEPTHWISE = 0.5  # the same of a depthwise weight
UNROLLED_PRODUCTS = 600  # most products of an area of a depthwise kernel
EDGE_PRODUCTS = 700  # the same where it permutes lines over the edges of tiles
EDGE_SHARE = 0.4  # smallest share of these lines to lines of a tile
OTHER = 6  # registers that a depthwise kernel needs for more than sums and weights
LEAST_SUMS = 4  # sums of a block that hide the latency of multiply-adds with those of the next
CACHE = 128 * 1024  # bytes that the layers of a chain compute for one strip of positions

Size = tuple[int, int]  # rows and columns of a tile


@dataclass(frozen=True, slots=True)
class WindowPiece:
    """A window of a layer with its buffers: nonzeros, the lines that they read, tiling problem."""

    step: ConvStep
    window: OutputWindow
    weight: Csr
    places: Places
    shape: TilingProblem
    x: Buffer
    add: Buffer
    out: Buffer
    is_depthwise: bool


def pieces(step: ConvStep, weights: Sequence[Tensor], x: Buffer, add: Buffer | None,
           out: Buffer) -> list[WindowPiece]:  # fmt: skip
    """The windows of a layer. Raises BadInput for an invalid weight."""
    channels = x.layout.size[1]
    if channels % step.groups:
        raise NoPlan(f"{channels} channels in {step.groups} groups")
    weight = read(step, weights, channels // step.groups * math.prod(step.kernel))
    depthwise = is_depthwise(step, channels, weights)
    return [_piece(step, window, weight, x, add or x, out, depthwise) for window in windows(step)]


def _piece(step: ConvStep, window: OutputWindow, weight: Csr, x: Buffer, add: Buffer,
           out: Buffer, depthwise: bool) -> WindowPiece:  # fmt: skip
    """The nonzeros that a window reads, and their lines."""
    x_layout, kernel = x.layout, math.prod(step.kernel)
    ky, kx = weight.columns % kernel // step.kernel[1], weight.columns % step.kernel[1]
    taps = [np.array([2**30 if tap is None else tap for tap in taps]) for taps in window.taps]
    dy, dx = taps[0][ky], taps[1][kx]
    is_used = (dy < 2**30) & (dx < 2**30)
    if not is_used.all():
        weight = replace(weight, rows=weight.rows[is_used], columns=weight.columns[is_used],
                         values=weight.values[is_used])  # fmt: skip
        dy, dx = dy[is_used], dx[is_used]
    group = weight.rows // (step.out // step.groups)
    channels = group * (x_layout.size[1] // step.groups) + weight.columns // kernel
    lines = (dy + x_layout.border[0]) * x_layout.row + dx + x_layout.border[2]
    rows = np.arange(weight.count)
    places = Places(
        channels, lines, rows * out.layout.pitch, rows * add.layout.pitch, x_layout.pitch
    )
    shape = shape_of(step, window, out.layout.grid, x_layout.size[1], len(weight))
    return WindowPiece(step, window, weight, places, shape, x, add, out, depthwise)


def shape_of(
    step: ConvStep, window: OutputWindow, grid: TileGrid, channels: int, nonzeros: int
) -> TilingProblem:
    """The tiling problem for an output in `grid`."""
    spans = [[tap for tap in taps if tap is not None] or [0] for taps in window.taps]
    areas = [grid.part(part) for part in range(grid.parts)]
    parts = tuple((h // window.step[0], w // window.step[1]) for _, _, h, w in areas)
    return TilingProblem(parts, step.out, channels, step.groups, nonzeros, window.stride,
                 (max(spans[0]) - min(spans[0]), max(spans[1]) - min(spans[1])))  # fmt: skip


def emit_alone(tape: Tape, isa: Isa, window_pieces: Sequence[WindowPiece]) -> list[Tiling]:
    """Write a layer as a phase of its own; returns the tiling of each window."""
    tilings = []
    for piece in window_pieces:
        if is_narrow(piece):
            emit_narrow(tape, isa, piece)
            continue
        if piece.is_depthwise:
            tilings.append(emit_depthwise(tape, isa, piece))
            continue
        weight = dense_weight(piece)
        if weight is not None:
            tilings.append(emit_dense(tape, isa, piece, weight))
            continue
        tiling = best(piece.shape, tape.threads, isa)[1]
        tilings.append(tiling)
        areas = [(0, 0, *part) for part in piece.shape.parts]
        if not tiling.by_rows:
            stream = _stream(piece, np.arange(piece.weight.count), tiling, isa)
            for part, area in enumerate(areas):
                _emit(tape, part, piece, tiling, stream, {part: area})
            continue
        for thread, rows in enumerate(dealt(piece.weight.per_row() + 1, tape.threads)):
            if len(rows):
                stream = _stream(piece, rows, tiling, isa)
                _emit(tape, thread, piece, tiling, stream, dict(enumerate(areas)))
    return tilings


def is_narrow(piece: WindowPiece) -> bool:
    """Whether a layer has one position, so that lanes should be rows."""
    batch, _, height, width = piece.out.layout.size
    grid = piece.out.layout.grid
    return is_pixelwise(piece.step) and batch * height * width == 1 and grid.positions == 1


def emit_narrow(tape: Tape, isa: Isa, piece: WindowPiece) -> None:
    """Write a layer with one position as a phase of its own."""
    weight, outs = piece.weight, [b.layout for b in (piece.out, piece.add)]
    kernel = SparseVectorKernel(piece.step.add is not None, piece.step.act, weight.kind)
    zero = np.zeros(1, np.int64)
    first = [4 * int(lay.element(zero, zero, zero)[0]) for lay in outs]  # bytes
    for thread, rows in enumerate(dealt(weight.per_row() + 1, tape.threads)):
        if not len(rows):
            continue
        slices = sliced(weight, rows, isa.lanes)
        slice_rows, source = slices.rows, np.maximum(slices.source, 0)
        columns, values = (
            np.zeros(source.shape, np.int32),
            np.zeros(source.shape, weight.values.dtype),
        )
        if len(weight):
            columns[:] = piece.places.channels[source]
            values[:] = np.where(slices.source >= 0, weight.values[source], 0)
        elements = [
            np.where(slice_rows >= 0, slice_rows * lay.pitch * isa.lanes, -1) for lay in outs
        ]
        buffers = {"x": (_compacted(tape, isa, thread, piece.x), 0), "out": (piece.out, first[0]),
                   "add": (piece.add, first[1])}  # fmt: skip
        tape.add(thread, KernelCall(kernel, NARROW, buffers, {
            "begin": 0, "end": len(slice_rows), "ends": slices.ends, "columns": columns,
            "values": values,
            "outs": elements[0].astype(np.int32), "adds": elements[1].astype(np.int32),
            "biases": weight.bias[slice_rows], "scales": weight.scale[slice_rows]}))  # fmt: skip


def _compacted(tape: Tape, isa: Isa, thread: int, x: Buffer) -> Buffer:
    """Write a copy of all channels of the only position, contiguous, for one thread.

    Gathers from it stay in the L1 cache.
    """
    x_layout, zero = x.layout, np.zeros(1, np.int64)
    count = -(-x_layout.size[1] // isa.lanes)
    compact = Buffer(GridLayout((1, count, 1, 1), TileGrid(1, 1, 1, 1, 1), NO_BORDER, isa.lanes))
    table = np.full(count * isa.lanes, -1, np.int32)
    table[: x_layout.size[1]] = np.arange(x_layout.size[1]) * x_layout.pitch * isa.lanes
    table[: x_layout.size[1]] += x_layout.element(zero, zero, zero).astype(np.int32)
    tape.add(thread, KernelCall(move.Gather(), move.CALL, {"x": (x, 0), "out": (compact, 0)}, {
        "begin": 0, "end": 1, "count": count, "table": table,
        "lines": np.arange(count, dtype=np.int32)}))  # fmt: skip
    return compact


def is_dense(shape: TilingProblem) -> bool:
    """Whether the weight of a pixelwise layer has few zeros, so that the dense kernel is faster."""
    return shape.groups == 1 and shape.nonzeros >= DENSE * shape.outputs * shape.channels


def dense_weight(piece: WindowPiece) -> np.ndarray | None:
    """The weight of a layer as [outputs, channels, taps], zeros included, if it has few zeros and
    the dense kernel supports the layer."""
    step, weight, channels = piece.step, piece.weight, piece.x.layout.size[1]
    taps = math.prod(step.kernel)
    if step.groups != 1 or step.transposed or weight.kind != "float32":
        return None
    if len(weight) < DENSE * weight.count * channels * taps:
        return None
    dense = np.zeros((weight.count, channels * taps), np.float32)
    dense[weight.rows, weight.columns] = weight.values
    return dense.reshape(weight.count, channels, taps)


def emit_dense(tape: Tape, isa: Isa, piece: WindowPiece, weight: np.ndarray) -> Tiling:
    """Write a dense layer as a phase of its own; returns its tiling.

    Threads share positions where the layout has a part for each, otherwise output channels.
    """
    packs: dict[tuple[int, int], tuple[DenseTiling, np.ndarray]] = {}
    for thread, areas, rows in _shares(tape, piece, len(weight)):
        if rows not in packs:
            shape, (_, channels, taps) = piece.shape, weight.shape
            problem = DenseProblem(
                shape.parts, rows[1] - rows[0], channels, taps, shape.stride, shape.reach
            )
            tiling = best_tiling(problem, isa)
            packs[rows] = tiling, pack(weight[slice(*rows)], tiling)
        for size, tiles in _by_size(areas, packs[rows][0].tile):
            tape.add(thread, _dense_call(piece, packs[rows], rows, tiles, size, isa))
    tiling = next(iter(packs.values()))[0]
    return Tiling(tiling.tile, tiling.inner, tiling.rows, len(piece.shape.parts) != tape.threads)


def _shares(
    tape: Tape, piece: WindowPiece, channels: int
) -> list[tuple[int, dict[int, Area], tuple[int, int]]]:
    """The share of each thread: its number, an area of each of its parts, range of its channels."""
    areas = {part: (0, 0, *size) for part, size in enumerate(piece.shape.parts)}
    if len(areas) == tape.threads:
        return [(part, {part: area}, (0, channels)) for part, area in areas.items()]
    ranges = enumerate(by_thread(channels, tape.threads))
    return [(thread, areas, share) for thread, share in ranges if share[0] < share[1]]


def _by_size(areas: Mapping[int, Area], tile: Size) -> list[tuple[Size, list[At]]]:
    """The tiles of one area of each part, by their size."""
    sizes: dict[Size, list[At]] = {}
    for part, area in areas.items():
        for i, j, height, width in rects(area, tile):
            sizes.setdefault((height, width), []).append((part, i, j))
    return list(sizes.items())


def _dense_call(piece: WindowPiece, pack: tuple[DenseTiling, np.ndarray], rows: tuple[int, int],
                tiles: Sequence[At], size: tuple[int, int], isa: Isa) -> KernelCall:  # fmt: skip
    """The call of the dense kernel for tiles of one size and output channels rows[0]:rows[1]."""
    (tiling, stream), (ys, xs) = pack, piece.window.taps
    x, out, add = piece.x.layout, piece.out.layout, piece.add.layout
    taps = [(y + x.border[0]) * x.row + z + x.border[2] for y in ys for z in xs
            if y is not None and z is not None]  # fmt: skip
    x_lines, out_lines, add_lines, table = _tile_lines(piece, tiles, size)
    table["x"] += min(taps)
    relative, unroll = tuple(tap - min(taps) for tap in taps), UNROLLED if len(taps) == 1 else 1
    kernel = DenseTileKernel(x_lines, out_lines, add_lines, relative, tiling.rows, piece.step.act,
                             unroll)  # fmt: skip
    wide, thin = split_outputs(rows[1] - rows[0], tiling.rows) or (0, 0)
    pitches = [layout.pitch * isa.line for layout in (x, out, add)]
    buffers = {"x": (piece.x, 0), "out": (piece.out, rows[0] * pitches[1]),
               "add": (piece.add, rows[0] * pitches[2] if add_lines else 0)}  # fmt: skip
    return KernelCall(kernel, DENSE_CALL, buffers, {
        "x_pitch": pitches[0], "out_pitch": pitches[1], "add_pitch": pitches[2],
        "channels": x.size[1], "inner": tiling.inner, "wide": wide, "thin": thin,
        "weights": stream, "biases": piece.weight.bias[slice(*rows)].astype(np.float32),
        "tiles": table, "tile_begin": 0, "tile_end": len(table)})  # fmt: skip


def is_depthwise(step: ConvStep, channels: int, weights: Sequence[Tensor]) -> bool:
    """Whether the depthwise kernel computes a layer: each output channel reads one of several input
    channels, with few zeros."""
    if step.transposed or not step.groups == channels > 1:
        return False
    number, begin, end = step.weight.values
    if number >= len(weights) or weights[number].dtype is not torch.float32:
        return False
    return end - begin >= DEPTHWISE * step.out * math.prod(step.kernel)


def permutes_edges(step: ConvStep, x: GridLayout, out: TileGrid) -> bool:
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
    return positions * math.prod(step.kernel) <= EDGE_PRODUCTS and edges >= EDGE_SHARE * lines


def emit_depthwise(tape: Tape, isa: Isa, piece: WindowPiece) -> Tiling:
    """Write a depthwise layer as a phase of its own; returns its tiling.

    Threads share positions where the layout has a part for each, otherwise channels.
    """
    x, taps = piece.x.layout, math.prod(piece.step.kernel)
    needed = reach(x.grid, piece.out.layout.grid, [piece.window])
    has_border = widened(x.border, needed) == x.border
    block = _depthwise_block(piece.shape.parts[0], piece.step.kernel[1], isa)
    most = max(block[1], UNROLLED_PRODUCTS // (block[0] * taps))  # columns of an area
    weight = np.zeros((piece.weight.count, taps), np.float32)
    weight[piece.weight.rows, piece.weight.columns] = piece.weight.values
    for thread, areas, share in _shares(tape, piece, x.size[1]):
        if has_border:
            for size, tiles in _by_size(areas, (block[0], most)):
                kernel = _depthwise_kernel(piece, size, block)
                tape.add(thread, _depthwise_call(kernel, piece, weight, share, tiles, isa))
            continue
        for part, (_, _, height, width) in areas.items():
            edges, lanes = _edges(piece, needed, part)
            kernel = _depthwise_kernel(piece, (height, width), block)
            kernel = replace(kernel, edges=edges, lanes=lanes)
            tape.add(thread, _depthwise_call(kernel, piece, weight, share, [(part, 0, 0)], isa))
    return Tiling(block, 1, 1, len(piece.shape.parts) != tape.threads)


def _depthwise_block(size: Size, taps: int, isa: Isa) -> Size:
    """Rows and columns of the positions whose sums stay in registers; taps: in a row.

    Positions of one row: the loads of the next block then overlap its products. Of several rows
    only where these are short, to hide the latency of products.
    """
    most = max(1, isa.registers - taps - OTHER)
    columns = -(-size[1] // -(-size[1] // most))
    return (1 if columns >= LEAST_SUMS else min(size[0], LEAST_SUMS // columns)), columns


def _depthwise_kernel(piece: WindowPiece, size: Size, block: Size) -> DepthwiseTileKernel:
    """The depthwise kernel for areas of one size."""
    buffers = (piece.x, piece.out, piece.add)[: 2 if piece.step.add is None else 3]
    rows = tuple(buffer.layout.row for buffer in buffers)
    taps = tuple(tuple(tap for tap in axis if tap is not None) for axis in piece.window.taps)
    blocks = tuple(rects((0, 0, *size), block))
    return DepthwiseTileKernel(blocks, taps, piece.window.stride, rows, piece.step.act)


def _edges(
    piece: WindowPiece, border: Border, part: int
) -> tuple[tuple[Edge, ...], tuple[tuple[int, ...], ...]]:
    """The rows and columns around a part of an input that are permuted; the permutations."""
    x, at = piece.x.layout, (part, 0, 0)
    top, left = first_position(piece.window, x.grid, piece.out.layout.grid, at)
    first, edges = x.line(part, top, left), []
    moves = permutations(replace(x, border=border), x)
    for number, positions in enumerate(moves.values()):
        edges += [(i - top, j - left, line - first, number)
                  for (of, i, j), line, _ in positions if of == part]  # fmt: skip
    return tuple(edges), tuple(moves)


def _depthwise_call(kernel: DepthwiseTileKernel, piece: WindowPiece, weight: np.ndarray,
                    share: tuple[int, int], tiles: Sequence[At],
                    isa: Isa) -> KernelCall:  # fmt: skip
    """The call of the depthwise kernel for some areas and channels share[0]:share[1]."""
    x, out, add = piece.x.layout, piece.out.layout, piece.add.layout
    table = _tile_lines(piece, tiles, (1, 1))[3]
    table["x"] += x.border[0] * x.row + x.border[2]
    pitches = [layout.pitch * isa.line for layout in (x, out, add)]
    outputs = piece.weight.count // x.size[1]
    first, rows = share[0] * outputs, slice(share[0] * outputs, share[1] * outputs)
    buffers = {"x": (piece.x, share[0] * pitches[0]), "out": (piece.out, first * pitches[1]),
               "add": (piece.add, first * pitches[2] if len(kernel.rows) > 2 else 0)}  # fmt: skip
    return KernelCall(kernel, DEPTHWISE_CALL, buffers, {
        "x_pitch": pitches[0], "out_pitch": pitches[1], "add_pitch": pitches[2],
        "channels": share[1] - share[0], "outputs": outputs, "weights": weight[rows].ravel(),
        "biases": piece.weight.bias[rows].astype(np.float32), "tiles": table, "tile_begin": 0,
        "tile_end": len(table)})  # fmt: skip


def emit_chain(tape: Tape, isa: Isa, window_pieces: Sequence[WindowPiece]) -> list[Tiling]:
    """Write layers of one grid as one phase, strip by strip; returns their tilings."""
    tilings = [best(piece.shape, tape.threads, isa, by_rows=False)[1] for piece in window_pieces]
    streams = [_stream(piece, np.arange(piece.weight.count), tiling, isa)
               for piece, tiling in zip(window_pieces, tilings, strict=True)]  # fmt: skip
    position_bytes = sum(piece.weight.count for piece in window_pieces) * isa.line
    for part, size in enumerate(window_pieces[0].shape.parts):
        for area in strips(
            *size, CACHE // position_bytes, max(tiling.tile[0] for tiling in tilings)
        ):
            for piece, tiling, stream in zip(window_pieces, tilings, streams, strict=True):
                _emit(tape, part, piece, tiling, stream, {part: area})
    return tilings


def chain_pays(shapes: Sequence[TilingProblem], threads: int, isa: Isa) -> bool:
    """Whether a chain of layers is estimated to be faster than separate phases."""
    if any(len(shape.parts) != threads or is_dense(shape) for shape in shapes):
        return False
    together = sum(best(shape, threads, isa, by_rows=False)[0] for shape in shapes)
    alone = sum(best(shape, threads, isa)[0] for shape in shapes)
    return together <= alone + BARRIER * (len(shapes) - 1) * (threads > 1)


def _stream(piece: WindowPiece, rows: np.ndarray, tiling: Tiling, isa: Isa) -> Stream:
    """The stream of some rows of a window."""
    return packed(piece.weight, piece.places, rows, tiling.block, tiling.side, isa.line)


def _emit(tape: Tape, thread: int, piece: WindowPiece, tiling: Tiling, stream: Stream,
          areas: Mapping[int, Area]) -> None:  # fmt: skip
    """Write the calls for one area of each part, one call per tile size."""
    for size, tiles in _by_size(areas, tiling.tile):
        tape.add(thread, _call(piece, stream, tiles, size, tiling.side))


def _call(piece: WindowPiece, stream: Stream, tiles: Sequence[At], size: tuple[int, int],
          side: int) -> KernelCall:  # fmt: skip
    """The call for tiles of one size."""
    x_lines, out_lines, add_lines, table = _tile_lines(piece, tiles, size)
    kernel = SparseTileKernel(x_lines, out_lines, add_lines, side, piece.step.act,
                              piece.weight.kind, stream.offsets.dtype == np.uint32)  # fmt: skip
    buffers = {"x": (piece.x, 0), "out": (piece.out, 0), "add": (piece.add, 0)}
    return KernelCall(kernel, CALL, buffers, {
        "blocks": stream.blocks, "block_count": len(stream.blocks), "records": stream.records,
        "offsets": stream.offsets, "values": stream.values, "first": 0, "tiles": table,
        "tile_begin": 0, "tile_end": len(table)})  # fmt: skip


def _tile_lines(
    piece: WindowPiece, tiles: Sequence[At], size: tuple[int, int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None, np.ndarray]:
    """The lines of the positions of a tile in x, out and the added tensor, relative to its first;
    and the table of the first lines of all tiles."""
    x, out, add = piece.x.layout, piece.out.layout, piece.add.layout
    (sy, sx), (oy, ox) = piece.window.stride, piece.window.step
    positions = [(i, j) for i in range(size[0]) for j in range(size[1])]
    has_add = piece.step.add is not None
    table = np.zeros(len(tiles), TILE)
    for k, (part, i, j) in enumerate(tiles):
        out_position = part, oy * i + piece.window.start[0], ox * j + piece.window.start[1]
        table[k] = (first_read(piece.window, x, out, (part, i, j)), out.line(*out_position),
                    add.line(*out_position) if has_add else 0, 0)  # fmt: skip
    adds = tuple(oy * i * add.row + ox * j for i, j in positions) if has_add else None
    return (tuple(sy * i * x.row + sx * j for i, j in positions),
            tuple(oy * i * out.row + ox * j for i, j in positions), adds, table)  # fmt: skip
