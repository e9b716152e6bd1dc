"""Sparse times dense kernels that read a CSR matrix directly, without packing.

Every row checks its own indices before it uses them: those of an invalid row are not followed, and
the call reports it. Vectors are at most as wide as the matrix has columns. Rows are read in their
order in memory, which the processor prefetches; a row has several sums, so that none waits for
the one before.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from llvmlite import ir

from demask.kernels.cpu.number_types import SIZES, read_number, read_vector, type_of_sums
from demask.kernels.llvm.activations import activated
from demask.kernels.llvm.emitter import BIT, DOUBLE, FLOAT, I16, I32, I64, WORDS, Emitter, Value, Variable
from demask.kernels.llvm.isa import Isa
from demask.ops.activations import Act

#: Call of a kernel. names: row of out for each row of the matrix, if rows are renumbered; begin,
#: end: rows of the matrix; pitches: bytes from row to row; tiles: number of tiles per row; left:
#: lanes in use of a partial vector; rows, columns, entries: sizes of the matrix; bad: set to 1 for
#: invalid indices.
CALL = np.dtype([(key, "<i8") for key in (
    "crow", "col", "values", "names", "x", "x_pitch", "out", "out_pitch", "bias", "rows", "columns",
    "entries", "begin", "end", "tiles", "left", "bad")])  # fmt: skip
#: fields that are addresses
ADDRESSES = ("crow", "col", "values", "names", "a", "x", "out", "bias", "bad")
SUMS = 8  # registers for sums: hides the latency of multiply-adds


def narrowed(e: Emitter, lanes: int, number: ir.Type = FLOAT) -> Emitter:
    """The same function, with vectors of `lanes` numbers."""
    other = copy.copy(e)
    other.isa, other.lanes = replace(e.isa, lanes=lanes), lanes
    other.number, other.bytes = number, 8 if number is DOUBLE else 4
    other.vector, other.ints = ir.VectorType(number, lanes), ir.VectorType(I32, lanes)
    return other


def isa_of_sums(isa: Isa, numbers: str) -> Isa:
    """The target with as many lanes as its vectors have sums of such numbers."""
    return replace(isa, lanes=isa.lanes // 2) if type_of_sums(numbers) is DOUBLE else isa


INDICES = {16: I16, 32: I32, 64: I64}


class Matrix:
    """The fields of a call (`CALL` by default), and the rows and nonzeros of its matrix.

    column_bits: of an index; columns of 16 bits are unsigned, have row starts of 32 bits, and are in range.
    """

    def __init__(self, e: Emitter, column_bits: int, fields: np.dtype[Any] = CALL):
        call = e.pointer(e.args[0])
        self.e, self.index, self.start = e, INDICES[column_bits], INDICES[max(column_bits, 32)]
        self.field = {key: e.load(I64, call, k) for k, key in enumerate(fields.names or ())}
        self.at = {key: e.pointer(self.field[key]) for key in ADDRESSES if key in self.field}

    def number(self, key: str, position: Value) -> Value:
        """A row start, or the number of a row, as a signed 64-bit integer."""
        index = self.e.load(self.start, self.at[key], position)
        return index if self.start is I64 else self.e.b.sext(index, I64)

    def column(self, position: Value) -> Value:
        """The column of a nonzero, which is in range."""
        load = self.e.load if self.index is I64 else self.e.load_long
        return load(self.index, self.at["col"], position)

    def columns(self, position: Value, count: int) -> list[Value]:
        """The columns of consecutive nonzeros; those of 16 bits are read by four."""
        b = self.e.b
        if self.index is not I16:
            return [self.column(b.add(position, I64(k))) for k in range(count)]
        first = self.e.at(self.at["col"], position, I16)
        fours = [b.load(self.e.at(first, k, I16), typ=I64, align=2) for k in range(0, count, 4)]
        return [b.and_(b.lshr(four, I64(16 * k)), I64(0xFFFF)) for four in fours for k in range(4)]

    def row(self, row: Value) -> tuple[Value, Value]:
        """(first nonzero, number of nonzeros) of a row; no nonzeros if the row or one of its columns is invalid."""
        b = self.e.b
        begin, end = self.number("crow", row), self.number("crow", b.add(row, I64(1)))
        if self.index is I16:
            return begin, b.sub(end, begin)
        valid = b.and_(b.icmp_signed("<=", I64(0), begin), b.icmp_signed("<=", begin, end))
        valid = b.and_(valid, b.icmp_signed("<=", end, self.field["entries"]))
        self.report(b.not_(valid))
        begin, count = b.select(valid, begin, I64(0)), b.select(valid, b.sub(end, begin), I64(0))
        in_range = self._has_columns_in_range(begin, count)
        self.report(b.not_(in_range))
        return begin, b.select(in_range, count, I64(0))

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

    def _has_columns_in_range(self, begin: Value, count: Value) -> Value:
        """Whether all columns of a row are less than the number of columns, which is less than 2**31.

        Vectors of 32-bit words are compared: of a 64-bit index the lower word with the number of columns, and the
        upper one with 1.
        """
        e, b = self.e, self.e.b
        parts = self.index.width // 32  # words of an index
        words, step = ir.VectorType(I32, e.lanes), e.lanes // parts
        maximum = e.intrinsic(f"llvm.umax.v{e.lanes}i32", words, words, words)
        largest, rest = e.variable(words, ir.Constant(words, [0] * e.lanes)), e.variable(I64, I64(0))
        first = e.at(self.at["col"], begin, self.index)

        def read(position: Value) -> None:
            several = b.load(e.at(first, position, self.index), typ=words, align=4)
            largest.set(b.call(maximum, [largest.get(), several]))

        with b.if_else(b.icmp_signed(">=", count, I64(step))) as (long, short):
            with long:
                with e.loop(I64(0), b.and_(count, I64(-step)), step) as i:
                    read(i)
                read(b.sub(count, I64(step)))  # the last ones, of which some were read before
            with short, e.loop(I64(0), count) as i:
                column = self.column(b.add(begin, i))
                rest.set(b.select(b.icmp_unsigned(">", column, rest.get()), column, rest.get()))
        limits, columns = ir.Constant(words, [1] * e.lanes), b.trunc(self.field["columns"], I32)
        for lane in range(0, e.lanes, parts):
            limits = b.insert_element(limits, columns, I32(lane))
        outside = any_set(e, b.icmp_unsigned(">=", largest.get(), limits))
        in_rest = b.icmp_unsigned("<", rest.get(), self.field["columns"])
        # A row without nonzeros is in range even in a matrix without columns.
        return b.or_(b.and_(b.not_(outside), in_rest), b.icmp_signed("==", count, I64(0)))


def below(e: Emitter, count: Value) -> Value:
    """The mask of the first `count` lanes; count is any signed 64-bit integer."""
    kind = ir.VectorType(I64, e.lanes)
    return e.b.icmp_signed("<", ir.Constant(kind, list(range(e.lanes))), e.splat(count))


def any_set(e: Emitter, mask: Value) -> Value:
    """Whether any lane of a mask is set."""
    bits = e.b.bitcast(mask, ir.IntType(e.lanes))
    return e.b.icmp_unsigned("!=", bits, ir.IntType(e.lanes)(0))


@dataclass(frozen=True, slots=True)
class Wide:
    """out[r] = act(bias[r] + sum of values * x[columns]) in tiles of `tile` vectors of `lanes`.

    partial: only `left` lanes of the last vector of a tile are in use. column_bits: of an index.
    numbers: type of the values (`number_types`); x, bias and out are of the type of sums. named: rows of out
    are renumbered. biased: whether there is a bias. padded: rows of x have full vectors even where `partial` is set.
    """

    tile: int
    lanes: int
    partial: bool
    column_bits: int = 32
    numbers: str = "f32"
    named: bool = False
    biased: bool = False
    act: Act | None = None
    padded: bool = False

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """Write k(call, arena)."""
        m, e = Matrix(e, self.column_bits), narrowed(e, self.lanes, type_of_sums(self.numbers))
        f, b = m.field, e.b
        size = self.tile * self.lanes * e.bytes
        mask = below(e, f["left"])
        with e.loop(I64(0), f["tiles"]) as tile:
            shift = b.mul(tile, I64(size))
            x, out = e.at(m.at["x"], shift), e.at(m.at["out"], shift)
            with e.loop(f["begin"], f["end"]) as row:
                begin, count = m.row(row)
                name, valid = m.named(row, self.named)
                sums = self._row_sums(e, m, begin, count, (x, mask))
                bias = e.splat(e.load(e.number, m.at["bias"], name)) if self.biased else None
                with b.if_then(valid):
                    self._store(e, m, name, sums, bias, (out, mask))

    def _row_sums(self, e: Emitter, m: Matrix, begin: Value, count: Value, at: tuple[Value, Value]) -> list[Value]:
        """The sums of a row, one per vector of the tile: of several nonzeros at a time."""
        b, together = e.b, max(SUMS // self.tile, 1)
        sums = [[e.variable(e.vector, e.splat(0.0)) for _ in range(self.tile)] for _ in range(together)]
        full = b.and_(count, I64(-together))
        with e.loop(I64(0), full, together) as i:
            for k, group in enumerate(sums):
                self._add_product(e, m, b.add(begin, b.add(i, I64(k))), group, at)
        if together > 1:
            with e.loop(full, count) as i:
                self._add_product(e, m, b.add(begin, i), sums[0], at)
        totals = [[sum_.get() for sum_ in group] for group in sums]
        while half := len(totals) // 2:
            totals = [list(map(b.fadd, *two)) for two in zip(totals[:half], totals[half:], strict=True)]
        return totals[0]

    def _add_product(
        self, e: Emitter, m: Matrix, position: Value, sums: Sequence[Variable], at: tuple[Value, Value]
    ) -> None:
        """sums += value * x[column] of the nonzero at a position."""
        x, mask = at
        value = e.splat(read_number(e, self.numbers, m.at["values"], position))
        line = e.at(x, e.b.mul(m.column(position), m.field["x_pitch"]))
        for t, sum_ in enumerate(sums):
            pointer = e.at(line, t * self.lanes * e.bytes)
            if self.partial and not self.padded and t == self.tile - 1:
                vector = e.load_masked(pointer, mask)
            else:
                vector = e.b.load(pointer, typ=e.vector, align=4)
            sum_.set(e.fma(value, vector, sum_.get()))

    def _store(
        self, e: Emitter, m: Matrix, row: Value, sums: Sequence[Value], bias: Value | None, at: tuple[Value, Value]
    ) -> None:
        out, mask = at
        line = e.at(out, e.b.mul(row, m.field["out_pitch"]))
        for t, total in enumerate(sums):
            total = total if bias is None else e.b.fadd(total, bias)
            value, pointer = activated(e, total, self.act), e.at(line, t * self.lanes * e.bytes)
            if self.partial and t == self.tile - 1:
                e.store_masked(value, pointer, mask)
            else:
                e.b.store(value, pointer, align=4)


@dataclass(frozen=True, slots=True)
class Dot:
    """The same for one column: lanes are nonzeros, whose elements of x are loaded one by one.

    That takes fewer instructions than a gather of LLVM on any processor, and no longer than one of
    the processor. The last vector of a row is read where the row ends: lanes that were added before
    are not added again. Nonzeros of rows with fewer than lanes are added one by one.
    """

    column_bits: int = 32
    numbers: str = "f32"
    named: bool = False
    biased: bool = False
    act: Act | None = None

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """Write k(call, arena)."""
        m, isa = Matrix(e, self.column_bits), isa_of_sums(e.isa, self.numbers)
        e = narrowed(e, isa.lanes, type_of_sums(self.numbers))
        b, number = e.b, e.number
        add = e.intrinsic(f"llvm.fma.{WORDS[number]}", number, number, number, number)
        with e.loop(m.field["begin"], m.field["end"]) as row:
            begin, count = m.row(row)
            end = b.add(begin, count)
            sums = [e.variable(e.vector, e.splat(0.0)) for _ in range(2)]
            rest = e.variable(number, number(0.0))
            with b.if_else(b.icmp_signed(">=", count, I64(e.lanes))) as (long, short):
                with long:
                    pairs, full = (b.add(begin, b.and_(count, I64(-n * e.lanes))) for n in (2, 1))
                    with e.loop(begin, pairs, 2 * e.lanes) as i:
                        for k, sum_ in enumerate(sums):
                            sum_.set(self._with_products(e, m, b.add(i, I64(k * e.lanes)), sum_))
                    with e.loop(pairs, full, e.lanes) as i:
                        sums[0].set(self._with_products(e, m, i, sums[0]))
                    last = self._with_products(e, m, b.sub(end, I64(e.lanes)), sums[1])
                    is_added = below(e, b.sub(I64(e.lanes), b.sub(end, full)))
                    sums[1].set(b.select(is_added, sums[1].get(), last))
                with short, e.loop(begin, end) as i:
                    value = read_number(e, self.numbers, m.at["values"], i)
                    x = e.load(number, m.at["x"], m.column(i))
                    rest.set(b.call(add, [value, x, rest.get()]))
            total = b.fadd(e.total(b.fadd(*(sum_.get() for sum_ in sums))), rest.get())
            self._finish(e, m, row, total)

    def _with_products(self, e: Emitter, m: Matrix, position: Value, sum_: Variable) -> Value:
        """The sum with the products of as many nonzeros as there are lanes."""
        b, vector = e.b, ir.Constant(e.vector, ir.Undefined)
        for lane, column in enumerate(m.columns(position, e.lanes)):
            vector = b.insert_element(vector, e.load(e.number, m.at["x"], column), I32(lane))
        offset = b.mul(position, I64(SIZES[self.numbers]))
        values = read_vector(e, self.numbers, e.at(m.at["values"], offset))
        return e.fma(values, vector, sum_.get())

    def _finish(self, e: Emitter, m: Matrix, row: Value, total: Value) -> None:
        name, valid = m.named(row, self.named)
        if self.biased:
            total = e.b.fadd(total, e.load(e.number, m.at["bias"], name))
        value = e.b.extract_element(activated(e, e.splat(total), self.act), I32(0))
        with e.b.if_then(valid):
            e.b.store(value, e.at(m.at["out"], name, e.number))


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
    isa = isa_of_sums(isa, options.get("numbers", "f32"))
    if columns == 1:
        unpadded = {key: value for key, value in options.items() if key != "padded"}
        return [ColumnPiece(Dot(**unpadded), 0, 1, 1)]
    lanes = vector(columns, isa)
    if columns < isa.lanes:
        return [ColumnPiece(Wide(1, lanes, columns < lanes, **options), 0, 1, columns)]
    vectors = -(-columns // isa.lanes)
    tile = -(-vectors // -(-vectors // (isa.registers // 4)))  # equal tiles that fit in registers
    left = columns % isa.lanes or isa.lanes
    full_tiles = (vectors - (left < isa.lanes)) // tile
    column_pieces = []
    if full_tiles:
        column_pieces.append(ColumnPiece(Wide(tile, isa.lanes, False, **options), 0, full_tiles, 0))
    rest_vectors = vectors - full_tiles * tile
    if rest_vectors:
        kernel = Wide(rest_vectors, isa.lanes, left < isa.lanes, **options)
        column_pieces.append(ColumnPiece(kernel, full_tiles * tile * isa.lanes, 1, left))
    return column_pieces


def vector(columns: int, isa: Isa) -> int:
    """Lanes of the vectors used for `columns` columns; isa: that of the sums."""
    return min(isa.lanes, 1 << (columns - 1).bit_length())
