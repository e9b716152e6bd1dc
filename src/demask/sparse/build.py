"""A program on given sizes as a tape: layouts, borders, and the kernels of each step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from demask.kernels import move
from demask.kernels.isa import Isa
from demask.sparse.layers import (
    Piece,
    as_conv,
    chain_pays,
    emit_alone,
    emit_chain,
    first_read,
    looks_at_pixels,
    pieces,
    reach,
    shape_of,
    touched,
    windows,
)
from demask.sparse.layout import (
    NO_BORDER,
    At,
    Border,
    Grid,
    Layout,
    grid_for,
    permutations,
    widened,
)
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
from demask.sparse.tape import Buffer, Call, NoPlan, Place, Tape, by_thread
from demask.sparse.tiling import Cut, Shape, best

POSITIVE = ("relu", "sigmoid", "hardsigmoid")
LEAST = -math.inf


@dataclass(frozen=True, slots=True)
class Need:
    """How a step reads a value: in which grid, with which border, filled with what."""

    value: int
    grid: Grid
    border: Border
    fill: float


Row = tuple[int, int, np.ndarray]  # a part, a line, the elements that belong to its lanes


class Work(NamedTuple):
    """A thread's part: which of the positions, which channels."""

    thread: int
    picked: np.ndarray
    begin: int
    end: int


@dataclass(slots=True)
class Builder:
    """Writes the tape of a program."""

    program: Program
    weights: Sequence[Tensor]
    inputs: Sequence[Tensor]
    isa: Isa
    threads: int
    tape: Tape = field(init=False)
    shapes: list[tuple[int, int, int, int]] = field(init=False)
    grids: list[Grid] = field(default_factory=list)
    needs: dict[int, list[Need]] = field(default_factory=dict)
    positive: list[bool] = field(default_factory=list)
    made: dict[tuple[int, Grid, float], Buffer] = field(default_factory=dict)
    cuts: list[tuple[str, Cut]] = field(default_factory=list)
    left: list[int] = field(default_factory=list)  # values that are still to be made

    def __post_init__(self) -> None:
        self.tape = Tape(self.threads)
        shapes = self.program.shapes([tuple(x.shape) for x in self.inputs])
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
            grid = grid_for(batch, height, width, self.isa.lanes, self.threads)
            step = self.program.steps[value - count] if value >= count else None
            if isinstance(step, Conv) and step.transposed:
                grid = _multiple(replace(grid, parts=1), step.stride)
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
        apart = self.tape.apart // self.isa.line if grid.parts > 1 else 0
        return Layout(self.shapes[value], grid, border, self.isa.lanes, apart)

    # -- buffers

    def main(self, value: int) -> Buffer:
        """Where a value is made: with the borders that its readers want there, if they agree."""
        key = (value, self.grids[value], 0.0)
        if key not in self.made:
            layout = self.layout(value, self.grids[value], self._border(value))
            self.made[key] = Buffer(layout)
        return self.made[key]

    def _border(self, value: int) -> Border:
        """The border that readers of a value want where it is made."""
        border = NO_BORDER
        for need in self.needs.get(value, ()):
            if need.grid == self.grids[value] and need.fill == 0.0:
                border = widened(border, need.border)
        return border

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
        self._copy(self.main(need.value), made, self._read_of(need.value, made.layout))
        return made

    def _read_of(self, value: int, layout: Layout) -> set[At]:
        """The positions of a copy of a value that anybody reads."""
        found: set[At] = set()
        for reader in self.left:
            step = self.step(reader)
            if value not in reads(step):
                continue
            if not isinstance(step, (Conv, Pool)) or step.x != value:
                return set(layout.around())
            made = self.grids[reader]
            for window in windows(step if isinstance(step, Conv) else _as_conv(step)):
                found |= touched(window, layout.grid, made)
        return found

    def _copy(self, source: Buffer, to: Buffer, wanted: set[At]) -> None:
        """A value into another layout, borders too, at the positions that are wanted."""
        self.tape.phase()
        rows = []
        for at in sorted(wanted & set(to.layout.around())):
            image, y, x, real = to.layout.pixels(at)
            held = [np.where(real, a, 0) for a in (image, y, x)]
            found = np.where(real, source.layout.element(*held), -1)
            rows.append((at[0], to.layout.line(*at), found))
        self._moved(move.Gather(to.fill), (source, 0), (to, 0), to.layout,
                    (self._pitch(source), self._pitch(to)), rows)  # fmt: skip

    def _pitch(self, buffer: Buffer) -> int:
        """Bytes from channel to channel."""
        return buffer.layout.pitch * self.isa.line

    def _moved(self, kernel: Any, x: Place, out: Place, lay: Layout, pitches: tuple[int, int],
               rows: Sequence[Row]) -> None:  # fmt: skip
        """Gather or scatter. lay: which channels, and whose parts these are."""
        neighbours = 4 in (pitches if isinstance(kernel, move.Scatter) else pitches[:1])
        for thread, picked, begin, end in self._work(lay, [row[0] for row in rows]):
            table = np.stack([rows[k][2] for k in picked]).astype(np.int32)
            lines = np.array([rows[k][1] for k in picked], np.int32)
            whole = (end - begin) // self.isa.lanes * self.isa.lanes if neighbours else 0
            turned = move.Turned(isinstance(kernel, move.Scatter))
            for one, a, b in ((turned, begin, begin + whole), (kernel, begin + whole, end)):
                if a < b:
                    self.tape.add(thread, Call(one, move.CALL, {"x": x, "out": out}, {
                        "x_pitch": pitches[0], "out_pitch": pitches[1], "begin": a, "end": b,
                        "count": len(lines), "table": table, "lines": lines}))  # fmt: skip

    def _work(self, layout: Layout, parts: Sequence[int]) -> Iterator[Work]:
        """What each thread does of a work on positions of given parts of every channel: that on its
        own part; on some channels, where there is one part."""
        grid, channels, every = layout.grid, layout.size[1], np.arange(len(parts))
        if grid.parts < self.threads:
            for thread, (begin, end) in enumerate(by_thread(channels, self.threads)):
                if begin < end and len(parts):
                    yield Work(thread, every, begin, end)
            return
        for thread in range(self.threads):
            picked = np.flatnonzero(np.array(parts) == thread)
            if len(picked):
                yield Work(thread, picked, 0, channels)

    def _borders(self, buffer: Buffer) -> None:
        """Fill the border of a value that was just made."""
        if buffer.layout.border == NO_BORDER:
            return
        found = permutations(buffer.layout)
        if not found:
            return
        self.tape.phase()
        flat = [(k, *place) for k, places in enumerate(found.values()) for place in places]
        for thread, picked, begin, end in self._work(
            buffer.layout, [at[0] for _, at, _, _ in flat]
        ):
            kernel = move.Border(tuple(found), _runs([flat[k] for k in picked]), buffer.fill)
            self.tape.add(thread, Call(kernel, move.CALL, {"out": (buffer, 0)}, {
                "out_pitch": self._pitch(buffer), "begin": begin, "end": end}))  # fmt: skip

    # -- steps

    def build(self, strides: Sequence[tuple[int, int, int, int]]) -> None:
        """Write the whole tape. strides: in elements, of each input as (batch, channel, y, x)."""
        count = len(self.program.inputs)
        for value, stride in enumerate(strides):
            self._take(value, stride)
        self.left = [count + place for place in range(len(self.program.steps))]
        while self.left:
            chain = self._chain()
            if len(chain) == 1:
                self._step(self.step(chain[0]), chain[0])
            else:
                self._chained(chain)
            self.left = [value for value in self.left if value not in chain]
        for place, value in enumerate(self.program.outputs):
            self._give(value, 1 + count + place)

    def step(self, value: int) -> Step:
        """What makes a value."""
        return self.program.steps[value - len(self.program.inputs)]

    def _chain(self) -> list[int]:
        """The next value to make, and those that its threads may make right after it."""
        chain, waiting = self.left[:1], set(self.left)
        head = self.step(chain[0])
        if not isinstance(head, (Conv, Linear)) or as_conv(head).transposed:
            return chain
        shapes = [self._shape(chain[0])]
        for value in self.left[1:]:
            step = self.step(value)
            if not isinstance(step, (Conv, Linear)) or not looks_at_pixels(step):
                continue
            grids = {self.grids[v] for v in (value, *(v for v in reads(step) if v in chain))}
            made = all(v not in waiting or v in chain for v in reads(step))
            if made and grids == {self.grids[chain[0]]}:
                more = [*shapes, self._shape(value)]
                if chain_pays(more, self.threads, self.isa):
                    chain, shapes = [*chain, value], more
        return chain

    def estimate(self) -> float:
        """Cycles of the layers, about."""
        first = len(self.program.inputs)
        layers = [first + k for k, step in enumerate(self.program.steps)
                  if isinstance(step, (Conv, Linear))]  # fmt: skip
        return sum(best(self._shape(v), self.threads, self.isa)[0] for v in layers)

    def largest(self) -> int:
        """Bytes of the largest value."""
        return max(size[1] * grid.positions for size, grid in
                   zip(self.shapes, self.grids, strict=True)) * self.isa.line  # fmt: skip

    def _shape(self, value: int) -> Shape:
        """What is to be cut of the layer that makes a value."""
        step = self.step(value)
        assert isinstance(step, (Conv, Linear))
        nonzeros = step.weight.values[2] - step.weight.values[1]
        conv = as_conv(step)
        channels = self.shapes[step.x][1]
        return shape_of(conv, windows(conv)[0], self.grids[value], channels, nonzeros)

    def _chained(self, chain: list[int]) -> None:
        """Several layers in one phase."""
        found: list[Piece] = []
        for place, value in enumerate(chain):
            step, inside = self.step(value), chain[:place]
            assert isinstance(step, (Conv, Linear))
            needs = self._reads(step, self.grids[value])
            sources = [self.main(n.value) if n.value in inside else self.buffer(n) for n in needs]
            found += self._pieces(step, sources, self._out(value, inside))
        self.tape.phase()
        cuts = emit_chain(self.tape, self.isa, found)
        self.cuts += [(p.step.name, cut) for p, cut in zip(found, cuts, strict=True)]
        for piece in found:
            self._borders(piece.out)

    def _pieces(self, step: Conv | Linear, sources: list[Buffer], out: Buffer) -> list[Piece]:
        add = sources[-1] if step.add is not None else None
        return pieces(as_conv(step), self.weights, sources[0], add, out)

    def _out(self, value: int, before: Sequence[int]) -> Buffer:
        """Where a layer writes: over what it adds, if nobody reads that afterwards. before: layers
        of the same phase that come first."""
        step = self.step(value)
        add = getattr(step, "add", None)
        if add is None or add in self.program.outputs or add == reads(step)[0]:
            return self.main(value)
        others = [v for v in self.left if v != value and add in reads(self.step(v))]
        if any(v not in before or not looks_at_pixels(self.step(v)) for v in others):  # type: ignore[arg-type]
            return self.main(value)
        key = (value, self.grids[value], 0.0)
        old = self.made.get((add, self.grids[value], 0.0))
        if old is not None and key not in self.made and old.layout.border == self._border(value):
            self.made[key] = old
        return self.main(value)

    def _take(self, value: int, stride: tuple[int, int, int, int]) -> None:
        to = self.main(value)
        self.tape.phase()
        rows = self._elements(to.layout, stride, to.layout.around())
        self._moved(move.Gather(to.fill), (1 + value, 0), (to, 0), to.layout,
                    (4 * stride[1], self._pitch(to)), rows)  # fmt: skip

    def _elements(self, layout: Layout, stride: tuple[int, int, int, int],
                  positions: Iterator[At]) -> list[Row]:  # fmt: skip
        """Positions, their lines, and the elements of a strided tensor there."""
        rows = []
        for at in positions:
            image, y, x, real = layout.pixels(at)
            place = image * stride[0] + y * stride[2] + x * stride[3]
            if real.any() and int(place[real].max()) >= 2**31:
                raise NoPlan("a tensor has more than 2**31 elements")
            rows.append((at[0], layout.line(*at), np.where(real, place, -1)))
        return rows

    def _give(self, value: int, slot: int) -> None:
        source = self.main(value)
        self.tape.phase()
        _, channels, height, width = self.shapes[value]
        tokens = self.program.kinds[value] == "tokens"
        stride = ((0, 1, 0, channels) if tokens
                  else (channels * height * width, height * width, width, 1))  # fmt: skip
        rows = self._elements(source.layout, stride, source.layout.inside())
        self._moved(move.Scatter(), (source, 0), (slot, 0), source.layout,
                    (self._pitch(source), 4 * stride[1]), rows)  # fmt: skip

    def _step(self, step: Step, value: int) -> None:
        grid = self.grids[value]
        sources = [self.buffer(need) for need in self._reads(step, grid)]
        out = self._out(value, ()) if isinstance(step, (Conv, Linear)) else self.main(value)
        self.tape.phase()
        if isinstance(step, (Conv, Linear)):
            cuts = emit_alone(self.tape, self.isa, self._pieces(step, sources, out))
            self.cuts += [(step.name, cut) for cut in cuts]
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
        kernel = move.Pointwise(act, len(sources) == 2)
        parts = [at[0] for at in out.layout.inside()]
        for thread, picked, begin, end in self._work(x.layout, parts):
            places = {"x": (x, 0), "z": (z, 0), "out": (out, first * self._pitch(out))}
            self.tape.add(thread, Call(kernel, move.CALL, places, {
                "x_pitch": self._pitch(x), "z_pitch": self._pitch(z),
                "out_pitch": self._pitch(out), "begin": begin, "end": end,
                "count": len(picked), "table": table[picked]}))  # fmt: skip

    def _pool(self, step: Pool, x: Buffer, out: Buffer) -> None:
        (window,) = windows(_as_conv(step))
        lay, made = x.layout, out.layout
        above, _, left, _ = lay.border
        taps = [(dy + above) * lay.row + dx + left
                for dy in window.taps[0] for dx in window.taps[1]]  # type: ignore[operator]  # fmt: skip
        rows, scales = [], []
        for at in made.inside():
            rows.append((first_read(window, lay, made, at), made.line(*at)))
            _, y, col, real = made.pixels(at)
            counts = _counts(step, 0, y, lay.size[2]) * _counts(step, 1, col, lay.size[3])
            scales.append(np.where(real, 1 / np.maximum(counts, 1), 0))
        kernel, parts = move.Pool(tuple(taps), step.mean), [at[0] for at in made.inside()]
        table, scale = np.array(rows, np.int32), np.stack(scales)
        for thread, picked, begin, end in self._work(made, parts):
            self._each(kernel, x, out, (thread, begin, end), table[picked],
                       {"weights": _aligned(scale[picked])})  # fmt: skip

    def _each(self, kernel: Any, x: Buffer, out: Buffer, own: tuple[int, int, int],
              table: np.ndarray, more: dict[str, Any]) -> None:  # fmt: skip
        thread, begin, end = own
        self.tape.add(thread, Call(kernel, move.CALL, {"x": (x, 0), "out": (out, 0)}, {
            "x_pitch": self._pitch(x), "out_pitch": self._pitch(out), "begin": begin, "end": end,
            "count": len(table), "table": table, **more}))  # fmt: skip

    def _mean(self, x: Buffer, out: Buffer) -> None:
        batch, _, height, width = x.layout.size
        lines, weights = [], []
        for at in x.layout.inside():
            lines.append(x.layout.line(*at))
            weights.append(x.layout.pixels(at)[3] / (height * width))
        grid = x.layout.grid
        per = grid.rows * grid.columns
        groups = tuple(tuple(range(b * per, (b + 1) * per)) for b in range(batch))
        places = self._pixel_places(out, batch)
        more = {"weights": _aligned(np.stack(weights)), "lines": places.astype(np.int32)}
        for thread, (begin, end) in enumerate(by_thread(x.layout.size[1], self.threads)):
            if begin < end:
                self._each(move.Mean(groups), x, out, (thread, begin, end),
                           np.array(lines, np.int32), more)  # fmt: skip

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
        used = sorted({int(place) // self.isa.lanes for place in to})
        table = np.full((used[-1] + 1, self.isa.lanes), -1)
        table.reshape(-1)[to] = source
        self._moved(move.Gather(), (x, 0), (out, 0), out.layout, (self._pitch(x), self._pitch(out)),
                    [(0, line, table[line]) for line in used])  # fmt: skip


def _multiple(grid: Grid, of: tuple[int, int]) -> Grid:
    """The grid with tiles rounded up to multiples."""
    return replace(grid, height=-(-grid.height // of[0]) * of[0],
                   width=-(-grid.width // of[1]) * of[1])  # fmt: skip


def _runs(places: Sequence[tuple[int, At, int, int]]) -> tuple[tuple[int, int, int, int], ...]:
    """Runs of neighbouring lines (permutation, first line, where it goes, how many)."""
    found: list[tuple[int, int, int, int]] = []
    for lanes, _, source, to in places:
        last = found[-1] if found else (-1, 0, 0, 0)
        if (lanes, source, to) == (last[0], last[1] + last[3], last[2] + last[3]):
            found[-1] = (*last[:3], last[3] + 1)
        else:
            found.append((lanes, source, to, 1))
    return tuple(found)


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
