"""Sparse times dense kernels that read a CSR matrix directly, without packing.

Every row checks its own indices before it uses them: those of an invalid row are not followed, and
the call reports it. Vectors are at most as wide as the matrix has columns; with few columns, rows
of similar length are computed together, since one row alone would wait for its own sums.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from llvmlite import ir

from demask.kernels.llvm.activations import activated
from demask.kernels.llvm.emitter import BIT, FLOAT, I32, I64, POINTER, VOID, Emitter, Value, Variable
from demask.kernels.llvm.isa import Isa
from demask.ops.activations import Act

#: Call of a kernel. names: row of out for each row of the matrix, if rows are renumbered; order:
#: rows of the matrix, of which this call computes begin to end, those before `together` in groups;
#: pitches: bytes from row to row; tiles: number of tiles per row; left: lanes in use of a partial
#: vector; rows, columns, entries: sizes of the matrix; bad: set to 1 for invalid indices.
CALL = np.dtype([(key, "<i8") for key in (
    "crow", "col", "values", "names", "order", "begin", "together", "end", "x", "x_pitch", "out",
    "out_pitch", "bias", "tiles", "left", "rows", "columns", "entries", "bad")])  # fmt: skip
#: fields that are addresses
ADDRESSES = ("crow", "col", "values", "names", "order", "a", "x", "out", "bias", "bad")


def narrowed(e: Emitter, lanes: int) -> Emitter:
    """The same function, with vectors of `lanes` lanes."""
    other = copy.copy(e)
    other.isa, other.lanes = replace(e.isa, lanes=lanes), lanes
    other.vector, other.ints = ir.VectorType(FLOAT, lanes), ir.VectorType(I32, lanes)
    return other


class Matrix:
    """The fields of a call (`CALL` by default), and the rows and nonzeros of its matrix."""

    def __init__(self, e: Emitter, wide: bool, fields: np.dtype[Any] = CALL):
        call = e.pointer(e.args[0])
        self.e, self.index = e, I64 if wide else I32
        self.field = {key: e.load(I64, call, k) for k, key in enumerate(fields.names or ())}
        self.at = {key: e.pointer(self.field[key]) for key in ADDRESSES if key in self.field}

    def number(self, key: str, position: Value) -> Value:
        """An index as a signed 64-bit integer."""
        index = self.e.load(self.index, self.at[key], position)
        return index if self.index is I64 else self.e.b.sext(index, I64)

    def row(self, position: Value) -> tuple[Value, Value, Value]:
        """(row, first nonzero, number of nonzeros) of a position in the order; no nonzeros if the
        row is invalid.
        """
        e, b = self.e, self.e.b
        row = e.load_long(I32, self.at["order"], position)
        begin, end = self.number("crow", row), self.number("crow", b.add(row, I64(1)))
        valid = b.and_(b.icmp_signed("<=", I64(0), begin), b.icmp_signed("<=", begin, end))
        valid = b.and_(valid, b.icmp_signed("<=", end, self.field["entries"]))
        self.report(b.not_(valid))
        return row, b.select(valid, begin, I64(0)), b.select(valid, b.sub(end, begin), I64(0))

    def named(self, row: Value, named: bool) -> tuple[Value, Value]:
        """(row of out, whether it is valid); row 0 if its number is out of range."""
        if not named:
            return row, BIT(1)
        b, name = self.e.b, self.number("names", row)
        valid = b.icmp_unsigned("<", name, self.field["rows"])
        self.report(b.not_(valid))
        return b.select(valid, name, I64(0)), valid

    def report(self, bad: Value) -> None:
        """Set `bad` if a condition is true."""
        with self.e.b.if_then(bad, likely=False):
            self.e.b.store(I64(1), self.at["bad"])

    def columns(self, position: Value, mask: Value) -> tuple[Value, Value]:
        """A vector of column indices, and the mask of those that are in range."""
        e, b = self.e, self.e.b
        kind = ir.VectorType(self.index, e.lanes)
        indices = masked(e, kind, e.at(self.at["col"], position, self.index), mask)
        limit = self.field["columns"]
        limit = limit if self.index is I64 else b.trunc(limit, I32)
        inside = b.icmp_unsigned("<", indices, e.splat(limit))
        return indices, b.and_(mask, inside)

    def checked(self, begin: Value, count: Value) -> Value:
        """How many nonzeros of a row to read: all, or none if a column is out of range."""
        e, b = self.e, self.e.b
        mask_type = ir.VectorType(BIT, e.lanes)
        bad = e.variable(mask_type, ir.Constant(mask_type, [0] * e.lanes))
        with e.loop(I64(0), count, e.lanes) as i:
            mask = below(e, b.sub(count, i))
            _, valid = self.columns(b.add(begin, i), mask)
            bad.set(b.or_(bad.get(), b.xor(mask, valid)))
        any_bad = any_set(e, bad.get())
        self.report(any_bad)
        return b.select(any_bad, I64(0), count)


def below(e: Emitter, count: Value) -> Value:
    """The mask of the first `count` lanes; count is any signed 64-bit integer."""
    kind = ir.VectorType(I64, e.lanes)
    return e.b.icmp_signed("<", ir.Constant(kind, list(range(e.lanes))), e.splat(count))


def any_set(e: Emitter, mask: Value) -> Value:
    """Whether any lane of a mask is set."""
    bits = e.b.bitcast(mask, ir.IntType(e.lanes))
    return e.b.icmp_unsigned("!=", bits, ir.IntType(e.lanes)(0))


def masked(e: Emitter, kind: Any, pointer: Value, mask: Value, align: int = 4, other: float = 0) -> Value:
    """A vector from memory; lanes outside of the mask are `other` and are not read."""
    word = {FLOAT: "f32", I32: "i32", I64: "i64"}[kind.element]
    load = e.intrinsic(f"llvm.masked.load.v{e.lanes}{word}.p0", kind, POINTER, I32, mask.type, kind)
    return e.b.call(load, [pointer, I32(align), mask, ir.Constant(kind, [other] * e.lanes)])


def store_masked(e: Emitter, value: Value, pointer: Value, mask: Value) -> None:
    """Write the lanes of a float vector that are in the mask."""
    store = e.intrinsic(f"llvm.masked.store.v{e.lanes}f32.p0", VOID, e.vector, POINTER, I32, mask.type)
    e.b.call(store, [value, pointer, I32(4), mask])


@dataclass(frozen=True, slots=True)
class Wide:
    """out[r] = act(bias[r] + sum of values * x[columns]) in tiles of `tile` vectors of `lanes`.

    partial: only `left` lanes of the last vector of a tile are in use. side: rows computed
    together.
    wide: 64-bit indices. named: rows of out are renumbered. biased: whether there is a bias.
    padded: rows of x have full vectors even where `partial` is set.
    """

    tile: int
    lanes: int
    partial: bool
    side: int
    wide: bool = False
    named: bool = False
    biased: bool = False
    act: Act | None = None
    padded: bool = False

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """Write k(call, arena)."""
        m, e = Matrix(e, self.wide), narrowed(e, self.lanes)
        f, b = m.field, e.b
        size = self.tile * self.lanes * 4
        mask = below(e, f["left"])
        with e.loop(I64(0), f["tiles"]) as tile:
            shift = b.mul(tile, I64(size))
            x, out = e.at(m.at["x"], shift), e.at(m.at["out"], shift)
            with e.loop(f["begin"], f["together"], self.side) as first:
                self._compute_rows(e, m, first, self.side, (x, out, mask))
            with e.loop(f["together"], f["end"]) as first:
                self._compute_rows(e, m, first, 1, (x, out, mask))

    def _compute_rows(self, e: Emitter, m: Matrix, first: Value, side: int, at: tuple[Value, Value, Value]) -> None:
        b, (x, out, mask) = e.b, at
        rows = [m.row(b.add(first, I64(r)) if r else first) for r in range(side)]
        counts = [m.checked(begin, count) for _, begin, count in rows]
        shortest = counts[0]
        for count in counts[1:]:
            shortest = b.select(b.icmp_signed("<", count, shortest), count, shortest)
        names = [m.named(row, self.named) for row, _, _ in rows]
        sums = []
        for name, _ in names:
            start = e.splat(e.load(FLOAT, m.at["bias"], name)) if self.biased else e.splat(0.0)
            sums.append([e.variable(e.vector, start) for _ in range(self.tile)])
        with e.loop(I64(0), shortest) as i:
            for (_, begin, _), row in zip(rows, sums, strict=True):
                self._add_product(e, m, b.add(begin, i), row, (x, mask))
        for (_, begin, _), count, row in zip(rows, counts, sums, strict=True):
            if side > 1:
                with e.loop(shortest, count) as i:
                    self._add_product(e, m, b.add(begin, i), row, (x, mask))
        for (name, good), sum_ in zip(names, sums, strict=True):
            with b.if_then(good):
                self._store(e, m, name, sum_, (out, mask))

    def _add_product(
        self, e: Emitter, m: Matrix, position: Value, sums: list[Variable], at: tuple[Value, Value]
    ) -> None:
        """sums += value * x[column] of the nonzero at a position."""
        x, mask = at
        value = e.splat(e.load(FLOAT, m.at["values"], position))
        line = e.at(x, e.b.mul(m.number("col", position), m.field["x_pitch"]))
        for t, sum_ in enumerate(sums):
            pointer = e.at(line, t * self.lanes * 4)
            if self.partial and not self.padded and t == self.tile - 1:
                vector = masked(e, e.vector, pointer, mask)
            else:
                vector = e.b.load(pointer, typ=e.vector, align=4)
            sum_.set(e.fma(value, vector, sum_.get()))

    def _store(self, e: Emitter, m: Matrix, row: Value, sums: list[Variable], at: tuple[Value, Value]) -> None:
        out, mask = at
        line = e.at(out, e.b.mul(row, m.field["out_pitch"]))
        for t, sum_ in enumerate(sums):
            value, pointer = activated(e, sum_.get(), self.act), e.at(line, t * self.lanes * 4)
            if self.partial and t == self.tile - 1:
                store_masked(e, value, pointer, mask)
            else:
                e.b.store(value, pointer, align=4)


@dataclass(frozen=True, slots=True)
class Dot:
    """The same for one column: lanes are nonzeros, and x is gathered.

    A row begins at the start of the aligned vector that contains its first value (values are stored
    at multiples of 4 bytes), so all reads are aligned. Lanes of other rows are masked and not read.
    """

    wide: bool = False
    named: bool = False
    biased: bool = False
    act: Act | None = None

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """Write k(call, arena)."""
        m, b = Matrix(e, self.wide), e.b
        shift = b.lshr(m.field["values"], I64(2))  # lane of the first value within its vector
        with e.loop(m.field["begin"], m.field["end"]) as position:
            row, begin, count = m.row(position)
            back = b.and_(b.add(begin, shift), I64(e.lanes - 1))
            sum_ = e.variable(e.vector, e.splat(0.0))
            none = ir.Constant(ir.VectorType(BIT, e.lanes), [0] * e.lanes)
            bad = e.variable(none.type, none)
            end = b.select(b.icmp_signed(">", count, I64(0)), count, b.neg(back))
            with e.loop(b.neg(back), end, e.lanes) as i:
                self._add_products(e, m, (begin, count, i), sum_, bad)
            m.report(any_set(e, bad.get()))
            self._finish(e, m, row, e.total(sum_.get()))

    def _add_products(
        self, e: Emitter, m: Matrix, at: tuple[Value, Value, Value], sum_: Variable, bad: Variable
    ) -> None:
        b, (begin, count, i) = e.b, at
        mask = b.and_(below(e, b.sub(count, i)), b.not_(below(e, b.neg(i))))
        position = b.add(begin, i)
        col, valid = m.columns(position, mask)
        bad.set(b.or_(bad.get(), b.xor(mask, valid)))
        # columns fit in 32 bits: there are fewer than 2**31
        index = b.trunc(col, e.ints) if self.wide else col
        values = masked(e, e.vector, e.at(m.at["values"], position, FLOAT), mask, e.isa.line)
        vector = e.gather(m.at["x"], index, valid, e.splat(0.0))
        sum_.set(e.fma(values, vector, sum_.get()))

    def _finish(self, e: Emitter, m: Matrix, row: Value, total: Value) -> None:
        name, valid = m.named(row, self.named)
        if self.biased:
            total = e.b.fadd(total, e.load(FLOAT, m.at["bias"], name))
        value = e.b.extract_element(activated(e, e.splat(total), self.act), I32(0))
        with e.b.if_then(valid):
            e.b.store(value, e.at(m.at["out"], name, FLOAT))


@dataclass(frozen=True, slots=True)
class ColumnPiece:
    """Some columns of the product: their kernel, the first column, the number of tiles, and the
    lanes in use of the last vector.
    """

    kernel: Wide | Dot
    first: int
    tiles: int
    left: int


def pieces(columns: int, isa: Isa, options: dict[str, Any]) -> list[ColumnPiece]:
    """The kernels that together compute `columns` columns.

    options: fields of the kernels.
    """
    if columns == 1:
        unpadded = {key: value for key, value in options.items() if key != "padded"}
        return [ColumnPiece(Dot(**unpadded), 0, 1, 1)]
    lanes = vector(columns, isa)
    if columns < isa.lanes:
        kernel = Wide(1, lanes, columns < lanes, SIDE[0], **options)
        return [ColumnPiece(kernel, 0, 1, columns)]
    vectors = -(-columns // isa.lanes)
    tile = -(-vectors // -(-vectors // (isa.registers // 4)))  # equal tiles that fit in registers
    left = columns % isa.lanes or isa.lanes
    full_tiles = (vectors - (left < isa.lanes)) // tile
    column_pieces = []
    if full_tiles:
        column_pieces.append(ColumnPiece(Wide(tile, isa.lanes, False, side(tile), **options), 0, full_tiles, 0))
    rest_vectors = vectors - full_tiles * tile
    if rest_vectors:
        kernel = Wide(rest_vectors, isa.lanes, left < isa.lanes, side(rest_vectors), **options)
        column_pieces.append(ColumnPiece(kernel, full_tiles * tile * isa.lanes, 1, left))
    return column_pieces


def vector(columns: int, isa: Isa) -> int:
    """Lanes of the vectors used for `columns` columns."""
    return min(isa.lanes, 1 << (columns - 1).bit_length())


SIDE = (4, 2, 2)  # rows computed together, for tiles of 1, 2, 3 vectors: hides FMA latency


def side(tile: int) -> int:
    """How many rows are computed together with tiles of `tile` vectors."""
    return SIDE[tile - 1] if tile <= len(SIDE) else 1
