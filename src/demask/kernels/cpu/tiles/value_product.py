"""The product of two values: rows of tokens in lanes, elements of the other value broadcast.

    for tile of P lines: for block of R outputs:
        sum[r][p] = 0
        for term:  sum[r][p] += x[term · pitch + p] · broadcast(y[term, r])
        out[r][p] = sum[r][p] + add[r][p]

Lanes are tokens, so that the factors of an output are single elements of the other value, wherever
its layout has them: their addresses are the sum of one per term and one per output.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from demask.kernels.llvm.emitter import FLOAT, I32, I64, Emitter, Fields, Value

#: a tile of positions: its first line in x, out and the added tensor
TILE = np.dtype([("x", "<i4"), ("out", "<i4"), ("add", "<i4"), ("hole", "<i4")])
#: call of the kernel; x, y, out and add are (slot of the arena, byte offset); pitches: bytes from
#: channel to channel; terms, outputs: how many; term_offsets, output_offsets: bytes of y, in tables
CALL = np.dtype([(key, "<i8") for key in (
    "x_slot", "x", "y_slot", "y", "out_slot", "out", "add_slot", "add", "x_pitch", "out_pitch",
    "add_pitch", "terms", "outputs", "term_offsets", "output_offsets", "tiles",
    "count")])  # fmt: skip


@dataclass(frozen=True, slots=True)
class ValueProductKernel:
    """The kernel for tiles of so many lines, which follow each other. rows: outputs of a block."""

    lines: int
    rows: int
    add: bool

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """Write k(call, arena)."""
        fields = Fields(e, CALL.names)
        bases = [fields.buffer(key) for key in ("x", "out", "add")[: 2 + self.add]]
        outputs = fields["outputs"]
        full = e.b.sub(outputs, e.b.srem(outputs, I64(self.rows)))
        with e.loop(I64(0), fields["count"]) as number:
            tile = e.at(fields.pointer("tiles"), e.b.mul(number, I64(TILE.itemsize)))
            addresses = [e.line(base, e.load_long(I32, tile, k)) for k, base in enumerate(bases)]
            with e.loop(I64(0), full, self.rows) as first:
                self._block(e, fields, addresses, first, self.rows)
            with e.loop(full, outputs) as first:
                self._block(e, fields, addresses, first, 1)

    def _block(self, e: Emitter, fields: Fields, addresses: list[Value], first: Value, rows: int) -> None:
        """Some outputs of a tile."""
        offsets = e.at(fields.pointer("output_offsets"), first, I64)
        factors = [e.opaque(e.at(fields.buffer("y"), e.load(I64, offsets, r))) for r in range(rows)]
        sums = [[e.variable(e.vector, e.splat(0.0)) for _ in range(self.lines)] for _ in range(rows)]
        address = e.variable(I64, e.b.ptrtoint(addresses[0], I64))
        with e.loop(I64(0), fields["terms"]) as term:
            x = e.pointer(address.get())
            shift = e.load(I64, e.at(fields.pointer("term_offsets"), term, I64))
            vectors = [e.read(x, line) for line in range(self.lines)]
            for factor, row in zip(factors, sums, strict=True):
                broadcast = e.splat(e.load(FLOAT, e.at(factor, shift)))
                for vector, total in zip(vectors, row, strict=True):
                    total.set(e.fma(vector, broadcast, total.get()))
            address.set(e.b.add(address.get(), fields["x_pitch"]))
        for r, row in enumerate(sums):
            channel = e.b.add(first, I64(r))
            out = e.at(addresses[1], e.b.mul(channel, fields["out_pitch"]))
            for line, total in enumerate(row):
                value = total.get()
                if self.add:
                    added = e.at(addresses[2], e.b.mul(channel, fields["add_pitch"]))
                    value = e.b.fadd(value, e.read(added, line))
                e.write(value, out, line)
