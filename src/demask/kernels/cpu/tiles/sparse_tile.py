"""The sparse kernel: a tile of positions stays in registers while the nonzeros of a row are read.

    for tile: for block of columns: for row:  acc[t] = bias + add, or the sum of earlier blocks
        for nonzero:  acc[t] += value * x[offset + displacement[t]]
        out[row] = act(acc)

One kernel computes linear layers and convolutions of any kernel size, stride, dilation and groups:
they differ in the stream of (offset, value) and in the displacements, which are constants in the
code. An offset counts vectors, so that it fits in 16 bits; the part of x that a block of columns
reads fits in the L1 cache. Few positions leave the FMA units idle, so `side` rows are computed
together; zeros pad them to one length, and their nonzeros are interleaved.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from demask.kernels.llvm.activations import activated
from demask.kernels.llvm.emitter import BYTE, FLOAT, I16, I32, I64, Emitter, Fields, Value, Variable
from demask.ops.activations import Act

#: a row of a block: the end of its nonzeros, times 4, plus FIRST and LAST for the first and last
#: block of this row; its line in out and in the added tensor; its bias; the scale of int8 values
RECORD = np.dtype([("end", "<u4"), ("out", "<i4"), ("add", "<i4"), ("bias", "<f4"), ("scale", "<f4")])
FIRST, LAST = 1, 2
MOST = 2**30 - 1  # nonzeros of a stream: `end` has 32 bits, two of them flags
#: a block of columns: byte offset of its part of x; its records
BLOCK = np.dtype([("x", "<i8"), ("begin", "<i8"), ("end", "<i8")])
#: a tile of positions: its first line in x, out and the added tensor
TILE = np.dtype([("x", "<i4"), ("out", "<i4"), ("add", "<i4"), ("hole", "<i4")])
#: call of the kernel; x, out and add are (slot of the arena, byte offset)
CALL = np.dtype([(key, "<i8") for key in (
    "x_slot", "x", "out_slot", "out", "add_slot", "add", "blocks", "block_count", "records",
    "offsets", "values", "first", "tiles", "tile_begin", "tile_end")])  # fmt: skip
KINDS = {"float32": FLOAT, "bfloat16": I16, "int8": BYTE}


@dataclass(frozen=True, slots=True)
class SparseTileKernel:
    """The kernel for tiles of one shape.

    x, out, add: lines of its positions in x, out and the added tensor, relative to the first. side:
    rows computed together. values: dtype of the weights. wide: 32-bit offsets.
    """

    x: tuple[int, ...]
    out: tuple[int, ...]
    add: tuple[int, ...] | None
    side: int
    act: Act | None
    values: str = "float32"
    wide: bool = False

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """Write k(call, arena)."""
        fields = Fields(e, CALL.names)
        x, out = fields.buffer("x"), fields.buffer("out")
        add = out if self.add is None else fields.buffer("add")
        blocks, records, tiles = (fields.pointer(k) for k in ("blocks", "records", "tiles"))
        n = e.variable(I64)
        with e.loop(fields["tile_begin"], fields["tile_end"]) as tile:
            lines = e.at(tiles, e.b.mul(tile, I64(TILE.itemsize)))
            x_t, out_t, add_t = (e.line(base, e.load_long(I32, lines, k)) for k, base in enumerate((x, out, add)))
            n.set(fields["first"])
            with e.loop(I64(0), fields["block_count"]) as k:
                block = e.at(blocks, e.b.mul(k, I64(BLOCK.itemsize)))
                x_b = e.at(x_t, e.load(I64, block, 0))
                with e.loop(e.load(I64, block, 1), e.load(I64, block, 2), self.side) as first:
                    record = e.at(records, e.b.mul(first, I64(RECORD.itemsize)))
                    self._compute_rows(e, n, record, (x_b, out_t, add_t), fields)

    def _compute_rows(
        self, e: Emitter, n: Variable, record: Value, bases: tuple[Value, Value, Value], fields: Fields
    ) -> None:
        x, out, add = bases
        records = [e.at(record, r * RECORD.itemsize) for r in range(self.side)]
        outs = [e.line(out, e.load_long(I32, row_record, 1)) for row_record in records]
        end_and_flags = e.load_long(I32, record, 0)
        sums = [[e.variable(e.vector) for _ in self.x] for _ in records]
        is_first = e.b.icmp_signed("!=", e.b.and_(end_and_flags, I64(FIRST)), I64(0))
        with e.b.if_else(is_first) as (then, otherwise):
            with then:
                for row_record, row in zip(records, sums, strict=True):
                    self._set_initial_sums(e, row_record, add, row)
            with otherwise:
                for row_out, row in zip(outs, sums, strict=True):
                    for line, sum_ in zip(self.out, row, strict=True):
                        sum_.set(e.read(row_out, line))
        end = e.b.lshr(end_and_flags, I64(2))
        self._prefetch_outputs(e, record, out)
        self._products(e, n.get(), end, x, sums, fields)
        n.set(end)
        is_last = e.b.icmp_signed("!=", e.b.and_(end_and_flags, I64(LAST)), I64(0))
        with e.b.if_then(is_last):
            for row_record, row in zip(records, sums, strict=True):
                self._scale_and_activate(e, row_record, row)
        for row_out, row in zip(outs, sums, strict=True):
            for line, sum_ in zip(self.out, row, strict=True):
                e.write(sum_.get(), row_out, line)

    def _prefetch_outputs(self, e: Emitter, record: Value, out: Value) -> None:
        """Prefetch the outputs of the next rows; hardware does not predict their addresses."""
        for r in range(self.side):
            next_record = e.at(record, (self.side + r) * RECORD.itemsize)
            row_out = e.opaque(e.line(out, e.load_long(I32, next_record, 1)))
            for line in self.out:
                e.prefetch(e.line(row_out, line))

    def _set_initial_sums(self, e: Emitter, record: Value, add: Value, row: list[Variable]) -> None:
        """Set the initial sums. `add` is read before out is written, which may be the same memory.

        Sums that are scaled at the end begin with their value divided by the scale.
        """
        bias = e.load(FLOAT, record, 3)
        inverse_scale = e.b.fdiv(FLOAT(1.0), e.load(FLOAT, record, 4)) if self.values == "int8" else None
        value = e.splat(bias if inverse_scale is None else e.b.fmul(bias, inverse_scale))
        add_line = e.line(add, e.load_long(I32, record, 2))
        for t, sum_ in enumerate(row):
            if self.add is None:
                sum_.set(value)
                continue
            added = e.read(add_line, self.add[t])
            sum_.set(e.b.fadd(added, value) if inverse_scale is None else e.fma(added, e.splat(inverse_scale), value))

    def _scale_and_activate(self, e: Emitter, record: Value, row: list[Variable]) -> None:
        for sum_ in row:
            value = sum_.get()
            if self.values == "int8":
                value = e.b.fmul(value, e.splat(e.load(FLOAT, record, 4)))
            sum_.set(activated(e, value, self.act))

    def _products(
        self, e: Emitter, begin: Value, end: Value, x: Value, sums: list[list[Variable]], fields: Fields
    ) -> None:
        offsets, values = fields.pointer("offsets"), fields.pointer("values")
        with e.loop(begin, end, self.side) as i:
            for r, row in enumerate(sums):
                position = e.b.add(i, I64(r)) if r else i
                offset = e.load_long(I32 if self.wide else I16, offsets, position)
                line = e.opaque(e.line(x, offset))
                value = e.splat(self._load_weight(e, values, position))
                for lines, sum_ in zip(self.x, row, strict=True):
                    sum_.set(e.fma(value, e.read(line, lines), sum_.get()))

    def _load_weight(self, e: Emitter, values: Value, position: Value) -> Value:
        stored = e.load(KINDS[self.values], values, position)
        if self.values == "bfloat16":
            return e.b.bitcast(e.b.shl(e.b.zext(stored, I32), I32(16)), FLOAT)
        return e.b.sitofp(stored, FLOAT) if self.values == "int8" else stored
