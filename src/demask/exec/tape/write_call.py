"""Calls of single ops on a tape.

Resizes have the weights of torch's own op: it is applied to unit vectors, which gives the weights in
the rounding of torch, and to vectors with one NaN or infinity, which tells what it reads with a weight
of zero: 0 * inf is NaN."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, nan, prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demask.exec.steps.called_op import OVER_CHANNELS, PRODUCT, RECURRENT, RESIZED
from demask.exec.steps.segment_calls import CALLED, sizes_and_factors
from demask.exec.steps.segment_steps import Numbers, Step
from demask.exec.steps.segment_weights import part
from demask.exec.tape.moved_values import MovedValues, MoveWriter, elements_of, is_move
from demask.exec.tape.recurrent_layer import recurrent_cycles, write_recurrent
from demask.exec.tape.tape import Buffer, KernelCall, NoPlan, aligned, by_thread
from demask.exec.tape.tile_layout import NO_BORDER, GridLayout, at_array
from demask.exec.tape.value_moves import ANY_VALUE, Moves, rows_of
from demask.kernels.cpu.tiles.called import NormKernel, PointwiseKernel, PReLUKernel, SoftmaxKernel
from demask.kernels.cpu.tiles.relayout import Gather
from demask.kernels.cpu.tiles.resize import CALL as RESIZE_CALL
from demask.kernels.cpu.tiles.resize import ResizeKernel
from demask.kernels.cpu.tiles.value_product import CALL as PRODUCT_CALL
from demask.kernels.cpu.tiles.value_product import TILE, ValueProductKernel

PROBED = 256  # unit vectors at once
Taps = tuple[np.ndarray, np.ndarray]  # pixels and weights, [outputs, taps]
Axis = tuple[np.ndarray, np.ndarray, np.ndarray]  # taps, weights, lines; see `ResizeKernel`


@dataclass(frozen=True, slots=True)
class ResizedAxis:
    """What outputs along an axis read. lines: of the output, [n]. elements: [n, taps, lanes] of x;
    weights: the same shape. full_lines: numbers of lines [n, taps] if all lanes read their own lane;
    negative otherwise."""

    lines: np.ndarray
    elements: np.ndarray
    weights: np.ndarray
    full_lines: np.ndarray

    def fields(self, name: str, picked: np.ndarray, reads_full_lines: bool) -> dict[str, Any]:
        """The fields of a call for some of the outputs."""
        taps = self.full_lines if reads_full_lines else self.elements
        return {
            f"{name}s": len(picked),
            f"{name}_taps": aligned(taps[picked], np.int32),
            f"{name}_weights": aligned(self.weights[picked]),
            f"{name}_lines": aligned(self.lines[picked], np.int32),
        }


def write_resize(step: Step[Numbers], moves: Moves, x: Buffer, out: Buffer) -> None:
    """Write a resize to the last phase of a tape, without borders."""
    channels, grid, threads = out.layout.size[1], out.layout.grid, moves.tape.threads
    taps = [_axis_taps(step, axis, x.layout.size[2 + axis], out.layout.size[2 + axis]) for axis in range(2)]
    for part_number in range(grid.parts):
        axes = _resized_axes(x.layout, out.layout, part_number, taps)
        if grid.parts == threads:
            _write_share(moves, (x, out), (part_number, 0, channels), axes)
            continue
        for thread, (begin, end) in enumerate(by_thread(channels, threads)):
            if begin < end:
                _write_share(moves, (x, out), (thread, begin, end), axes)


def _write_share(
    moves: Moves, buffers: tuple[Buffer, Buffer], share: tuple[int, int, int], axes: Sequence[ResizedAxis]
) -> None:
    """Write the calls of a thread: of rows and columns that read full lines, and of the others."""
    thread, begin, end = share
    full = [np.flatnonzero((axis.full_lines >= 0).all(1)) for axis in axes]
    others = [np.flatnonzero((axis.full_lines < 0).any(1)) for axis in axes]
    every = np.arange(len(axes[1].lines))
    for is_full, picked in ((True, full), (False, (full[0], others[1])), (False, (others[0], every))):
        if not all(map(len, picked)):
            continue
        kernel = ResizeKernel(axes[0].weights.shape[1], axes[1].weights.shape[1], is_full)
        fields: dict[str, Any] = {"begin": begin, "end": end}
        for key, buffer in zip(("x", "out"), buffers, strict=True):
            fields[f"{key}_pitch"] = moves.pitch(buffer)
        for name, axis, numbers in zip(("row", "column"), axes, picked, strict=True):
            fields |= axis.fields(name, numbers, is_full)
        locations = {key: (buffer, 0) for key, buffer in zip(("x", "out"), buffers, strict=True)}
        moves.tape.add(thread, KernelCall(kernel, RESIZE_CALL, locations, fields))


def _resized_axes(x: GridLayout, out: GridLayout, part: int, taps: Sequence[Taps]) -> list[ResizedAxis]:
    """Rows and columns of a part of the output.

    The number of an element is the sum of one number for its image and row, and one for its column.
    """
    grid, lane, zero = out.grid, np.arange(out.lanes), np.zeros(1, np.int64)
    image, tile = np.divmod(lane, grid.rows * grid.columns)
    is_used = image < grid.images
    image, tiles = np.where(is_used, image, 0), np.divmod(tile, grid.columns)
    area, first = grid.part(part), x.element(zero, zero, zero)
    axes = []
    for axis, length in enumerate((grid.height, grid.width)):
        position = np.arange(area[2 + axis])
        pixel = tiles[axis] * length + (area[axis] + position)[:, None]  # [outputs, lanes]
        is_read = is_used & (pixel < out.size[2 + axis])
        source, weights = (of[np.where(is_read, pixel, 0)].transpose(0, 2, 1) for of in taps[axis])
        if axis == 0:
            elements, own = x.element(image, source, zero), lane - tiles[1]
            lines = out.line(part, position, 0)
        else:
            elements, own, lines = x.element(zero, zero, source) - first, tiles[1], position
        full = _full_lines(elements - own, is_read)
        if x.grid.images * x.grid.rows != grid.images * grid.rows or x.grid.columns != grid.columns:
            full = np.full_like(full, -1)
        axes.append(ResizedAxis(lines, elements, weights, full))
    if int(axes[0].elements.max()) + int(axes[1].elements.max()) >= 2**31:
        raise NoPlan("a value has more than 2**31 elements")
    return axes


def _full_lines(elements: np.ndarray, is_read: np.ndarray) -> np.ndarray:
    """The numbers [n, taps] of lines that begin with these elements [n, taps, lanes], the same ones
    in all lanes that are read; -1 if there are none."""
    lanes, is_read = elements.shape[2], np.broadcast_to(is_read[:, None, :], elements.shape)
    least = np.where(is_read, elements, elements.max(initial=0)).min(2)
    most = np.where(is_read, elements, 0).max(2)
    is_line = ((least == most) & (least % lanes == 0)) | ~is_read.any(2)
    return np.where(is_line, np.where(is_read.any(2), least, 0) // lanes, -1)


def _axis_taps(step: Step[Numbers], axis: int, old: int, new: int) -> Taps:
    """The pixels and weights that each output reads along the height (0) or width (1)."""
    axis += len(step.fields.numbers) - 3  # of the op, whose numbers are a flag and one per axis
    if axis < 0:
        return np.zeros((1, 1), np.int64), np.ones((1, 1), np.float32)
    taps: list[list[tuple[int, float]]] = [[] for _ in range(new)]
    clear = np.ones(new, bool)  # whether an output reads no element that it multiplies by zero
    for begin in range(0, old, PROBED):
        probe = _Probe(step, axis, old, new, range(begin, min(begin + PROBED, old)))
        weights, is_read, is_nan = probe.results(1.0), probe.results(nan).isnan(), probe.is_nan_with_infinity()
        for x, out in is_read.nonzero().tolist():
            weight = float(weights[x, out])
            taps[out].append((begin + x, weight))
            if is_nan[x, out] and weight:  # the pixel is also read with a weight of zero
                taps[out].append((begin + x, 0.0))
        clear &= ~(is_nan & is_read).any(0).numpy()
    for own, is_clear in zip(taps, clear, strict=True):
        _extend_taps(own, max(map(len, taps)), is_clear)
    pixels, factors = np.array(taps, np.float64).transpose(2, 0, 1)
    return pixels.astype(np.int64), factors.astype(np.float32)


def _extend_taps(taps: list[tuple[int, float]], count: int, is_clear: bool) -> None:
    """Extend taps of one output to a count, without other results for any values."""
    while len(taps) < count:
        pixel, weight = taps[-1] if is_clear else next(tap for tap in taps if not tap[1])
        if is_clear:
            taps[-1:] = [(pixel, weight / 2), (pixel, weight / 2)]
        else:
            taps.append((pixel, 0.0))


@dataclass(frozen=True, slots=True)
class _Probe:
    """An op, applied to vectors of `old` elements that are zero but for one of `pixels`."""

    step: Step[Numbers]
    axis: int
    old: int
    new: int
    pixels: range

    def results(self, value: float) -> Tensor:
        """The results [pixels, new] if the other element has a value."""
        return self._resize_vectors(value, 1, 1)[..., 0]

    def is_nan_with_infinity(self) -> Tensor:
        """Whether the results are NaN if the other element is is_nan_with_infinity.

        Along the other axis, output 1 of 3 is between elements 1 and 2 of 4.
        """
        return self._resize_vectors(inf, 4, 3)[..., min(1, len(self.step.fields.numbers) - 2)].isnan()

    def _resize_vectors(self, value: float, other: int, resized: int) -> Tensor:
        """The results [pixels, new, resized], for so many elements along the other axis."""
        axes = len(self.step.fields.numbers) - 1
        other, resized = (other, resized) if axes == 2 else (1, 1)
        x = torch.zeros(len(self.pixels), 1, self.old, other)
        x[torch.arange(len(self.pixels)), 0, list(self.pixels), min(1, other - 1)] = value
        _, factors = sizes_and_factors(self.step.fields.numbers, 1)
        sizes, scales = [self.new, resized], [factors and factors[self.axis], None]
        if self.axis == 1:
            x, sizes, scales = x.transpose(2, 3).contiguous(), sizes[::-1], scales[::-1]
        op = CALLED[self.step.op].op.overloadpacket.default
        result = op(x if axes == 2 else x[..., 0], sizes[:axes], bool(self.step.fields.numbers[0]), *scales[:axes])
        result = result.reshape(len(x), *sizes)
        return result.transpose(1, 2) if self.axis == 1 else result


WIDE = 8  # lines of a tile with many registers; half as many with few
MOST_ROWS = 8  # outputs of a block


def write_call(value: int, moves: Moves, moved: MovedValues, sources: Sequence[Buffer], out: Buffer) -> None:
    """Write the call of an op to a tape, without borders. sources: as in `MovedValues.sources`."""
    step = moved.step(value)
    assert step is not None
    lowering = CALLED[step.op].lowering
    if is_move(step) and (same := moved.by_pixel(value)) is not None:
        _move_pixels(moves, moved, same, sources[0], out)
    elif is_move(step):
        buffers = dict(zip(moved.sources(step), sources, strict=True))
        MoveWriter(moves.tape, moved, buffers, moves.isa.lanes).to_buffer(value, out)
    elif lowering == RESIZED:
        write_resize(step, moves, sources[0], out)
    elif lowering == RECURRENT:
        write_recurrent(value, moves, moved, sources, out)
    elif lowering == OVER_CHANNELS:
        _over_channels(value, step, moves, moved, sources[0], out)
    elif lowering == PRODUCT:
        products = _ValueProducts(step, moves, moved, sources, out)
        products.write()
    else:
        moves.pointwise(PointwiseKernel(step.op, step.fields.numbers), list(sources), out)


def call_cycles(moved: MovedValues) -> float:
    """Estimated cycles of the calls of a program that take as long as layers."""
    return recurrent_cycles(moved)


def _move_pixels(moves: Moves, moved: MovedValues, same: tuple[int, np.ndarray], source: Buffer, out: Buffer) -> None:
    """Write a value that has the same elements of each channel of its source."""
    layout, (x, numbers) = out.layout, same
    numbers = numbers.reshape(layout.size[0], *layout.size[2:])
    flat = elements_of(source.layout, moved.program.kinds[x], moved.shapes[x], numbers.clip(0))
    at = at_array(layout.inside())
    image, y, column, is_inside = layout.pixels(at)
    pixel = tuple(np.where(is_inside, a, 0) for a in (image, y, column))
    read = np.where(numbers[pixel] < 0, -1, flat[pixel])
    rows = rows_of(layout, at, np.where(is_inside, read, ANY_VALUE))
    moves.moved(Gather(), (source, 0), (out, 0), layout, (moves.pitch(source), moves.pitch(out)), rows)


def _over_channels(value: int, step: Step[Numbers], moves: Moves, moved: MovedValues, x: Buffer, out: Buffer) -> None:
    """Write a norm, a softmax or a PReLU."""
    shape, kind = moved.shapes[value], moved.program.kinds[value]
    groups = prod(shape[:-2]) if kind == "matrices" else 1
    factors = np.zeros(1, np.float32)
    if step.index is not None:
        factors = aligned(part(step.index, moved.weights).detach().float().numpy())
    kernel: Any
    if step.op == "softmax":
        kernel = SoftmaxKernel()
    elif step.op == "prelu":
        kernel = PReLUKernel()
    else:
        count = 0 if step.index is None else len(factors) // shape[-1]
        kernel = NormKernel(step.op == "norm", float(step.fields.numbers[1]), count)
    moves.over_channels(kernel, x, out, groups, factors)


_FactorOffsets = tuple[np.ndarray, np.ndarray]  # bytes of the elements of a factor: terms, outputs


@dataclass(frozen=True, slots=True)
class _RowShare:
    """Lines of one part that a thread computes, for some matrices."""

    thread: int
    part: int
    begin: int
    end: int
    items: range


@dataclass(frozen=True, slots=True)
class _ColumnRange:
    """Channels of a buffer from a first one."""

    buffer: Buffer
    first: int


@dataclass(frozen=True, slots=True)
class _ValueProducts:
    """Writes products of two values, and attention: for each matrix, the scores of a share of the
    rows, their softmax, and the product with the values, by one thread, in its cache."""

    step: Step[Numbers]
    moves: Moves
    moved: MovedValues
    sources: Sequence[Buffer]
    out: Buffer

    def write(self) -> None:
        x, out = self.sources[0], self.out
        shapes = [self.moved.shapes[v] for v in self.step.reads]
        factors = [
            self._factor_offsets(k, transposed=k == 1 and self.step.op == "attention")
            for k in range(1, len(shapes[:3]))
        ]
        columns, out_columns = shapes[0][-1], out.layout.size[1] // max(prod(shapes[0][:-2]), 1)
        for share in self._row_shares(prod(shapes[0][:-2])):
            if self.step.op != "attention":
                for item in share.items:
                    self._write_product(
                        share,
                        _ColumnRange(x, item * columns),
                        (1, factors[0][item]),
                        _ColumnRange(out, item * out_columns),
                    )
                continue
            keys = shapes[1][-2]
            scaled, scores = self._thread_memory(columns), self._thread_memory(keys)
            for item in share.items:
                add = _ColumnRange(self.sources[3], item * keys) if len(shapes) > 3 else None
                first = _ColumnRange(scaled, 0), _ColumnRange(scores, 0)
                self._scale_columns(share, _ColumnRange(x, item * columns), first[0], columns**-0.5)
                self._write_product(share, first[0], (1, factors[0][item]), first[1], add)
                self._write_softmax(share, scores)
                self._write_product(share, first[1], (2, factors[1][item]), _ColumnRange(out, item * out_columns))

    def _row_shares(self, items: int) -> Iterator[_RowShare]:
        """The shares of threads: positions of their parts, or else full matrices."""
        grid, threads = self.out.layout.grid, self.moves.tape.threads
        for thread in range(threads):
            if grid.parts == threads:
                _, _, _, width = grid.part(thread)
                yield _RowShare(thread, thread, 0, width, range(items))
                continue
            begin, end = by_thread(items, threads)[thread]
            for part_number in range(grid.parts):
                _, _, _, width = grid.part(part_number)
                yield _RowShare(thread, part_number, 0, width, range(begin, end))

    def _thread_memory(self, channels: int) -> Buffer:
        layout = self.out.layout
        size = (1, channels, 1, layout.size[3])
        grid = replace(layout.grid, parts=1)
        return Buffer(GridLayout(size, grid, NO_BORDER, layout.lanes))

    def _first_line(self, buffer: Buffer, share: _RowShare) -> int:
        """The first line of a share; memory of one thread starts with that."""
        layout = buffer.layout
        is_own = layout.grid == self.out.layout.grid
        return int(layout.line(share.part, 0, share.begin)) if is_own else 0

    def _location(self, columns: _ColumnRange) -> tuple[Buffer, int]:
        return columns.buffer, columns.first * self.moves.pitch(columns.buffer)

    def _factor_offsets(self, operand: int, transposed: bool) -> list[_FactorOffsets]:
        """Bytes of the elements of a factor per matrix: for each term, and for each output."""
        value = self.step.reads[operand]
        source, numbers = self.moved.factor_source(value), self.moved.numbers(value)
        if source == value:
            numbers = value * 2**32 + 1 + np.arange(numbers.numel()).reshape(numbers.shape)
        flat = np.asarray(numbers) - (source * 2**32 + 1)
        flat = flat.reshape(-1, *flat.shape[-2:]).astype(np.int64)
        flat = flat.swapaxes(1, 2) if transposed else flat
        kind, shape = self.moved.program.kinds[source], self.moved.shapes[source]
        at = 4 * elements_of(self.sources[operand].layout, kind, shape, flat)
        return [(np.ascontiguousarray(a[:, 0]), a[0] - a[0, 0]) for a in at]

    def _write_product(
        self,
        share: _RowShare,
        x: _ColumnRange,
        factor: tuple[int, _FactorOffsets],
        out: _ColumnRange,
        add: _ColumnRange | None = None,
    ) -> None:
        """Write one product for a share."""
        tape, isa = self.moves.tape, self.moves.isa
        operand, (terms, outputs) = factor
        added = out if add is None else add
        firsts = [self._first_line(c.buffer, share) for c in (x, out, added)]
        most = WIDE if isa.registers >= 32 else WIDE // 2
        pieces = -(-(share.end - share.begin) // most)
        by_size: dict[int, list[int]] = {}
        for begin, end in by_thread(share.end - share.begin, pieces) if pieces else ():
            by_size.setdefault(end - begin, []).append(begin)
        for lines, begins in by_size.items():
            rows = max(1, min(MOST_ROWS, (isa.registers - 2 - lines) // lines))
            tiles = np.zeros(len(begins), TILE)
            for key, first in zip(("x", "out", "add"), firsts, strict=True):
                tiles[key] = first + np.array(begins)
            buffers = {
                "x": self._location(x),
                "y": (self.sources[operand], 0),
                "out": self._location(out),
                "add": self._location(added),
            }
            tape.add(
                share.thread,
                KernelCall(
                    ValueProductKernel(lines, rows, add is not None),
                    PRODUCT_CALL,
                    buffers,
                    {
                        "x_pitch": self.moves.pitch(x.buffer),
                        "out_pitch": self.moves.pitch(out.buffer),
                        "add_pitch": self.moves.pitch(added.buffer),
                        "terms": len(terms),
                        "outputs": len(outputs),
                        "term_offsets": terms,
                        "output_offsets": outputs,
                        "tiles": tiles,
                        "count": len(tiles),
                    },
                ),
            )

    def _scale_columns(self, share: _RowShare, x: _ColumnRange, out: _ColumnRange, factor: float) -> None:
        count = share.end - share.begin
        table = np.zeros((count, 3), np.int32)
        for k, columns in enumerate((x, x, out)):
            table[:, k] = self._first_line(columns.buffer, share) + np.arange(count)
        self._write_channel_call(PointwiseKernel("times", (factor,)), share, (x, out), table, out.buffer.layout.size[1])

    def _write_softmax(self, share: _RowShare, scores: Buffer) -> None:
        count, columns = share.end - share.begin, _ColumnRange(scores, 0)
        table = self._first_line(scores, share) + np.arange(count, dtype=np.int32).repeat(2)
        self._write_channel_call(
            SoftmaxKernel(True), share, (columns, columns), table.reshape(-1, 2), scores.layout.size[1]
        )

    def _write_channel_call(
        self,
        kernel: Any,
        share: _RowShare,
        columns: tuple[_ColumnRange, _ColumnRange],
        table: np.ndarray,
        channels: int,
    ) -> None:
        """Write a call of a kernel of all channels."""
        x, out = columns
        buffers = {"x": self._location(x), "z": self._location(x), "out": self._location(out)}
        if len(table):
            self.moves.add_call(share.thread, kernel, buffers, (0, channels), table.astype(np.int32))
