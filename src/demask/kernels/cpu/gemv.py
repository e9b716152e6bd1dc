"""A matrix times one vector, by columns: tiles of rows, one column of a tile after the other.

    y[r] = act(w[r, c0] * x[c0] + w[r, c1] * x[c1] + ... + bias[r])        over a list of (c, x[c])

Weights are stored as [tile][column][rows of the tile], so a tile needs one accumulator per row.
Each output is one chain of fused multiply-adds in the order of the list, starting at +0; its bias
is added last. The dense product uses the list of all columns. The list of nonzero inputs gives the
same bits for all finite weights: fma(w, 0, s) == s unless s is -0 (the result of a product that
underflows), and s + bias is the same for both zeros as long as no bias is -0
(`pilot.chains.packing` writes +0). NaN counts as nonzero. `RowKernel` computes single rows of a
row-major matrix by the same chains, so its bits are the same too.

A call is a structure of 64-bit numbers: addresses that never change, and *slots*, indices into a
table of addresses that each call passes (its `arena`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from llvmlite import ir

from demask.kernels.cpu.csr import below
from demask.kernels.llvm.activations import activated
from demask.kernels.llvm.emitter import FLOAT, I32, I64, Emitter, Fields, Value
from demask.kernels.llvm.isa import Isa

AHEAD = 4  # columns prefetched before they are read
SIDE = 8  # rows computed together: FMA latency is 4 cycles, throughput 2 per cycle
SLACK = 64  # unused elements after a list that may be written and read

#: x: slot of the input, n: its length; cols, values: slots of the list of its nonzeros; count:
#: slot of the length of the list, a 64-bit number
COMPACT = np.dtype([(key, "<i8") for key in ("x", "n", "cols", "values", "count")])
#: weights, bias: addresses; begin, end, step: tiles; pitch: bytes of a tile; cols, values, count,
#: out: slots
COLUMNS = np.dtype(
    [(key, "<i8") for key in ("weights", "bias", "begin", "end", "step", "pitch", "cols", "values", "count", "out")]
)
#: lists, counts: the first of `threads` slots, one for each thread that listed rows; thread: number
#: of the share of each list to compute; weights, bias: addresses; pitch: bytes of a row; cols to
#: out: slots
ROWS = np.dtype([(key, "<i8") for key in (
    "lists", "counts", "threads", "thread", "weights", "bias", "pitch", "cols", "values", "count",
    "out")])  # fmt: skip


def vectors_of(rows: int, isa: Isa, largest: int) -> int:
    """Vectors per tile of rows: the most that waste little and balance two threads.

    >>> from demask.kernels.llvm.isa import AVX512
    >>> [vectors_of(rows, AVX512, 16) for rows in (10, 768, 3072, 4096)]
    [1, 12, 16, 16]
    """
    needed = -(-rows // isa.lanes)

    def cost(vectors: int) -> tuple[float, int]:
        tiles = -(-needed // vectors)
        return max(tiles * vectors, -(-tiles // 2) * 2 * vectors * (needed > largest)), -vectors

    return min(range(1, min(largest, needed) + 1), key=cost)


def iota(e: Emitter) -> Value:
    """0, 1, 2, ... in the lanes."""
    return ir.Constant(e.ints, list(range(e.lanes)))


def compressed(e: Emitter, x: Value, mask: Value) -> Value:
    """The lanes with a set mask, moved to the front."""
    word = "f32" if x.type == e.vector else "i32"
    name = f"llvm.experimental.vector.compress.v{e.lanes}{word}"
    call = e.intrinsic(name, x.type, x.type, mask.type, x.type)
    return e.b.call(call, [x, mask, ir.Constant(x.type, ir.Undefined)])


def set_lanes(e: Emitter, mask: Value) -> Value:
    """How many lanes of a mask are set, as a 64-bit integer."""
    bits = e.b.zext(e.b.bitcast(mask, ir.IntType(e.lanes)), I64)
    return e.b.call(e.intrinsic("llvm.ctpop.i64", I64, I64), [bits])


@dataclass(frozen=True, slots=True)
class CompactKernel:
    """Lists the columns with a nonzero input (NaN counts as nonzero), and their inputs."""

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """Write k(call, arena)."""
        f, b = Fields(e, COMPACT.names), e.b
        x, cols, values = f.slot("x"), f.slot("cols"), f.slot("values")
        length = e.variable(I64, I64(0))
        with e.loop(I64(0), f["n"], e.lanes) as i:
            x_vector = e.load_masked(e.at(x, i, FLOAT), below(e, b.sub(f["n"], i)))
            mask = b.fcmp_unordered("!=", x_vector, e.splat(0.0))
            columns = b.add(iota(e), e.splat(b.trunc(i, I32)))
            position = length.get()
            b.store(compressed(e, columns, mask), e.at(cols, position, I32), align=4)
            b.store(compressed(e, x_vector, mask), e.at(values, position, FLOAT), align=4)
            length.set(b.add(position, set_lanes(e, mask)))
        b.store(length.get(), f.slot("count"))


@dataclass(frozen=True, slots=True)
class ColumnKernel:
    """The product over the listed columns for every `step`-th tile of `vectors` vectors."""

    vectors: int
    relu: bool
    ahead: int = AHEAD

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """Write k(call, arena)."""
        f, b = Fields(e, COLUMNS.names), e.b
        cols, values, out = f.slot("cols"), f.slot("values"), f.slot("out")
        weights, bias, count = f.pointer("weights"), f.pointer("bias"), f.count("count")
        line = self.vectors * e.isa.line
        with e.loop(f["begin"], f["end"], f["step"]) as tile:
            base = e.at(weights, b.mul(tile, f["pitch"]))
            sums = [e.variable(e.vector, e.splat(0.0)) for _ in range(self.vectors)]
            with e.loop(I64(0), count) as k:
                if self.ahead:
                    next_number = e.load_long(I32, e.at(cols, b.add(k, I64(self.ahead)), I32))
                    next_column = e.at(base, b.mul(next_number, I64(line)))
                    for offset in range(0, line, 64):
                        e.prefetch(e.at(next_column, offset), writes=False)
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
    """The product over the listed columns for listed rows of a row-major matrix."""

    relu: bool
    side: int = SIDE

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """Write k(call, arena)."""
        f, b = Fields(e, ROWS.names), e.b
        with e.loop(I64(0), f["threads"]) as list_number:
            rows, count = f.slot("lists", list_number), e.load(I64, f.slot("counts", list_number))
            share = [b.sdiv(b.mul(count, b.add(f["thread"], I64(k))), f["threads"]) for k in (0, 1)]
            last = b.sub(share[1], I64(1))
            with e.loop(share[0], share[1], self.side) as first:
                current = []
                for k in range(self.side):  # repeats the last row if fewer are left
                    position = b.add(first, I64(k))
                    position = b.select(b.icmp_signed("<", position, last), position, last)
                    current.append(e.load_long(I32, rows, position))
                positions = [b.add(first, I64(self.side + k)) for k in range(self.side)]
                self._compute_rows(e, f, current, [e.load_long(I32, rows, position) for position in positions])

    def _compute_rows(self, e: Emitter, f: Fields, rows: list[Value], later: list[Value]) -> None:
        """later: the next rows, which are prefetched."""
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
                    e.prefetch(e.at(line, column, FLOAT), writes=False)
            for line, sum_ in zip(lines, sums, strict=True):
                sum_.set(b.call(fma, [x, e.load(FLOAT, line, column), sum_.get()]))
        for row, sum_ in zip(rows, sums, strict=True):
            y = b.fadd(sum_.get(), e.load(FLOAT, bias, row))
            if self.relu:
                y = b.select(b.fcmp_ordered("<", y, FLOAT(0.0)), FLOAT(0.0), y)
            b.store(y, e.at(out, row, FLOAT))
