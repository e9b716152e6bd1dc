"""Which outputs of relu(w · x + b) are zero, proved from 8-bit or 4-bit weights.

**Bound.** The weights of a row are w_j = s q_j + c + d_j, with integers q_j that the pilot reads;
the input is x_j = lo + t u_j + e_j, with integers 0 <= u_j <= 65535. Then, exactly,

    Σ w_j x_j = s (lo Σ q_j + t Σ q_j u_j + Σ q_j e_j) + c Σ x_j + Σ d_j x_j

P = Σ q_j u_j is computed in integers, without error. |Σ q_j e_j| <= max|e| Σ|q_j|, and
|Σ d_j x_j| <= min(max|d| ‖x‖₁, ‖d‖₂ ‖x‖₂): the first is better for few nonzeros, the second for
many (Hölder; Cauchy and Schwarz).

**Rounding.** The kernel that the certificate is about (`kernels.cpu.gemv`) is a chain of n' fused
multiply-adds in float32, n' being the nonzeros of x. Its error is at most γ_n' Σ|w_j x_j| <= γ_n'
max|w| ‖x‖₁, where γ_n = n u / (1 - n u), u = 2^-24 (Higham, "Accuracy and Stability of Numerical
Algorithms", 2nd ed., section 3.1 and lemma 3.1), plus n' 2^-126 for products that underflow. Adding
the bias rounds once more, which preserves the sign. Sums over x here have terms of one sign or are
bounded in the same way, in as many chains as there are lanes. The bound itself is about ten
operations on numbers of at most (|lo| + range) Σ|q_j| s, |c| ‖x‖₁, |b| and the errors above: each
of these is increased by 40 u of itself. Constants are computed in float64 and rounded up.

So relu returns 0 wherever the bound is <= 0. NaN, infinities and sums above 1e30 fail the
comparison, and the row is computed.

**Layouts.** 8 bits: [tile][4 columns][rows of the tile][4]. 4 bits: [tile][8 columns][rows][4
bytes], with the first four columns in the low halves, values 0 to 15. The second plane of two: row
by row, 128 columns in 64 bytes, low halves first. u has 16 bits, stored as two planes of bytes, so
every product of bytes is summed twice, exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from llvmlite import ir

from demask.kernels.cpu.csr import below
from demask.kernels.cpu.gemv import compressed, iota, set_lanes
from demask.kernels.llvm.emitter import BYTE, FLOAT, I16, I32, I64, Emitter, Fields, Value, Variable
from demask.kernels.llvm.isa import Isa

NIBBLES = 0x0F0F0F0F  # the lower halves of four bytes


def int_splat(e: Emitter, value: int) -> Value:
    """An integer in every lane."""
    return ir.Constant(e.ints, [value] * e.lanes)


class Dots:
    """sum += products of four bytes with four bytes in each lane; u is unsigned, q signed."""

    def __init__(self, e: Emitter, instruction: str):
        self.e, self.instruction = e, instruction
        self.short = ir.VectorType(I16, 2 * e.lanes)
        self.bytes = ir.VectorType(BYTE, 4 * e.lanes)

    def ready(self, u: Value) -> list[Value]:
        """Four bytes (a 32-bit integer, or one per lane) in the form that products need."""
        e, b = self.e, self.e.b
        wide = e.splat(u) if u.type == I32 else u
        if self.instruction == "vnni":
            return [wide]
        if self.instruction == "madd":
            low = int_splat(e, 0x00FF00FF)
            odd = b.and_(b.lshr(wide, int_splat(e, 8)), low)
            return [b.bitcast(b.and_(wide, low), self.short), b.bitcast(odd, self.short)]
        return [b.and_(b.lshr(wide, int_splat(e, 8 * k)), int_splat(e, 255)) for k in range(4)]

    def add(self, sum_: Value, u: list[Value], q: Value) -> Value:
        e, b = self.e, self.e.b
        if self.instruction == "vnni":
            name = "llvm.x86.avx512.vpdpbusd.512"
            call = e.intrinsic(name, e.ints, e.ints, self.bytes, self.bytes)
            u0, q0 = (b.bitcast(v, self.bytes) for v in (u[0], q))
            return b.call(call, [sum_, u0, q0])
        if self.instruction == "madd":
            eight = ir.Constant(self.short, [8] * (2 * e.lanes))
            pairs = b.bitcast(q, self.short)
            even, odd = b.ashr(b.shl(pairs, eight), eight), b.ashr(pairs, eight)
            for one, other in ((u[0], even), (u[1], odd)):
                sum_ = b.add(sum_, self._madd(one, other))
            return sum_
        for k in range(4):
            one = b.ashr(b.shl(q, int_splat(e, 24 - 8 * k)), int_splat(e, 24))
            sum_ = b.add(sum_, b.mul(one, u[k]))
        return sum_

    def _madd(self, x: Value, y: Value) -> Value:
        e = self.e
        name = "llvm.x86.avx512.pmaddw.d.512" if e.lanes == 16 else "llvm.x86.avx2.pmadd.wd"
        return e.b.call(e.intrinsic(name, e.ints, self.short, self.short), [x, y])


def joined(e: Emitter, low: Value, high: Value) -> Value:
    """low + 256 * high of integers, as float32."""
    return e.fma(e.b.sitofp(high, e.vector), e.splat(256.0), e.b.sitofp(low, e.vector))


def halves(e: Emitter, q: Value) -> list[Value]:
    """The lower and upper four bits of every byte, 0 to 15."""
    return [e.b.and_(q, int_splat(e, NIBBLES)), e.b.and_(e.b.lshr(q, int_splat(e, 4)), int_splat(e, NIBBLES))]


class Listed:
    """Sums products of listed groups of columns for the rows of a tile.

    bits: 8 (4 columns per group) or 4 (8 columns). ahead: groups prefetched before they are read.
    """

    def __init__(self, e: Emitter, f: Fields, instruction: str, bits: int, ahead: int):
        self.e, self.dots, self.bits, self.ahead = e, Dots(e, instruction), bits, ahead
        self.planes, self.groups = (f.slot("u0"), f.slot("u1")), f.slot("groups")

    def add(self, base: Value, k: Value, sums: Sequence[Sequence[Variable]]) -> None:
        """Add group k of the list. sums: per vector of rows, one sum for each plane of u."""
        e, b = self.e, self.e.b
        line, count = len(sums) * e.isa.line, 1 if self.bits == 8 else 2
        if self.ahead:
            next_number = e.load_long(I32, e.at(self.groups, b.add(k, I64(self.ahead)), I32))
            next_group = e.at(base, b.mul(next_number, I64(line)))
            for offset in range(0, line, 64):
                e.prefetch(e.at(next_group, offset), writes=False)
        group = e.load_long(I32, self.groups, k)
        weights = e.opaque(e.at(base, b.mul(group, I64(line))))
        words = [
            [self.dots.ready(e.load(I32, plane, b.add(b.mul(group, I64(count)), I64(h)))) for plane in self.planes]
            for h in range(count)
        ]
        for v, vector_sums in enumerate(sums):
            q = b.load(e.line(weights, v), typ=e.ints, align=e.isa.line)
            parts = [q] if count == 1 else halves(e, q)
            for part, word in zip(parts, words, strict=True):
                for plane, sum_ in enumerate(vector_sums):
                    sum_.set(self.dots.add(sum_.get(), word[plane], part))


LEVELS = 65535  # of u
UNIT = 2.0**-24  # of float32
CEILING = 1e30  # larger sums are not certified: they, or parts of them, might overflow
AHEAD = 16  # groups of columns prefetched before they are read: 8 KB
LATER = 12  # rows that the second level prefetches before it reads them
MOST_COLUMNS = 32768  # integer sums stay below 2**31
#: constants of a row, in this order: one vector each per vector of rows, or row by row for the next
#: level
CONSTANTS = ("scale", "total", "size", "least", "norm", "largest", "bias", "center")
#: numbers of an input, float32, in this order
NUMBERS = ("lo", "step", "e", "one_norm", "two_norm", "rounding", "sum")

#: x: slot, n: length; u0, u1: slots of its bytes; groups, count: slots of the list of groups of
#: `width` columns with a nonzero u, and of its length; numbers: slot; limit: bits of a float32
QUANTIZE = np.dtype(
    [(key, "<i8") for key in ("x", "n", "u0", "u1", "groups", "count", "group_count", "numbers", "limit", "sums")]
)
#: weights, constants: addresses; begin, end, step: tiles of `pitch` bytes; rows: number of rows;
#: out: slot of zeros; list, left: slots of the rows not proved zero, and of their number; first,
#: second: slots of their sums, for another level
ZERO_PROOF = np.dtype([(key, "<i8") for key in (
    "weights", "constants", "begin", "end", "step", "pitch", "rows", "u0", "u1", "groups", "count",
    "numbers", "out", "list", "left", "first", "second")])  # fmt: skip
#: the next level for listed rows: lists to second are the first of `threads` slots
SECOND_PROOF = np.dtype([(key, "<i8") for key in (
    "lists", "counts", "first", "second", "threads", "thread", "weights", "constants", "pitch",
    "blocks", "u0", "u1", "numbers", "sums", "list", "left")])  # fmt: skip


def dot_instruction(isa: Isa) -> str:
    """How this processor multiplies bytes: "vnni", "madd" (pairs of 16-bit integers) or "mul"."""
    if not isa.triple.startswith("x86"):
        return "mul"
    if isa.lanes == 16:
        return "vnni" if "+avx512vnni" in isa.features else "madd"
    return "madd" if isa.lanes == 8 else "mul"


def tile_vectors(isa: Isa) -> int:
    """Most vectors of a tile: each needs two sums, one for each plane of u."""
    return isa.registers // 4


def _reduce_lanes(e: Emitter, x: Value, reduction: str) -> Value:
    """The largest ("fmax") or smallest ("fmin") lane, or the integer sum ("add") of the lanes."""
    kind, word = (I32, "i32") if x.type == e.ints else (FLOAT, "f32")
    call = e.intrinsic(f"llvm.vector.reduce.{reduction}.v{e.lanes}{word}", kind, x.type)
    return e.b.call(call, [x])


@dataclass(frozen=True, slots=True)
class Quantize:
    """x as integers, the groups of columns to read, and the numbers that the bound needs."""

    width: int  # columns per group

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """Write k(call, arena)."""
        f, b = Fields(e, QUANTIZE.names), e.b
        lo, high, sums = self._statistics(e, f)
        step = b.fdiv(b.fsub(high, lo), FLOAT(float(LEVELS)))
        is_positive = b.fcmp_ordered(">", step, FLOAT(0.0))
        scale = b.select(is_positive, b.fdiv(FLOAT(1.0), step), FLOAT(0.0))
        e_max = self._write_planes(e, f, (lo, step, scale))
        # each |e| was rounded; the terms of the bound with lo and t u are rounded, too
        magnitude = b.fadd(b.fsub(FLOAT(0.0), lo), b.fsub(high, lo))
        e_max = b.fadd(b.fmul(e_max, FLOAT(1 + 4 * UNIT)), b.fmul(magnitude, FLOAT(40 * UNIT)))
        numbers = f.slot("numbers")
        for k, value in enumerate((lo, step, e_max, *sums)):
            b.store(value, e.at(numbers, k, FLOAT))
        self._list_groups(e, f)

    def _statistics(self, e: Emitter, f: Fields) -> tuple[Value, Value, list[Value]]:
        """(smallest of x and 0, largest of x and 0, [1-norm, 2-norm, rounding error, sum]); norms
        are rounded up.
        """
        b, x, n = e.b, f.slot("x"), f["n"]
        names = ("least", "largest", "ones", "twos", "sum")
        sums = {key: e.variable(e.vector, e.splat(0.0)) for key in names}
        nonzeros = e.variable(I64, I64(0))
        magnitude_bits = int_splat(e, 0x7FFFFFFF)
        with e.loop(I64(0), n, e.lanes) as i:
            v = e.load_masked(e.at(x, i, FLOAT), below(e, b.sub(n, i)))
            magnitude = b.bitcast(b.and_(b.bitcast(v, e.ints), magnitude_bits), e.vector)
            sums["least"].set(e.smaller(sums["least"].get(), v))
            sums["largest"].set(e.larger(sums["largest"].get(), v))
            sums["ones"].set(b.fadd(sums["ones"].get(), magnitude))
            sums["twos"].set(e.fma(v, v, sums["twos"].get()))
            sums["sum"].set(b.fadd(sums["sum"].get(), v))
            nonzeros.set(b.add(nonzeros.get(), set_lanes(e, b.fcmp_unordered("!=", v, e.splat(0.0)))))
        # additions per sum: in chains and then across the lanes
        chain = b.fadd(b.fdiv(b.sitofp(n, FLOAT), FLOAT(float(e.lanes))), FLOAT(40.0))
        rounding_factor = b.fadd(FLOAT(1.0), b.fmul(chain, FLOAT(2.1 * UNIT)))
        ones = b.fmul(e.total(sums["ones"].get()), rounding_factor)
        limit = b.bitcast(b.trunc(f["limit"], I32), FLOAT)
        ones = b.select(b.fcmp_ordered("<", ones, limit), ones, FLOAT(float("nan")))
        root = e.intrinsic("llvm.sqrt.f32", FLOAT, FLOAT)
        underflow = b.fmul(b.sitofp(n, FLOAT), FLOAT(2e-38))  # squares that underflow
        twos = b.fmul(b.fadd(e.total(sums["twos"].get()), underflow), rounding_factor)
        twos = b.fmul(b.call(root, [twos]), FLOAT(1 + 4 * UNIT))
        count = b.fadd(b.sitofp(nonzeros.get(), FLOAT), chain)
        rounding = b.fmul(b.fadd(b.fmul(count, FLOAT(1.02 * UNIT)), FLOAT(100 * UNIT)), ones)
        least, most = _reduce_lanes(e, sums["least"].get(), "fmin"), sums["largest"].get()
        return least, _reduce_lanes(e, most, "fmax"), [ones, twos, rounding, e.total(sums["sum"].get())]

    def _write_planes(self, e: Emitter, f: Fields, quantization: tuple[Value, Value, Value]) -> Value:
        """Write u; returns max|e|. quantization: lo, step and 1 / step."""
        b, x, n = e.b, f.slot("x"), f["n"]
        planes, largest = (f.slot("u0"), f.slot("u1")), e.variable(e.vector, e.splat(0.0))
        sums = [e.variable(e.ints, int_splat(e, 0)) for _ in planes]
        lo, step, scale = map(e.splat, quantization)
        to_int = e.intrinsic(f"llvm.fptosi.sat.v{e.lanes}i32.v{e.lanes}f32", e.ints, e.vector)
        narrow, magnitude_bits = ir.VectorType(BYTE, e.lanes), int_splat(e, 0x7FFFFFFF)
        none, full = int_splat(e, 0), int_splat(e, LEVELS)
        with e.loop(I64(0), n, e.lanes) as i:
            mask = below(e, b.sub(n, i))
            v = e.load_masked(e.at(x, i, FLOAT), mask)
            u = b.call(to_int, [e.fma(b.fsub(v, lo), scale, e.splat(0.5))])
            u = b.select(b.icmp_signed("<", u, none), none, u)
            u = b.select(b.icmp_signed(">", u, full), full, u)
            u = b.select(mask, u, none)
            error = b.fsub(v, e.fma(b.sitofp(u, e.vector), step, lo))
            error = b.bitcast(b.and_(b.bitcast(error, e.ints), magnitude_bits), e.vector)
            largest.set(e.larger(largest.get(), b.select(mask, error, e.splat(0.0))))
            for k, (plane, sum_) in enumerate(zip(planes, sums, strict=True)):
                part = b.and_(b.lshr(u, int_splat(e, 8 * k)), int_splat(e, 255))
                sum_.set(b.add(sum_.get(), part))
                b.store(b.trunc(part, narrow), e.at(plane, i), align=1)
        for k, sum_ in enumerate(sums):
            b.store(_reduce_lanes(e, sum_.get(), "add"), e.at(f.slot("sums"), k, I32))
        return _reduce_lanes(e, largest.get(), "fmax")

    def _list_groups(self, e: Emitter, f: Fields) -> None:
        """List the groups that contain a nonzero u."""
        b, length = e.b, e.variable(I64, I64(0))
        u0, u1, groups = f.slot("u0"), f.slot("u1"), f.slot("groups")
        word = ir.IntType(8 * self.width)
        kind = ir.VectorType(word, e.lanes)
        with e.loop(I64(0), f["group_count"], e.lanes) as i:
            low, high = (b.load(e.at(u, i, word), typ=kind, align=1) for u in (u0, u1))
            mask = b.icmp_unsigned("!=", b.or_(low, high), ir.Constant(kind, [0] * e.lanes))
            mask = b.and_(mask, below(e, b.sub(f["group_count"], i)))
            number = b.add(iota(e), e.splat(b.trunc(i, I32)))
            b.store(compressed(e, number, mask), e.at(groups, length.get(), I32), align=4)
            length.set(b.add(length.get(), set_lanes(e, mask)))
        b.store(length.get(), f.slot("count"))


def _bound(e: Emitter, row: dict[str, Value], x: dict[str, Value], p: Value) -> Value:
    """An upper bound of the sum plus bias, for a vector of rows. p: Σ q u."""
    b = e.b
    residual = e.smaller(b.fmul(row["least"], x["one_norm"]), b.fmul(row["norm"], x["two_norm"]))
    bound = e.fma(row["center"], x["sum"], row["bias"])
    bound = e.fma(row["total"], x["lo"], bound)
    bound = e.fma(row["scale"], b.fmul(p, x["step"]), bound)
    errors = e.fma(row["size"], x["e"], e.fma(row["largest"], x["rounding"], residual))
    return b.fadd(bound, errors)


def numbers_of(e: Emitter, f: Fields) -> dict[str, Value]:
    """The numbers that `Quantize` wrote for an input, each in all lanes."""
    address = f.slot("numbers")
    return {key: e.splat(e.load(FLOAT, address, k)) for k, key in enumerate(NUMBERS)}


@dataclass(frozen=True, slots=True)
class ZeroProofKernel:
    """Writes zeros for every `step`-th tile of `vectors` vectors, and lists the rows not proved
    zero.

    bits: 8 or 4. stores_sums: whether to store sums of listed rows for another level.
    """

    bits: int
    vectors: int
    instruction: str
    stores_sums: bool = False
    ahead: int = AHEAD

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """Write k(call, arena)."""
        f, b = Fields(e, ZERO_PROOF.names), e.b
        listed, count = Listed(e, f, self.instruction, self.bits, self.ahead), f.count("count")
        numbers, length = numbers_of(e, f), e.variable(I64, I64(0))
        line = self.vectors * e.isa.line
        with e.loop(f["begin"], f["end"], f["step"]) as tile:
            base = e.at(f.pointer("weights"), b.mul(tile, f["pitch"]))
            sums = [[e.variable(e.ints, int_splat(e, 0)) for _ in range(2)] for _ in range(self.vectors)]
            with e.loop(I64(0), count) as k:
                listed.add(base, k, sums)
            for v, (low, high) in enumerate(sums):
                vector = b.add(b.mul(tile, I64(self.vectors)), I64(v))
                constants = e.at(f.pointer("constants"), b.mul(vector, I64(len(CONSTANTS) * e.isa.line)))
                row = {key: e.read(constants, k) for k, key in enumerate(CONSTANTS)}
                bound = _bound(e, row, numbers, joined(e, low.get(), high.get()))
                unproved = b.fcmp_unordered(">", bound, e.splat(0.0))
                first = b.mul(vector, I64(e.lanes))
                unproved = b.and_(unproved, below(e, b.sub(f["rows"], first)))
                number = b.add(iota(e), e.splat(b.trunc(first, I32)))
                lists = [("list", number)]
                if self.stores_sums:
                    lists += [("first", low.get()), ("second", high.get())]
                for key, value in lists:
                    address = e.at(f.slot(key), length.get(), I32)
                    b.store(compressed(e, value, unproved), address, align=4)
                length.set(b.add(length.get(), set_lanes(e, unproved)))
                out = e.line(e.at(f.slot("out"), b.mul(tile, I64(line))), v)
                b.store(e.splat(0.0), out, align=4)
        b.store(length.get(), f.slot("left"))


@dataclass(frozen=True, slots=True)
class SecondProofKernel:
    """Lists which of the rows that 4 bits did not prove zero are not proved by 8 bits either.

    The lower 4 bits are read row by row. Σ q u = 16 (Σ h u - 8 Σ u) + Σ l u, with the upper halves
    h (as stored) and the lower halves l.
    """

    instruction: str

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """Write k(call, arena)."""
        f, b = Fields(e, SECOND_PROOF.names), e.b
        numbers, length = numbers_of(e, f), e.variable(I64, I64(0))
        with e.loop(I64(0), f["threads"]) as list_number:
            count = e.load(I64, f.slot("counts", list_number))
            lists = {key: f.slot(key, list_number) for key in ("lists", "first", "second")}
            share = [b.sdiv(b.mul(count, b.add(f["thread"], I64(k))), f["threads"]) for k in (0, 1)]
            with e.loop(share[0], share[1]) as position:
                row = e.load_long(I32, lists["lists"], position)
                later = e.load_long(I32, lists["lists"], b.add(position, I64(LATER)))
                sums = []
                low = self._low_sums(e, f, row, later)
                for k, (key, part) in enumerate(zip(("first", "second"), low, strict=True)):
                    offset = b.mul(e.load(I32, f.slot("sums"), k), I32(8))
                    upper = b.sub(e.load(I32, lists[key], position), offset)
                    sums.append(b.add(part, b.mul(upper, I32(16))))
                unproved = self._unproved(e, f, numbers, row, sums)
                b.store(b.trunc(row, I32), e.at(f.slot("list"), length.get(), I32))
                length.set(b.add(length.get(), b.zext(unproved, I64)))
        b.store(length.get(), f.slot("left"))

    def _low_sums(self, e: Emitter, f: Fields, row: Value, later: Value) -> list[Value]:
        """Σ l u for both planes of u. later: a row to prefetch."""
        b, products = e.b, Dots(e, self.instruction)
        line = e.at(f.pointer("weights"), b.mul(row, f["pitch"]))
        sums, nibble = [e.variable(e.ints, int_splat(e, 0)) for _ in range(2)], int_splat(e, 0x0F0F0F0F)
        vectors = 16 // e.lanes  # vectors of 64 bytes
        later_line = e.at(f.pointer("weights"), b.mul(later, f["pitch"]))
        e.prefetch(e.at(f.pointer("constants"), b.mul(later, I64(4 * len(CONSTANTS)))), writes=False)
        with e.loop(I64(0), f["blocks"]) as block:
            e.prefetch(e.at(later_line, b.mul(block, I64(64))), writes=False)
            for v in range(vectors):
                address = e.at(line, b.add(b.mul(block, I64(64)), I64(v * e.isa.line)))
                q = b.load(address, typ=e.ints, align=1)
                for half in range(2):
                    part = b.and_(b.lshr(q, int_splat(e, 4)) if half else q, nibble)
                    u_offset = b.add(b.mul(block, I64(128)), I64(64 * half + v * e.isa.line))
                    for plane, key in enumerate(("u0", "u1")):
                        u = b.load(e.at(f.slot(key), u_offset), typ=e.ints, align=1)
                        sum_ = sums[plane]
                        sum_.set(products.add(sum_.get(), products.ready(u), part))
        return [_reduce_lanes(e, sum_.get(), "add") for sum_ in sums]

    def _unproved(self, e: Emitter, f: Fields, numbers: dict[str, Value], row: Value, sums: list[Value]) -> Value:
        """Whether the bound of a row is not <= 0. sums: Σ q u for both planes of u."""
        b = e.b
        address = e.at(f.pointer("constants"), b.mul(row, I64(4 * len(CONSTANTS))))
        row_constants = {key: e.splat(e.load(FLOAT, address, k)) for k, key in enumerate(CONSTANTS)}
        bound = _bound(e, row_constants, numbers, joined(e, *map(e.splat, sums)))
        return b.fcmp_unordered(">", b.extract_element(bound, I32(0)), FLOAT(0.0))
