"""Which outputs of relu(w · x + b) are zero, proved from 8-bit or 4-bit weights.

**The bound.** Of a row, w_j = s q_j + c + d_j, with whole q_j that the pilot reads; of the input,
x_j = lo + t u_j + e_j, with whole 0 <= u_j <= 65535. Then, exactly,

    Σ w_j x_j = s (lo Σ q_j + t Σ q_j u_j + Σ q_j e_j) + c Σ x_j + Σ d_j x_j

P = Σ q_j u_j is computed in whole numbers, without error. |Σ q_j e_j| <= max|e| Σ|q_j|, and
|Σ d_j x_j| <= min(max|d| ‖x‖₁, ‖d‖₂ ‖x‖₂): the first is better for few nonzeros, the second for
many (Hölder; Cauchy and Schwarz).

**Rounding.** The kernel that the certificate speaks for (`kernels.gemv`) is a chain of n' fused
multiply-adds in float32, n' being the nonzeros of x. Its error is at most γ_n' Σ|w_j x_j| <=
γ_n' max|w| ‖x‖₁, where γ_n = n u / (1 - n u), u = 2^-24 (Higham, "Accuracy and Stability of
Numerical Algorithms", 2nd ed., section 3.1 and lemma 3.1), and n' 2^-126 more where products
underflow. Adding the bias rounds once more, which keeps the sign. Sums over x here are of one sign
or bounded in the same way, in as many chains as there are lanes. The bound itself is some ten
operations on numbers of at most (|lo| + range) Σ|q_j| s, |c| ‖x‖₁, |b| and the errors above: each
of these enters with 40 u of itself more. Constants are computed in float64 and rounded up.

So relu gives 0 wherever the bound is <= 0. NaN, infinities and sums beyond 1e30 fail the
comparison, and the row is computed.

**Layouts.** 8 bits: [tile][4 columns][rows of the tile][4]. 4 bits: [tile][8 columns][rows][4
bytes], low halves the first four columns, values 0 … 15. The second plane of two: row by row, 128
columns in 64 bytes, low halves first. u in two planes of bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from llvmlite import ir

from demask.kernels.cpu.csr import below, masked
from demask.kernels.cpu.gemv import ask, compressed, iota, set_lanes
from demask.kernels.cpu.int_dot import Dots, Listed, joined, whole
from demask.kernels.llvm.emitter import BYTE, FLOAT, I32, I64, Emitter, Fields, Value
from demask.kernels.llvm.isa import Isa

LEVELS = 65535  # of u
UNIT = 2.0**-24  # of float32
CEILING = 1e30  # sums beyond it are not certified: they, or parts of them, might overflow
AHEAD = 16  # groups of columns that are asked for before they are read: 8 KB
LATER = 12  # rows that the second level asks for before it reads them
MOST_COLUMNS = 32768  # whole sums stay below 2**31
#: constants of a row, in this order: one vector each per vector of rows, or row by row for the next
#: level
CONSTANTS = ("scale", "total", "size", "least", "norm", "largest", "bias", "center")
#: numbers of an input, float32, in this order
NUMBERS = ("lo", "step", "e", "one_norm", "two_norm", "rounding", "sum")

#: x: slot, n: length; u0, u1: slots of its bytes; groups, count: slots of the list of groups of
#: `width` columns of which any u is not 0; numbers: slot; limit: bits of a float32
QUANTISE = np.dtype([(key, "<i8") for key in (
    "x", "n", "u0", "u1", "groups", "count", "group_count", "numbers", "limit",
    "sums")])  # fmt: skip
#: weights, constants: addresses; tiles begin, end, step of `pitch` bytes; rows: how many there are;
#: out: slot of zeros; list, left: slots of the rows not proved, and of their number; first,
#: second: slots of their sums, for another level
PILOT = np.dtype([(key, "<i8") for key in (
    "weights", "constants", "begin", "end", "step", "pitch", "rows", "u0", "u1", "groups", "count",
    "numbers", "out", "list", "left", "first", "second")])  # fmt: skip
#: the next level for listed rows: lists … second are the first of `threads` slots
SECOND = np.dtype([(key, "<i8") for key in (
    "lists", "counts", "first", "second", "threads", "thread", "weights", "constants", "pitch",
    "blocks", "u0", "u1", "numbers", "sums", "list", "left")])  # fmt: skip


def dots(isa: Isa) -> str:
    """How this processor multiplies bytes: "vnni", "madd" (pairs of 16 bits) or "mul"."""
    if not isa.triple.startswith("x86"):
        return "mul"
    if isa.lanes == 16:
        return "vnni" if "+avx512vnni" in isa.features else "madd"
    return "madd" if isa.lanes == 8 else "mul"


def tile_vectors(isa: Isa) -> int:
    """Vectors of a tile at most: each needs two sums, one for each plane of u."""
    return isa.registers // 4


def _reduced(e: Emitter, x: Value, how: str) -> Value:
    """The largest ("fmax"), least ("fmin") or sum ("add", of whole numbers) of the lanes."""
    kind, word = (I32, "i32") if x.type == e.ints else (FLOAT, "f32")
    call = e.intrinsic(f"llvm.vector.reduce.{how}.v{e.lanes}{word}", kind, x.type)
    return e.b.call(call, [x])


@dataclass(frozen=True, slots=True)
class Quantise:
    """x as whole numbers, the groups of columns to read, and the numbers of the bound."""

    width: int  # columns of a group

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """k(call, arena)"""
        f, b = Fields(e, QUANTISE.names), e.b
        lo, high, total = self._looked_at(e, f)
        step = b.fdiv(b.fsub(high, lo), FLOAT(float(LEVELS)))
        there = b.fcmp_ordered(">", step, FLOAT(0.0))
        scale = b.select(there, b.fdiv(FLOAT(1.0), step), FLOAT(0.0))
        e_max = self._planes(e, f, (lo, step, scale))
        # each |e| was rounded; the terms of the bound that hold lo and t u round, too
        reach = b.fadd(b.fsub(FLOAT(0.0), lo), b.fsub(high, lo))
        e_max = b.fadd(b.fmul(e_max, FLOAT(1 + 4 * UNIT)), b.fmul(reach, FLOAT(40 * UNIT)))
        numbers = f.slot("numbers")
        for k, value in enumerate((lo, step, e_max, *total)):
            b.store(value, e.at(numbers, k, FLOAT))
        self._groups(e, f)

    def _looked_at(self, e: Emitter, f: Fields) -> tuple[Value, Value, list[Value]]:
        """The least and the largest of x and 0; norms, rounded up, and the sum."""
        b, x, n = e.b, f.slot("x"), f["n"]
        names = ("least", "largest", "ones", "twos", "sum")
        found = {key: e.variable(e.vector, e.splat(0.0)) for key in names}
        some = e.variable(I64, I64(0))
        sign = whole(e, 0x7FFFFFFF)
        with e.loop(I64(0), n, e.lanes) as i:
            v = masked(e, e.vector, e.at(x, i, FLOAT), below(e, b.sub(n, i)))
            size = b.bitcast(b.and_(b.bitcast(v, e.ints), sign), e.vector)
            found["least"].set(e.smaller(found["least"].get(), v))
            found["largest"].set(e.larger(found["largest"].get(), v))
            found["ones"].set(b.fadd(found["ones"].get(), size))
            found["twos"].set(e.fma(v, v, found["twos"].get()))
            found["sum"].set(b.fadd(found["sum"].get(), v))
            some.set(b.add(some.get(), set_lanes(e, b.fcmp_unordered("!=", v, e.splat(0.0)))))
        # sums of so many numbers, in chains and then across the lanes
        chain = b.fadd(b.fdiv(b.sitofp(n, FLOAT), FLOAT(float(e.lanes))), FLOAT(40.0))
        more = b.fadd(FLOAT(1.0), b.fmul(chain, FLOAT(2.1 * UNIT)))
        ones = b.fmul(e.total(found["ones"].get()), more)
        limit = b.bitcast(b.trunc(f["limit"], I32), FLOAT)
        ones = b.select(b.fcmp_ordered("<", ones, limit), ones, FLOAT(float("nan")))
        root = e.intrinsic("llvm.sqrt.f32", FLOAT, FLOAT)
        small = b.fmul(b.sitofp(n, FLOAT), FLOAT(2e-38))  # squares that underflow
        twos = b.fmul(b.fadd(e.total(found["twos"].get()), small), more)
        twos = b.fmul(b.call(root, [twos]), FLOAT(1 + 4 * UNIT))
        count = b.fadd(b.sitofp(some.get(), FLOAT), chain)
        rounding = b.fmul(b.fadd(b.fmul(count, FLOAT(1.02 * UNIT)), FLOAT(100 * UNIT)), ones)
        least, most = _reduced(e, found["least"].get(), "fmin"), found["largest"].get()
        return least, _reduced(e, most, "fmax"), [ones, twos, rounding, e.total(found["sum"].get())]

    def _planes(self, e: Emitter, f: Fields, of: tuple[Value, Value, Value]) -> Value:
        """Write u; max|e|."""
        b, x, n = e.b, f.slot("x"), f["n"]
        planes, worst = (f.slot("u0"), f.slot("u1")), e.variable(e.vector, e.splat(0.0))
        sums = [e.variable(e.ints, whole(e, 0)) for _ in planes]
        lo, step, scale = map(e.splat, of)
        rounded = e.intrinsic(f"llvm.fptosi.sat.v{e.lanes}i32.v{e.lanes}f32", e.ints, e.vector)
        narrow, sign = ir.VectorType(BYTE, e.lanes), whole(e, 0x7FFFFFFF)
        none, full = whole(e, 0), whole(e, LEVELS)
        with e.loop(I64(0), n, e.lanes) as i:
            mask = below(e, b.sub(n, i))
            v = masked(e, e.vector, e.at(x, i, FLOAT), mask)
            u = b.call(rounded, [e.fma(b.fsub(v, lo), scale, e.splat(0.5))])
            u = b.select(b.icmp_signed("<", u, none), none, u)
            u = b.select(b.icmp_signed(">", u, full), full, u)
            u = b.select(mask, u, none)
            off = b.fsub(v, e.fma(b.sitofp(u, e.vector), step, lo))
            off = b.bitcast(b.and_(b.bitcast(off, e.ints), sign), e.vector)
            worst.set(e.larger(worst.get(), b.select(mask, off, e.splat(0.0))))
            for k, (plane, sum_) in enumerate(zip(planes, sums, strict=True)):
                part = b.and_(b.lshr(u, whole(e, 8 * k)), whole(e, 255))
                sum_.set(b.add(sum_.get(), part))
                b.store(b.trunc(part, narrow), e.at(plane, i), align=1)
        for k, sum_ in enumerate(sums):
            b.store(_reduced(e, sum_.get(), "add"), e.at(f.slot("sums"), k, I32))
        return _reduced(e, worst.get(), "fmax")

    def _groups(self, e: Emitter, f: Fields) -> None:
        """List the groups in which any u is not 0."""
        b, found = e.b, e.variable(I64, I64(0))
        u0, u1, groups = f.slot("u0"), f.slot("u1"), f.slot("groups")
        word = ir.IntType(8 * self.width)
        kind = ir.VectorType(word, e.lanes)
        with e.loop(I64(0), f["group_count"], e.lanes) as i:
            low, high = (b.load(e.at(u, i, word), typ=kind, align=1) for u in (u0, u1))
            mask = b.icmp_unsigned("!=", b.or_(low, high), ir.Constant(kind, [0] * e.lanes))
            mask = b.and_(mask, below(e, b.sub(f["group_count"], i)))
            number = b.add(iota(e), e.splat(b.trunc(i, I32)))
            b.store(compressed(e, number, mask), e.at(groups, found.get(), I32), align=4)
            found.set(b.add(found.get(), set_lanes(e, mask)))
        b.store(found.get(), f.slot("count"))


def _bound(e: Emitter, row: dict[str, Value], x: dict[str, Value], p: Value) -> Value:
    """An upper bound of the sum and its bias, in vectors."""
    b = e.b
    near = e.smaller(b.fmul(row["least"], x["one_norm"]), b.fmul(row["norm"], x["two_norm"]))
    bound = e.fma(row["center"], x["sum"], row["bias"])
    bound = e.fma(row["total"], x["lo"], bound)
    bound = e.fma(row["scale"], b.fmul(p, x["step"]), bound)
    far = e.fma(row["size"], x["e"], e.fma(row["largest"], x["rounding"], near))
    return b.fadd(bound, far)


def numbers_of(e: Emitter, f: Fields) -> dict[str, Value]:
    """What `Quantise` wrote of an input, in vectors."""
    place = f.slot("numbers")
    return {key: e.splat(e.load(FLOAT, place, k)) for k, key in enumerate(NUMBERS)}


@dataclass(frozen=True, slots=True)
class Pilot:
    """Zeros for every `step`-th tile of `vectors` vectors, and the list of rows not proved zero.

    bits: 8 or 4. kept: the sums of listed rows are kept for another level.
    """

    bits: int
    vectors: int
    how: str
    kept: bool = False
    ahead: int = AHEAD

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """k(call, arena)"""
        f, b = Fields(e, PILOT.names), e.b
        listed, count = (
            Listed(e, f, self.how, self.bits, self.ahead, signed=False),
            f.count("count"),
        )
        numbers, found = numbers_of(e, f), e.variable(I64, I64(0))
        line = self.vectors * e.isa.line
        with e.loop(f["begin"], f["end"], f["step"]) as tile:
            base = e.at(f.pointer("weights"), b.mul(tile, f["pitch"]))
            sums = [
                [e.variable(e.ints, whole(e, 0)) for _ in range(2)] for _ in range(self.vectors)
            ]
            with e.loop(I64(0), count) as k:
                listed.add(base, k, sums)
            for v, (low, high) in enumerate(sums):
                at = b.add(b.mul(tile, I64(self.vectors)), I64(v))
                place = e.at(f.pointer("constants"), b.mul(at, I64(len(CONSTANTS) * e.isa.line)))
                row = {key: e.read(place, k) for k, key in enumerate(CONSTANTS)}
                bound = _bound(e, row, numbers, joined(e, low.get(), high.get()))
                open_ = b.fcmp_unordered(">", bound, e.splat(0.0))
                first = b.mul(at, I64(e.lanes))
                open_ = b.and_(open_, below(e, b.sub(f["rows"], first)))
                number = b.add(iota(e), e.splat(b.trunc(first, I32)))
                lists = [("list", number)]
                if self.kept:
                    lists += [("first", low.get()), ("second", high.get())]
                for key, value in lists:
                    here = e.at(f.slot(key), found.get(), I32)
                    b.store(compressed(e, value, open_), here, align=4)
                found.set(b.add(found.get(), set_lanes(e, open_)))
                out = e.line(e.at(f.slot("out"), b.mul(tile, I64(line))), v)
                b.store(e.splat(0.0), out, align=4)
        b.store(found.get(), f.slot("left"))


@dataclass(frozen=True, slots=True)
class Second:
    """Of rows that 4 bits did not prove zero, those that 8 bits do not: the lower 4 bits are read
    row by row. Σ q u = 16 (Σ h u - 8 Σ u) + Σ l u, of the halves h (as stored) and l."""

    how: str

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """k(call, arena)"""
        f, b = Fields(e, SECOND.names), e.b
        numbers, found = numbers_of(e, f), e.variable(I64, I64(0))
        with e.loop(I64(0), f["threads"]) as segment:
            count = e.load(I64, f.slot("counts", segment))
            lists = {key: f.slot(key, segment) for key in ("lists", "first", "second")}
            share = [b.sdiv(b.mul(count, b.add(f["thread"], I64(k))), f["threads"]) for k in (0, 1)]
            with e.loop(share[0], share[1]) as place:
                row = e.load_long(I32, lists["lists"], place)
                later = e.load_long(I32, lists["lists"], b.add(place, I64(LATER)))
                sums = []
                low = self._low(e, f, row, later)
                for k, (key, part) in enumerate(zip(("first", "second"), low, strict=True)):
                    every = b.mul(e.load(I32, f.slot("sums"), k), I32(8))
                    upper = b.sub(e.load(I32, lists[key], place), every)
                    sums.append(b.add(part, b.mul(upper, I32(16))))
                open_ = self._open(e, f, numbers, row, sums)
                b.store(b.trunc(row, I32), e.at(f.slot("list"), found.get(), I32))
                found.set(b.add(found.get(), b.zext(open_, I64)))
        b.store(found.get(), f.slot("left"))

    def _low(self, e: Emitter, f: Fields, row: Value, later: Value) -> list[Value]:
        """Σ l u for both planes of u. later: a row that is asked for meanwhile."""
        b, dots = e.b, Dots(e, self.how)
        line = e.at(f.pointer("weights"), b.mul(row, f["pitch"]))
        sums, nibble = [e.variable(e.ints, whole(e, 0)) for _ in range(2)], whole(e, 0x0F0F0F0F)
        parts = 16 // e.lanes  # vectors of 64 bytes
        there = e.at(f.pointer("weights"), b.mul(later, f["pitch"]))
        ask(e, e.at(f.pointer("constants"), b.mul(later, I64(4 * len(CONSTANTS)))))
        with e.loop(I64(0), f["blocks"]) as block:
            ask(e, e.at(there, b.mul(block, I64(64))))
            for v in range(parts):
                place = e.at(line, b.add(b.mul(block, I64(64)), I64(v * e.isa.line)))
                q = b.load(place, typ=e.ints, align=1)
                for half in range(2):
                    part = b.and_(b.lshr(q, whole(e, 4)) if half else q, nibble)
                    at = b.add(b.mul(block, I64(128)), I64(64 * half + v * e.isa.line))
                    for plane, key in enumerate(("u0", "u1")):
                        u = b.load(e.at(f.slot(key), at), typ=e.ints, align=1)
                        sum_ = sums[plane]
                        sum_.set(dots.add(sum_.get(), dots.ready(u), part))
        return [_reduced(e, sum_.get(), "add") for sum_ in sums]

    def _open(self, e: Emitter, f: Fields, numbers: dict[str, Value], row: Value,
              sums: list[Value]) -> Value:  # fmt: skip
        b = e.b
        place = e.at(f.pointer("constants"), b.mul(row, I64(4 * len(CONSTANTS))))
        of = {key: e.splat(e.load(FLOAT, place, k)) for k, key in enumerate(CONSTANTS)}
        bound = _bound(e, of, numbers, joined(e, *map(e.splat, sums)))
        return b.fcmp_unordered(">", b.extract_element(bound, I32(0)), FLOAT(0.0))
