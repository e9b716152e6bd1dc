"""Products of a matrix with one to eight vectors, which are as fast as the matrix can be read.

    out[j, r] = scale[r] * sum over k of w[r, k] * x[j, k]

Sums are in float32, of weights in any of `number_types`. A dense matrix is read as it is in memory. Of a
matrix with zeros, only the nonzeros and a bit for each element are (`bitmap_layout`); a table with an entry for
each byte of bits has the number of the nonzero of each lane. Zeros are multiplied as in the dense matrix (0 * inf is
NaN).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from llvmlite import ir

from demask.kernels.bitmap_layout import BITS, STEP
from demask.kernels.cpu.csr import below, narrowed
from demask.kernels.cpu.number_types import SIZES, as_float, is_supported, read_vector
from demask.kernels.llvm.emitter import BYTE, FLOAT, I32, I64, Emitter, Fields, Value, Variable
from demask.kernels.llvm.isa import Isa

#: Call of a kernel. weights: the matrix, or its nonzeros; bits, starts: of a bitmap, and the number of the
#: first value of each pair of rows; table: of permutations; x: float32, with pitches in bytes; scale: float32
#: per row, or 0; rows, columns: of the matrix; begin, end: rows, or pairs of rows; first: pair of the first row of out.
FIELDS = "weights bits starts table scale rows columns begin end x x_pitch out out_pitch first"
CALL = np.dtype([(key, "<i8") for key in FIELDS.split()])
AHEAD = 1536  # bytes that values are prefetched before they are read
MOST = {"bitmap": 4, "dense": 8}  # vectors of one call


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


def _store_totals(e: Emitter, f: Fields, row: Value, sums: list[list[Variable]], numbers: range) -> None:
    """Store what a row has with each of some vectors: the total of a list of sums."""
    b = e.b
    scale = e.variable(FLOAT, FLOAT(1.0))
    with b.if_then(b.icmp_signed("!=", f["scale"], I64(0))):
        last = b.sub(f["rows"], I64(1))  # the last pair may have one row
        scale.set(e.load(FLOAT, f.pointer("scale"), b.select(b.icmp_signed("<", row, last), row, last)))
    for j, parts in zip(numbers, sums, strict=True):
        total = e.total(functools.reduce(b.fadd, [sum_.get() for sum_ in parts]))
        line = e.at(f.pointer("out"), b.mul(f["out_pitch"], I64(j)))
        b.store(b.fmul(total, scale.get()), e.at(line, row, FLOAT))


@dataclass(frozen=True, slots=True)
class DenseRows:
    """The product of a dense matrix, which has at least as many columns as vectors have lanes, with n vectors.

    Several rows are read together, and for some vectors at a time, whose sums fit in registers. Meanwhile the
    next rows are prefetched, which are too far in memory for the processor to foresee.
    """

    numbers: str
    n: int

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
        sums = [[[e.variable(e.vector, e.splat(0.0)) for _ in range(unroll)] for _ in numbers] for _ in lines]

        def add(k: Value, unit: int, mask: Value | None = None) -> None:
            x = [e.b.load(e.at(vector, k, FLOAT), typ=e.vector, align=4) for vector in vectors]
            for line, row_sums in zip(lines, sums, strict=True):
                w = read_vector(e, self.numbers, e.at(line, b.mul(k, I64(size))))
                for values, parts in zip(x, row_sums, strict=True):
                    total = e.fma(w, values, parts[unit].get())
                    parts[unit].set(total if mask is None else b.select(mask, parts[unit].get(), total))

        full, end = (b.and_(f["columns"], I64(-n)) for n in (step, e.lanes))
        with e.loop(I64(0), full, step) as k:
            for line in lines if numbers.start == 0 else ():
                following = e.at(line, b.add(b.mul(pitch, I64(count)), b.mul(k, I64(size))))
                for ahead in range(0, step * size, 64):
                    e.prefetch(e.at(following, ahead), writes=False)
            for unit in range(unroll):
                add(b.add(k, I64(unit * e.lanes)), unit)
        if unroll > 1:
            with e.loop(full, end, e.lanes) as k:
                add(k, 0)
        with b.if_then(b.icmp_signed("<", end, f["columns"])):  # lanes that were added are not added again
            is_added = below(e, b.sub(I64(e.lanes), b.sub(f["columns"], end)))
            add(b.sub(f["columns"], I64(e.lanes)), 0, is_added)
        for a, row_sums in enumerate(sums):
            _store_totals(e, f, b.add(row, I64(a)), row_sums, numbers)


@dataclass(frozen=True, slots=True)
class BitmapRows:
    """The product of a matrix in the form of a bitmap with n vectors. x is padded with zeros to a multiple of
    `STEP` columns, `out` to an even number of rows."""

    numbers: str
    n: int

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """Write k(call, arena)."""
        e = narrowed(e, BITS)
        f, b = Fields(e, CALL.names), e.b
        vectors = [e.at(f.pointer("x"), b.mul(f["x_pitch"], I64(j))) for j in range(self.n)]
        unroll = 2 if self.n == 1 else 1
        with e.loop(f["begin"], f["end"]) as pair:
            sums = [[[e.variable(e.vector, e.splat(0.0)) for _ in range(unroll)] for _ in vectors] for _ in range(2)]
            for k, unit, expanded in _vectors_of_pair(e, f, self.numbers, pair):
                x = [b.load(e.at(e.at(v, k, FLOAT), 4 * BITS * unit), typ=e.vector, align=4) for v in vectors]
                for row_sums in sums:
                    w = expanded()
                    for column, parts in zip(x, row_sums, strict=True):
                        parts[unit % unroll].set(e.fma(w, column, parts[unit % unroll].get()))
            for a, row_sums in enumerate(sums):
                _store_totals(e, f, b.add(b.mul(pair, I64(2)), I64(a)), row_sums, range(self.n))


@dataclass(frozen=True, slots=True)
class BitmapDecode:
    """The rows of such a matrix in float32, as rows of `out` from row 0 on, padded to `STEP` columns; not scaled."""

    numbers: str

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """Write k(call, arena)."""
        e = narrowed(e, BITS)
        f, b = Fields(e, CALL.names), e.b
        with e.loop(f["begin"], f["end"]) as pair:
            row = b.mul(b.sub(pair, f["first"]), I64(2))
            lines = [e.at(f.pointer("out"), b.mul(b.add(row, I64(a)), f["out_pitch"])) for a in range(2)]
            for k, unit, expanded in _vectors_of_pair(e, f, self.numbers, pair):
                for line in lines:
                    b.store(expanded(), e.at(e.at(line, k, FLOAT), 4 * BITS * unit), align=4)


def _vectors_of_pair(
    e: Emitter, f: Fields, numbers: str, pair: Value
) -> Iterator[tuple[Value, int, Callable[[], Value]]]:
    """Runs its body for each eight columns of two rows: the columns from `k` + 8 * `unit` on. The function that it
    gets returns those of the first row when it is called first, then those of the second."""
    b, size, entry = e.b, SIZES[numbers], permutations(numbers, e.isa.is_arm).nbytes // 256
    table, count_bits = f.pointer("table"), e.intrinsic("llvm.ctpop.i64", I64, I64)
    words = e.at(f.pointer("bits"), b.mul(pair, b.lshr(f["columns"], I64(2))))
    first = b.mul(e.load(I64, f.pointer("starts"), pair), I64(size))
    values = e.variable(words.type, e.at(f.pointer("weights"), first))

    def expand(word: Value, bit: int) -> Value:
        mask = _entry(e, word, bit, entry)
        vector = _expanded(e, numbers, values.get(), e.at(table, mask))
        values.set(e.at(values.get(), b.mul(b.call(count_bits, [mask]), I64(size))))
        return vector

    with e.loop(I64(0), f["columns"], STEP) as k:
        here = e.at(words, b.lshr(k, I64(2)))
        e.prefetch(e.at(here, 512), writes=False)
        for half in range(STEP // BITS // 2):
            e.prefetch(e.at(values.get(), AHEAD), writes=False)
            word = e.load(I32, here, half)
            for unit in range(2):
                bits = iter((2 * BITS * unit, 2 * BITS * unit + BITS))
                yield k, 2 * half + unit, lambda word=word, bits=bits: expand(word, next(bits))


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
