"""Sparse layers on a tape: what they read where, how they are cut, the kernel's calls.

Layers whose threads share positions, not rows, follow one another without a barrier while they look
at one pixel at a time (a *chain*): a thread then takes some of its positions through all of them,
and what lies between stays in its cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from demask.kernels.cpu import relayout as move
from demask.kernels.cpu.sparse_tile import CALL, TILE, SparseTileKernel
from demask.kernels.cpu.sparse_vector import CALL as NARROW
from demask.kernels.cpu.sparse_vector import SparseVectorKernel
from demask.kernels.llvm.isa import Isa
from demask.sparse.plan.pack_weights import Csr, Places, Stream, dealt, packed, read, sliced
from demask.sparse.plan.tape import Buffer, KernelCall, NoPlan, Tape
from demask.sparse.plan.tile_layout import NO_BORDER, Area, At, Border, GridLayout, TileGrid
from demask.sparse.plan.tiling import Tiling, TilingProblem, best, rects, strips
from demask.sparse.segment_program import ConvStep, LinearStep

BARRIER = 3000.0  # cycles until all threads have come
CACHE = 128 * 1024  # bytes of what a chain makes from one strip of positions


@dataclass(frozen=True, slots=True)
class OutputWindow:
    """The positions of an output that one stream of nonzeros computes, and where each kernel place
    reads, in lines of rows and columns from a position (None: nowhere)."""

    start: tuple[int, int]
    step: tuple[int, int]
    stride: tuple[int, int]
    taps: tuple[tuple[int | None, ...], tuple[int | None, ...]]


def windows(step: ConvStep) -> list[OutputWindow]:
    """One of a convolution; of a transposed one as many as its strides give."""
    if not step.transposed:
        taps = tuple(tuple(k * d - p[0] for k in range(n)) for n, d, p in
                     zip(step.kernel, step.dilation, step.padding, strict=True))  # fmt: skip
        return [OutputWindow((0, 0), (1, 1), step.stride, taps)]  # type: ignore[arg-type]
    found = []
    for i in range(step.stride[0]):
        for j in range(step.stride[1]):
            taps = tuple(_turned(step, axis, at) for axis, at in enumerate((i, j)))
            found.append(OutputWindow((i, j), step.stride, (1, 1), taps))  # type: ignore[arg-type]
    return found


def _turned(step: ConvStep, axis: int, at: int) -> tuple[int | None, ...]:
    """Output position s·i + at reads input i + tap: s · (i + tap) + d · k = s · i + at + p."""
    s, d, p = step.stride[axis], step.dilation[axis], step.padding[axis][0]
    shifts = [at + p - d * k for k in range(step.kernel[axis])]
    return tuple(shift // s if shift % s == 0 else None for shift in shifts)


def reach(grid: TileGrid, out: TileGrid, all_: Sequence[OutputWindow]) -> Border:
    """The border that windows read of an input, for the parts of an output."""
    found = [0, 0, 0, 0]
    for window in all_:
        for axis in (0, 1):
            taps = [tap for tap in window.taps[axis] if tap is not None]
            for part in range(out.parts) if taps else ():
                mine, made = grid.part(part), out.part(part)
                stride, step = window.stride[axis], window.step[axis]
                first = made[axis] // step * stride - mine[axis]
                last = first + (made[2 + axis] // step - 1) * stride
                found[2 * axis] = max(found[2 * axis], -(first + min(taps)))
                more = last + max(taps) - (mine[2 + axis] - 1)
                found[2 * axis + 1] = max(found[2 * axis + 1], more)
    return tuple(found)  # type: ignore[return-value]


def touched(window: OutputWindow, grid: TileGrid, out: TileGrid) -> set[At]:
    """The positions of an input that a window reads."""
    found: set[At] = set()
    for part in range(out.parts):
        mine, made = grid.part(part), out.part(part)
        axes = []
        for axis in (0, 1):
            stride, step = window.stride[axis], window.step[axis]
            first = made[axis] // step * stride - mine[axis]
            taps = [tap for tap in window.taps[axis] if tap is not None]
            axes.append({first + k * stride + tap for k in range(made[2 + axis] // step)
                         for tap in taps})  # fmt: skip
        found |= {(part, i, j) for i in axes[0] for j in axes[1]}
    return found


def looks_at_pixels(step: ConvStep | LinearStep) -> bool:
    """Does a layer make each pixel from that pixel alone?"""
    if isinstance(step, LinearStep):
        return True
    plain = step.kernel == step.stride == (1, 1) and step.padding == ((0, 0), (0, 0))
    return plain and not step.transposed


def as_conv(step: ConvStep | LinearStep) -> ConvStep:
    """A layer as a convolution of an image."""
    if isinstance(step, ConvStep):
        return step
    return ConvStep(step.x, step.weight, step.bias, step.out, (1, 1), act=step.act, add=step.add,
                name=step.name)  # fmt: skip


@dataclass(frozen=True, slots=True)
class WindowPiece:
    """A window of a layer, on given buffers: its nonzeros, where they read, its size."""

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
    """A layer, window by window. BadInput: a weight that does not fit."""
    channels = x.layout.size[1]
    if channels % step.groups:
        raise NoPlan(f"{channels} channels in {step.groups} groups")
    weight = read(step, weights, channels // step.groups * math.prod(step.kernel))
    return [_piece(step, window, weight, x, add or x, out) for window in windows(step)]


def _piece(step: ConvStep, window: OutputWindow, weight: Csr, x: Buffer, add: Buffer,
           out: Buffer) -> WindowPiece:  # fmt: skip
    """The nonzeros that a window reads, and where they read."""
    lay, kernel = x.layout, math.prod(step.kernel)
    ky, kx = weight.columns % kernel // step.kernel[1], weight.columns % step.kernel[1]
    taps = [np.array([2**30 if tap is None else tap for tap in taps]) for taps in window.taps]
    dy, dx = taps[0][ky], taps[1][kx]
    used = (dy < 2**30) & (dx < 2**30)
    if not used.all():
        weight = replace(weight, rows=weight.rows[used], columns=weight.columns[used],
                         values=weight.values[used])  # fmt: skip
        dy, dx = dy[used], dx[used]
    group = weight.rows // (step.out // step.groups)
    channels = group * (lay.size[1] // step.groups) + weight.columns // kernel
    lines = (dy + lay.border[0]) * lay.row + dx + lay.border[2]
    every = np.arange(weight.count)
    places = Places(channels, lines, every * out.layout.pitch, every * add.layout.pitch, lay.pitch)
    shape = shape_of(step, window, out.layout.grid, lay.size[1], len(weight))
    return WindowPiece(step, window, weight, places, shape, x, add, out)


def shape_of(
    step: ConvStep, window: OutputWindow, grid: TileGrid, channels: int, nonzeros: int
) -> TilingProblem:
    """What is to be cut, for an output in `grid`."""
    spans = [[tap for tap in taps if tap is not None] or [0] for taps in window.taps]
    areas = [grid.part(part) for part in range(grid.parts)]
    parts = tuple((h // window.step[0], w // window.step[1]) for _, _, h, w in areas)
    return TilingProblem(parts, step.out, channels, step.groups, nonzeros, window.stride,
                 (max(spans[0]) - min(spans[0]), max(spans[1]) - min(spans[1])))  # fmt: skip


def emit_alone(tape: Tape, isa: Isa, found: Sequence[WindowPiece]) -> list[Tiling]:
    """A layer as a phase of its own, each window cut as is best."""
    cuts = []
    for piece in found:
        if is_narrow(piece):
            emit_narrow(tape, isa, piece)
            continue
        cut = best(piece.shape, tape.threads, isa)[1]
        cuts.append(cut)
        whole = [(0, 0, *part) for part in piece.shape.parts]
        if not cut.by_rows:
            stream = _stream(piece, np.arange(piece.weight.count), cut, isa)
            for part, area in enumerate(whole):
                _emit(tape, part, piece, cut, stream, {part: area})
            continue
        for thread, rows in enumerate(dealt(piece.weight.per_row() + 1, tape.threads)):
            if len(rows):
                stream = _stream(piece, rows, cut, isa)
                _emit(tape, thread, piece, cut, stream, dict(enumerate(whole)))
    return cuts


def is_narrow(piece: WindowPiece) -> bool:
    """Is a layer computed for one position only? Then lanes had better be rows."""
    batch, _, height, width = piece.out.layout.size
    grid = piece.out.layout.grid
    return looks_at_pixels(piece.step) and batch * height * width == 1 and grid.positions == 1


def emit_narrow(tape: Tape, isa: Isa, piece: WindowPiece) -> None:
    """A layer on one position as a phase of its own."""
    weight, outs = piece.weight, [b.layout for b in (piece.out, piece.add)]
    kernel = SparseVectorKernel(piece.step.add is not None, piece.step.act, weight.kind)
    zero = np.zeros(1, np.int64)
    first = [4 * int(lay.element(zero, zero, zero)[0]) for lay in outs]  # bytes
    for thread, rows in enumerate(dealt(weight.per_row() + 1, tape.threads)):
        if not len(rows):
            continue
        found = sliced(weight, rows, isa.lanes)
        own, source = found.rows, np.maximum(found.source, 0)
        columns, values = (
            np.zeros(source.shape, np.int32),
            np.zeros(source.shape, weight.values.dtype),
        )
        if len(weight):
            columns[:] = piece.places.channels[source]
            values[:] = np.where(found.source >= 0, weight.values[source], 0)
        places = [np.where(own >= 0, own * lay.pitch * isa.lanes, -1) for lay in outs]
        buffers = {"x": (_close(tape, isa, thread, piece.x), 0), "out": (piece.out, first[0]),
                   "add": (piece.add, first[1])}  # fmt: skip
        tape.add(thread, KernelCall(kernel, NARROW, buffers, {
            "begin": 0, "end": len(own), "ends": found.ends, "columns": columns, "values": values,
            "outs": places[0].astype(np.int32), "adds": places[1].astype(np.int32),
            "biases": weight.bias[own], "scales": weight.scale[own]}))  # fmt: skip


def _close(tape: Tape, isa: Isa, thread: int, x: Buffer) -> Buffer:
    """The only position of all channels, one behind the other, for one thread: gathers of them stay
    in the first cache."""
    lay, zero = x.layout, np.zeros(1, np.int64)
    count = -(-lay.size[1] // isa.lanes)
    near = Buffer(GridLayout((1, count, 1, 1), TileGrid(1, 1, 1, 1, 1), NO_BORDER, isa.lanes))
    table = np.full(count * isa.lanes, -1, np.int32)
    table[: lay.size[1]] = np.arange(lay.size[1]) * lay.pitch * isa.lanes
    table[: lay.size[1]] += lay.element(zero, zero, zero).astype(np.int32)
    tape.add(thread, KernelCall(move.Gather(), move.CALL, {"x": (x, 0), "out": (near, 0)}, {
        "begin": 0, "end": 1, "count": count, "table": table,
        "lines": np.arange(count, dtype=np.int32)}))  # fmt: skip
    return near


def emit_chain(tape: Tape, isa: Isa, found: Sequence[WindowPiece]) -> list[Tiling]:
    """Layers of one grid as one phase, some positions after the other."""
    cuts = [best(piece.shape, tape.threads, isa, by_rows=False)[1] for piece in found]
    streams = [_stream(piece, np.arange(piece.weight.count), cut, isa)
               for piece, cut in zip(found, cuts, strict=True)]  # fmt: skip
    bytes_ = sum(piece.weight.count for piece in found) * isa.line
    for part, size in enumerate(found[0].shape.parts):
        for area in strips(*size, CACHE // bytes_, max(cut.tile[0] for cut in cuts)):
            for piece, cut, stream in zip(found, cuts, streams, strict=True):
                _emit(tape, part, piece, cut, stream, {part: area})
    return cuts


def chain_pays(shapes: Sequence[TilingProblem], threads: int, isa: Isa) -> bool:
    """Is a chain of layers faster than the layers alone, by the estimate?"""
    if any(len(shape.parts) != threads for shape in shapes):
        return False
    together = sum(best(shape, threads, isa, by_rows=False)[0] for shape in shapes)
    alone = sum(best(shape, threads, isa)[0] for shape in shapes)
    return together <= alone + BARRIER * (len(shapes) - 1) * (threads > 1)


def _stream(piece: WindowPiece, rows: np.ndarray, cut: Tiling, isa: Isa) -> Stream:
    return packed(piece.weight, piece.places, rows, cut.block, cut.side, isa.line)


def _emit(tape: Tape, thread: int, piece: WindowPiece, cut: Tiling, stream: Stream,
          areas: Mapping[int, Area]) -> None:  # fmt: skip
    """The calls for an area of each of some parts, one for each size of tile."""
    tiles = [(part, rect) for part, area in areas.items() for rect in rects(area, cut.tile)]
    for size in dict.fromkeys(rect[2:] for _, rect in tiles):
        same = [(part, *rect[:2]) for part, rect in tiles if rect[2:] == size]
        tape.add(thread, _call(piece, stream, same, size, cut.side))


def _call(piece: WindowPiece, stream: Stream, tiles: Sequence[At], size: tuple[int, int],
          side: int) -> KernelCall:  # fmt: skip
    x, made, add = piece.x.layout, piece.out.layout, piece.add.layout
    step, ((sy, sx), (oy, ox)) = piece.step, (piece.window.stride, piece.window.step)
    inner = [(i, j) for i in range(size[0]) for j in range(size[1])]
    adds = None if step.add is None else tuple(oy * i * add.row + ox * j for i, j in inner)
    kernel = SparseTileKernel(tuple(sy * i * x.row + sx * j for i, j in inner),
                  tuple(oy * i * made.row + ox * j for i, j in inner), adds, side, step.act,
                  piece.weight.kind, stream.offsets.dtype == np.uint32)  # fmt: skip
    table = np.zeros(len(tiles), TILE)
    for k, (part, i, j) in enumerate(tiles):
        at = part, oy * i + piece.window.start[0], ox * j + piece.window.start[1]
        table[k] = (first_read(piece.window, x, made, (part, i, j)), made.line(*at),
                    add.line(*at) if step.add is not None else 0, 0)  # fmt: skip
    buffers = {"x": (piece.x, 0), "out": (piece.out, 0), "add": (piece.add, 0)}
    return KernelCall(kernel, CALL, buffers, {
        "blocks": stream.blocks, "block_count": len(stream.blocks), "records": stream.records,
        "offsets": stream.offsets, "values": stream.values, "first": 0, "tiles": table,
        "tile_begin": 0, "tile_end": len(table)})  # fmt: skip


def first_read(window: OutputWindow, x: GridLayout, out: GridLayout, at: At) -> int:
    """The line that a tap of 0 reads for a position of an output, borders not counted: what a tap
    reads is that many rows and columns from there."""
    part, i, j = at
    mine, made = x.grid.part(part), out.grid.part(part)
    places = [(made[axis] // window.step[axis] + k) * window.stride[axis] - mine[axis]
              for axis, k in enumerate((i, j))]  # fmt: skip
    return part * x.apart + places[0] * x.row + places[1]
