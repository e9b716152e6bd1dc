"""SDDMM: products of two dense matrices, only at the nonzeros of a sparse one.

    out[p] = sum over k of a[row of p, k] * x[column of p, k]

Several nonzeros of one row are computed together: a vector of a is read once for all of them. Their
sums are reduced across lanes together, in as many rounds as a single one needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from llvmlite import ir

from demask.kernels.cpu.csr import Matrix, below, isa_of_sums, narrowed
from demask.kernels.cpu.number_types import type_of_sums
from demask.kernels.llvm.emitter import I64, Emitter, Value, Variable

#: Call of a kernel, as `csr.CALL` except for: a, a_pitch: the operand read by rows of the matrix;
#: x: the one read by its columns; names: row of a for each row of the matrix, if renumbered, less
#: than `rows`; vectors: full vectors of each sum; left: lanes in use of one more.
CALL = np.dtype([(key, "<i8") for key in (
    "crow", "col", "names", "a", "a_pitch", "x", "x_pitch", "out", "vectors", "left", "rows", "columns",
    "entries", "begin", "end", "bad")])  # fmt: skip
TOGETHER = 8  # nonzeros computed together: hides FMA latency


@dataclass(frozen=True, slots=True)
class Sampled:
    """out[p] = the dot product of a[row] and x[column].

    partial: one more vector has `left` lanes in use. column_bits: of an index. named: rows are
    renumbered.
    more: sums are added to the values in out. numbers: "f32" or "f64", of all of them.
    """

    partial: bool
    column_bits: int = 32
    named: bool = False
    more: bool = False
    numbers: str = "f32"

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """Write k(call, arena)."""
        m, isa = Matrix(e, self.column_bits, CALL), isa_of_sums(e.isa, self.numbers)
        e = narrowed(e, isa.lanes, type_of_sums(self.numbers))
        b = e.b
        together = min(TOGETHER, e.lanes)
        with e.loop(m.field["begin"], m.field["end"]) as row:
            begin, count = m.row(row)
            name, valid = m.named(row, self.named)
            count = b.select(valid, count, I64(0))
            a = e.at(m.at["a"], b.mul(name, m.field["a_pitch"]))
            last = b.sub(b.add(begin, count), I64(1))
            with e.loop(I64(0), count, together) as i:
                first = b.add(begin, i)
                sums = self._sums(e, m, a, (first, last, together))
                here = b.select(b.icmp_signed("<", b.sub(count, i), I64(together)), b.sub(count, i), I64(together))
                self._store(e, e.at(m.at["out"], first, e.number), totals(e, sums), here)

    def _sums(self, e: Emitter, m: Matrix, a: Value, at: tuple[Value, Value, int]) -> list[Value]:
        """A vector per nonzero, to be reduced across lanes; repeats the last if fewer are left."""
        b, (first, last, together) = e.b, at
        lines = []
        for k in range(together):
            position = b.add(first, I64(k))
            position = b.select(b.icmp_signed("<", position, last), position, last)
            lines.append(e.at(m.at["x"], b.mul(m.column(position), m.field["x_pitch"])))
        sums = [e.variable(e.vector, e.splat(0.0)) for _ in lines]
        size = e.lanes * e.bytes
        full = b.mul(m.field["vectors"], I64(size))
        with e.loop(I64(0), full, size) as shift:
            self._products(e, a, lines, sums, (shift, None))
        if self.partial:
            self._products(e, a, lines, sums, (full, below(e, m.field["left"])))
        return [sum_.get() for sum_ in sums]

    def _products(
        self, e: Emitter, a: Value, lines: Sequence[Value], sums: Sequence[Variable], at: tuple[Value, Value | None]
    ) -> None:
        shift, mask = at

        def read(line: Value) -> Value:
            pointer = e.at(line, shift)
            if mask is None:
                return e.b.load(pointer, typ=e.vector, align=4)
            return e.load_masked(pointer, mask)

        factor = read(a)
        for line, sum_ in zip(lines, sums, strict=True):
            sum_.set(e.fma(factor, read(line), sum_.get()))

    def _store(self, e: Emitter, out: Value, value: Value, count: Value) -> None:
        mask = below(e, count)
        if self.more:
            value = e.b.fadd(value, e.load_masked(out, mask))
        e.store_masked(value, out, mask)


def totals(e: Emitter, vectors: Sequence[Value]) -> Value:
    """Lane k is the sum of the lanes of vector k, for 2**n vectors, at most as many as lanes.

    Each round halves either the number of vectors or the number of lanes still to be added.
    """
    partial, lanes, distance = list(vectors), range(e.lanes), 1
    while distance < e.lanes:
        if len(partial) > 1:
            low = [k if not k & distance else e.lanes + k - distance for k in lanes]
            high = [k + distance if not k & distance else e.lanes + k for k in lanes]
            pairs = zip(partial[::2], partial[1::2], strict=True)
        else:
            low, high = list(lanes), [k ^ distance for k in lanes]
            pairs = zip(partial, partial, strict=True)
        partial = [e.b.fadd(_picked(e, a, b, low), _picked(e, a, b, high)) for a, b in pairs]
        distance *= 2
    return partial[0]


def _picked(e: Emitter, a: Value, b: Value, lanes: Sequence[int]) -> Value:
    """Lanes of two vectors, numbered through both."""
    return e.b.shuffle_vector(a, b, ir.Constant(e.ints, list(lanes)))
