"""Kernels that move and combine full vectors: layout conversion, borders of tiles, pools.

Each is called with (call, arena). `call` has 64-bit fields; a buffer is a pair (slot of the arena,
byte offset). Kernels loop over channels; tables describe one channel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np
from llvmlite import ir

from demask.kernels.llvm.activations import activated
from demask.kernels.llvm.emitter import FLOAT, I32, I64, Emitter, Fields, Value
from demask.ops.activations import Act

#: fields of every call: three buffers, their bytes from channel to channel, channels, tables
CALL = np.dtype([(key, "<i8") for key in (
    "x_slot", "x", "z_slot", "z", "out_slot", "out", "x_pitch", "z_pitch", "out_pitch",
    "begin", "end", "count", "table", "lines", "weights")])  # fmt: skip


UNROLLED = 16  # lines; longer runs are loops


class CallFields(Fields):
    """The fields of a call, with loops over channels and lines."""

    def __init__(self, e: Emitter):
        super().__init__(e, CALL.names)

    def channel(self, key: str, base: Value, channel: Value) -> Value:
        """The address of a channel of a buffer."""
        return self.e.at(base, self.e.b.mul(channel, self.field[f"{key}_pitch"]))

    @contextmanager
    def channels(self, *keys: str) -> Iterator[list[Value]]:
        """A loop over channels; yields the address of the channel in each of these buffers."""
        bases = [(key, self.buffer(key)) for key in keys]
        with self.e.loop(self["begin"], self["end"]) as c:
            yield [self.channel(key, base, c) for key, base in bases]

    def lines(self) -> AbstractContextManager[Value]:
        """A loop over the rows of the table."""
        return self.e.loop(I64(0), self["count"])

    @contextmanager
    def pairs(self) -> Iterator[list[Value]]:
        """A loop over the pairs of the table; yields their lines of x and out, of channel 0."""
        bases = self.buffer("x"), self.buffer("out")
        with self.lines() as k:
            yield self.pair(k, *bases)

    def pair(self, k: Value, *bases: Value) -> list[Value]:
        """The addresses of the lines of pair k of the table, from these addresses of x and out."""
        pair = self.e.at(self.pointer("table"), self.e.b.mul(k, I64(8)))
        return [self.e.line(base, self.e.load_long(I32, pair, n)) for n, base in enumerate(bases)]

    @contextmanager
    def triples(self) -> Iterator[tuple[list[Value], Value]]:
        """A loop over channels and triples of the table; yields their lines: of x and z, of out."""
        with self.channels("x", "z", "out") as channels, self.lines() as k:
            row = self.e.at(self.pointer("table"), self.e.b.mul(k, I64(12)))
            *addresses, to = (self.e.line(channel, self.e.load_long(I32, row, n)) for n, channel in enumerate(channels))
            yield addresses, to


def read_index(e: Emitter, table: Value, row: Value) -> tuple[Value, Value]:
    """A vector of element numbers, and the mask of those that are not negative."""
    index = e.b.load(e.line(table, row), typ=e.ints, align=4)
    return index, e.b.icmp_signed(">=", index, ir.Constant(e.ints, [0] * e.lanes))


@dataclass(frozen=True, slots=True)
class Gather:
    """out[line] = x[elements] for each channel.

    `table` has a row of element numbers per line, -1 for the fill value; `lines` are those of out.
    """

    fill: float = 0.0

    arguments = 2

    def emit(self, e: Emitter) -> None:
        call = CallFields(e)
        with call.channels("x", "out") as (x_c, out_c), call.lines() as k:
            index, mask = read_index(e, call.pointer("table"), k)
            elements = e.gather(x_c, index, mask, e.splat(self.fill))
            e.write(elements, e.line(out_c, e.load_long(I32, call.pointer("lines"), k)))


@dataclass(frozen=True, slots=True)
class Scatter:
    """out[elements] = x[line], the inverse of `Gather`; skips lanes with a negative number."""

    arguments = 2

    def emit(self, e: Emitter) -> None:
        call = CallFields(e)
        with call.channels("x", "out") as (x_c, out_c), call.lines() as k:
            index, mask = read_index(e, call.pointer("table"), k)
            line = e.line(x_c, e.load_long(I32, call.pointer("lines"), k))
            e.scatter(e.read(line), out_c, index, mask)


@dataclass(frozen=True, slots=True)
class TransposedKernel:
    """`Gather` or, if `out`, `Scatter` of tensors in channels-last order, for full vectors of
    channels: lanes and channels are transposed in registers."""

    out: bool

    arguments = 2

    def emit(self, e: Emitter) -> None:
        call = CallFields(e)
        x, out = call.buffer("x"), call.buffer("out")
        tiled_key, dense = ("x", out) if self.out else ("out", x)
        with e.loop(call["begin"], call["end"], e.lanes) as c:
            channel = call.channel(tiled_key, x if self.out else out, c)
            base = e.at(dense, c, FLOAT)
            with call.lines() as k:
                table = e.line(call.pointer("table"), k)
                line = e.line(channel, e.load_long(I32, call.pointer("lines"), k))
                lines = [e.at(line, e.b.mul(call[f"{tiled_key}_pitch"], I64(r))) for r in range(e.lanes)]
                _move_transposed(e, lines, table, base, self.out)


@dataclass(frozen=True, slots=True)
class RunKernel:
    """`Gather` or, if `out`, `Scatter` of runs of as many lines as a vector has lanes, where every
    lane has the element after that of the line before: they are transposed in registers.

    `table` has the elements of the first line of each run, -1 in lanes without elements; `lines`
    the lines of each run.
    """

    out: bool
    fill: float = 0.0

    arguments = 2

    def emit(self, e: Emitter) -> None:
        call = CallFields(e)
        with call.channels("x", "out") as (x_c, out_c), call.lines() as k:
            tiled, dense = (x_c, out_c) if self.out else (out_c, x_c)
            table, numbers = (e.line(call.pointer(key), k) for key in ("table", "lines"))
            lines = [e.line(tiled, e.load_long(I32, numbers, r)) for r in range(e.lanes)]
            _move_transposed(e, lines, table, dense, self.out, self.fill)


def _move_transposed(e: Emitter, lines: list[Value], table: Value, base: Value, out: bool, fill: float = 0.0) -> None:
    """lines = transposed rows of elements that start at those of the table, or the inverse."""
    if not out:
        rows = [_read_row(e, base, table, lane, fill) for lane in range(e.lanes)]
        for value, line in zip(e.transposed(rows), lines, strict=True):
            e.write(value, line)
        return
    for lane, value in enumerate(e.transposed([e.read(line) for line in lines])):
        element = e.load(I32, table, lane)
        with e.b.if_then(e.b.icmp_signed(">=", element, I32(0))):
            e.b.store(value, e.at(base, e.b.zext(element, I64), FLOAT), align=4)


def _read_row(e: Emitter, base: Value, table: Value, lane: int, fill: float) -> Value:
    """A row of elements that starts at that in a lane of the table; the fill value if it is -1."""
    element = e.load(I32, table, lane)
    vector = e.variable(e.vector, e.splat(fill))
    with e.b.if_then(e.b.icmp_signed(">=", element, I32(0))):
        address = e.at(base, e.b.zext(element, I64), FLOAT)
        vector.set(e.b.load(address, typ=e.vector, align=4))
    return vector.get()


@dataclass(frozen=True, slots=True)
class BorderKernel:
    """out[line] = permuted lanes of another line of the same channel.

    runs: (number of the lane permutation, first source line, first target line, number of lines).
    """

    lanes: tuple[tuple[int, ...], ...]
    runs: tuple[tuple[int, int, int, int], ...]
    fill: float = 0.0

    arguments = 2

    def emit(self, e: Emitter) -> None:
        call = CallFields(e)
        with call.channels("out") as (channel,):
            for lanes, source, to, count in self.runs:
                lines = e.line(channel, source), e.line(channel, to)
                if count <= UNROLLED:
                    for k in range(count):
                        self._copy(e, lanes, e.line(lines[0], k), e.line(lines[1], k))
                    continue
                with e.loop(I64(0), I64(count)) as k:
                    self._copy(e, lanes, e.line(lines[0], k), e.line(lines[1], k))

    def _copy(self, e: Emitter, lanes: int, source: Value, to: Value) -> None:
        e.write(e.permuted(e.read(source), self.lanes[lanes], self.fill), to)


@dataclass(frozen=True, slots=True)
class PoolKernel:
    """out[line] = maximum, or weighted sum, of x at `taps`, line offsets from a source line.

    `table` has pairs (x, out) of lines, `weights` a vector per pair.
    """

    taps: tuple[int, ...]
    mean: bool

    arguments = 2

    def emit(self, e: Emitter) -> None:
        call = CallFields(e)
        with call.channels("x", "out") as (x_c, out_c), call.lines() as k:
            source, to = call.pair(k, x_c, out_c)
            value = e.read(source, self.taps[0])
            for tap in self.taps[1:]:
                other = e.read(source, tap)
                value = e.b.fadd(value, other) if self.mean else e.largest(value, other)
            if self.mean:
                value = e.b.fmul(value, e.read(e.line(call.pointer("weights"), k)))
            e.write(value, to)


@dataclass(frozen=True, slots=True)
class Pointwise:
    """out[line] = act(x[line] + z[line]), or act(x[line]). `table` has triples of lines."""

    act: Act | None
    add: bool

    arguments = 2

    def emit(self, e: Emitter) -> None:
        call = CallFields(e)
        with call.triples() as ((source, other), to):
            value = e.read(source)
            if self.add:
                value = e.b.fadd(value, e.read(other))
            e.write(activated(e, value, self.act), to)


@dataclass(frozen=True, slots=True)
class ScaleKernel:
    """out[line] = act(x[line] * z) for each channel; `table` has pairs (x, out) of lines.

    lanes: the lane of the line of z by which each lane is multiplied.
    """

    act: Act | None
    lanes: tuple[int, ...]

    arguments = 2

    def emit(self, e: Emitter) -> None:
        call = CallFields(e)
        with call.channels("x", "z", "out") as (x_c, z_c, out_c):
            factor = e.permuted(e.read(z_c), self.lanes)
            with call.lines() as k:
                source, to = call.pair(k, x_c, out_c)
                e.write(activated(e, e.b.fmul(e.read(source), factor), self.act), to)


@dataclass(frozen=True, slots=True)
class SelectKernel:
    """out[line] of channel c = x[line] of channel `lines`[c], or zeros if that is negative.

    `table` has pairs (x, out) of lines.
    """

    arguments = 2

    def emit(self, e: Emitter) -> None:
        call = CallFields(e)
        x, out = call.buffer("x"), call.buffer("out")
        with e.loop(call["begin"], call["end"]) as c:
            channel = e.b.sext(e.load(I32, call.pointer("lines"), c), I64)
            is_zero = e.b.icmp_signed("<", channel, I64(0))
            x_c = call.channel("x", x, e.b.select(is_zero, I64(0), channel))
            out_c = call.channel("out", out, c)
            with call.lines() as k:
                source, to = call.pair(k, x_c, out_c)
                e.write(e.b.select(is_zero, e.splat(0.0), e.read(source)), to)
