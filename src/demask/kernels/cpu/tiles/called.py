"""Kernels of calls of single ops: elements at other places, pointwise functions, softmax.

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
from demask.kernels.llvm.emitter import BIT, I32, Emitter, Value


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
    root = e.b.fmul(e.b.fadd(power_minus_1, e.splat(1.0)), power)
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
        with call.triples() as (places, to):
            vectors = [e.read(place) for place in places]
            e.write(POINTWISE[self.function](e, vectors, self.numbers), to)


@dataclass(frozen=True, slots=True)
class SoftmaxKernel:
    """out[line] of each channel = e**x[line] over the sum of that of all channels.

    `table` has pairs (x, out) of lines. safe: zeros, not NaN, where all channels are -inf (or NaN,
    as in torch's attention).
    """

    safe: bool = False

    arguments = 2

    def emit(self, e: Emitter) -> None:
        call, lowest = CallFields(e), e.splat(-inf)
        with call.pairs() as (x, out):
            first, larger = (lowest, e.larger) if self.safe else (e.read(x), e.largest)
            largest, total = e.variable(e.vector, first), e.variable(e.vector, e.splat(0.0))
            with e.loop(call["begin"], call["end"]) as c:
                largest.set(larger(largest.get(), e.read(call.channel("x", x, c))))
            is_empty = e.b.fcmp_ordered("==", largest.get(), lowest)
            if self.safe:
                largest.set(e.b.select(is_empty, e.splat(0.0), largest.get()))
            with e.loop(call["begin"], call["end"]) as c:
                shifted = e.b.fsub(e.read(call.channel("x", x, c)), largest.get())
                power = exponential(e, shifted)
                e.write(power, call.channel("out", out, c))
                total.set(e.b.fadd(total.get(), power))
            with e.loop(call["begin"], call["end"]) as c:
                place = call.channel("out", out, c)
                share = e.b.fdiv(e.read(place), total.get())
                e.write(e.b.select(is_empty, e.splat(0.0), share) if self.safe else share, place)
