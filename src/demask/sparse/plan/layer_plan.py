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
from torch import Tensor

from demask.kernels.cpu import relayout as move
from demask.kernels.cpu.dense_tile import CALL as DENSE_CALL
from demask.kernels.cpu.dense_tile import DenseTileKernel
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
from demask.sparse.plan.pack_weights import Csr, Places, Stream, dealt, packed, read, sliced
from demask.sparse.plan.tape import Buffer, KernelCall, NoPlan, Tape, by_thread
from demask.sparse.plan.tile_layout import NO_BORDER, Area, At, Border, GridLayout, TileGrid
from demask.sparse.plan.tiling import Tiling, TilingProblem, best, rects, strips
from demask.sparse.segment_program import ConvStep, LinearStep

BARRIER = 3000.0  # cycles of a barrier
DENSE = 0.9  # share of nonzeros from which a weight is multiplied with its zeros
CACHE = 128 * 1024  # bytes that the layers of a chain compute for one strip of positions


@dataclass(frozen=True, slots=True)
class OutputWindow:
    """The positions of an output that one stream of nonzeros computes.

    taps: for each kernel position, the row or column that it reads, relative to the output position
    times the stride (None: it reads nothing).
    """

    start: tuple[int, int]
    step: tuple[int, int]
    stride: tuple[int, int]
    taps: tuple[tuple[int | None, ...], tuple[int | None, ...]]


def windows(step: ConvStep) -> list[OutputWindow]:
    """One window for a convolution; one per stride offset for a transposed convolution."""
    if not step.transposed:
        taps = tuple(tuple(k * d - p[0] for k in range(n)) for n, d, p in
                     zip(step.kernel, step.dilation, step.padding, strict=True))  # fmt: skip
        return [OutputWindow((0, 0), (1, 1), step.stride, taps)]  # type: ignore[arg-type]
    output_windows = []
    for i in range(step.stride[0]):
        for j in range(step.stride[1]):
            taps = tuple(_transposed_taps(step, axis, offset) for axis, offset in enumerate((i, j)))
            output_windows.append(OutputWindow((i, j), step.stride, (1, 1), taps))  # type: ignore[arg-type]
    return output_windows


def _transposed_taps(step: ConvStep, axis: int, offset: int) -> tuple[int | None, ...]:
    """Output position s*i + offset reads input i + tap: s*(i + tap) + d*k = s*i + offset + p."""
    s, d, p = step.stride[axis], step.dilation[axis], step.padding[axis][0]
    shifts = [offset + p - d * k for k in range(step.kernel[axis])]
    return tuple(shift // s if shift % s == 0 else None for shift in shifts)


def reach(grid: TileGrid, out: TileGrid, all_: Sequence[OutputWindow]) -> Border:
    """The border that windows read around the parts of an input, for the parts of an output."""
    border = [0, 0, 0, 0]
    for window in all_:
        for axis in (0, 1):
            taps = [tap for tap in window.taps[axis] if tap is not None]
            for part in range(out.parts) if taps else ():
                in_area, out_area = grid.part(part), out.part(part)
                stride, step = window.stride[axis], window.step[axis]
                first = out_area[axis] // step * stride - in_area[axis]
                last = first + (out_area[2 + axis] // step - 1) * stride
                border[2 * axis] = max(border[2 * axis], -(first + min(taps)))
                excess = last + max(taps) - (in_area[2 + axis] - 1)
                border[2 * axis + 1] = max(border[2 * axis + 1], excess)
    return tuple(border)  # type: ignore[return-value]


def touched(window: OutputWindow, grid: TileGrid, out: TileGrid) -> set[At]:
    """The positions of an input that a window reads."""
    positions: set[At] = set()
    for part in range(out.parts):
        in_area, out_area = grid.part(part), out.part(part)
        axes = []
        for axis in (0, 1):
            stride, step = window.stride[axis], window.step[axis]
            first = out_area[axis] // step * stride - in_area[axis]
            taps = [tap for tap in window.taps[axis] if tap is not None]
            axes.append({first + k * stride + tap for k in range(out_area[2 + axis] // step)
                         for tap in taps})  # fmt: skip
        positions |= {(part, i, j) for i in axes[0] for j in axes[1]}
    return positions


def is_pixelwise(step: ConvStep | LinearStep) -> bool:
    """Whether each output pixel of a layer depends only on the same input pixel."""
    if isinstance(step, LinearStep):
        return True
    is_1x1 = step.kernel == step.stride == (1, 1) and step.padding == ((0, 0), (0, 0))
    return is_1x1 and not step.transposed


def as_conv(step: ConvStep | LinearStep) -> ConvStep:
    """A layer as a convolution of images."""
    if isinstance(step, ConvStep):
        return step
    return ConvStep(step.x, step.weight, step.bias, step.out, (1, 1), act=step.act, add=step.add,
                name=step.name)  # fmt: skip


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


def pieces(step: ConvStep, weights: Sequence[Tensor], x: Buffer, add: Buffer | None,
           out: Buffer) -> list[WindowPiece]:  # fmt: skip
    """The windows of a layer. Raises BadInput for an invalid weight."""
    channels = x.layout.size[1]
    if channels % step.groups:
        raise NoPlan(f"{channels} channels in {step.groups} groups")
    weight = read(step, weights, channels // step.groups * math.prod(step.kernel))
    return [_piece(step, window, weight, x, add or x, out) for window in windows(step)]


def _piece(step: ConvStep, window: OutputWindow, weight: Csr, x: Buffer, add: Buffer,
           out: Buffer) -> WindowPiece:  # fmt: skip
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
    return WindowPiece(step, window, weight, places, shape, x, add, out)


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
    areas = {part: (0, 0, *size) for part, size in enumerate(piece.shape.parts)}
    by_rows = len(areas) != tape.threads
    if by_rows:
        shares = [(thread, areas, rows) for thread, rows in
                  enumerate(by_thread(len(weight), tape.threads)) if rows[0] < rows[1]]  # fmt: skip
    else:
        shares = [(part, {part: area}, (0, len(weight))) for part, area in areas.items()]
    packs: dict[tuple[int, int], tuple[DenseTiling, np.ndarray]] = {}
    for thread, own_areas, rows in shares:
        if rows not in packs:
            shape, (_, channels, taps) = piece.shape, weight.shape
            problem = DenseProblem(
                shape.parts, rows[1] - rows[0], channels, taps, shape.stride, shape.reach
            )
            tiling = best_tiling(problem, isa)
            packs[rows] = tiling, pack(weight[slice(*rows)], tiling)
        tiles = [(part, rect) for part, area in own_areas.items()
                 for rect in rects(area, packs[rows][0].tile)]  # fmt: skip
        for size in dict.fromkeys(rect[2:] for _, rect in tiles):
            size_tiles = [(part, *rect[:2]) for part, rect in tiles if rect[2:] == size]
            tape.add(thread, _dense_call(piece, packs[rows], rows, size_tiles, size, isa))
    tiling = next(iter(packs.values()))[0]
    return Tiling(tiling.tile, tiling.inner, tiling.rows, by_rows)


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
    tiles = [(part, rect) for part, area in areas.items() for rect in rects(area, tiling.tile)]
    for size in dict.fromkeys(rect[2:] for _, rect in tiles):
        size_tiles = [(part, *rect[:2]) for part, rect in tiles if rect[2:] == size]
        tape.add(thread, _call(piece, stream, size_tiles, size, tiling.side))


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


def first_read(window: OutputWindow, x: GridLayout, out: GridLayout, at: At) -> int:
    """The line that a tap of 0 reads for an output position, not counting borders.

    A tap reads that many rows and columns from there.
    """
    part, i, j = at
    in_area, out_area = x.grid.part(part), out.grid.part(part)
    starts = [(out_area[axis] // window.step[axis] + k) * window.stride[axis] - in_area[axis]
              for axis, k in enumerate((i, j))]  # fmt: skip
    return part * x.part_pitch + starts[0] * x.row + starts[1]
