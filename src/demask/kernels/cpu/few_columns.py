"""Products of a matrix with one to eight vectors, which are as fast as the matrix can be read.

    out[j, r] = scale[r] * sum over k of w[r, k] * x[j, k]

Sums are in float32, of weights in any of `number_types`. A row has a scale, or each group of its columns has one.
A dense matrix is read as it is in memory. Of a matrix with zeros, only the nonzeros and a bit for each element are
(`bitmap_layout`); a table with an entry for each byte of bits has the number of the nonzero of each lane. Zeros are
multiplied as in the dense matrix (0 * inf is NaN).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from llvmlite import ir

from demask.kernels.bitmap_layout import BITS, STEP
from demask.kernels.cpu.csr import below, narrowed
from demask.kernels.cpu.number_types import SIZES, TYPES, as_float, is_supported, read_vector
from demask.kernels.llvm.emitter import BIT, BYTE, FLOAT, I16, I32, I64, Emitter, Fields, Value, Variable
from demask.kernels.llvm.isa import Isa

#: Call of a kernel. weights: the matrix, or its nonzeros; bits, starts: of a bitmap, and the number of the
#: first value of each pair of rows; table: of permutations; x: float32, with pitches in bytes; scale: float32
#: per row, or per row and group, or 0; groups: of a row; group: columns of one, a multiple of `STEP`; rows, columns:
#: of the matrix; begin, end: rows, or pairs of rows; first: pair of the first row of out.
FIELDS = "weights bits starts table scale groups group rows columns begin end x x_pitch out out_pitch first"
CALL = np.dtype([(key, "<i8") for key in FIELDS.split()])
AHEAD = 1536  # bytes that values are prefetched before they are read
MOST = {"bitmap": 4, "dense": 8}  # vectors of one call


def has_expand(numbers: str, isa: Isa) -> bool:
    """Whether an instruction of AVX-512 moves consecutive numbers to the lanes of a mask: vexpandps, and in VBMI2
    vpexpandw and vpexpandb."""
    return isa.lanes == 16 and (numbers == "f32" or "+avx512vbmi2" in isa.features)


def is_bitmap_supported(numbers: str, isa: Isa) -> bool:
    """Whether there is an instruction that moves bytes or words to lanes by a table."""
    return isa.is_arm or ("x86" in isa.triple and isa.lanes >= 8 and is_supported(numbers, isa))


@functools.cache
def permutations(numbers: str, arm: bool) -> np.ndarray:
    """The table of `BitmapRows`: for each byte of bits, where the values of its eight columns come from."""
    bits = np.arange(256)[:, None] >> np.arange(BITS) & 1
    order = np.where(bits, bits.cumsum(1) - 1, -1)  # number of the value of each column
    if numbers == "f32" and not arm:  # lanes, for vpermps; negative: zero
        table = order.astype(np.int32)
    else:  # bytes, for vpshufb and tbl; -1: zero. Of 32-bit lanes bf16 and i8 are the upper bytes
        size = SIZES[numbers]
        lane = size if numbers == "f16" else 4
        table = np.full((256, BITS, lane), -1, np.int8)
        source = np.where(order[..., None] < 0, -1, order[..., None] * size + np.arange(size))
        table[..., lane - size :] = source
    memory = np.zeros(table.nbytes + 63, np.uint8)  # entries must not cross cache lines
    first = -memory.ctypes.data % 64
    aligned = memory[first : first + table.nbytes]
    aligned[:] = np.frombuffer(table.tobytes(), np.uint8)
    return aligned


def _multiply_rows(
    e: Emitter,
    f: Fields,
    rows: list[Value],
    numbers: range,
    unroll: int,
    grouped: bool,
    add: Callable[[list[list[list[Variable]]], Value, Value], None],
) -> None:
    """Store what some rows have with each of some vectors. add: adds the products of the columns from one to another
    to sums [row][vector][`unroll`]."""
    b = e.b
    sums = [[[e.variable(e.vector, e.splat(0.0)) for _ in range(unroll)] for _ in numbers] for _ in rows]
    totals = sums
    if grouped:
        totals = [[[e.variable(e.vector, e.splat(0.0))] for _ in numbers] for _ in rows]
        number = e.variable(I64, I64(0))
        with e.loop(I64(0), f["columns"], f["group"]) as begin:
            end = b.add(begin, f["group"])
            add(sums, begin, b.select(b.icmp_signed("<", end, f["columns"]), end, f["columns"]))
            for row, row_sums, row_totals in zip(rows, sums, totals, strict=True):
                scale = e.splat(_scale(e, f, row, number.get()))
                for parts, (total,) in zip(row_sums, row_totals, strict=True):
                    group = functools.reduce(b.fadd, [part.get() for part in parts])
                    total.set(e.fma(group, scale, total.get()))
                    for part in parts:
                        part.set(e.splat(0.0))
            number.set(b.add(number.get(), I64(1)))
    else:
        add(sums, I64(0), f["columns"])
    for row, row_totals in zip(rows, totals, strict=True):
        scale = e.variable(FLOAT, FLOAT(1.0))
        if not grouped:
            with b.if_then(b.icmp_signed("!=", f["scale"], I64(0))):
                scale.set(_scale(e, f, row, I64(0)))
        for j, parts in zip(numbers, row_totals, strict=True):
            total = e.total(functools.reduce(b.fadd, [part.get() for part in parts]))
            line = e.at(f.pointer("out"), b.mul(f["out_pitch"], I64(j)))
            b.store(b.fmul(total, scale.get()), e.at(line, row, FLOAT))


def _scale(e: Emitter, f: Fields, row: Value, group: Value) -> Value:
    """The scale of a group of a row; of the last pair, which may have one row, that of the first."""
    b, last = e.b, e.b.sub(f["rows"], I64(1))
    row = b.select(b.icmp_signed("<", row, last), row, last)
    return e.load(FLOAT, f.pointer("scale"), b.add(b.mul(row, f["groups"]), group))


@dataclass(frozen=True, slots=True)
class DenseRows:
    """The product of a dense matrix, which has at least as many columns as vectors have lanes, with n vectors.

    Several rows are read together, and for some vectors at a time, whose sums fit in registers. Meanwhile the
    next rows are prefetched, which are too far in memory for the processor to foresee.
    """

    numbers: str
    n: int
    grouped: bool = False  # whether groups of columns have scales

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """Write k(call, arena)."""
        f, b = Fields(e, CALL.names), e.b
        sums = e.isa.registers // 2
        together = min(max(sums // self.n, 2), 4)
        rows = b.sub(f["end"], f["begin"])
        end = b.add(f["begin"], b.mul(b.sdiv(rows, I64(together)), I64(together)))
        for begin, limit, count in ((f["begin"], end, together), (end, f["end"], 1)):
            with e.loop(begin, limit, count) as row:
                for first in range(0, self.n, sums // 2):
                    numbers = range(first, min(first + sums // 2, self.n))
                    self._multiply(e, f, row, count, numbers, max(sums // (together * len(numbers)), 1))

    def _multiply(self, e: Emitter, f: Fields, row: Value, count: int, numbers: range, unroll: int) -> None:
        """Compute some rows for some vectors. unroll: sums of each."""
        b, size = e.b, SIZES[self.numbers]
        pitch, step = b.mul(f["columns"], I64(size)), unroll * e.lanes
        lines = [e.at(f.pointer("weights"), b.mul(b.add(row, I64(a)), pitch)) for a in range(count)]
        vectors = [e.at(f.pointer("x"), b.mul(f["x_pitch"], I64(j))) for j in numbers]

        def add_vector(sums: list[list[list[Variable]]], k: Value, unit: int = 0, mask: Value | None = None) -> None:
            x = [e.b.load(e.at(vector, k, FLOAT), typ=e.vector, align=4) for vector in vectors]
            for line, row_sums in zip(lines, sums, strict=True):
                w = read_vector(e, self.numbers, e.at(line, b.mul(k, I64(size))))
                for values, parts in zip(x, row_sums, strict=True):
                    total = e.fma(w, values, parts[unit].get())
                    parts[unit].set(total if mask is None else b.select(mask, parts[unit].get(), total))

        def add(sums: list[list[list[Variable]]], begin: Value, limit: Value) -> None:
            full, end = (b.add(begin, b.and_(b.sub(limit, begin), I64(-n))) for n in (step, e.lanes))
            with e.loop(begin, full, step) as k:
                for line in lines if numbers.start == 0 else ():
                    following = e.at(line, b.add(b.mul(pitch, I64(count)), b.mul(k, I64(size))))
                    for ahead in range(0, step * size, 64):
                        e.prefetch(e.at(following, ahead), writes=False)
                for unit in range(unroll):
                    add_vector(sums, b.add(k, I64(unit * e.lanes)), unit)
            if unroll > 1:
                with e.loop(full, end, e.lanes) as k:
                    add_vector(sums, k)
            with b.if_then(b.icmp_signed("<", end, limit)):  # lanes that were added are not added again
                is_added = below(e, b.sub(I64(e.lanes), b.sub(limit, end)))
                add_vector(sums, b.sub(limit, I64(e.lanes)), 0, is_added)

        rows = [b.add(row, I64(a)) for a in range(count)]
        _multiply_rows(e, f, rows, numbers, unroll, self.grouped, add)


@dataclass(frozen=True, slots=True)
class BitmapRows:
    """The product of a matrix in the form of a bitmap with n vectors. x is padded with zeros to a multiple of
    `STEP` columns, `out` to an even number of rows."""

    numbers: str
    n: int
    grouped: bool = False  # whether groups of columns have scales

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """Write k(call, arena)."""
        is_expanded, wide = has_expand(self.numbers, e.isa), narrowed(e, 2 * BITS)
        e = narrowed(e, BITS)
        f, b = Fields(e, CALL.names), e.b
        vectors = [e.at(f.pointer("x"), b.mul(f["x_pitch"], I64(j))) for j in range(self.n)]
        unroll = 2 if self.n == 1 else 1
        with e.loop(f["begin"], f["end"]) as pair:
            of_pair = BitmapPair(e, f, self.numbers, pair)

            def x_of(k: Value, unit: int) -> list[Value]:
                return [b.load(e.at(e.at(v, k, FLOAT), 4 * BITS * unit), typ=e.vector, align=4) for v in vectors]

            def add(sums: list[list[list[Variable]]], begin: Value, end: Value, of_pair: BitmapPair = of_pair) -> None:
                for k, unit, word, bit in of_pair.words(begin, end):
                    x = x_of(k, unit)
                    for a, row_sums in enumerate(sums):
                        w = of_pair.row(word, bit + BITS * a)
                        for column, parts in zip(x, row_sums, strict=True):
                            parts[unit % unroll].set(e.fma(w, column, parts[unit % unroll].get()))

            def add_both(
                sums: list[list[list[Variable]]], begin: Value, end: Value, of_pair: BitmapPair = of_pair
            ) -> None:
                """The same with vectors of both rows."""
                both = [[wide.variable(wide.vector, wide.splat(0.0)) for _ in range(2 * unroll)] for _ in vectors]
                for k, unit, word, bit in of_pair.words(begin, end):
                    w = of_pair.rows(wide, word, bit)
                    for column, parts in zip(x_of(k, unit), both, strict=True):
                        twice = b.shuffle_vector(column, column, ir.Constant(wide.ints, [*range(BITS)] * 2))
                        part = parts[unit % len(parts)]
                        part.set(wide.fma(w, twice, part.get()))
                for j, parts in enumerate(both):
                    total = functools.reduce(b.fadd, [part.get() for part in parts])
                    for a, row_sums in enumerate(sums):
                        sum_ = row_sums[j][0]
                        sum_.set(b.fadd(sum_.get(), _half(e, total, a)))

            rows = [b.add(b.mul(pair, I64(2)), I64(a)) for a in range(2)]
            _multiply_rows(e, f, rows, range(self.n), unroll, self.grouped, add_both if is_expanded else add)


@dataclass(frozen=True, slots=True)
class BitmapDecode:
    """The rows of such a matrix in float32, as rows of `out` from row 0 on, padded to `STEP` columns; not scaled.

    keeps: in bfloat16, which the matrix has.
    """

    numbers: str
    keeps: bool = False

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """Write k(call, arena)."""
        is_expanded, wide = has_expand(self.numbers, e.isa), narrowed(e, 2 * BITS)
        e = narrowed(e, BITS)
        f, b = Fields(e, CALL.names), e.b
        with e.loop(f["begin"], f["end"]) as pair:
            row = b.mul(b.sub(pair, f["first"]), I64(2))
            lines = [e.at(f.pointer("out"), b.mul(b.add(row, I64(a)), f["out_pitch"])) for a in range(2)]
            of_pair = BitmapPair(e, f, self.numbers, pair)
            for k, unit, word, bit in of_pair.words(I64(0), f["columns"]):
                both = of_pair.expanded(wide, word, bit) if is_expanded else None
                if both is not None and not self.keeps:
                    both = as_float(wide, self.numbers, both)
                for a, line in enumerate(lines):
                    values = of_pair.row(word, bit + BITS * a) if both is None else _half(e, both, a)
                    if self.keeps and both is None:  # the upper halves of float32
                        words = ir.VectorType(I32, BITS)
                        halves = b.lshr(b.bitcast(values, words), ir.Constant(words, [16] * BITS))
                        values = b.trunc(halves, ir.VectorType(I16, BITS))
                    size = 2 if self.keeps else 4
                    b.store(values, e.at(line, b.add(b.mul(k, I64(size)), I64(size * BITS * unit))), align=size)


@dataclass(frozen=True, slots=True)
class ColumnsDecode:
    """The nonzeros of rows in CSR in their columns of `out`, rows of zeros of as many bits, from row `first` on.

    Of a call, weights are the nonzeros, bits their columns, and starts (int32) those of rows; begin, end and first are
    rows. narrow: whether columns are 16-bit numbers without sign, or int32.
    """

    numbers: str
    narrow: bool

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """Write k(call, arena)."""
        f, b, size = Fields(e, CALL.names), e.b, I64(SIZES[self.numbers])
        kind = TYPES[self.numbers]
        with e.loop(f["begin"], f["end"]) as row:
            line = e.at(f.pointer("out"), b.mul(b.sub(row, f["first"]), f["out_pitch"]))
            ends = [e.load_long(I32, f.pointer("starts"), b.add(row, I64(k))) for k in range(2)]
            with e.loop(*ends) as k:
                column = e.load(I16 if self.narrow else I32, f.pointer("bits"), k)
                number = b.load(e.at(f.pointer("weights"), b.mul(k, size)), typ=kind, align=1)
                b.store(number, e.at(line, b.mul(b.zext(column, I64), size)), align=SIZES[self.numbers])


class BitmapPair:
    """Two rows of a bitmap, whose columns are read once, in ascending order."""

    def __init__(self, e: Emitter, f: Fields, numbers: str, pair: Value):
        b, self.e, self.numbers = e.b, e, numbers
        self.table, self.entry = f.pointer("table"), permutations(numbers, e.isa.is_arm).nbytes // 256
        self.bits = e.at(f.pointer("bits"), b.mul(pair, b.lshr(f["columns"], I64(2))))
        first = b.mul(e.load(I64, f.pointer("starts"), pair), I64(SIZES[numbers]))
        self.values = e.variable(self.bits.type, e.at(f.pointer("weights"), first))

    def row(self, word: Value, bit: int) -> Value:
        """Eight columns of a row as float32, whose bits begin at one of a word: those that follow what was read."""
        e = self.e
        mask = _entry(e, word, bit, self.entry)
        vector = _expanded(e, self.numbers, self.values.get(), e.at(self.table, mask))
        self._advance(mask)
        return vector

    def rows(self, wide: Emitter, word: Value, bit: int) -> Value:
        """Eight columns of the first row and those of the second as float32, by an instruction that expands."""
        return as_float(wide, self.numbers, self.expanded(wide, word, bit))

    def expanded(self, wide: Emitter, word: Value, bit: int) -> Value:
        """The same as they are stored."""
        b = wide.b
        bits = b.trunc(b.lshr(word, I32(bit)), I16)
        numbers = b.load(self.values.get(), typ=ir.VectorType(TYPES[self.numbers], 2 * BITS), align=1)
        expanded = expand(wide, numbers, b.bitcast(bits, ir.VectorType(BIT, 2 * BITS)))
        self._advance(b.zext(bits, I64))
        return expanded

    def _advance(self, mask: Value) -> None:
        """Go on after as many values as a mask has bits."""
        e, b = self.e, self.e.b
        count = b.call(e.intrinsic("llvm.ctpop.i64", I64, I64), [mask])
        self.values.set(e.at(self.values.get(), b.mul(count, I64(SIZES[self.numbers]))))

    def words(self, begin: Value, end: Value) -> Iterator[tuple[Value, int, Value, int]]:
        """Runs its body for each eight columns from `begin` to `end`, those from `k` + 8 * `unit` on: with the bits of
        the first row, and then of the second, in a word from a bit on."""
        e, b = self.e, self.e.b
        with e.loop(begin, end, STEP) as k:
            here = e.at(self.bits, b.lshr(k, I64(2)))
            e.prefetch(e.at(here, 512), writes=False)
            for half in range(STEP // BITS // 2):
                e.prefetch(e.at(self.values.get(), AHEAD), writes=False)
                word = e.load(I32, here, half)
                for unit in range(2):
                    yield k, 2 * half + unit, word, 2 * BITS * unit


def expand(e: Emitter, numbers: Value, mask: Value) -> Value:
    """Consecutive numbers in the lanes of a mask, zeros in others, by an instruction of AVX-512."""
    kind, name = numbers.type, {FLOAT: "f32", ir.HalfType(): "i16", I16: "i16", BYTE: "i8"}[numbers.type.element]
    integers = ir.VectorType({"f32": FLOAT, "i16": I16, "i8": BYTE}[name], kind.count)
    function = e.intrinsic(f"llvm.x86.avx512.mask.expand.v{kind.count}{name}", integers, integers, integers, mask.type)
    zeros = ir.Constant(integers, [0] * kind.count)
    return e.b.bitcast(e.b.call(function, [e.b.bitcast(numbers, integers), zeros, mask]), kind)


def _half(e: Emitter, vector: Value, number: int) -> Value:
    """Eight lanes of sixteen."""
    lanes = range(BITS * number, BITS * number + BITS)
    return e.b.shuffle_vector(vector, vector, ir.Constant(e.ints, list(lanes)))


def _expanded(e: Emitter, numbers: str, values: Value, entry: Value) -> Value:
    """Eight columns of a row as float32: values in their lanes, and zeros."""
    b = e.b
    if e.isa.is_arm:
        return _expanded_by_tbl(e, numbers, values, entry)
    if numbers == "f32":
        order = b.load(entry, typ=e.ints, align=32)
        permute = e.intrinsic("llvm.x86.avx2.permps", e.vector, e.vector, e.ints)
        moved = b.call(permute, [b.load(values, typ=e.vector, align=4), order])
        return b.select(b.icmp_signed("<", order, e.splat(I32(0))), e.splat(0.0), moved)
    short, long = ir.VectorType(BYTE, 16), ir.VectorType(BYTE, 32)
    if numbers == "f16":
        shuffle = e.intrinsic("llvm.x86.ssse3.pshuf.b.128", short, short, short)
        moved = b.call(shuffle, [b.load(values, typ=short, align=1), b.load(entry, typ=short, align=16)])
        return as_float(e, "f16", b.bitcast(moved, ir.VectorType(ir.HalfType(), BITS)))
    packed = b.load(values, typ=short, align=1)
    twice = ir.Constant(ir.VectorType(I32, 32), [*range(16)] * 2)
    both = b.shuffle_vector(packed, ir.Constant(short, ir.Undefined), twice)
    shuffle = e.intrinsic("llvm.x86.avx2.pshuf.b", long, long, long)
    moved = b.call(shuffle, [both, b.load(entry, typ=long, align=32)])
    return _from_upper_bytes(e, numbers, moved)


def _expanded_by_tbl(e: Emitter, numbers: str, values: Value, entry: Value) -> Value:
    """The same with the instructions of NEON, each of which moves bytes of one or two registers to one."""
    b, short = e.b, ir.VectorType(BYTE, 16)
    count = 2 if numbers == "f32" else 1
    registers = [b.load(e.at(values, 16 * k), typ=short, align=1) for k in range(count)]
    table = e.intrinsic(f"llvm.aarch64.neon.tbl{count}.v16i8", short, *[short] * (count + 1))

    def move(half: int) -> Value:
        return b.call(table, [*registers, b.load(e.at(entry, 16 * half), typ=short, align=16)])

    if numbers == "f16":
        return as_float(e, "f16", b.bitcast(move(0), ir.VectorType(ir.HalfType(), BITS)))
    moved = b.shuffle_vector(move(0), move(1), ir.Constant(ir.VectorType(I32, 32), list(range(32))))
    return b.bitcast(moved, e.vector) if numbers == "f32" else _from_upper_bytes(e, numbers, moved)


def _from_upper_bytes(e: Emitter, numbers: str, moved: Value) -> Value:
    """Numbers whose bytes are the upper ones of 32-bit lanes, as float32."""
    if numbers == "bf16":
        return e.b.bitcast(moved, e.vector)
    return e.b.sitofp(e.b.ashr(e.b.bitcast(moved, e.ints), e.splat(I32(24))), e.vector)


def _entry(e: Emitter, word: Value, bit: int, size: int) -> Value:
    """Offset in bytes of the table's entry for the byte of a word that begins at a bit."""
    shift = bit - (size.bit_length() - 1)
    moved = e.b.lshr(word, I32(shift)) if shift > 0 else e.b.shl(word, I32(-shift))
    return e.b.zext(e.b.and_(moved, I32(255 * size)), I64)
