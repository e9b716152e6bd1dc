"""The sparse kernel: a tile of positions stays in registers while the nonzeros of a row go by.

    for tile: for block of columns: for row:  acc[t] = bias + add, or what earlier blocks left
        for nonzero:  acc[t] += value * x[offset + displacement[t]]
        out[row] = act(acc)

One kernel serves linear layers and convolutions of any kernel, stride, dilation and groups: what
differs is the stream of (offset, value) and the displacements, which are written into the code. An
offset counts vectors, so that it has 16 bits; a block of columns is about as much of x as the first
cache holds. Few positions leave the adders idle, so `side` rows go side by side, filled up with
zeros to one length, their nonzeros in turns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from demask.kernels.llvm.activations import activated
from demask.kernels.llvm.emitter import BYTE, FLOAT, I16, I32, I64, Emitter, Fields, Value, Variable
from demask.ops.activations import Act

#: a row of a block: where its nonzeros end, times 4, and whether this is the first and the last
#: block of this row; its line in out and in what is added; its bias; the factor of int8 values
RECORD = np.dtype([("end", "<u4"), ("out", "<i4"), ("add", "<i4"), ("bias", "<f4"),
                   ("scale", "<f4")])  # fmt: skip
FIRST, LAST = 1, 2
MOST = 2**30 - 1  # nonzeros of a stream: `end` has 32 bits
#: a block of columns: where its part of x begins, in bytes; its records
BLOCK = np.dtype([("x", "<i8"), ("begin", "<i8"), ("end", "<i8")])
#: a tile of positions: its first line in x, out and what is added
TILE = np.dtype([("x", "<i4"), ("out", "<i4"), ("add", "<i4"), ("hole", "<i4")])
#: what the kernel is called with; x, out and add are (slot of the arena, bytes behind it)
CALL = np.dtype([(key, "<i8") for key in (
    "x_slot", "x", "out_slot", "out", "add_slot", "add", "blocks", "block_count", "records",
    "offsets", "values", "first", "tiles", "tile_begin", "tile_end")])  # fmt: skip
KINDS = {"float32": FLOAT, "bfloat16": I16, "int8": BYTE}


@dataclass(frozen=True, slots=True)
class SparseTileKernel:
    """The kernel for tiles of one shape: lines of its positions in x, out and what is added,
    relative to the first. values: how weights are stored; wide: offsets of 32 bits."""

    x: tuple[int, ...]
    out: tuple[int, ...]
    add: tuple[int, ...] | None
    side: int
    act: Act | None
    values: str = "float32"
    wide: bool = False

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """k(call, arena)"""
        places = Fields(e, CALL.names)
        x, out = places.buffer("x"), places.buffer("out")
        add = out if self.add is None else places.buffer("add")
        blocks, records, tiles = (places.pointer(k) for k in ("blocks", "records", "tiles"))
        n = e.variable(I64)
        with e.loop(places["tile_begin"], places["tile_end"]) as tile:
            at = e.at(tiles, e.b.mul(tile, I64(TILE.itemsize)))
            x_t, out_t, add_t = (
                e.line(place, e.load_long(I32, at, k)) for k, place in enumerate((x, out, add))
            )
            n.set(places["first"])
            with e.loop(I64(0), places["block_count"]) as k:
                block = e.at(blocks, e.b.mul(k, I64(BLOCK.itemsize)))
                x_b = e.at(x_t, e.load(I64, block, 0))
                with e.loop(e.load(I64, block, 1), e.load(I64, block, 2), self.side) as first:
                    at = e.at(records, e.b.mul(first, I64(RECORD.itemsize)))
                    self._rows(e, n, at, (x_b, out_t, add_t), places)

    def _rows(self, e: Emitter, n: Variable, record: Value, at: tuple[Value, Value, Value],
              places: Fields) -> None:  # fmt: skip
        x, out, add = at
        each = [e.at(record, r * RECORD.itemsize) for r in range(self.side)]
        outs = [e.line(out, e.load_long(I32, one, 1)) for one in each]
        ending = e.load_long(I32, record, 0)
        sums = [[e.variable(e.vector) for _ in self.x] for _ in each]
        is_first = e.b.icmp_signed("!=", e.b.and_(ending, I64(FIRST)), I64(0))
        with e.b.if_else(is_first) as (then, otherwise):
            with then:
                for one, row in zip(each, sums, strict=True):
                    self._begin(e, one, add, row)
            with otherwise:
                for place, row in zip(outs, sums, strict=True):
                    for line, sum_ in zip(self.out, row, strict=True):
                        sum_.set(e.read(place, line))
        end = e.b.lshr(ending, I64(2))
        self._fetch(e, record, out)
        self._products(e, n.get(), end, x, sums, places)
        n.set(end)
        is_last = e.b.icmp_signed("!=", e.b.and_(ending, I64(LAST)), I64(0))
        with e.b.if_then(is_last):
            for one, row in zip(each, sums, strict=True):
                self._finish(e, one, row)
        for place, row in zip(outs, sums, strict=True):
            for line, sum_ in zip(self.out, row, strict=True):
                e.write(sum_.get(), place, line)

    def _fetch(self, e: Emitter, record: Value, out: Value) -> None:
        """Ask for the outputs of the next rows: they lie far apart, and no processor guesses
        where."""
        for r in range(self.side):
            behind = e.at(record, (self.side + r) * RECORD.itemsize)
            place = e.opaque(e.line(out, e.load_long(I32, behind, 1)))
            for line in self.out:
                e.prefetch(e.line(place, line))

    def _begin(self, e: Emitter, record: Value, add: Value, row: list[Variable]) -> None:
        """What sums begin with: `add` is read before out is written, which may be the same. Sums
        that are scaled at the end begin with that much less."""
        bias = e.load(FLOAT, record, 3)
        less = e.b.fdiv(FLOAT(1.0), e.load(FLOAT, record, 4)) if self.values == "int8" else None
        value = e.splat(bias if less is None else e.b.fmul(bias, less))
        other = e.line(add, e.load_long(I32, record, 2))
        for t, sum_ in enumerate(row):
            if self.add is None:
                sum_.set(value)
                continue
            more = e.read(other, self.add[t])
            sum_.set(e.b.fadd(more, value) if less is None else e.fma(more, e.splat(less), value))

    def _finish(self, e: Emitter, record: Value, row: list[Variable]) -> None:
        """The scale and the activation."""
        for sum_ in row:
            value = sum_.get()
            if self.values == "int8":
                value = e.b.fmul(value, e.splat(e.load(FLOAT, record, 4)))
            sum_.set(activated(e, value, self.act))

    def _products(self, e: Emitter, begin: Value, end: Value, x: Value,
                  sums: list[list[Variable]], places: Fields) -> None:  # fmt: skip
        offsets, values = places.pointer("offsets"), places.pointer("values")
        with e.loop(begin, end, self.side) as i:
            for r, row in enumerate(sums):
                place = e.b.add(i, I64(r)) if r else i
                offset = e.load_long(I32 if self.wide else I16, offsets, place)
                line = e.opaque(e.line(x, offset))
                value = e.splat(self._value(e, values, place))
                for lines, sum_ in zip(self.x, row, strict=True):
                    sum_.set(e.fma(value, e.read(line, lines), sum_.get()))

    def _value(self, e: Emitter, values: Value, place: Value) -> Value:
        found = e.load(KINDS[self.values], values, place)
        if self.values == "bfloat16":
            return e.b.bitcast(e.b.shl(e.b.zext(found, I32), I32(16)), FLOAT)
        return e.b.sitofp(found, FLOAT) if self.values == "int8" else found
