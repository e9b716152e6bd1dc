"""A program on given sizes as a tape: layouts, borders, and the kernels of each step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from demask.kernels import move
from demask.kernels.isa import Isa
from demask.kernels.tile import CALL, TILE, Tile
from demask.sparse.layout import NO_BORDER, Border, Grid, Layout, grid_for, permutations, widened
from demask.sparse.pack import Csr, Places, Stream, dealt, packed, read
from demask.sparse.program import (
    Add,
    Cat,
    Conv,
    Flat,
    Linear,
    Mean,
    Pool,
    Program,
    Step,
    canonical,
    reads,
)
from demask.sparse.tape import Buffer, Call, Tape, by_thread
from demask.sparse.tiling import Cut, Shape, best, rects, shares

POSITIVE = ("relu", "sigmoid", "hardsigmoid")
LEAST = -math.inf


class NoPlan(Exception):
    """The kernels cannot do this; its text says why."""


@dataclass(frozen=True, slots=True)
class Need:
    """How a step reads a value: in which grid, with which border, filled with what."""

    value: int
    grid: Grid
    border: Border
    fill: float


@dataclass(frozen=True, slots=True)
class Window:
    """The positions of an output that one stream of nonzeros computes, and where each kernel place
    reads, in lines of rows and columns from a position (None: nowhere)."""

    start: tuple[int, int]
    step: tuple[int, int]
    stride: tuple[int, int]
    taps: tuple[tuple[int | None, ...], tuple[int | None, ...]]


def windows(step: Conv) -> list[Window]:
    """One of a convolution; of a transposed one as many as its strides give."""
    if not step.transposed:
        taps = tuple(tuple(k * d - p[0] for k in range(n)) for n, d, p in
                     zip(step.kernel, step.dilation, step.padding, strict=True))  # fmt: skip
        return [Window((0, 0), (1, 1), step.stride, taps)]  # type: ignore[arg-type]
    found = []
    for i in range(step.stride[0]):
        for j in range(step.stride[1]):
            taps = tuple(_turned(step, axis, at) for axis, at in enumerate((i, j)))
            found.append(Window((i, j), step.stride, (1, 1), taps))  # type: ignore[arg-type]
    return found


def _turned(step: Conv, axis: int, at: int) -> tuple[int | None, ...]:
    """Output position s·i + at reads input i + tap: s · (i + tap) + d · k = s · i + at + p."""
    s, d, p = step.stride[axis], step.dilation[axis], step.padding[axis][0]
    shifts = [at + p - d * k for k in range(step.kernel[axis])]
    return tuple(shift // s if shift % s == 0 else None for shift in shifts)


def reach(grid: Grid, out: Grid, all_: Sequence[Window]) -> Border:
    """The border that windows read of an input."""
    found = [0, 0, 0, 0]
    for window in all_:
        for axis, (size, made) in enumerate(((grid.height, out.height), (grid.width, out.width))):
            taps = [tap for tap in window.taps[axis] if tap is not None]
            if not taps:
                continue
            last = (made // window.step[axis] - 1) * window.stride[axis]
            found[2 * axis] = max(found[2 * axis], -min(taps))
            found[2 * axis + 1] = max(found[2 * axis + 1], last + max(taps) - (size - 1))
    return tuple(found)  # type: ignore[return-value]


@dataclass(slots=True)
class Builder:
    """Writes the tape of a program."""

    program: Program
    weights: Sequence[Tensor]
    sizes: Sequence[tuple[Any, ...]]
    isa: Isa
    threads: int
    tape: Tape = field(init=False)
    shapes: list[tuple[int, int, int, int]] = field(init=False)
    grids: list[Grid] = field(default_factory=list)
    needs: dict[int, list[Need]] = field(default_factory=dict)
    positive: list[bool] = field(default_factory=list)
    made: dict[tuple[int, Grid, float], Buffer] = field(default_factory=dict)
    cuts: list[tuple[str, Cut]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tape = Tape(self.threads)
        shapes = self.program.shapes(self.sizes)
        self.shapes = [canonical(*both) for both in zip(self.program.kinds, shapes, strict=True)]
        for value, size in enumerate(self.shapes):
            if math.prod(size) == 0 or max(size) >= 2**24:
                raise NoPlan(f"value {value} has the size {size}")
            if size[0] > self.isa.lanes:
                raise NoPlan(f"{size[0]} images at once")
        self._choose()

    # -- what values look like

    def _choose(self) -> None:
        """Grids of all values; how each is read."""
        count = len(self.program.inputs)
        for value, (batch, _, height, width) in enumerate(self.shapes):
            grid = grid_for(batch, height, width, self.isa.lanes)
            step = self.program.steps[value - count] if value >= count else None
            if isinstance(step, Conv) and step.transposed:
                grid = _multiple(grid, step.stride)
            self.grids.append(grid)
            self.positive.append(step is not None and self._is_positive(step))
            for need in [] if step is None else self._reads(step, grid):
                self.needs.setdefault(need.value, []).append(need)

    def _is_positive(self, step: Step) -> bool:
        act = getattr(step, "act", None)
        if act is not None:
            return act[0] in POSITIVE or (act[0] == "clamp" and act[1][0] >= 0)
        kept = isinstance(step, (Pool, Mean, Flat, Add, Cat))
        return kept and all(self.positive[v] for v in reads(step))

    def _reads(self, step: Step, grid: Grid) -> list[Need]:
        x = reads(step)[0]
        if isinstance(step, (Conv, Pool)):
            of = self.input_grid(step, grid)
            if isinstance(step, Conv):
                border = reach(of, grid, windows(step))
                added = [] if step.add is None else [Need(step.add, grid, NO_BORDER, 0.0)]
                return [Need(x, of, border, 0.0), *added]
            border = reach(of, grid, windows(_as_conv(step)))
            largest = not step.mean and not self.positive[x]
            return [Need(x, of, border, LEAST if largest else 0.0)]
        if isinstance(step, (Mean, Flat)):
            return [Need(x, self.grids[x], NO_BORDER, 0.0)]
        return [Need(v, grid, NO_BORDER, 0.0) for v in reads(step)]

    def input_grid(self, step: Conv | Pool, grid: Grid) -> Grid:
        """The grid of what a windowed step reads, for an output in `grid`."""
        if isinstance(step, Conv) and step.transposed:
            s = step.stride
            return replace(grid, height=grid.height // s[0], width=grid.width // s[1])
        return grid.scaled(step.stride)

    def layout(self, value: int, grid: Grid, border: Border) -> Layout:
        return Layout(self.shapes[value], grid, border, self.isa.lanes)

    # -- buffers

    def main(self, value: int) -> Buffer:
        """Where a value is made: with the borders that its readers want there, if they agree."""
        key = (value, self.grids[value], 0.0)
        if key not in self.made:
            border = NO_BORDER
            for need in self.needs.get(value, ()):
                if need.grid == self.grids[value] and need.fill == 0.0:
                    border = widened(border, need.border)
            self.made[key] = Buffer(self.layout(value, self.grids[value], border))
        return self.made[key]

    def buffer(self, need: Need) -> Buffer:
        """A value as a step reads it; copied into another layout if it lies otherwise."""
        border = need.border != NO_BORDER
        fill = need.fill if border else 0.0
        key = (need.value, need.grid, fill)
        if key in self.made:
            return self.made[key]
        border_ = NO_BORDER
        for other in self.needs[need.value]:
            if other.grid == need.grid and (other.fill == fill or other.border == NO_BORDER):
                border_ = widened(border_, other.border)
        made = Buffer(self.layout(need.value, need.grid, border_), fill)
        self.made[key] = made
        self._copy(self.main(need.value), made)
        return made

    def _copy(self, source: Buffer, to: Buffer) -> None:
        """A value into another layout, borders too."""
        self.tape.phase()
        table, lines = [], []
        for i, j in to.layout.around():
            image, y, x, real = to.layout.pixels(i, j)
            held = [np.where(real, a, 0) for a in (image, y, x)]
            table.append(np.where(real, source.layout.element(*held), -1))
            lines.append(to.layout.line(i, j))
        pitch = source.layout.pitch * self.isa.line
        self._moved(move.Gather(to.fill), (source, 0), (to, 0), to.layout.size[1], pitch,
                    to.layout.pitch * self.isa.line, table, lines)  # fmt: skip

    def _moved(self, kernel: Any, x: Any, out: Any, channels: int, x_pitch: int, out_pitch: int,
               table: Sequence[np.ndarray], lines: Sequence[int]) -> None:  # fmt: skip
        rows = np.ascontiguousarray(np.stack(table).astype(np.int32))
        places = np.array(lines, np.int32)
        for thread, (begin, end) in enumerate(by_thread(channels, self.threads)):
            if begin < end:
                self.tape.add(thread, Call(kernel, move.CALL, {"x": x, "out": out}, {
                    "x_pitch": x_pitch, "out_pitch": out_pitch, "begin": begin, "end": end,
                    "count": len(places), "table": rows, "lines": places}))  # fmt: skip

    def _borders(self, buffer: Buffer) -> None:
        """Fill the border of a value that was just made."""
        if buffer.layout.border == NO_BORDER:
            return
        found = permutations(buffer.layout)
        if not found:
            return
        self.tape.phase()
        pairs = np.array([pair for pairs in found.values() for pair in pairs], np.int32)
        ends = np.cumsum([len(pairs) for pairs in found.values()]).astype(np.int32)
        kernel = move.Border(tuple(found), buffer.fill)
        for thread, (begin, end) in enumerate(by_thread(buffer.layout.size[1], self.threads)):
            if begin < end:
                self.tape.add(thread, Call(kernel, move.CALL, {"out": (buffer, 0)}, {
                    "out_pitch": buffer.layout.pitch * self.isa.line, "begin": begin, "end": end,
                    "table": pairs, "lines": ends}))  # fmt: skip

    # -- steps

    def build(self, strides: Sequence[tuple[int, int, int, int]]) -> None:
        """Write the whole tape. strides: in elements, of each input as (batch, channel, y, x)."""
        count = len(self.program.inputs)
        for value, stride in enumerate(strides):
            self._take(value, stride)
        for place, step in enumerate(self.program.steps):
            self._step(step, count + place)
        for place, value in enumerate(self.program.outputs):
            self._give(value, 1 + count + place)

    def _take(self, value: int, stride: tuple[int, int, int, int]) -> None:
        to = self.main(value)
        self.tape.phase()
        table, lines = self._elements(to.layout, stride, to.layout.around())
        self._moved(move.Gather(to.fill), (1 + value, 0), (to, 0), to.layout.size[1],
                    4 * stride[1], to.layout.pitch * self.isa.line, table, lines)  # fmt: skip

    def _elements(self, layout: Layout, stride: tuple[int, int, int, int],
                  positions: Any) -> tuple[list[np.ndarray], list[int]]:  # fmt: skip
        """Rows of element numbers of a strided tensor, and the line of each."""
        table, lines = [], []
        for i, j in positions:
            image, y, x, real = layout.pixels(i, j)
            place = image * stride[0] + y * stride[2] + x * stride[3]
            if real.any() and int(place[real].max()) >= 2**31:
                raise NoPlan("a tensor has more than 2**31 elements")
            table.append(np.where(real, place, -1))
            lines.append(layout.line(i, j))
        return table, lines

    def _give(self, value: int, slot: int) -> None:
        source = self.main(value)
        self.tape.phase()
        _, channels, height, width = self.shapes[value]
        tokens = self.program.kinds[value] == "tokens"
        stride = ((0, 1, 0, channels) if tokens
                  else (channels * height * width, height * width, width, 1))  # fmt: skip
        table, lines = self._elements(source.layout, stride, source.layout.inside())
        self._moved(move.Scatter(), (source, 0), (slot, 0), channels,
                    source.layout.pitch * self.isa.line, 4 * stride[1], table, lines)  # fmt: skip

    def _step(self, step: Step, value: int) -> None:
        grid = self.grids[value]
        sources = [self.buffer(need) for need in self._reads(step, grid)]
        out = self.main(value)
        self.tape.phase()
        if isinstance(step, Conv):
            self._conv(step, windows(step), sources, out)
        elif isinstance(step, Linear):
            self._conv(_as_one_by_one(step), windows(_as_one_by_one(step)), sources, out)
        elif isinstance(step, Pool):
            self._pool(step, sources[0], out)
        elif isinstance(step, Mean):
            self._mean(sources[0], out)
        elif isinstance(step, Flat):
            self._flat(sources[0], out)
        elif isinstance(step, Cat):
            first = 0
            for source in sources:
                self._pointwise(None, [source], out, first)
                first += source.layout.size[1]
        else:
            self._pointwise(step.act, sources, out, 0)
        self._borders(out)

    def _pointwise(self, act: Any, sources: list[Buffer], out: Buffer, first: int) -> None:
        x, z = sources[0], sources[-1]
        rows = [(x.layout.line(*at), z.layout.line(*at), out.layout.line(*at))
                for at in out.layout.inside()]  # fmt: skip
        table = np.array(rows, np.int32)
        pitch = out.layout.pitch * self.isa.line
        kernel = move.Pointwise(act, len(sources) == 2)
        for thread, (begin, end) in enumerate(by_thread(x.layout.size[1], self.threads)):
            if begin < end:
                places = {"x": (x, 0), "z": (z, 0), "out": (out, first * pitch)}
                self.tape.add(thread, Call(kernel, move.CALL, places, {
                    "x_pitch": x.layout.pitch * self.isa.line,
                    "z_pitch": z.layout.pitch * self.isa.line, "out_pitch": pitch,
                    "begin": begin, "end": end, "count": len(table), "table": table}))  # fmt: skip

    def _pool(self, step: Pool, x: Buffer, out: Buffer) -> None:
        (window,) = windows(_as_conv(step))
        taps = [dy * x.layout.row + dx for dy in window.taps[0] for dx in window.taps[1]]  # type: ignore[operator]
        rows, scales = [], []
        for i, j in out.layout.inside():
            source = x.layout.line(i * step.stride[0], j * step.stride[1]) + min(taps)
            rows.append((source, out.layout.line(i, j)))
            _, y, col, real = out.layout.pixels(i, j)
            counts = _counts(step, 0, y, x.layout.size[2]) * _counts(step, 1, col, x.layout.size[3])
            scales.append(np.where(real, 1 / np.maximum(counts, 1), 0))
        kernel = move.Pool(tuple(tap - min(taps) for tap in taps), step.mean)
        table, scale = np.array(rows, np.int32), _aligned(np.stack(scales))
        self._each(kernel, x, out, table, {"weights": scale})

    def _each(self, kernel: Any, x: Buffer, out: Buffer, table: np.ndarray,
              more: dict[str, Any]) -> None:  # fmt: skip
        for thread, (begin, end) in enumerate(by_thread(x.layout.size[1], self.threads)):
            if begin < end:
                self.tape.add(thread, Call(kernel, move.CALL, {"x": (x, 0), "out": (out, 0)}, {
                    "x_pitch": x.layout.pitch * self.isa.line,
                    "out_pitch": out.layout.pitch * self.isa.line, "begin": begin, "end": end,
                    "count": len(table), "table": table, **more}))  # fmt: skip

    def _mean(self, x: Buffer, out: Buffer) -> None:
        batch, _, height, width = x.layout.size
        lines, weights = [], []
        for i, j in x.layout.inside():
            lines.append(x.layout.line(i, j))
            weights.append(x.layout.pixels(i, j)[3] / (height * width))
        grid = x.layout.grid
        per = grid.rows * grid.columns
        groups = tuple(tuple(range(b * per, (b + 1) * per)) for b in range(batch))
        places = self._pixel_places(out, batch)
        self._each(move.Mean(groups), x, out, np.array(lines, np.int32),
                   {"weights": _aligned(np.stack(weights)),
                    "lines": places.astype(np.int32)})  # fmt: skip

    def _pixel_places(self, out: Buffer, batch: int) -> np.ndarray:
        """The element of each image's only pixel; tokens are pixels of one row."""
        image = np.arange(batch)
        zero = np.zeros(batch, np.int64)
        tokens = out.layout.size[0] == 1 and out.layout.size[3] == batch
        if tokens:
            return out.layout.element(zero, zero, image)
        return out.layout.element(image, zero, zero)

    def _flat(self, x: Buffer, out: Buffer) -> None:
        batch = x.layout.size[0]
        source, to = self._pixel_places(x, batch), self._pixel_places(out, batch)
        table = np.full((out.layout.pitch, self.isa.lanes), -1)
        table.reshape(-1)[to] = source
        used = sorted({int(place) // self.isa.lanes for place in to})
        self._moved(move.Gather(), (x, 0), (out, 0), x.layout.size[1],
                    x.layout.pitch * self.isa.line, out.layout.pitch * self.isa.line,
                    [table[line] for line in used], used)  # fmt: skip

    # -- layers

    def _conv(self, step: Conv, all_: list[Window], sources: list[Buffer], out: Buffer) -> None:
        x = sources[0]
        weight = read(step, self.weights, self._columns(step, x))
        for window in all_:
            self._window(step, window, weight, sources, out)

    def _columns(self, step: Conv, x: Buffer) -> int:
        channels = x.layout.size[1]
        if channels % step.groups:
            raise NoPlan(f"{channels} channels in {step.groups} groups")
        return channels // step.groups * math.prod(step.kernel)

    def _window(self, step: Conv, window: Window, weight: Csr, sources: list[Buffer],
                out: Buffer) -> None:  # fmt: skip
        x, grid = sources[0], out.layout.grid
        weight, places = self._places(step, window, weight, sources, out)
        rows, columns = grid.height // window.step[0], grid.width // window.step[1]
        spans = [[tap for tap in taps if tap is not None] or [0] for taps in window.taps]
        shape = Shape(rows, columns, weight.count, x.layout.size[1] // step.groups, len(weight),
                      window.stride, (max(spans[0]) - min(spans[0]),
                                      max(spans[1]) - min(spans[1])))  # fmt: skip
        cut = best(shape, self.threads, self.isa.line, self.isa.registers)
        self.cuts.append((step.name, cut))
        every = np.arange(weight.count)
        if cut.by_rows:
            parts = [(part, [((0, rows), (0, columns))])
                     for part in dealt(weight.per_row() + 1, self.threads)]  # fmt: skip
        else:
            parts = [(every, [share]) for share in shares(shape, self.threads)]
        streams: dict[int, Stream] = {}
        for thread, (part, areas) in enumerate(parts):
            if not len(part):
                continue
            key = thread if cut.by_rows else 0
            if key not in streams:
                streams[key] = packed(weight, places, part, cut.block, cut.side, self.isa.line)
            cut_ = [rect for area in areas for rect in rects(*area, cut.tile)]
            for size in dict.fromkeys(rect[2:] for rect in cut_):
                tiles = [rect for rect in cut_ if rect[2:] == size]
                self.tape.add(thread, self._call(step, window, sources, out, streams[key], tiles,
                                                 cut.side, weight.kind))  # fmt: skip

    def _places(self, step: Conv, window: Window, weight: Csr, sources: list[Buffer],
                out: Buffer) -> tuple[Csr, Places]:  # fmt: skip
        """The nonzeros that a window reads, and where they read."""
        x, add = sources[0].layout, sources[-1].layout
        kernel = math.prod(step.kernel)
        ky, kx = weight.columns % kernel // step.kernel[1], weight.columns % step.kernel[1]
        taps = [np.array([2**30 if tap is None else tap for tap in taps]) for taps in window.taps]
        dy, dx = taps[0][ky], taps[1][kx]
        used = (dy < 2**30) & (dx < 2**30)
        if not used.all():
            weight = replace(weight, rows=weight.rows[used], columns=weight.columns[used],
                             values=weight.values[used])  # fmt: skip
            dy, dx = dy[used], dx[used]
        group = weight.rows // (step.out // step.groups)
        channels = group * (x.size[1] // step.groups) + weight.columns // kernel
        lines = (dy + x.border[0]) * x.row + dx + x.border[2]
        every = np.arange(weight.count)
        return weight, Places(channels, lines, every * out.layout.pitch, every * add.pitch, x.pitch)

    def _call(self, step: Conv, window: Window, sources: list[Buffer], out: Buffer, stream: Stream,
              tiles: list[Any], side: int, kind: str) -> Call:  # fmt: skip
        x, made, add = sources[0].layout, out.layout, sources[-1].layout
        (height, width), (sy, sx) = tiles[0][2:], window.stride
        oy, ox = window.step
        inner = [(i, j) for i in range(height) for j in range(width)]
        adds = None if step.add is None else tuple(oy * i * add.row + ox * j for i, j in inner)
        kernel = Tile(tuple(sy * i * x.row + sx * j for i, j in inner),
                      tuple(oy * i * made.row + ox * j for i, j in inner), adds, side, step.act,
                      kind, stream.offsets.dtype == np.uint32)  # fmt: skip
        table = np.zeros(len(tiles), TILE)
        for k, (i, j, _, _) in enumerate(tiles):
            at = oy * i + window.start[0], ox * j + window.start[1]
            table[k] = (sy * i * x.row + sx * j, made.line(*at), add.line(*at), 0)
        buffers = {"x": (sources[0], 0), "out": (out, 0), "add": (sources[-1], 0)}
        return Call(kernel, CALL, buffers, {
            "blocks": stream.blocks, "block_count": len(stream.blocks), "records": stream.records,
            "offsets": stream.offsets, "values": stream.values, "first": 0, "tiles": table,
            "tile_begin": 0, "tile_end": len(table)})  # fmt: skip


def _multiple(grid: Grid, of: tuple[int, int]) -> Grid:
    """The grid with tiles rounded up to multiples."""
    return replace(grid, height=-(-grid.height // of[0]) * of[0],
                   width=-(-grid.width // of[1]) * of[1])  # fmt: skip


def _as_one_by_one(step: Linear) -> Conv:
    return Conv(step.x, step.weight, step.bias, step.out, (1, 1), act=step.act, add=step.add,
                name=step.name)  # fmt: skip


def _as_conv(step: Pool) -> Conv:
    """A convolution with the windows of a pool."""
    pads = tuple((p, p) for p in step.padding)
    return Conv(step.x, None, None, 1, step.kernel, step.stride, pads, step.dilation)  # type: ignore[arg-type]


def _counts(step: Pool, axis: int, out: np.ndarray, size: int) -> np.ndarray:
    """How many pixels the windows of these outputs hold along an axis, as torch counts them."""
    kernel, pad = step.kernel[axis], step.padding[axis]
    start = out * step.stride[axis] - pad
    end = np.minimum(start + kernel, size + pad)
    if step.counted:
        return end - start
    return np.minimum(end, size) - np.maximum(start, 0)


def _aligned(array: np.ndarray) -> np.ndarray:
    """A float32 copy that begins at a cache line."""
    raw = np.zeros(array.size * 4 + 64, np.uint8)
    skipped = -raw.ctypes.data % 64
    found = raw[skipped : skipped + array.size * 4].view(np.float32).reshape(array.shape)
    found[:] = array
    return found
