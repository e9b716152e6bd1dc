"""Moves and combinations of full values on a tape: layout conversion, borders, pools, means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from demask.exec.steps.segment_steps import Pool, Selection
from demask.exec.tape.layers.layer_windows import first_read, windows
from demask.exec.tape.tape import Buffer, KernelCall, Location, NoPlan, Tape, aligned, by_thread
from demask.exec.tape.tile_layout import NO_BORDER, At, GridLayout, at_array, permutations
from demask.kernels.cpu.tiles import relayout as move
from demask.kernels.cpu.tiles.mean import CALL as MEAN_CALL
from demask.kernels.cpu.tiles.mean import FEW, MeanKernel, exponent
from demask.kernels.llvm.isa import Isa

ANY_VALUE = -2  # instead of the number of an element of a lane that nothing reads
Row = tuple[int, int, np.ndarray]  # part, line, elements of its lanes


class MovePart(NamedTuple):
    """The share of a thread: positions `picked`, channels `begin` to `end`."""

    thread: int
    picked: np.ndarray
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Moves:
    """Writes calls to the last phase of a tape, with work shared by its threads."""

    tape: Tape
    isa: Isa

    def pitch(self, buffer: Buffer) -> int:
        """Bytes from channel to channel."""
        return buffer.layout.pitch * self.isa.line

    def moved(
        self, kernel: Any, x: Location, out: Location, layout: GridLayout, pitches: tuple[int, int], rows: Sequence[Row]
    ) -> None:
        """Write a gather or scatter of `rows`. layout: of the value in vectors."""
        is_out = isinstance(kernel, move.Scatter)
        is_channels_last = 4 in (pitches if is_out else pitches[:1])
        for thread, picked, begin, end in self._work(layout, [row[0] for row in rows]):
            table = np.stack([rows[k][2] for k in picked]).astype(np.int32)
            lines = np.array([rows[k][1] for k in picked], np.int32)
            if isinstance(x[0], Buffer) and isinstance(out[0], Buffer):
                full_lines = _full_line_numbers(table)
                copied = full_lines >= 0
                if copied.any():
                    line_table = np.stack([full_lines, full_lines, lines], 1)[copied].astype(np.int32)
                    copy, buffers = move.Pointwise(None, False), {"x": x, "z": x, "out": out}
                    x_pitch, out_pitch = pitches
                    self.add_call(
                        thread,
                        copy,
                        buffers,
                        (begin, end),
                        line_table,
                        x_pitch=x_pitch,
                        z_pitch=x_pitch,
                        out_pitch=out_pitch,
                    )
                table, lines = table[~copied], lines[~copied]
                if not len(table):
                    continue
            full_channels = (end - begin) // self.isa.lanes * self.isa.lanes if is_channels_last else 0
            middle = begin + full_channels
            calls: list[tuple[Any, ...]] = []
            calls.append((move.TransposedKernel(is_out), begin, middle, table, lines))
            starts, rest = _split_runs(table)
            runs = starts[:, None] + np.arange(self.isa.lanes)
            fill = getattr(kernel, "fill", 0.0)
            calls.append((move.RunKernel(is_out, fill), middle, end, table[starts], lines[runs]))
            calls.append((kernel, middle, end, table[rest], lines[rest]))
            for chosen, first, last, numbers, at in calls:
                if first < last and len(numbers):
                    fields = {"x_pitch": pitches[0], "out_pitch": pitches[1], "lines": at}
                    self.add_call(thread, chosen, {"x": x, "out": out}, (first, last), numbers, **fields)

    def add_call(
        self,
        thread: int,
        kernel: Any,
        buffers: Mapping[str, Location],
        channels: tuple[int, int],
        table: np.ndarray,
        **fields: Any,
    ) -> None:
        """Write the call of a kernel for the channels from one to another, by one thread."""
        pitches = {f"{key}_pitch": self.pitch(x) for key, (x, _) in buffers.items() if isinstance(x, Buffer)}
        shared = {"begin": channels[0], "end": channels[1], "count": len(table), "table": table}
        self.tape.add(thread, KernelCall(kernel, move.CALL, buffers, {**pitches, **shared, **fields}))

    def _work(self, layout: GridLayout, parts: Sequence[int]) -> Iterator[MovePart]:
        """The share of each thread of work on all channels of positions in these parts.

        A thread computes its own part, or some channels if there is only one part.
        """
        grid, channels, all_positions = layout.grid, layout.size[1], np.arange(len(parts))
        if grid.parts < self.tape.threads:
            for thread, (begin, end) in enumerate(by_thread(channels, self.tape.threads)):
                if begin < end and len(parts):
                    yield MovePart(thread, all_positions, begin, end)
            return
        for thread in range(self.tape.threads):
            picked = np.flatnonzero(np.array(parts) == thread)
            if len(picked):
                yield MovePart(thread, picked, 0, channels)

    def borders(self, buffer: Buffer) -> None:
        """Write the calls that fill the border of a value."""
        if buffer.layout.border == NO_BORDER:
            return
        lane_moves = permutations(buffer.layout)
        if not lane_moves:
            return
        self.tape.phase()
        numbered_moves = [
            (k, *lane_move) for k, same_lanes in enumerate(lane_moves.values()) for lane_move in same_lanes
        ]
        for thread, picked, begin, end in self._work(buffer.layout, [at[0] for _, at, _, _ in numbered_moves]):
            kernel = move.BorderKernel(tuple(lane_moves), _runs([numbered_moves[k] for k in picked]), buffer.fill)
            self.tape.add(
                thread,
                KernelCall(
                    kernel,
                    move.CALL,
                    {"out": (buffer, 0)},
                    {"out_pitch": self.pitch(buffer), "begin": begin, "end": end},
                ),
            )

    def pointwise(self, kernel: Any, sources: list[Buffer], out: Buffer) -> None:
        """Write a kernel of one or two values of the same grid."""
        x, z = sources[0], sources[-1]
        rows = [(x.layout.line(*at), z.layout.line(*at), out.layout.line(*at)) for at in out.layout.inside()]
        table = np.array(rows, np.int32)
        parts = [at[0] for at in out.layout.inside()]
        buffers = {"x": (x, 0), "z": (z, 0), "out": (out, 0)}
        for thread, picked, begin, end in self._work(x.layout, parts):
            self.add_call(thread, kernel, buffers, (begin, end), table[picked])

    def over_channels(
        self, kernel: Any, x: Buffer, out: Buffer, groups: int = 1, factors: np.ndarray | None = None
    ) -> None:
        """Write a kernel that computes each position from all of its channels.

        groups: of channels that are independent. factors: float32, which the kernel reads.
        """
        fields = {} if factors is None else {"weights": factors}
        buffers = {"x": (x, 0), "out": (out, 0)}
        count = x.layout.size[1] // groups
        at, threads, grid = at_array(out.layout.inside()), self.tape.threads, out.layout.grid
        table = np.stack([x.layout.line(*at.T), out.layout.line(*at.T)], 1).astype(np.int32)
        for thread, (begin, end) in enumerate(by_thread(len(at), threads)):
            is_own = at[:, 0] == thread if grid.parts == threads else slice(begin, end)
            if len(table[is_own]):
                for first in range(0, x.layout.size[1], count):
                    self.add_call(thread, kernel, buffers, (first, first + count), table[is_own], **fields)

    def pool(self, pool: Pool, x: Buffer, out: Buffer) -> None:
        """Write a pool."""
        (window,) = windows(pool.window)
        x_layout, out_layout = x.layout, out.layout
        above, _, left, _ = x_layout.border
        axis_taps = [[tap for tap in taps if tap is not None] for taps in window.taps]
        taps = [(dy + above) * x_layout.row + dx + left for dy, dx in product(*axis_taps)]
        at = at_array(out_layout.inside())
        reads = first_read(window, x_layout, out_layout, at)
        _, y, col, is_inside = out_layout.pixels(at)
        counts = _counts(pool, 0, y, x_layout.size[2]) * _counts(pool, 1, col, x_layout.size[3])
        kernel, parts = move.PoolKernel(tuple(taps), pool.mean), at[:, 0].tolist()
        table = np.stack([reads, out_layout.line(*at.T)], 1).astype(np.int32)
        scale = np.where(is_inside, 1 / np.maximum(counts, 1), 0)
        buffers = {"x": (x, 0), "out": (out, 0)}
        for thread, picked, begin, end in self._work(out_layout, parts):
            self.add_call(thread, kernel, buffers, (begin, end), table[picked], weights=aligned(scale[picked]))

    def scale(self, act: Any, factors: tuple[Buffer, Buffer], out: Buffer) -> None:
        """Write act(x * z). factors: x and z; z: images of one pixel."""
        x, z = factors
        grid, lanes = x.layout.grid, self.isa.lanes
        tiles_per_image = grid.rows * grid.columns
        elements = self._pixel_elements(z, x.layout.size[0])
        images = [min(lane // tiles_per_image, len(elements) - 1) for lane in range(lanes)]
        if len({int(e) // lanes for e in elements}) != 1:
            raise NoPlan("factors of several images are in several lines")
        line = int(elements[0]) // lanes
        spread = tuple(int(elements[image]) % lanes for image in images)
        kernel = move.ScaleKernel(act, spread)
        positions = list(out.layout.inside())
        table = np.array([(x.layout.line(*at), out.layout.line(*at)) for at in positions], np.int32)
        buffers = {"x": (x, 0), "z": (z, line * self.isa.line), "out": (out, 0)}
        for thread, picked, begin, end in self._work(x.layout, [at[0] for at in positions]):
            self.add_call(thread, kernel, buffers, (begin, end), table[picked])

    def select(self, selection: Selection, channels: np.ndarray, x: Buffer, out: Buffer) -> None:
        """Write the selected channels of x. channels: int32, -1 for zeros."""
        (window,) = windows(selection.window)
        first = x.layout.line(0, 0, 0)
        at = at_array(out.layout.inside())
        reads = first + first_read(window, x.layout, out.layout, at)
        buffers = {"x": (x, 0), "out": (out, 0)}
        table = np.stack([reads, out.layout.line(*at.T)], 1).astype(np.int32)
        for thread, picked, begin, end in self._work(out.layout, at[:, 0].tolist()):
            self.add_call(thread, move.SelectKernel(), buffers, (begin, end), table[picked], lines=channels)

    def mean(self, x: Buffer, out: Buffer) -> None:
        """Write the means of images."""
        (batch, channels, height, width), grid = x.layout.size, x.layout.grid
        tiles = grid.rows * grid.columns
        groups = tuple(tuple(range(k * tiles, k * tiles + tiles)) for k in range(batch))
        at = at_array(x.layout.inside())
        is_inside = x.layout.pixels(at)[3]
        partial = ~is_inside[:, : batch * tiles].all(1)
        order = np.argsort(partial, kind="stable")  # full lines first
        count, full_count = len(at), len(at) - int(partial.sum())
        table = x.layout.line(*at[order].T).astype(np.int32)
        lines = tuple(table.tolist()) if count <= FEW else ()
        fields = {
            "x_pitch": self.pitch(x),
            "out_pitch": self.pitch(out),
            "whole": full_count,
            "count": count,
            "table": table,
            "masks": aligned(-is_inside[order[full_count:]].astype(np.int32), np.int32),
            "outs": self._pixel_elements(out, batch).astype(np.int32),
            "pixels": height * width,
            "exponent": exponent(height * width),
        }
        kernel, buffers = MeanKernel(groups, lines, full_count if lines else 0), {"x": x, "out": out}
        for thread, (begin, end) in enumerate(by_thread(channels, self.tape.threads)):
            if begin < end:
                self.tape.add(
                    thread,
                    KernelCall(
                        kernel,
                        MEAN_CALL,
                        {key: (buffer, 0) for key, buffer in buffers.items()},
                        {**fields, "begin": begin, "end": end},
                    ),
                )

    def _pixel_elements(self, out: Buffer, batch: int) -> np.ndarray:
        """The element of the only pixel of each image; tokens are pixels of one row."""
        image = np.arange(batch)
        zero = np.zeros(batch, np.int64)
        is_tokens = out.layout.size[0] == 1 and out.layout.size[3] == batch
        if is_tokens:
            return out.layout.element(zero, zero, image)
        return out.layout.element(image, zero, zero)

    def flat(self, x: Buffer, out: Buffer) -> None:
        """Write images of one pixel as tokens."""
        batch = x.layout.size[0]
        source, to = self._pixel_elements(x, batch), self._pixel_elements(out, batch)
        lines = sorted({int(element) // self.isa.lanes for element in to})
        table = np.full((lines[-1] + 1, self.isa.lanes), -1)
        table.reshape(-1)[to] = source
        self.moved(
            move.Gather(),
            (x, 0),
            (out, 0),
            out.layout,
            (self.pitch(x), self.pitch(out)),
            [(0, line, table[line]) for line in lines],
        )


def elements(layout: GridLayout, stride: tuple[int, int, int, int], positions: Iterator[At]) -> list[Row]:
    """Positions with their lines and the elements of a strided tensor."""
    at = at_array(positions)
    image, y, x, is_inside = layout.pixels(at)
    element = image * stride[0] + y * stride[2] + x * stride[3]
    if is_inside.any() and int(element[is_inside].max()) >= 2**31:
        raise NoPlan("a tensor has more than 2**31 elements")
    return rows_of(layout, at, np.where(is_inside, element, -1))


def rows_of(layout: GridLayout, at: np.ndarray, elements: np.ndarray) -> list[Row]:
    """Positions [n, 3] with their lines and the elements [n, lanes] of their lanes."""
    return list(zip(at[:, 0].tolist(), layout.line(*at.T).tolist(), elements, strict=True))


def _full_line_numbers(table: np.ndarray) -> np.ndarray:
    """The line whose elements are those of each row [n, lanes], or would be where nothing
    reads them; -1 for other rows."""
    lanes = table.shape[1]
    first = table - np.arange(lanes)
    least = np.where(table == ANY_VALUE, table.max(initial=0), first).min(1)
    is_line = ((first == least[:, None]) | (table == ANY_VALUE)).all(1)
    return np.where(is_line & (least >= 0) & (least % lanes == 0), least // lanes, -1)


def _split_runs(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first rows of runs of as many rows of elements [n, lanes] as a row has lanes, and the
    numbers of rows in no run.

    In a run each element is one more than that in the row before, or -1 as that. Runs may overlap:
    the last of a longer sequence ends where that ends.
    """
    lanes = table.shape[1]
    has_none = (table < 0) & (np.roll(table, 1, 0) < 0)
    continues = ((table == np.roll(table, 1, 0) + 1) & (table > 0) | has_none).all(1)
    continues[:1] = False
    begins = np.flatnonzero(~continues)
    starts, rest = [], []
    for begin, end in zip(begins, [*begins[1:], len(table)], strict=True):
        if end - begin < lanes:
            rest += range(begin, end)
            continue
        starts += [*range(begin, end - lanes, lanes), end - lanes]
    return np.array(starts, np.int64), np.array(rest, np.int64)


def _runs(moves: Sequence[tuple[int, At, int, int]]) -> tuple[tuple[int, int, int, int], ...]:
    """Runs of consecutive lines: (permutation, first source line, first target line, count)."""
    runs: list[tuple[int, int, int, int]] = []
    for lanes, _, source, to in moves:
        last = runs[-1] if runs else (-1, 0, 0, 0)
        if (lanes, source, to) == (last[0], last[1] + last[3], last[2] + last[3]):
            runs[-1] = (last[0], last[1], last[2], last[3] + 1)
        else:
            runs.append((lanes, source, to, 1))
    return tuple(runs)


def _counts(pool: Pool, axis: int, out: np.ndarray, size: int) -> np.ndarray:
    """Number of pixels in the windows of these outputs along an axis, as counted by torch."""
    kernel, pad = pool.kernel[axis], pool.padding[axis]
    start = out * pool.stride[axis] - pad
    end = np.minimum(start + kernel, size + pad)
    if pool.counted:
        return end - start
    return np.minimum(end, size) - np.maximum(start, 0)
