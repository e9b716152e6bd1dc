"""Kernels that move and combine whole vectors: between layouts, over borders of tiles, pools.

Each is called with (call, arena): `call` holds 64-bit fields, buffers among them as (slot of the
arena, bytes behind it). Channels are looped over inside; tables say what belongs to one channel.
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

#: fields of every call: three buffers, bytes from channel to channel in each, channels, tables
CALL = np.dtype([(key, "<i8") for key in (
    "x_slot", "x", "z_slot", "z", "out_slot", "out", "x_pitch", "z_pitch", "out_pitch",
    "begin", "end", "count", "table", "lines", "weights")])  # fmt: skip


UNROLLED = 16  # lines: longer runs are loops


class _CallFields(Fields):
    """The fields of a call; loops over channels and lines."""

    def __init__(self, e: Emitter):
        super().__init__(e, CALL.names)

    def channel(self, key: str, base: Value, channel: Value) -> Value:
        """Where a channel of a buffer begins."""
        return self.e.at(base, self.e.b.mul(channel, self.field[f"{key}_pitch"]))

    @contextmanager
    def channels(self, *keys: str) -> Iterator[list[Value]]:
        """The code for each channel: where it begins in each of these buffers."""
        bases = [(key, self.buffer(key)) for key in keys]
        with self.e.loop(self["begin"], self["end"]) as c:
            yield [self.channel(key, base, c) for key, base in bases]

    def lines(self) -> AbstractContextManager[Value]:
        """The code for each row of the table."""
        return self.e.loop(I64(0), self["count"])


def _index(e: Emitter, table: Value, row: Value) -> tuple[Value, Value]:
    """A vector of element numbers and the mask of those that are not negative."""
    index = e.b.load(e.line(table, row), typ=e.ints, align=4)
    return index, e.b.icmp_signed(">=", index, ir.Constant(e.ints, [0] * e.lanes))


@dataclass(frozen=True, slots=True)
class Gather:
    """out[line] = x[elements] of each channel: `table` has a row of element numbers per line, -1
    for the fill; `lines` the lines in out."""

    fill: float = 0.0

    arguments = 2

    def emit(self, e: Emitter) -> None:
        call = _CallFields(e)
        with call.channels("x", "out") as (x_c, out_c), call.lines() as k:
            index, mask = _index(e, call.pointer("table"), k)
            found = e.gather(x_c, index, mask, e.splat(self.fill))
            e.write(found, e.line(out_c, e.load_long(I32, call.pointer("lines"), k)))


@dataclass(frozen=True, slots=True)
class Scatter:
    """out[elements] = x[line]: the way back, lanes with a negative number left out."""

    arguments = 2

    def emit(self, e: Emitter) -> None:
        call = _CallFields(e)
        with call.channels("x", "out") as (x_c, out_c), call.lines() as k:
            index, mask = _index(e, call.pointer("table"), k)
            line = e.line(x_c, e.load_long(I32, call.pointer("lines"), k))
            e.scatter(e.read(line), out_c, index, mask)


@dataclass(frozen=True, slots=True)
class TransposedKernel:
    """`Gather` or `Scatter` (out: which) of tensors whose channels are neighbours, for whole
    vectors of channels: lanes and channels change places in registers."""

    out: bool

    arguments = 2

    def emit(self, e: Emitter) -> None:
        call = _CallFields(e)
        x, out = call.buffer("x"), call.buffer("out")
        mine, theirs = ("x", out) if self.out else ("out", x)
        with e.loop(call["begin"], call["end"], e.lanes) as c:
            own = call.channel(mine, x if self.out else out, c)
            base = e.at(theirs, c, FLOAT)
            with call.lines() as k:
                table = e.line(call.pointer("table"), k)
                line = e.line(own, e.load_long(I32, call.pointer("lines"), k))
                lines = [e.at(line, e.b.mul(call[f"{mine}_pitch"], I64(r)))
                         for r in range(e.lanes)]  # fmt: skip
                if self.out:
                    self._give(e, lines, table, base)
                else:
                    self._take(e, lines, table, base)

    def _give(self, e: Emitter, lines: list[Value], table: Value, base: Value) -> None:
        for lane, value in enumerate(e.transposed([e.read(place) for place in lines])):
            place = e.load(I32, table, lane)
            with e.b.if_then(e.b.icmp_signed(">=", place, I32(0))):
                e.b.store(value, e.at(base, e.b.zext(place, I64), FLOAT), align=4)

    def _take(self, e: Emitter, lines: list[Value], table: Value, base: Value) -> None:
        found = e.transposed([self._read(e, base, table, lane) for lane in range(e.lanes)])
        for value, place in zip(found, lines, strict=True):
            e.write(value, place)

    def _read(self, e: Emitter, base: Value, table: Value, lane: int) -> Value:
        """Channels of the element of a lane, zeros where it has none."""
        place = e.load(I32, table, lane)
        real = e.b.icmp_signed(">=", place, I32(0))
        found = e.variable(e.vector, e.splat(0.0))
        with e.b.if_then(real):
            at = e.at(base, e.b.zext(place, I64), FLOAT)
            found.set(e.b.load(at, typ=e.vector, align=4))
        return found.get()


@dataclass(frozen=True, slots=True)
class BorderKernel:
    """out[line] = lanes of another line of the same channels: runs of (permutation of lanes, first
    line, where it goes, how many)."""

    lanes: tuple[tuple[int, ...], ...]
    runs: tuple[tuple[int, int, int, int], ...]
    fill: float = 0.0

    arguments = 2

    def emit(self, e: Emitter) -> None:
        call = _CallFields(e)
        with call.channels("out") as (channel,):
            for lanes, source, to, count in self.runs:
                ends = e.line(channel, source), e.line(channel, to)
                if count <= UNROLLED:
                    for k in range(count):
                        self._copy(e, lanes, e.line(ends[0], k), e.line(ends[1], k))
                    continue
                with e.loop(I64(0), I64(count)) as k:
                    self._copy(e, lanes, e.line(ends[0], k), e.line(ends[1], k))

    def _copy(self, e: Emitter, lanes: int, source: Value, to: Value) -> None:
        e.write(e.permuted(e.read(source), self.lanes[lanes], self.fill), to)


@dataclass(frozen=True, slots=True)
class PoolKernel:
    """out[line] = the largest, or the weighted sum, of x at `taps` lines from another: `table` has
    pairs (x, out) of lines, `weights` a vector per pair."""

    taps: tuple[int, ...]
    mean: bool

    arguments = 2

    def emit(self, e: Emitter) -> None:
        call = _CallFields(e)
        with call.channels("x", "out") as (x_c, out_c), call.lines() as k:
            pair = e.at(call.pointer("table"), e.b.mul(k, I64(8)))
            source, to = (
                e.line(place, e.load_long(I32, pair, n)) for n, place in enumerate((x_c, out_c))
            )
            found = e.read(source, self.taps[0])
            for tap in self.taps[1:]:
                other = e.read(source, tap)
                found = e.b.fadd(found, other) if self.mean else e.largest(found, other)
            if self.mean:
                found = e.b.fmul(found, e.read(e.line(call.pointer("weights"), k)))
            e.write(found, to)


@dataclass(frozen=True, slots=True)
class Pointwise:
    """out[line] = act(x[line] + z[line]), or act(x[line]): `table` has triples of lines."""

    act: Act | None
    add: bool

    arguments = 2

    def emit(self, e: Emitter) -> None:
        call = _CallFields(e)
        with call.channels("x", "z", "out") as places, call.lines() as k:
            row = e.at(call.pointer("table"), e.b.mul(k, I64(12)))
            source, other, to = (
                e.line(place, e.load_long(I32, row, n)) for n, place in enumerate(places)
            )
            found = e.read(source)
            if self.add:
                found = e.b.fadd(found, e.read(other))
            e.write(activated(e, found, self.act), to)


@dataclass(frozen=True, slots=True)
class MeanKernel:
    """The mean of each channel over the positions of an image: `table` has its lines, `weights` a
    vector per line. groups: the lanes of each image; `lines` the element of out for each."""

    groups: tuple[tuple[int, ...], ...]

    arguments = 2

    def emit(self, e: Emitter) -> None:
        call = _CallFields(e)
        with call.channels("x", "out") as (x_c, out_c):
            sums = e.variable(e.vector, e.splat(0.0))
            with call.lines() as k:
                line = e.read(e.line(x_c, e.load_long(I32, call.pointer("table"), k)))
                weight = e.read(e.line(call.pointer("weights"), k))
                # beyond the image there may be anything, also what times 0 is no number
                real = e.b.fcmp_ordered("!=", weight, e.splat(0.0))
                sums.set(e.b.select(real, e.fma(line, weight, sums.get()), sums.get()))
            for b, lanes in enumerate(self.groups):
                own = [k if k in lanes else -1 for k in range(e.lanes)]
                total = e.total(e.permuted(sums.get(), own))
                place = e.at(out_c, e.load_long(I32, call.pointer("lines"), b), FLOAT)
                e.b.store(total, place)
