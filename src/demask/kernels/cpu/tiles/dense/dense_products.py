"""The products of dense kernels: loops over input channels and taps that read one weight stream."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from demask.kernels.llvm.emitter import I64, Emitter, Fields, Value, Variable

Totals = list[list[Value]]
#: adds the products at a tap: (addresses of the channel, line of the tap), (weights, first float),
#: totals
Outer = Callable[[tuple[list[Value], int], tuple[Value, int], Totals], None]


@dataclass(frozen=True, slots=True)
class Products:
    """The sums of a block of outputs and some positions, over taps of input channels.

    taps: lines of the kernel's positions in one row, relative to the first. unroll: input channels
    per iteration; 0: one, by a loop over rows of taps. Rows are not written out: 49 taps would take
    seconds to compile, and run slower. floats: of the weight, per tap. fetch: called once for the
    taps of an iteration, to prefetch what comes later. starts: lines of a channel at which `outer`
    gets an address; what it reads from one is not taken from what it has read from another.
    """

    e: Emitter
    fields: Fields
    taps: Sequence[int]
    unroll: int
    floats: int
    outer: Outer
    fetch: Callable[[], None] | None = None
    starts: Sequence[int] = (0,)

    def add(self, x: tuple[Value, Value, Value], weight: Variable, sums: list[list[Variable]]) -> None:
        """Add the products of a block of input channels.

        x: the address of the first input, the offsets of these channels, and how many there are.
        weight: the address of the next weight.
        """
        e, (first, offsets, count) = self.e, x

        def channel(number: Value) -> Value:
            return e.at(first, e.load(I64, offsets, number))

        if not self.unroll:
            with e.loop(I64(0), count) as number:
                begin = channel(number)
                with e.loop(I64(0), self.fields["tap_rows"]) as row:
                    address = e.at(begin, e.b.mul(row, self.fields["tap_pitch"]))
                    self._row([address], weight, sums)
            return
        whole = e.b.sub(count, e.b.srem(count, I64(self.unroll)))
        with e.loop(I64(0), whole, self.unroll) as number:
            table = e.at(offsets, number, I64)
            channels = [e.at(first, e.load(I64, table, n)) for n in range(self.unroll)]
            self._row(channels, weight, sums)
        if self.unroll > 1:
            with e.loop(whole, count) as number:
                self._row([channel(number)], weight, sums)

    def _row(self, channels: list[Value], weight: Variable, sums: list[list[Variable]]) -> None:
        """Add the products of one row of taps of the channels at these addresses."""
        e, k = self.e, 0
        weights = e.pointer(weight.get())
        if self.fetch is not None:
            self.fetch()
        # Sums are values here, not variables: LLVM compiles a third of the instructions.
        totals = [[sum_.get() for sum_ in row] for row in sums]
        for channel in channels:
            addresses = [e.opaque(e.line(channel, start)) for start in self.starts]
            for tap in self.taps:
                self.outer((addresses, tap), (weights, k), totals)
                k += self.floats
        for row, row_totals in zip(sums, totals, strict=True):
            for sum_, total in zip(row, row_totals, strict=True):
                sum_.set(total)
        weight.set(e.b.add(weight.get(), I64(4 * k)))


def add_products(e: Emitter, totals: Totals, vector: Callable[[int], Value], factor: Callable[[int], Value]) -> None:
    """Add to totals[r][t] the product of factor(r), in all lanes, and vector(t).

    Only the fewer of both are in registers at once: LLVM keeps the order of loads.
    """
    if len(totals[0]) <= len(totals):
        vectors = [vector(t) for t in range(len(totals[0]))]
        for r, row in enumerate(totals):
            row[:] = map(functools.partial(e.fma, factor(r)), vectors, row)
        return
    factors = [factor(r) for r in range(len(totals))]
    for t in range(len(totals[0])):
        value = vector(t)
        for row, row_factor in zip(totals, factors, strict=True):
            row[t] = e.fma(row_factor, value, row[t])
