"""Kernels of calls of single ops: elements at other positions, pointwise functions, PReLU, softmax, norms.

Calls have the fields of `relayout.CALL`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

from llvmlite import ir

from demask.kernels.cpu.tiles.relayout import CallFields, read_index
from demask.kernels.llvm.activations import exponential, reduced_exponential
from demask.kernels.llvm.emitter import BIT, DOUBLE, FLOAT, I32, I64, Emitter, Value, Variable

TOGETHER = 4  # sums that hide the latency of additions


@dataclass(frozen=True, slots=True)
class ElementGather:
    """Lines of out = elements of x; `table` has their numbers, -1 for zeros, `lines` those of out.

    partial: leave lanes as they are where the number is -1. tail: store only so many lanes; 0:
    all. Lines of out need not be aligned.
    """

    partial: bool = False
    tail: int = 0

    arguments = 2

    def emit(self, e: Emitter) -> None:
        call = CallFields(e)
        x, out = call.buffer("x"), call.buffer("out")
        lanes = ir.Constant(e.ints, list(range(e.lanes)))
        count = self.tail or e.lanes
        bits = [int(k < count) for k in range(e.lanes)]
        is_stored = ir.Constant(ir.VectorType(BIT, e.lanes), bits)
        with call.lines() as k:
            index, is_valid = read_index(e, call.pointer("table"), k)
            value = e.gather(x, index, is_valid, e.splat(0.0))
            line = e.line(out, e.load_long(I32, call.pointer("lines"), k))
            if self.partial or self.tail:
                mask = e.b.and_(is_valid, is_stored) if self.partial else is_stored
                e.scatter(value, line, lanes, mask)
            else:
                e.b.store(value, line, align=4)


def _exp(e: Emitter, x: Value) -> Value:
    """e**x as the square of e**(x / 2), which neither overflows nor loses digits."""
    half = e.b.fmul(x, e.splat(0.5))
    half = e.smaller(e.larger(half, e.splat(-64.0)), e.splat(64.0))
    power, power_minus_1 = reduced_exponential(e, half, 0)
    root = e.fma(power_minus_1, power, power)
    return e.b.fmul(root, root)


#: name in `segment_calls.CALLED` -> function (emitter, vectors, numbers) -> vector
POINTWISE: dict[str, Callable[[Emitter, list[Value], tuple[float, ...]], Any]] = {
    "times": lambda e, xs, n: e.b.fmul(xs[0], e.splat(n[0])),
    "over": lambda e, xs, n: e.b.fdiv(xs[0], e.splat(n[0])),
    "plus": lambda e, xs, n: e.b.fadd(xs[0], e.splat(n[0])),
    "product": lambda e, xs, n: e.b.fmul(*xs),
    "difference": lambda e, xs, n: e.b.fsub(*xs),
    "exp": lambda e, xs, n: _exp(e, xs[0]),
}


@dataclass(frozen=True, slots=True)
class PointwiseKernel:
    """out[line] = a function of x[line] and z[line]. `table` has triples of lines."""

    function: str
    numbers: tuple[float, ...]

    arguments = 2

    def emit(self, e: Emitter) -> None:
        call = CallFields(e)
        with call.triples() as (addresses, to):
            vectors = [e.read(address) for address in addresses]
            e.write(POINTWISE[self.function](e, vectors, self.numbers), to)


@dataclass(frozen=True, slots=True)
class PReLUKernel:
    """out[line] = x[line], times the weight of its channel where it is not above zero.

    `table` has pairs (x, out) of lines.
    """

    arguments = 2

    def emit(self, e: Emitter) -> None:
        call = CallFields(e)
        bases = call.buffer("x"), call.buffer("out")
        with e.loop(call["begin"], call["end"]) as c:
            weight = e.splat(e.load(FLOAT, call.pointer("weights"), c))
            x_c, out_c = (call.channel(key, base, c) for key, base in zip(("x", "out"), bases, strict=True))
            with call.lines() as k:
                read, written = call.pair(k, x_c, out_c)
                x = e.read(read)
                is_above = e.b.fcmp_ordered(">", x, e.splat(0.0))
                e.write(e.b.select(is_above, x, e.b.fmul(x, weight)), written)


@dataclass(frozen=True, slots=True)
class SoftmaxKernel:
    """out[line] of each channel = e**x[line] over the sum of that of all channels.

    `table` has pairs (x, out) of lines. safe: zeros, not NaN, where all channels are -inf, as in
    attention whose mask hides all keys of a query.
    """

    safe: bool = False

    arguments = 2

    def emit(self, e: Emitter) -> None:
        call, lowest = CallFields(e), e.splat(-inf)
        with call.pairs() as (x, out):
            largest, total = e.variable(e.vector, lowest), e.variable(e.vector, e.splat(0.0))
            with e.loop(call["begin"], call["end"]) as c:
                largest.set(e.largest(largest.get(), e.read(call.channel("x", x, c))))
            is_empty = e.b.fcmp_ordered("==", largest.get(), lowest)
            if self.safe:
                largest.set(e.b.select(is_empty, e.splat(0.0), largest.get()))
            with e.loop(call["begin"], call["end"]) as c:
                shifted = e.b.fsub(e.read(call.channel("x", x, c)), largest.get())
                power = exponential(e, shifted)
                e.write(power, call.channel("out", out, c))
                total.set(e.b.fadd(total.get(), power))
            with e.loop(call["begin"], call["end"]) as c:
                address = call.channel("out", out, c)
                share = e.b.fdiv(e.read(address), total.get())
                e.write(e.b.select(is_empty, e.splat(0.0), share) if self.safe else share, address)


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
                return e.fma(distance, distance, so_far)

            variance = e.b.fdiv(_total(e, call, add_square), size)
            root = e.intrinsic(f"llvm.sqrt.v{e.lanes}f64", wide, wide)
            eps = ir.Constant(wide, [self.eps] * e.lanes)
            one = ir.Constant(wide, [1.0] * e.lanes)
            scale = e.b.fdiv(one, e.b.call(root, [e.b.fadd(variance, eps)]))
            with e.loop(call["begin"], call["end"]) as c:
                value = e.b.fmul(e.b.fsub(read(c), mean), scale)
                value = self._scaled(e, call, value, e.b.sub(c, call["begin"]), count)
                e.write(e.b.fptrunc(value, e.vector), call.channel("out", out, c))

    def _scaled(self, e: Emitter, call: CallFields, value: Value, channel: Value, count: Value) -> Value:
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
