"""Products of bytes with bytes, summed in whole numbers: q of a matrix, signed, with u of an input.

u has 16 bits, in two planes of bytes, so every product is summed twice, exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from demask.kernels.cpu.gemv import ask
from demask.kernels.llvm.emitter import BYTE, I16, I32, I64, Emitter, Fields, Value, Variable

NIBBLES = 0x0F0F0F0F  # the lower halves of four bytes


def whole(e: Emitter, value: int) -> Value:
    """A whole number in every lane."""
    return ir.Constant(e.ints, [value] * e.lanes)


class Dots:
    """sum += the products of four bytes with four bytes in each lane; u unsigned, q signed."""

    def __init__(self, e: Emitter, how: str):
        self.e, self.how = e, how
        self.short = ir.VectorType(I16, 2 * e.lanes)
        self.bytes = ir.VectorType(BYTE, 4 * e.lanes)

    def ready(self, u: Value) -> list[Value]:
        """What products need of four bytes (a number of 32 bits, or lanes of them)."""
        e, b = self.e, self.e.b
        wide = e.splat(u) if u.type == I32 else u
        if self.how == "vnni":
            return [wide]
        if self.how == "madd":
            low = whole(e, 0x00FF00FF)
            odd = b.and_(b.lshr(wide, whole(e, 8)), low)
            return [b.bitcast(b.and_(wide, low), self.short), b.bitcast(odd, self.short)]
        return [b.and_(b.lshr(wide, whole(e, 8 * k)), whole(e, 255)) for k in range(4)]

    def add(self, sum_: Value, u: list[Value], q: Value) -> Value:
        e, b = self.e, self.e.b
        if self.how == "vnni":
            name = "llvm.x86.avx512.vpdpbusd.512"
            call = e.intrinsic(name, e.ints, e.ints, self.bytes, self.bytes)
            u0, q0 = (b.bitcast(v, self.bytes) for v in (u[0], q))
            return b.call(call, [sum_, u0, q0])
        if self.how == "madd":
            eight = ir.Constant(self.short, [8] * (2 * e.lanes))
            pairs = b.bitcast(q, self.short)
            even, odd = b.ashr(b.shl(pairs, eight), eight), b.ashr(pairs, eight)
            for one, other in ((u[0], even), (u[1], odd)):
                sum_ = b.add(sum_, self._madd(one, other))
            return sum_
        for k in range(4):
            one = b.ashr(b.shl(q, whole(e, 24 - 8 * k)), whole(e, 24))
            sum_ = b.add(sum_, b.mul(one, u[k]))
        return sum_

    def _madd(self, x: Value, y: Value) -> Value:
        e = self.e
        name = "llvm.x86.avx512.pmaddw.d.512" if e.lanes == 16 else "llvm.x86.avx2.pmadd.wd"
        return e.b.call(e.intrinsic(name, e.ints, self.short, self.short), [x, y])


def joined(e: Emitter, low: Value, high: Value) -> Value:
    """low + 256 high, of whole numbers, as float32."""
    return e.fma(e.b.sitofp(high, e.vector), e.splat(256.0), e.b.sitofp(low, e.vector))


def halves(e: Emitter, q: Value, signed: bool) -> list[Value]:
    """The lower and the upper four bits of every byte: as 0 … 15, or, signed, 16 times -8 … 7."""
    b = e.b
    if signed:
        upper = whole(e, NIBBLES << 4)
        return [b.and_(b.shl(q, whole(e, 4)), upper), b.and_(q, upper)]
    return [b.and_(q, whole(e, NIBBLES)), b.and_(b.lshr(q, whole(e, 4)), whole(e, NIBBLES))]


class Listed:
    """Adds what listed groups of columns give: sums of products for the rows of a tile.

    bits: 8 (4 columns in a group) or 4 (8 columns); signed: see `halves`. ahead: groups that are
    asked for before they are read.
    """

    def __init__(self, e: Emitter, f: Fields, how: str, bits: int, ahead: int, signed: bool):
        self.e, self.dots, self.bits, self.ahead, self.signed = e, Dots(e, how), bits, ahead, signed
        self.planes, self.groups = (f.slot("u0"), f.slot("u1")), f.slot("groups")

    def add(self, base: Value, k: Value, sums: Sequence[Sequence[Variable]]) -> None:
        """Group k of the list. sums: per vector of the tile's rows one for each plane of u."""
        e, b = self.e, self.e.b
        line, count = len(sums) * e.isa.line, 1 if self.bits == 8 else 2
        if self.ahead:
            later = e.load_long(I32, e.at(self.groups, b.add(k, I64(self.ahead)), I32))
            there = e.at(base, b.mul(later, I64(line)))
            for place in range(0, line, 64):
                ask(e, e.at(there, place))
        group = e.load_long(I32, self.groups, k)
        place = e.opaque(e.at(base, b.mul(group, I64(line))))
        words = [[self.dots.ready(e.load(I32, plane, b.add(b.mul(group, I64(count)), I64(h))))
                  for plane in self.planes] for h in range(count)]  # fmt: skip
        for v, pair in enumerate(sums):
            q = b.load(e.line(place, v), typ=e.ints, align=e.isa.line)
            parts = [q] if count == 1 else halves(e, q, self.signed)
            for part, word in zip(parts, words, strict=True):
                for plane, sum_ in enumerate(pair):
                    sum_.set(self.dots.add(sum_.get(), word[plane], part))
