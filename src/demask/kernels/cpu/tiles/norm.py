"""The kernel of norms over the channels of a position.

Lanes are positions, so that each has its own statistics and all are summed in the same order,
whatever the layout. Sums and results are computed in float64, means before variances, and rounded
once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from demask.kernels.cpu.tiles.relayout import CallFields
from demask.kernels.llvm.emitter import FLOAT, I64, Emitter, Value, Variable

DOUBLE = ir.DoubleType()
TOGETHER = 4  # sums that hide the latency of additions


@dataclass(frozen=True, slots=True)
class NormKernel:
    """out[line] = (x[line] - mean) / sqrt(variance + eps) · weight + bias, per channel.

    centered: whether the mean is subtracted. factors: how many of weight and bias there are, one
    after another in `weights`. `table` has pairs (x, out) of lines. Calls have the fields of
    `relayout.CALL`.
    """

    centered: bool
    eps: float
    factors: int

    arguments = 2

    def emit(self, e: Emitter) -> None:
        call = CallFields(e)
        wide = ir.VectorType(DOUBLE, e.lanes)
        count = e.b.sub(call["end"], call["begin"])
        size = e.splat(e.b.sitofp(count, DOUBLE))
        with call.pairs() as (x, out):

            def read(c: Value) -> Value:
                return e.b.fpext(e.read(call.channel("x", x, c)), wide)

            mean = ir.Constant(wide, [0.0] * e.lanes)
            if self.centered:
                total = _total(e, call, lambda c, so_far: e.b.fadd(so_far, read(c)))
                mean = e.b.fdiv(total, size)

            def add_square(c: Value, so_far: Value) -> Value:
                distance = e.b.fsub(read(c), mean)
                return _fma(e, distance, distance, so_far)

            variance = e.b.fdiv(_total(e, call, add_square), size)
            root = e.intrinsic(f"llvm.sqrt.v{e.lanes}f64", wide, wide)
            eps = ir.Constant(wide, [self.eps] * e.lanes)
            one = ir.Constant(wide, [1.0] * e.lanes)
            scale = e.b.fdiv(one, e.b.call(root, [e.b.fadd(variance, eps)]))
            with e.loop(call["begin"], call["end"]) as c:
                value = e.b.fmul(e.b.fsub(read(c), mean), scale)
                value = self._scaled(e, call, value, e.b.sub(c, call["begin"]), count)
                e.write(e.b.fptrunc(value, e.vector), call.channel("out", out, c))

    def _scaled(self, e: Emitter, call: CallFields, value: Value, channel: Value,
                count: Value) -> Value:  # fmt: skip
        """value · weight + bias of a channel."""
        stored = call.pointer("weights")
        if self.factors > 0:
            value = e.b.fmul(value, e.splat(_factor(e, stored, channel)))
        if self.factors > 1:
            value = e.b.fadd(value, e.splat(_factor(e, stored, e.b.add(channel, count))))
        return value


def _factor(e: Emitter, stored: Value, number: Value) -> Value:
    return e.b.fpext(e.load(FLOAT, stored, number), DOUBLE)


def _total(e: Emitter, call: CallFields, add: Callable[[Value, Value], Value]) -> Value:
    """The sum of a function of the channels. add: (channel, sum so far) -> sum."""
    wide = ir.VectorType(DOUBLE, e.lanes)
    zero = ir.Constant(wide, [0.0] * e.lanes)
    sums: list[Variable] = [e.variable(wide, zero) for _ in range(TOGETHER)]
    begin, end = call["begin"], call["end"]
    rest = e.b.sub(end, e.b.srem(e.b.sub(end, begin), I64(TOGETHER)))
    with e.loop(begin, rest, TOGETHER) as c:
        for n, total in enumerate(sums):
            total.set(add(e.b.add(c, I64(n)), total.get()))
    with e.loop(rest, end) as c:
        sums[0].set(add(c, sums[0].get()))
    result = sums[0].get()
    for total in sums[1:]:
        result = e.b.fadd(result, total.get())
    return result


def _fma(e: Emitter, a: Value, b: Value, c: Value) -> Value:
    function = e.intrinsic(f"llvm.fma.v{e.lanes}f64", a.type, a.type, a.type, a.type)
    return e.b.call(function, [a, b, c])
