"""A matrix times one vector, by columns: tiles of rows, the columns of a tile one after the other.

    y[r] = act(w[r, c0] · x[c0] + w[r, c1] · x[c1] + … + bias[r])        over a list of (c, x[c])

Weights lie as [tile][column][rows of the tile], so the rows of a tile are as many accumulators,
and each output is one chain of fused multiply-adds in the order of the list, begun at +0, its bias
added last. The dense product is the list of all columns; the list of nonzero ones gives the same
bits, whatever the finite weights: fma(w, 0, s) == s unless s is -0 (which a product that underflows
makes), and s + bias is the same for both zeros as long as no bias is -0 (`pilot.packing` writes
+0). NaN counts as nonzero. `RowKernel` computes single rows of a row-major matrix by the same chains, so
its bits are the same too.

What machine code is called with is a structure of 64-bit numbers: addresses of what never moves,
and *slots*, numbers of places in a table of addresses that each call brings (its `arena`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from llvmlite import ir

from demask.kernels.cpu.csr import below, masked
from demask.kernels.llvm.activations import activated
from demask.kernels.llvm.emitter import FLOAT, I32, I64, POINTER, Emitter, Fields, Value
from demask.kernels.llvm.isa import Isa

AHEAD = 4  # columns that are asked for before they are read
SIDE = 8  # rows whose chains run side by side: 4 cycles of waiting, 2 products a cycle
SLACK = 64  # elements behind a list that may be written, and read, for nothing

#: x: slot of the input, n: its length; cols, values: slots of the list made of it; count: slot of
#: its length, a 64-bit number
COMPACT = np.dtype([(key, "<i8") for key in ("x", "n", "cols", "values", "count")])
#: weights, bias: addresses; begin, end, step: tiles; pitch: bytes of a tile; cols, values, count,
#: out: slots
COLUMNS = np.dtype([(key, "<i8") for key in (
    "weights", "bias", "begin", "end", "step", "pitch", "cols", "values", "count",
    "out")])  # fmt: skip
#: lists, counts: the first of `threads` slots, one for each thread that listed rows; thread: whose
#: share of each list this is; weights, bias: addresses; pitch: bytes of a row; cols … out: slots
ROWS = np.dtype([(key, "<i8") for key in (
    "lists", "counts", "threads", "thread", "weights", "bias", "pitch", "cols", "values", "count",
    "out")])  # fmt: skip


def vectors_of(rows: int, isa: Isa, most: int) -> int:
    """Vectors of a tile's rows: the most that waste little and give two threads as much each.

    >>> from demask.kernels.llvm.isa import AVX512
    >>> [vectors_of(rows, AVX512, 16) for rows in (10, 768, 3072, 4096)]
    [1, 12, 16, 16]
    """
    needed = -(-rows // isa.lanes)

    def cost(vectors: int) -> tuple[float, int]:
        tiles = -(-needed // vectors)
        return max(tiles * vectors, -(-tiles // 2) * 2 * vectors * (needed > most)), -vectors

    return min(range(1, min(most, needed) + 1), key=cost)


def iota(e: Emitter) -> Value:
    """0, 1, 2, … in the lanes."""
    return ir.Constant(e.ints, list(range(e.lanes)))


def compressed(e: Emitter, x: Value, mask: Value) -> Value:
    """The lanes of which the mask is set, in front."""
    word = "f32" if x.type == e.vector else "i32"
    name = f"llvm.experimental.vector.compress.v{e.lanes}{word}"
    call = e.intrinsic(name, x.type, x.type, mask.type, x.type)
    return e.b.call(call, [x, mask, ir.Constant(x.type, ir.Undefined)])


def set_lanes(e: Emitter, mask: Value) -> Value:
    """How many lanes of a mask are set, in 64 bits."""
    bits = e.b.zext(e.b.bitcast(mask, ir.IntType(e.lanes)), I64)
    return e.b.call(e.intrinsic("llvm.ctpop.i64", I64, I64), [bits])


def ask(e: Emitter, pointer: Value) -> None:
    """Have a line that will be read brought near."""
    call = e.intrinsic("llvm.prefetch.p0", ir.VoidType(), POINTER, I32, I32, I32)
    e.b.call(call, [pointer, I32(0), I32(3), I32(1)])


@dataclass(frozen=True, slots=True)
class Compact:
    """The list of the columns whose input is not 0 (NaN is not), and of their inputs."""

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """k(call, arena)"""
        f, b = Fields(e, COMPACT.names), e.b
        x, cols, values = f.slot("x"), f.slot("cols"), f.slot("values")
        found = e.variable(I64, I64(0))
        with e.loop(I64(0), f["n"], e.lanes) as i:
            given = masked(e, e.vector, e.at(x, i, FLOAT), below(e, b.sub(f["n"], i)))
            mask = b.fcmp_unordered("!=", given, e.splat(0.0))
            number = b.add(iota(e), e.splat(b.trunc(i, I32)))
            place = found.get()
            b.store(compressed(e, number, mask), e.at(cols, place, I32), align=4)
            b.store(compressed(e, given, mask), e.at(values, place, FLOAT), align=4)
            found.set(b.add(place, set_lanes(e, mask)))
        b.store(found.get(), f.slot("count"))


@dataclass(frozen=True, slots=True)
class ColumnKernel:
    """The product over the listed columns, for every `step`-th tile of `vectors` vectors."""

    vectors: int
    relu: bool
    ahead: int = AHEAD

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """k(call, arena)"""
        f, b = Fields(e, COLUMNS.names), e.b
        cols, values, out = f.slot("cols"), f.slot("values"), f.slot("out")
        weights, bias, count = f.pointer("weights"), f.pointer("bias"), f.count("count")
        line = self.vectors * e.isa.line
        with e.loop(f["begin"], f["end"], f["step"]) as tile:
            base = e.at(weights, b.mul(tile, f["pitch"]))
            sums = [e.variable(e.vector, e.splat(0.0)) for _ in range(self.vectors)]
            with e.loop(I64(0), count) as k:
                if self.ahead:
                    later = e.load_long(I32, e.at(cols, b.add(k, I64(self.ahead)), I32))
                    there = e.at(base, b.mul(later, I64(line)))
                    for at in range(0, line, 64):
                        ask(e, e.at(there, at))
                column = e.opaque(e.at(base, b.mul(e.load_long(I32, cols, k), I64(line))))
                x = e.splat(e.load(FLOAT, values, k))
                for v, sum_ in enumerate(sums):
                    sum_.set(e.fma(x, e.read(column, v), sum_.get()))
            first = b.mul(tile, I64(line))
            for v, sum_ in enumerate(sums):
                y = b.fadd(sum_.get(), e.read(e.at(bias, first), v))
                y = activated(e, y, ("relu", ()) if self.relu else None)
                b.store(y, e.line(e.at(out, first), v), align=4)


@dataclass(frozen=True, slots=True)
class RowKernel:
    """The product over the listed columns, for listed rows of a row-major matrix."""

    relu: bool
    side: int = SIDE

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """k(call, arena)"""
        f, b = Fields(e, ROWS.names), e.b
        with e.loop(I64(0), f["threads"]) as segment:
            rows, count = f.slot("lists", segment), e.load(I64, f.slot("counts", segment))
            share = [b.sdiv(b.mul(count, b.add(f["thread"], I64(k))), f["threads"]) for k in (0, 1)]
            last = b.sub(share[1], I64(1))
            with e.loop(share[0], share[1], self.side) as first:
                found = []
                for k in range(self.side):  # the last row again, where there are fewer
                    place = b.add(first, I64(k))
                    place = b.select(b.icmp_signed("<", place, last), place, last)
                    found.append(e.load_long(I32, rows, place))
                places = [b.add(first, I64(self.side + k)) for k in range(self.side)]
                self._rows(e, f, found, [e.load_long(I32, rows, place) for place in places])

    def _rows(self, e: Emitter, f: Fields, rows: list[Value], later: list[Value]) -> None:
        """later: the rows after these, which are asked for meanwhile."""
        b, weights, bias = e.b, f.pointer("weights"), f.pointer("bias")
        cols, values, out = f.slot("cols"), f.slot("values"), f.slot("out")
        fma = e.intrinsic("llvm.fma.f32", FLOAT, FLOAT, FLOAT, FLOAT)
        lines = [e.at(weights, b.mul(row, f["pitch"])) for row in rows]
        sums = [e.variable(FLOAT, FLOAT(0.0)) for _ in rows]
        with e.loop(I64(0), f.count("count")) as k:
            column, x = e.load_long(I32, cols, k), e.load(FLOAT, values, k)
            with b.if_then(b.icmp_signed("==", b.and_(k, I64(7)), I64(0))):
                for row in later:
                    line = e.at(weights, b.mul(row, f["pitch"]))
                    ask(e, e.at(line, column, FLOAT))
            for line, sum_ in zip(lines, sums, strict=True):
                sum_.set(b.call(fma, [x, e.load(FLOAT, line, column), sum_.get()]))
        for row, sum_ in zip(rows, sums, strict=True):
            y = b.fadd(sum_.get(), e.load(FLOAT, bias, row))
            if self.relu:
                y = b.select(b.fcmp_ordered("<", y, FLOAT(0.0)), FLOAT(0.0), y)
            b.store(y, e.at(out, row, FLOAT))
