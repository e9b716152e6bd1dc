"""The dense kernel: sums of a block of output channels and a tile of positions stay in registers.

    for tile: for block of input channels: for block of R output channels:
        acc[r][t] = bias[r] + add, or the sum of earlier blocks of input channels
        for channel: for tap:
            v[t] = x[channel · pitch + tap + t]
            acc[r][t] += broadcast(weight) · v[t]
        out[r][t] = act(acc[r][t])

Weights are packed in the order of use, [input block][output block][channel][tap][r]: one sequential
stream per tile. The inputs that a tile reads from a block of input channels fit in the L1 cache.
Output channels are `wide` blocks of `rows` and then `thin` blocks of `rows` - 1: nothing is padded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from demask.kernels.llvm.activations import activated
from demask.kernels.llvm.emitter import FLOAT, I32, I64, Emitter, Fields, Value, Variable
from demask.ops.activations import Act

#: a tile of positions: its first line in x, out and the added tensor
TILE = np.dtype([("x", "<i4"), ("out", "<i4"), ("add", "<i4"), ("hole", "<i4")])
#: call of the kernel; x, out and add are (slot of the arena, byte offset); pitches: bytes from
#: channel to channel; inner: input channels of a block; wide, thin: numbers of output blocks
CALL = np.dtype([(key, "<i8") for key in (
    "x_slot", "x", "out_slot", "out", "add_slot", "add", "x_pitch", "out_pitch", "add_pitch",
    "channels", "inner", "wide", "thin", "weights", "biases", "tiles", "tile_begin",
    "tile_end")])  # fmt: skip


@dataclass(frozen=True, slots=True)
class DenseTileKernel:
    """The kernel for tiles of one shape.

    x, out, add: lines of its positions in x, out and the added tensor, relative to the first. taps:
    lines of the kernel's positions, relative to the first. rows: output channels of a wide block.
    unroll: input channels per iteration.
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
        weight, bias = e.variable(I64), e.variable(I64)
        with e.loop(fields["tile_begin"], fields["tile_end"]) as tile:
            lines = e.at(tiles, e.b.mul(tile, I64(TILE.itemsize)))
            x_tile, out_tile, add_tile = (
                e.line(base, e.load_long(I32, lines, k)) for k, base in enumerate((x, out, add))
            )
            weight.set(fields["weights"])
            with e.loop(I64(0), channels, fields["inner"]) as first:
                left = e.b.sub(channels, first)
                count = e.b.select(
                    e.b.icmp_signed("<", left, fields["inner"]), left, fields["inner"]
                )
                ends = (e.b.icmp_signed("==", first, I64(0)), e.b.icmp_signed("==", left, count))
                x_block = e.at(x_tile, e.b.mul(first, fields["x_pitch"]))
                outputs = (e.variable(I64, e.b.ptrtoint(out_tile, I64)),
                           e.variable(I64, e.b.ptrtoint(add_tile, I64)))  # fmt: skip
                bias.set(fields["biases"])
                for rows, blocks in ((self.rows, "wide"), (self.rows - 1, "thin")):
                    if rows:
                        with e.loop(I64(0), fields[blocks]):
                            self._block(
                                e, fields, rows, (x_block, count), outputs, (weight, bias), ends
                            )

    def _block(self, e: Emitter, fields: Fields, rows: int, x: tuple[Value, Value],
               outputs: tuple[Variable, Variable], streams: tuple[Variable, Variable],
               ends: tuple[Value, Value]) -> None:  # fmt: skip
        """The sums of one output block. x: address and number of the input channels. ends: whether
        these are the first and the last."""
        weight, bias = streams
        out, add = (
            [e.pointer(e.b.add(place.get(), e.b.mul(fields[pitch], I64(r)))) for r in range(rows)]
            for place, pitch in zip(outputs, ("out_pitch", "add_pitch"), strict=True)
        )
        sums = [[e.variable(e.vector) for _ in self.x] for _ in range(rows)]
        with e.b.if_else(ends[0]) as (then, otherwise):
            with then:
                self._begin(e, e.pointer(bias.get()), add, sums)
            with otherwise:
                for row_out, row in zip(out, sums, strict=True):
                    for line, sum_ in zip(self.out, row, strict=True):
                        sum_.set(e.read(row_out, line))
        self._products(e, fields["x_pitch"], x, weight, sums)
        with e.b.if_then(ends[1]):
            for sum_ in (sum_ for row in sums for sum_ in row):
                sum_.set(activated(e, sum_.get(), self.act))
        for row_out, row in zip(out, sums, strict=True):
            for line, sum_ in zip(self.out, row, strict=True):
                e.write(sum_.get(), row_out, line)
        for place, pitch in zip(outputs, ("out_pitch", "add_pitch"), strict=True):
            place.set(e.b.add(place.get(), e.b.mul(fields[pitch], I64(rows))))
        bias.set(e.b.add(bias.get(), I64(4 * rows)))

    def _begin(self, e: Emitter, bias: Value, add: list[Value], sums: list[list[Variable]]) -> None:
        """Set the initial sums; `add` is read before out is written, which may share its memory."""
        for r, row in enumerate(sums):
            value = e.splat(e.load(FLOAT, bias, r))
            for t, sum_ in enumerate(row):
                added = None if self.add is None else e.read(add[r], self.add[t])
                sum_.set(value if added is None else e.b.fadd(added, value))

    def _products(self, e: Emitter, pitch: Value, x: tuple[Value, Value], weight: Variable,
                  sums: list[list[Variable]]) -> None:  # fmt: skip
        """Add the products of the input channels of a block."""
        first, count = x
        line = e.variable(I64, e.b.ptrtoint(first, I64))

        def channels(number: int) -> None:
            weights, k, address = e.pointer(weight.get()), 0, line.get()
            for _ in range(number):
                channel = e.opaque(e.pointer(address))
                for tap in self.taps:
                    vectors = [e.read(channel, tap + t) for t in self.x]
                    for row in sums:
                        value = e.splat(e.load(FLOAT, weights, k))
                        k += 1
                        for vector, sum_ in zip(vectors, row, strict=True):
                            sum_.set(e.fma(value, vector, sum_.get()))
                address = e.b.add(address, pitch)
            line.set(address)
            weight.set(e.b.add(weight.get(), I64(4 * k)))

        whole = e.b.sub(count, e.b.srem(count, I64(self.unroll)))
        with e.loop(I64(0), whole, self.unroll):
            channels(self.unroll)
        if self.unroll > 1:
            with e.loop(whole, count):
                channels(1)
