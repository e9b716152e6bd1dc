"""Kernels that resize images: weighted sums of elements of some rows and columns.

What a row of positions of the output reads is the same for all of its columns, and the other way
round. An output of row r and column c of a tile is in line `row_lines`[r] + `column_lines`[c]; its
taps are the sums of one entry of row r and one of column c, and their weights are vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from demask.kernels.llvm.emitter import I32, I64, Emitter, Fields, Value

#: fields of every call: buffers, their bytes from channel to channel, channels, and of rows and
#: columns their numbers, the taps of each, their weights, and lines of the output
CALL = np.dtype([(key, "<i8") for key in (
    "x_slot", "x", "out_slot", "out", "x_pitch", "out_pitch", "begin", "end", "rows", "row_taps",
    "row_weights", "row_lines", "columns", "column_taps", "column_weights",
    "column_lines")])  # fmt: skip


@dataclass(frozen=True, slots=True)
class ResizeKernel:
    """out = weighted sums over columns, summed with the weights of rows.

    row_taps: of each output; 0 for the rows of a signal. whole: whether entries of taps are
    numbers of lines, whose lanes are those of the output, instead of vectors of element numbers.
    """

    row_taps: int
    column_taps: int
    whole: bool

    arguments = 2

    def emit(self, e: Emitter) -> None:
        call = Fields(e, CALL.names)
        x, out = call.buffer("x"), call.buffer("out")
        with e.loop(call["begin"], call["end"]) as c:
            x_c, out_c = (e.at(base, e.b.mul(c, call[f"{key}_pitch"])) for key, base in (("x", x), ("out", out)))
            with e.loop(I64(0), call["rows"]) as r:
                rows = [self._load_tap(e, call.pointer("row_taps"), r, t, self.row_taps) for t in range(self.row_taps)]
                weights = _load_weights(e, call.pointer("row_weights"), r, self.row_taps)
                to = e.line(out_c, e.load_long(I32, call.pointer("row_lines"), r))
                with e.loop(I64(0), call["columns"]) as k:
                    columns = [
                        self._load_tap(e, call.pointer("column_taps"), k, t, self.column_taps)
                        for t in range(self.column_taps)
                    ]
                    across = _load_weights(e, call.pointer("column_weights"), k, self.column_taps)
                    sums = [
                        _weighted_sum(e, [self._load_elements(e, x_c, row, tap) for tap in columns], across)
                        for row in rows or [None]
                    ]
                    value = _weighted_sum(e, sums, weights) if rows else sums[0]
                    e.write(value, e.line(to, e.load_long(I32, call.pointer("column_lines"), k)))

    def _load_tap(self, e: Emitter, table: Value, row: Value, tap: int, taps: int) -> Value:
        """The entry of a tap: a number of lines, or a vector of elements."""
        number = e.b.add(e.b.mul(row, I64(taps)), I64(tap))
        if self.whole:
            return e.load_long(I32, table, number)
        return e.b.load(e.line(table, number), typ=e.ints, align=4)

    def _load_elements(self, e: Emitter, x: Value, row: Value | None, column: Value) -> Value:
        """The elements at a row and a column."""
        element = column if row is None else e.b.add(row, column)
        if self.whole:
            return e.read(e.line(x, element))
        return e.gather(x, element, e.every(), e.splat(0.0))


def _load_weights(e: Emitter, table: Value, row: Value, taps: int) -> list[Value]:
    first = e.line(table, e.b.mul(row, I64(taps)))
    return [e.read(first, tap) for tap in range(taps)]


def _weighted_sum(e: Emitter, values: Sequence[Value], weights: Sequence[Value]) -> Value:
    total = e.b.fmul(values[0], weights[0])
    for value, weight in zip(values[1:], weights[1:], strict=True):
        total = e.fma(value, weight, total)
    return total
