"""What moves and combines whole values, on a tape: between layouts, over borders, pools, means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from demask.kernels.cpu import relayout as move
from demask.kernels.llvm.isa import Isa
from demask.sparse.plan.layer_plan import first_read, windows
from demask.sparse.plan.tape import Buffer, KernelCall, NoPlan, Place, Tape, by_thread
from demask.sparse.plan.tile_layout import NO_BORDER, At, GridLayout, permutations
from demask.sparse.segment_program import ConvStep, PoolStep

Row = tuple[int, int, np.ndarray]  # a part, a line, the elements that belong to its lanes


class MovePart(NamedTuple):
    """A thread's part: which of the positions, which channels."""

    thread: int
    picked: np.ndarray
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Moves:
    """Writes calls onto the present phase of a tape, work dealt to its threads."""

    tape: Tape
    isa: Isa

    def pitch(self, buffer: Buffer) -> int:
        """Bytes from channel to channel."""
        return buffer.layout.pitch * self.isa.line

    def moved(self, kernel: Any, x: Place, out: Place, lay: GridLayout, pitches: tuple[int, int],
               rows: Sequence[Row]) -> None:  # fmt: skip
        """Gather or scatter. lay: which channels, and whose parts these are."""
        neighbours = 4 in (pitches if isinstance(kernel, move.Scatter) else pitches[:1])
        for thread, picked, begin, end in self._work(lay, [row[0] for row in rows]):
            table = np.stack([rows[k][2] for k in picked]).astype(np.int32)
            lines = np.array([rows[k][1] for k in picked], np.int32)
            whole = (end - begin) // self.isa.lanes * self.isa.lanes if neighbours else 0
            turned = move.TransposedKernel(isinstance(kernel, move.Scatter))
            for one, a, b in ((turned, begin, begin + whole), (kernel, begin + whole, end)):
                if a < b:
                    self.tape.add(thread, KernelCall(one, move.CALL, {"x": x, "out": out}, {
                        "x_pitch": pitches[0], "out_pitch": pitches[1], "begin": a, "end": b,
                        "count": len(lines), "table": table, "lines": lines}))  # fmt: skip

    def _work(self, layout: GridLayout, parts: Sequence[int]) -> Iterator[MovePart]:
        """What each thread does of a work on positions of given parts of every channel: that on its
        own part; on some channels, where there is one part."""
        grid, channels, every = layout.grid, layout.size[1], np.arange(len(parts))
        if grid.parts < self.tape.threads:
            for thread, (begin, end) in enumerate(by_thread(channels, self.tape.threads)):
                if begin < end and len(parts):
                    yield MovePart(thread, every, begin, end)
            return
        for thread in range(self.tape.threads):
            picked = np.flatnonzero(np.array(parts) == thread)
            if len(picked):
                yield MovePart(thread, picked, 0, channels)

    def borders(self, buffer: Buffer) -> None:
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
            kernel = move.BorderKernel(tuple(found), _runs([flat[k] for k in picked]), buffer.fill)
            self.tape.add(thread, KernelCall(kernel, move.CALL, {"out": (buffer, 0)}, {
                "out_pitch": self.pitch(buffer), "begin": begin, "end": end}))  # fmt: skip

    def pointwise(self, act: Any, sources: list[Buffer], out: Buffer, first: int) -> None:
        x, z = sources[0], sources[-1]
        rows = [(x.layout.line(*at), z.layout.line(*at), out.layout.line(*at))
                for at in out.layout.inside()]  # fmt: skip
        table = np.array(rows, np.int32)
        kernel = move.Pointwise(act, len(sources) == 2)
        parts = [at[0] for at in out.layout.inside()]
        for thread, picked, begin, end in self._work(x.layout, parts):
            places = {"x": (x, 0), "z": (z, 0), "out": (out, first * self.pitch(out))}
            self.tape.add(thread, KernelCall(kernel, move.CALL, places, {
                "x_pitch": self.pitch(x), "z_pitch": self.pitch(z),
                "out_pitch": self.pitch(out), "begin": begin, "end": end,
                "count": len(picked), "table": table[picked]}))  # fmt: skip

    def pool(self, step: PoolStep, x: Buffer, out: Buffer) -> None:
        (window,) = windows(as_windows(step))
        lay, made = x.layout, out.layout
        above, _, left, _ = lay.border
        places = [[tap for tap in taps if tap is not None] for taps in window.taps]
        taps = [(dy + above) * lay.row + dx + left for dy, dx in product(*places)]
        rows, scales = [], []
        for at in made.inside():
            rows.append((first_read(window, lay, made, at), made.line(*at)))
            _, y, col, real = made.pixels(at)
            counts = _counts(step, 0, y, lay.size[2]) * _counts(step, 1, col, lay.size[3])
            scales.append(np.where(real, 1 / np.maximum(counts, 1), 0))
        kernel, parts = move.PoolKernel(tuple(taps), step.mean), [at[0] for at in made.inside()]
        table, scale = np.array(rows, np.int32), np.stack(scales)
        for thread, picked, begin, end in self._work(made, parts):
            self._each(kernel, x, out, (thread, begin, end), table[picked],
                       {"weights": _aligned(scale[picked])})  # fmt: skip

    def _each(self, kernel: Any, x: Buffer, out: Buffer, own: tuple[int, int, int],
              table: np.ndarray, more: dict[str, Any]) -> None:  # fmt: skip
        thread, begin, end = own
        self.tape.add(thread, KernelCall(kernel, move.CALL, {"x": (x, 0), "out": (out, 0)}, {
            "x_pitch": self.pitch(x), "out_pitch": self.pitch(out), "begin": begin, "end": end,
            "count": len(table), "table": table, **more}))  # fmt: skip

    def mean(self, x: Buffer, out: Buffer) -> None:
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
        for thread, (begin, end) in enumerate(by_thread(x.layout.size[1], self.tape.threads)):
            if begin < end:
                self._each(move.MeanKernel(groups), x, out, (thread, begin, end),
                           np.array(lines, np.int32), more)  # fmt: skip

    def _pixel_places(self, out: Buffer, batch: int) -> np.ndarray:
        """The element of each image's only pixel; tokens are pixels of one row."""
        image = np.arange(batch)
        zero = np.zeros(batch, np.int64)
        tokens = out.layout.size[0] == 1 and out.layout.size[3] == batch
        if tokens:
            return out.layout.element(zero, zero, image)
        return out.layout.element(image, zero, zero)

    def flat(self, x: Buffer, out: Buffer) -> None:
        batch = x.layout.size[0]
        source, to = self._pixel_places(x, batch), self._pixel_places(out, batch)
        used = sorted({int(place) // self.isa.lanes for place in to})
        table = np.full((used[-1] + 1, self.isa.lanes), -1)
        table.reshape(-1)[to] = source
        self.moved(move.Gather(), (x, 0), (out, 0), out.layout, (self.pitch(x), self.pitch(out)),
                    [(0, line, table[line]) for line in used])  # fmt: skip


def elements(layout: GridLayout, stride: tuple[int, int, int, int],
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


def _runs(places: Sequence[tuple[int, At, int, int]]) -> tuple[tuple[int, int, int, int], ...]:
    """Runs of neighbouring lines (permutation, first line, where it goes, how many)."""
    found: list[tuple[int, int, int, int]] = []
    for lanes, _, source, to in places:
        last = found[-1] if found else (-1, 0, 0, 0)
        if (lanes, source, to) == (last[0], last[1] + last[3], last[2] + last[3]):
            found[-1] = (last[0], last[1], last[2], last[3] + 1)
        else:
            found.append((lanes, source, to, 1))
    return tuple(found)


def as_windows(step: PoolStep) -> ConvStep:
    """A convolution with the windows of a pool."""
    pads = tuple((p, p) for p in step.padding)
    return ConvStep(step.x, None, None, 1, step.kernel, step.stride, pads, step.dilation)  # type: ignore[arg-type]


def _counts(step: PoolStep, axis: int, out: np.ndarray, size: int) -> np.ndarray:
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
