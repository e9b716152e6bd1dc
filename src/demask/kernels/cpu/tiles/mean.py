"""The kernel of means over the positions of images, with the same bits in any order of the sum.

    for channel: for image:  M = 1.5 · 2^k, from the largest |x| and the number of positions
        sum = M;  for position:  sum += x · (1 + 2^-40)   in float64
        mean = (sum - M) / positions

Lanes are tiles, and which positions a lane has depends on the grid, which depends on the number of
threads. So the sum must not depend on its order. `sum` stays between 2^k and 2^(k+1), where numbers
of float64 are multiples of a unit: each addition rounds its x to a multiple, and multiples are
added exactly (Demmel and Nguyen, Parallel Reproducible Summation, 2015, with one bin). The factor
moves an x that is halfway between multiples: such ties would be rounded by the sum so far. Error
of the sum per position: 2^-37 of the largest |x|, for up to 2^14 positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import ceil, log2, nan

import numpy as np
from llvmlite import ir

from demask.kernels.llvm.emitter import BIT, DOUBLE, FLOAT, I32, I64, Emitter, Fields, Value, Variable

#: call of the kernel. whole, count: lines with an image in every lane, and all lines, which follow;
#: table: lines; masks: a vector per line that is not whole, bits set inside of an image; outs:
#: element of each image; pixels: of an image; exponent: see `exponent`
CALL = np.dtype([(key, "<i8") for key in (
    "x_slot", "x", "out_slot", "out", "x_pitch", "out_pitch", "begin", "end", "whole", "count",
    "table", "masks", "outs", "pixels", "exponent")])  # fmt: skip
FEW = 16  # lines that stay in registers
TOGETHER = 2  # sums that hide the latency of multiply-adds
LEAST = 14  # log2 of the positions up to which the unit is the same
FACTOR = 1 + 2.0**-40
FRACTION = 52  # bits of a float64 after its first
Use = Callable[[Value, Variable], None]
EachLine = Callable[[Use, Sequence[Variable]], None]
EXPONENT, HALF = 0x7FF << FRACTION, 1 << (FRACTION - 1)  # bits of a float64


def exponent(pixels: int) -> int:
    """The exponent of the first sum for a largest |x| of 1.

    All sums of `pixels` values below 2 differ from it by less than half of 2^exponent.

    >>> exponent(49), exponent(2**14 + 1)
    (16, 17)
    """
    return 2 + max(LEAST, ceil(log2(pixels)))


@dataclass(frozen=True, slots=True)
class MeanKernel:
    """The mean of each channel over the positions of an image.

    groups: the lanes of each image. lines: those of the table, if they are few: they then stay in
    registers. whole: how many of these are whole.
    """

    groups: tuple[tuple[int, ...], ...]
    lines: tuple[int, ...] = ()
    whole: int = 0

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """Write k(call, arena)."""
        fields = Fields(e, CALL.names)
        x, out = fields.buffer("x"), fields.buffer("out")
        wide = ir.VectorType(DOUBLE, e.lanes)
        factor = ir.Constant(wide, [FACTOR] * e.lanes)
        share = e.b.fdiv(DOUBLE(1.0), e.b.sitofp(fields["pixels"], DOUBLE))
        with e.loop(fields["begin"], fields["end"]) as c:
            x_c, out_c = (e.at(base, e.b.mul(c, fields[f"{key}_pitch"])) for key, base in (("x", x), ("out", out)))
            each_line = self._each_line(e, fields, x_c)
            first = self._first_sums(e, fields, self._largest(e, each_line))
            sums = [e.variable(wide, first) for _ in range(TOGETHER)]

            def add(bits: Value, sum_: Variable) -> None:
                value = e.b.fpext(e.b.bitcast(bits, e.vector), wide)
                sum_.set(e.fma(value, factor, sum_.get()))

            each_line(add, sums)
            parts = [e.b.fsub(sum_.get(), first) for sum_ in sums]
            total = parts[0]
            for part in parts[1:]:
                total = e.b.fadd(total, part)
            for image, lanes in enumerate(self.groups):
                mean = e.b.fmul(_total(e, _select_lanes(e, lanes, total)), share)
                # which of several NaNs is left depends on the order
                is_nan = e.b.fcmp_unordered("uno", mean, mean)
                mean = e.b.fptrunc(e.b.select(is_nan, DOUBLE(nan), mean), FLOAT)
                element = e.load_long(I32, fields.pointer("outs"), image)
                e.b.store(mean, e.at(out_c, element, FLOAT))

    def _each_line(self, e: Emitter, fields: Fields, x_c: Value) -> EachLine:
        """A function that calls another with the bits of each line of a channel, zeros outside of
        the images, and one of some variables."""
        table, masks, whole = fields.pointer("table"), fields.pointer("masks"), fields["whole"]

        def inside(bits: Value, mask: Value) -> Value:
            """The bits inside of the image: memory outside of it may hold anything."""
            return e.b.and_(bits, e.b.load(mask, typ=e.ints, align=e.isa.line))

        if self.lines:
            few = [e.b.bitcast(e.read(x_c, line), e.ints) for line in self.lines]
            few[self.whole :] = [inside(bits, e.line(masks, k)) for k, bits in enumerate(few[self.whole :])]

            def each_of_few(use: Use, variables: Sequence[Variable]) -> None:
                for bits, variable in zip(few, cycle(variables)):
                    use(bits, variable)

            return each_of_few

        def read(k: Value) -> Value:
            return e.b.bitcast(e.read(e.line(x_c, e.load_long(I32, table, k))), e.ints)

        def read_inside(k: Value) -> Value:
            return inside(read(k), e.line(masks, e.b.sub(k, whole)))

        def each_line(use: Use, variables: Sequence[Variable]) -> None:
            _call_each(e, (I64(0), whole), lambda k, v: use(read(k), v), variables)
            _call_each(e, (whole, fields["count"]), lambda k, v: use(read_inside(k), v), variables)

        return each_line

    def _largest(self, e: Emitter, each_line: EachLine) -> Value:
        """The largest |x| of each lane, as bits: int32, where NaN is above infinity."""
        absolute = ir.Constant(e.ints, [0x7FFFFFFF] * e.lanes)
        zeros = ir.Constant(e.ints, [0] * e.lanes)
        largest = [e.variable(e.ints, zeros) for _ in range(TOGETHER)]

        def compare(bits: Value, most: Variable) -> None:
            most.set(_larger(e, e.b.and_(bits, absolute), most.get()))

        each_line(compare, largest)
        together = largest[0].get()
        for most in largest[1:]:
            together = _larger(e, together, most.get())
        return together

    def _first_sums(self, e: Emitter, fields: Fields, largest: Value) -> Value:
        """The M of the image of each lane."""
        wide, result = ir.VectorType(DOUBLE, e.lanes), None
        shift = e.b.shl(fields["exponent"], I64(FRACTION))
        reduce = e.intrinsic(f"llvm.vector.reduce.smax.v{e.lanes}i32", I32, e.ints)
        for lanes in self.groups:
            most = e.b.bitcast(e.b.call(reduce, [_select_lanes(e, lanes, largest)]), FLOAT)
            bits = e.b.and_(e.b.bitcast(e.b.fpext(most, DOUBLE), I64), I64(EXPONENT))
            first = e.b.bitcast(e.b.or_(e.b.add(bits, shift), I64(HALF)), DOUBLE)
            other = ir.Constant(wide, None) if result is None else result
            result = e.b.select(_mask(e, lanes), e.splat(first), other)
        return result


def _call_each(e: Emitter, span: tuple[Value, Value], use: Use, variables: Sequence[Variable]) -> None:
    """Call `use` with each number of a span and one of the variables, which take turns."""
    begin, end = span
    together = I64(len(variables))
    rest = e.b.sub(end, e.b.srem(e.b.sub(end, begin), together))
    with e.loop(begin, rest, together) as k:
        for n, variable in enumerate(variables):
            use(e.b.add(k, I64(n)), variable)
    with e.loop(rest, end) as k:
        use(k, variables[0])


def _mask(e: Emitter, lanes: Sequence[int]) -> Value:
    kind = ir.VectorType(BIT, e.lanes)
    return ir.Constant(kind, [int(lane in lanes) for lane in range(e.lanes)])


def _select_lanes(e: Emitter, lanes: Sequence[int], x: Value) -> Value:
    """These lanes of x; 0 in others."""
    return e.b.select(_mask(e, lanes), x, ir.Constant(x.type, None))


def _larger(e: Emitter, a: Value, b: Value) -> Value:
    return e.b.select(e.b.icmp_signed(">", a, b), a, b)


def _total(e: Emitter, x: Value) -> Value:
    lanes = e.lanes
    while lanes > 1:
        lanes //= 2
        low, high = (ir.Constant(ir.VectorType(I32, lanes), list(range(first, first + lanes))) for first in (0, lanes))
        x = e.b.fadd(e.b.shuffle_vector(x, x, low), e.b.shuffle_vector(x, x, high))
    return e.b.extract_element(x, I32(0))
