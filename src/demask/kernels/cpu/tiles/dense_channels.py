"""The dense kernel for images of few positions: lanes are output channels, so that none is empty.

    for block of U vectors of output channels:
        sums[position][u] = bias[u] + add                 # transposed from the layout of values
        for block of input channels: for group of positions:
            acc[u][p] = sums[p][u]
            for channel: for row of taps: for tap:
                acc[u][p] += weight[u] · broadcast(x[channel, tap, p])
            sums[p][u] = acc[u][p]
        out = act(sums)                                   # transposed back

Positions are elements of vectors whose lanes are tiles, as in the layout of values; `sums` has one
for every lane of a line, also for those outside of the image, which no group has. Weights are
packed in the order of use, [output block][channel][tap][u][lane]. Output channels are `wide` blocks
of `vectors`, then `thin` blocks of `vectors` - 1; the last vector may repeat a channel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from demask.kernels.cpu.tiles.dense_tile import TILE, Products
from demask.kernels.llvm.activations import activated
from demask.kernels.llvm.emitter import FLOAT, I32, I64, Emitter, Fields, Value, Variable
from demask.ops.activations import Act

#: a group of positions: bytes of its first input, and of its first sum for one vector of outputs
GROUP = np.dtype([("x", "<i8"), ("sum", "<i8")])
#: call of the kernel; x, out, add and sums are (slot of the arena, byte offset); offsets: bytes of
#: each channel, in tables; tap_rows, tap_pitch: number of rows of taps, and bytes from row to row;
#: inner: input channels of a block; wide, thin: numbers of output blocks; ends: end of the groups
#: of each shape; lines: a TILE for each line of positions
CALL = np.dtype([(key, "<i8") for key in (
    "x_slot", "x", "out_slot", "out", "add_slot", "add", "sums_slot", "sums", "x_offsets",
    "out_offsets", "add_offsets", "tap_rows", "tap_pitch", "channels", "inner", "wide", "thin",
    "weights", "biases", "groups", "ends", "lines", "line_count")])  # fmt: skip

Lanes = tuple[int, ...]  # of the positions of a group, relative to the first


@dataclass(frozen=True, slots=True)
class DenseChannelsKernel:
    """The kernel for groups of positions of some shapes.

    lanes: of a line up to the last position of the image. widths: vectors of output channels of a
    wide block, and of a thin one if there are any. taps: lines of the kernel's positions in one
    row, relative to the first. unroll: input channels per
    iteration; 0: one, by a loop over rows of taps. fetched: lines of the weight of the next pass
    that an iteration prefetches; all groups together prefetch about all of it.
    """

    shapes: tuple[Lanes, ...]
    lanes: int
    widths: tuple[int, ...]
    taps: tuple[int, ...]
    add: bool
    act: Act | None
    unroll: int = 1
    fetched: int = 0

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """Write k(call, arena)."""
        fields = Fields(e, CALL.names)
        weight, row = e.variable(I64, fields["weights"]), e.variable(I64, I64(0))
        for vectors, blocks in zip(self.widths, ("wide", "thin"), strict=False):
            with e.loop(I64(0), fields[blocks]):
                self._set_initial_sums(e, fields, vectors, row.get())
                with e.loop(I64(0), fields["channels"], fields["inner"]) as first:
                    self._add_input_block(e, fields, vectors, weight, first)
                self._write_sums(e, fields, vectors, row.get())
                row.set(e.b.add(row.get(), I64(vectors * e.lanes)))

    def _set_initial_sums(self, e: Emitter, fields: Fields, vectors: int, row: Value) -> None:
        """Set the sums of a block to bias + add."""
        with e.loop(I64(0), I64(vectors)) as u:
            first = e.b.add(row, e.b.mul(u, I64(e.lanes)))
            bias = e.b.load(e.at(fields.pointer("biases"), first, FLOAT), typ=e.vector, align=4)
            with e.loop(I64(0), fields["line_count"]) as number:
                values = [bias] * self.lanes
                if self.add:
                    lines = self._lines(e, fields, "add", first, number)
                    added = e.transposed([e.read(line) for line in lines])[: self.lanes]
                    values = [e.b.fadd(value, bias) for value in added]
                sums = self._sums(e, fields, vectors, u, number)
                for lane, value in enumerate(values):
                    e.write(value, sums, lane * vectors)

    def _write_sums(self, e: Emitter, fields: Fields, vectors: int, row: Value) -> None:
        """Write the activated sums of a block."""
        with e.loop(I64(0), I64(vectors)) as u:
            first = e.b.add(row, e.b.mul(u, I64(e.lanes)))
            with e.loop(I64(0), fields["line_count"]) as number:
                sums = self._sums(e, fields, vectors, u, number)
                lines = self._lines(e, fields, "out", first, number)
                rows = [e.read(sums, lane * vectors) for lane in range(self.lanes)]
                rows += [e.splat(0.0)] * (e.lanes - self.lanes)
                for value, line in zip(e.transposed(rows), lines, strict=True):
                    e.write(activated(e, value, self.act), line)

    def _sums(self, e: Emitter, fields: Fields, vectors: int, u: Value, line: Value) -> Value:
        """The address of the sums of a vector of outputs at the first position of a line."""
        first = e.b.mul(line, I64(vectors * e.lanes))
        return e.line(fields.buffer("sums"), e.b.add(first, u))

    def _lines(self, e: Emitter, fields: Fields, key: str, row: Value, line: Value) -> list[Value]:
        """The addresses of a line of as many rows as there are lanes."""
        lines = e.at(fields.pointer("lines"), e.b.mul(line, I64(TILE.itemsize)))
        first = e.line(fields.buffer(key), e.load_long(I32, lines, (TILE.names or ()).index(key)))
        offsets = e.at(fields.pointer(f"{key}_offsets"), row, I64)
        return [e.at(first, e.load(I64, offsets, r)) for r in range(e.lanes)]

    def _add_input_block(self, e: Emitter, fields: Fields, vectors: int, weight: Variable, first: Value) -> None:
        """Add the products of a block of input channels to the sums of all positions."""
        left, inner = e.b.sub(fields["channels"], first), fields["inner"]
        count = e.b.select(e.b.icmp_signed("<", left, inner), left, inner)
        channels = e.at(fields.pointer("x_offsets"), first, I64), count
        start, begin = weight.get(), I64(0)
        fetch = self._fetch(e, fields, vectors, (start, count))
        for k, lanes in enumerate(self.shapes):
            end = e.load(I64, fields.pointer("ends"), k)
            with e.loop(begin, end) as number:
                group = e.at(fields.pointer("groups"), e.b.mul(number, I64(GROUP.itemsize)))
                weight.set(start)
                outer = functools.partial(self._add_tap, e, lanes)
                products = Products(e, fields, self.taps, self.unroll, vectors * e.lanes, outer, fetch)
                self._add_group(e, products, (group, *channels), lanes, weight)
            begin = end

    def _add_group(
        self, e: Emitter, products: Products, x: tuple[Value, Value, Value], lanes: Lanes, weight: Variable
    ) -> None:
        """Add products to the sums of a group. x: its entry in the table, and the offsets and
        number of the input channels."""
        vectors = products.floats // e.lanes
        first = e.at(products.fields.buffer("x"), e.load(I64, x[0]))
        sums = e.at(products.fields.buffer("sums"), e.b.mul(e.load(I64, x[0], 1), I64(vectors)))
        totals = [[e.variable(e.vector, e.read(sums, lane * vectors + u)) for lane in lanes] for u in range(vectors)]
        products.add((first, *x[1:]), weight, totals)
        for u, row in enumerate(totals):
            for lane, total in zip(lanes, row, strict=True):
                e.write(total.get(), sums, lane * vectors + u)

    def _fetch(
        self, e: Emitter, fields: Fields, vectors: int, stream: tuple[Value, Value]
    ) -> Callable[[], None] | None:
        """Writes prefetches of the weights that follow those of a pass, from (their address, number
        of input channels)."""
        if not self.fetched:
            return None
        taps = I64(len(self.taps)) if self.unroll else e.b.mul(fields["tap_rows"], I64(len(self.taps)))
        size = e.b.mul(e.b.mul(stream[1], taps), I64(vectors * e.isa.line))
        following = e.variable(I64, e.b.add(stream[0], size))

        def fetch() -> None:
            address = following.get()
            for k in range(self.fetched):
                e.prefetch(e.pointer(e.b.add(address, I64(64 * k))), writes=False)
            following.set(e.b.add(address, I64(64 * self.fetched)))

        return fetch

    def _add_tap(
        self,
        e: Emitter,
        lanes: Lanes,
        x: tuple[list[Value], int],
        weights: tuple[Value, int],
        totals: list[list[Value]],
    ) -> None:
        """Add the products of the vectors of weights and the inputs of a group at a tap."""
        vectors = [
            e.b.load(e.at(weights[0], weights[1] + u * e.lanes, FLOAT), typ=e.vector, align=4)
            for u in range(len(totals))
        ]
        first = x[1] * e.lanes
        for p, lane in enumerate(lanes):
            factor = e.splat(e.load(FLOAT, x[0][0], first + lane))
            for vector, row in zip(vectors, totals, strict=True):
                row[p] = e.fma(vector, factor, row[p])
