"""Integer products of bytes with bytes: signed q of a matrix with u of an input.

u has 16 bits, stored as two planes of bytes, so every product is summed twice, exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from demask.kernels.llvm.emitter import BYTE, I16, I32, I64, Emitter, Fields, Value, Variable

NIBBLES = 0x0F0F0F0F  # the lower halves of four bytes


def whole(e: Emitter, value: int) -> Value:
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
            low = whole(e, 0x00FF00FF)
            odd = b.and_(b.lshr(wide, whole(e, 8)), low)
            return [b.bitcast(b.and_(wide, low), self.short), b.bitcast(odd, self.short)]
        return [b.and_(b.lshr(wide, whole(e, 8 * k)), whole(e, 255)) for k in range(4)]

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
            one = b.ashr(b.shl(q, whole(e, 24 - 8 * k)), whole(e, 24))
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
    return [e.b.and_(q, whole(e, NIBBLES)), e.b.and_(e.b.lshr(q, whole(e, 4)), whole(e, NIBBLES))]


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
