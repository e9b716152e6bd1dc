"""The dense kernel: sums of a block of output channels and a tile of positions stay in registers.

    for tile: for block of input channels: for block of R output channels:
        acc[r][t] = bias[r] + add, or the sum of earlier blocks of input channels
        for channel: for row of taps: for tap:
            v[t] = x[channel · pitch + row · tap_pitch + tap + t]
            acc[r][t] += broadcast(weight) · v[t]
        out[r][t] = act(acc[r][t])

Weights are packed in the order of use, [input block][output block][channel][tap][r]: one sequential
stream per tile. The inputs that a tile reads from a block of input channels fit in the L1 cache.
Tables have the offsets of input and output channels, so that a layer may skip some of them.
Output channels are `wide` blocks of `rows` and then `thin` blocks of `rows` - 1: nothing is padded.

`Products` are those of all dense kernels: loops over input channels and taps that read one weight
stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from demask.kernels.llvm.activations import activated
from demask.kernels.llvm.emitter import FLOAT, I32, I64, Emitter, Fields, Value, Variable
from demask.ops.activations import Act

Totals = list[list[Value]]
#: adds the products at a tap: (addresses of the channel, line of the tap), (weights, first float),
#: totals
Outer = Callable[[tuple[list[Value], int], tuple[Value, int], Totals], None]


@dataclass(frozen=True, slots=True)
class Products:
    """The sums of a block of outputs and some positions, over taps of input channels.

    taps: lines of the kernel's positions in one row, relative to the first. unroll: input channels
    per iteration; 0: one, by a loop over rows of taps. Rows are not written out: 49 taps would take
    seconds to compile, and run slower. floats: of the weight, per tap. fetch: called once for the
    taps of an iteration, to prefetch what comes later. starts: lines of a channel at which `outer`
    gets an address; what it reads from one is not taken from what it has read from another.
    """

    e: Emitter
    fields: Fields
    taps: Sequence[int]
    unroll: int
    floats: int
    outer: Outer
    fetch: Callable[[], None] | None = None
    starts: Sequence[int] = (0,)

    def add(self, x: tuple[Value, Value, Value], weight: Variable, sums: list[list[Variable]]) -> None:
        """Add the products of a block of input channels.

        x: the address of the first input, the offsets of these channels, and how many there are.
        weight: the address of the next weight.
        """
        e, (first, offsets, count) = self.e, x

        def channel(number: Value) -> Value:
            return e.at(first, e.load(I64, offsets, number))

        if not self.unroll:
            with e.loop(I64(0), count) as number:
                begin = channel(number)
                with e.loop(I64(0), self.fields["tap_rows"]) as row:
                    address = e.at(begin, e.b.mul(row, self.fields["tap_pitch"]))
                    self._add_row_of_taps([address], weight, sums)
            return
        full = e.b.sub(count, e.b.srem(count, I64(self.unroll)))
        with e.loop(I64(0), full, self.unroll) as number:
            table = e.at(offsets, number, I64)
            channels = [e.at(first, e.load(I64, table, n)) for n in range(self.unroll)]
            self._add_row_of_taps(channels, weight, sums)
        if self.unroll > 1:
            with e.loop(full, count) as number:
                self._add_row_of_taps([channel(number)], weight, sums)

    def _add_row_of_taps(self, channels: list[Value], weight: Variable, sums: list[list[Variable]]) -> None:
        """Add the products of one row of taps of the channels at these addresses."""
        e, k = self.e, 0
        weights = e.pointer(weight.get())
        if self.fetch is not None:
            self.fetch()
        # Sums are values here, not variables: LLVM compiles a third of the instructions.
        totals = [[sum_.get() for sum_ in row] for row in sums]
        for channel in channels:
            addresses = [e.opaque(e.line(channel, start)) for start in self.starts]
            for tap in self.taps:
                self.outer((addresses, tap), (weights, k), totals)
                k += self.floats
        for row, row_totals in zip(sums, totals, strict=True):
            for sum_, total in zip(row, row_totals, strict=True):
                sum_.set(total)
        weight.set(e.b.add(weight.get(), I64(4 * k)))


def add_products(e: Emitter, totals: Totals, vector: Callable[[int], Value], factor: Callable[[int], Value]) -> None:
    """Add to totals[r][t] the product of factor(r), in all lanes, and vector(t).

    Only the fewer of both are in registers at once: LLVM keeps the order of loads.
    """
    if len(totals[0]) <= len(totals):
        vectors = [vector(t) for t in range(len(totals[0]))]
        for r, row in enumerate(totals):
            row[:] = map(functools.partial(e.fma, factor(r)), vectors, row)
        return
    factors = [factor(r) for r in range(len(totals))]
    for t in range(len(totals[0])):
        value = vector(t)
        for row, row_factor in zip(totals, factors, strict=True):
            row[t] = e.fma(row_factor, value, row[t])


#: a tile of positions: its first line in x, out and the added tensor
TILE = np.dtype([("x", "<i4"), ("out", "<i4"), ("add", "<i4"), ("hole", "<i4")])
#: call of the kernel; x, out and add are (slot of the arena, byte offset); offsets: bytes of each
#: channel, in tables; tap_rows, tap_pitch: number of rows of taps, and bytes from row to row;
#: inner: input channels of a block; wide, thin: numbers of output blocks
CALL = np.dtype([(key, "<i8") for key in (
    "x_slot", "x", "out_slot", "out", "add_slot", "add", "x_offsets", "out_offsets",
    "add_offsets", "tap_rows", "tap_pitch", "channels", "inner", "wide", "thin", "weights",
    "biases", "tiles", "tile_begin", "tile_end")])  # fmt: skip


@dataclass(frozen=True, slots=True)
class DenseTileKernel:
    """The kernel for tiles of one shape.

    x, out, add: lines of its positions in x, out and the added tensor, relative to the first. taps:
    lines of the kernel's positions in one row, relative to the first. rows: output channels of a
    wide block. unroll: input channels per iteration; 0: one, by a loop over rows of taps. Rows
    are not written out: 49 taps would take seconds to compile, and run slower.
    """

    x: tuple[int, ...]
    out: tuple[int, ...]
    add: tuple[int, ...] | None
    taps: tuple[int, ...]
    rows: int
    act: Act | None
    unroll: int = 1

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """Write k(call, arena)."""
        fields = Fields(e, CALL.names)
        x, out = fields.buffer("x"), fields.buffer("out")
        add = out if self.add is None else fields.buffer("add")
        tiles, channels = fields.pointer("tiles"), fields["channels"]
        weight, row = e.variable(I64), e.variable(I64)
        # A layer without input channels has one pass, too: its sums are the biases.
        some = e.b.icmp_signed(">", channels, I64(0))
        end = e.b.select(some, channels, I64(1))
        with e.loop(fields["tile_begin"], fields["tile_end"]) as tile:
            lines = e.at(tiles, e.b.mul(tile, I64(TILE.itemsize)))
            x_tile, out_tile, add_tile = (
                e.line(base, e.load_long(I32, lines, k)) for k, base in enumerate((x, out, add))
            )
            weight.set(fields["weights"])
            with e.loop(I64(0), end, fields["inner"]) as first:
                left = e.b.sub(channels, first)
                count = e.b.select(e.b.icmp_signed("<", left, fields["inner"]), left, fields["inner"])
                ends = (e.b.icmp_signed("==", first, I64(0)), e.b.icmp_signed("==", left, count))
                offsets = e.at(fields.pointer("x_offsets"), first, I64)
                row.set(I64(0))
                for rows, blocks in ((self.rows, "wide"), (self.rows - 1, "thin")):
                    if rows:
                        with e.loop(I64(0), fields[blocks]):
                            self._block(
                                e, fields, rows, (x_tile, offsets, count), (out_tile, add_tile), (weight, row), ends
                            )

    def _block(
        self,
        e: Emitter,
        fields: Fields,
        rows: int,
        x: tuple[Value, Value, Value],
        outputs: tuple[Value, Value],
        streams: tuple[Variable, Variable],
        ends: tuple[Value, Value],
    ) -> None:
        """The sums of one output block. x: its tile, offsets and number of the input channels.
        ends: whether these are the first and the last."""
        weight, row_number = streams
        first = row_number.get()
        out, add = (
            [e.at(base, e.load(I64, e.at(fields.pointer(key), first, I64), r)) for r in range(rows)]
            for base, key in zip(outputs, ("out_offsets", "add_offsets"), strict=True)
        )
        sums = [[e.variable(e.vector) for _ in self.x] for _ in range(rows)]
        with e.b.if_else(ends[0]) as (then, otherwise):
            with then:
                self._set_initial_sums(e, e.at(fields.pointer("biases"), first, FLOAT), add, sums)
            with otherwise:
                for row_out, row in zip(out, sums, strict=True):
                    for line, sum_ in zip(self.out, row, strict=True):
                        sum_.set(e.read(row_out, line))
        outer, starts = functools.partial(self._add_tap, e), self._lines_with_addresses()
        Products(e, fields, self.taps, self.unroll, rows, outer, starts=starts).add(x, weight, sums)
        with e.b.if_then(ends[1]):
            for sum_ in (sum_ for row in sums for sum_ in row):
                sum_.set(activated(e, sum_.get(), self.act))
        for row_out, row in zip(out, sums, strict=True):
            for line, sum_ in zip(self.out, row, strict=True):
                e.write(sum_.get(), row_out, line)
        row_number.set(e.b.add(first, I64(rows)))

    def _set_initial_sums(self, e: Emitter, bias: Value, add: list[Value], sums: list[list[Variable]]) -> None:
        """Set the initial sums; `add` is read before out is written, which may share its memory."""
        for r, row in enumerate(sums):
            value = e.splat(e.load(FLOAT, bias, r))
            for t, sum_ in enumerate(row):
                added = None if self.add is None else e.read(add[r], self.add[t])
                sum_.set(value if added is None else e.b.fadd(added, value))

    def _lines_with_addresses(self) -> tuple[int, ...]:
        """Lines with addresses of their own: one, or all where a tap of a position is a later tap
        but the next of another. LLVM would leave it in a register until then, and run out of them.
        """
        nearest = min((b - a for a, b in pairwise(sorted(self.x))), default=1)
        return self.x if 1 < nearest < len(self.taps) else (0,)

    def _add_tap(
        self, e: Emitter, x: tuple[list[Value], int], weights: tuple[Value, int], totals: list[list[Value]]
    ) -> None:
        """Add the products of the vectors at a tap and one weight per row."""

        def vector(t: int) -> Value:
            if len(x[0]) > 1:
                return e.read(x[0][t], x[1])
            return e.read(x[0][0], x[1] + self.x[t])

        add_products(e, totals, vector, lambda r: e.splat(e.load(FLOAT, weights[0], weights[1] + r)))
