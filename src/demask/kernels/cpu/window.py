"""Depthwise convolutions, average and max pools: windows that slide over each channel separately.

    out[r, q, c] = act(bias[c] + sum over i, j of w[c, i, j] * x[y, z, c])
    y = r * step + i * dilation - top;  z = q * step + j * dilation - left

x is 0 (-inf for a max pool) outside of the image. Images are stored as (rows, columns, channels).

With a column step of 1, a row is columns * channels floats, and every vector is full for any number
of channels: the weights repeat with their period. Otherwise, vectors contain channels of one
position. Several rows of the output are computed together, so that each vector of x is read once
for all of them. Columns near the border are read through masks: a column is in the image if and
only if its floats are in the row. Taps are summed in the same order everywhere, so that a value
does not depend on the tile that computes it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from llvmlite import ir

from demask.kernels.llvm.activations import activated
from demask.kernels.llvm.emitter import BIT, FLOAT, I32, I64, Emitter, Value
from demask.kernels.llvm.isa import Isa, host
from demask.kernels.llvm.jit import CODE
from demask.kernels.thread_team import SpareTasks, job_of_calls
from demask.ops.activations import Act

#: Call of a kernel. table: memory for a `WeightTable`; pitches: floats from row to row; floats: of
#: a row; left: padding before it, in floats; rows and units of the output, of which
#: [inner, inner_end) read only from the image. A unit is a vector of a row, or a column.
CALL = np.dtype([(key, "<i8") for key in (
    "x", "out", "weight", "bias", "table", "x_pitch", "out_pitch", "rows_in", "floats_in",
    "floats_out", "top", "left", "row", "inner_row", "inner_row_end", "row_end", "unit",
    "inner_unit", "inner_unit_end", "unit_end")])  # fmt: skip
ADDRESSES = 4  # the first fields, addresses that change from call to call
LARGEST_WINDOW = 7  # longest side of a window; taps are unrolled
TABLE = 1 << 13  # bytes up to which weights are repeated to a full period
WORK = 1 << 18  # products for which one more thread pays
LINE = 64  # bytes of a cache line


@dataclass(frozen=True, slots=True)
class WindowKernel:
    """The kernel of one geometry; pairs are (rows, columns).

    mode: "conv", "mean" or "max". divisor: of a mean. add: whether to add to the values in out.
    side:
    rows of the output computed together, then those for the remaining rows.
    """

    size: tuple[int, int]
    step: tuple[int, int]
    dilation: tuple[int, int]
    channels: int
    mode: str = "conv"
    divisor: int = 1
    act: Act | None = None
    add: bool = False
    side: tuple[int, ...] = (4, 1)

    arguments = 2

    @property
    def flat(self) -> bool:
        """Whether vectors span columns."""
        return self.step[1] == 1

    @property
    def taps(self) -> int:
        return self.size[0] * self.size[1]

    def table(self, lanes: int) -> WeightTable:
        if not self.flat:
            return WeightTable(-(-self.channels // lanes) * lanes, lanes, self.channels)
        period = math.lcm(self.channels, lanes)
        if 4 * period * (self.taps + 1) <= TABLE:
            return WeightTable(period, lanes, period)
        return WeightTable(self.channels + lanes, lanes % self.channels, self.channels)

    def emit(self, e: Emitter) -> None:
        """Write k(call, arena)."""
        _WindowBody(e, self).emit()


class WeightTable(NamedTuple):
    """Layout of weights: a line of `pitch` floats per tap, then the bias.

    A vector reads each line at a float, its phase; the phase of the next vector is larger by
    `advance`, modulo `modulus`.
    """

    pitch: int
    advance: int
    modulus: int


class _WindowBody:
    """Writes the code of one kernel."""

    def __init__(self, e: Emitter, window: WindowKernel):
        call = e.pointer(e.args[0])
        self.e, self.w, self.t = e, window, window.table(e.lanes)
        self.field = {key: e.load(I64, call, k) for k, key in enumerate(CALL.names or ())}
        self.out, self.table = e.pointer(self.field["out"]), e.pointer(self.field["table"])
        # of the first column of the first window, which may be before the row
        self.x = e.at(e.pointer(self.field["x"]), e.b.neg(self.field["left"]), FLOAT)
        self.lane_numbers = ir.Constant(e.ints, list(range(e.lanes)))

    def emit(self) -> None:
        e, b, f = self.e, self.e.b, self.field
        if self.w.mode == "conv":
            self._write_table()
        with e.loop(f["row"], f["row_end"]) as row:
            inner = b.and_(b.icmp_signed(">=", row, f["inner_row"]), b.icmp_signed("<", row, f["inner_row_end"]))
            end = b.select(inner, f["inner_unit"], f["unit_end"])
            begin = b.select(inner, f["inner_unit_end"], f["unit_end"])
            with e.loop(I64(0), I64(2)) as part:
                first = b.icmp_signed("==", part, I64(0))
                ends = b.select(first, f["unit"], begin), b.select(first, end, f["unit_end"])
                self._each_vector(*ends, lambda *unit: self._compute_border(row, *unit))
        begin = f["inner_row"]
        for side in self.w.side:
            count = b.sdiv(b.sub(f["inner_row_end"], begin), I64(side))
            end = b.add(begin, b.mul(count, I64(side)))
            with e.loop(begin, end, side) as row:
                self._compute_rows(row, side)
            begin = end

    def _write_table(self) -> None:
        """Write the weight table."""
        e, b, taps = self.e, self.e.b, self.w.taps
        weight, bias = e.pointer(self.field["weight"]), e.pointer(self.field["bias"])
        biased = b.icmp_signed("!=", self.field["bias"], I64(0))
        with e.loop(I64(0), I64(self.t.pitch)) as k:
            channel = b.urem(k, I64(self.w.channels))
            channel_weights = e.at(weight, b.mul(channel, I64(taps)), FLOAT)
            for tap in range(taps):
                value = e.load(FLOAT, channel_weights, tap)
                b.store(value, e.at(self.table, b.add(k, I64(tap * self.t.pitch)), FLOAT))
            value = e.variable(FLOAT, FLOAT(0.0))
            with b.if_then(biased):
                value.set(e.load(FLOAT, bias, channel))
            bias_index = b.add(k, I64(taps * self.t.pitch))
            b.store(value.get(), e.at(self.table, bias_index, FLOAT))

    def _each_vector(self, begin: Value, end: Value, body: Callable[..., None]) -> None:
        """Calls body(index in x, index in out, phase, mask or None) for each vector of a row."""
        e, b, w, t = self.e, self.e.b, self.w, self.t
        if w.flat:
            phase = e.variable(I64, b.urem(b.mul(begin, I64(e.lanes)), I64(t.modulus)))
            with e.loop(begin, end) as k:
                index = b.mul(k, I64(e.lanes))
                current_phase = I64(0) if t.modulus == e.lanes else phase.get()
                body(index, index, current_phase, None)
                next_phase = b.add(phase.get(), I64(t.advance))
                wraps = b.icmp_signed(">=", next_phase, I64(t.modulus))
                phase.set(b.select(wraps, b.sub(next_phase, I64(t.modulus)), next_phase))
            return
        full, rest = w.channels // e.lanes * e.lanes, w.channels % e.lanes
        with e.loop(begin, end) as k:
            x, out = b.mul(k, I64(w.step[1] * w.channels)), b.mul(k, I64(w.channels))
            if full:
                with e.loop(I64(0), I64(full), e.lanes) as c:
                    body(b.add(x, c), b.add(out, c), c, None)
            if rest:
                lanes = [k < rest for k in range(e.lanes)]
                mask = ir.Constant(ir.VectorType(BIT, e.lanes), lanes)
                body(b.add(x, I64(full)), b.add(out, I64(full)), I64(full), mask)

    # -- rows within the image

    def _compute_rows(self, row: Value, side: int) -> None:
        """Rows computed together, for the units that read only from the image."""
        e, b, w, f = self.e, self.e.b, self.w, self.field
        first = b.sub(b.mul(row, I64(w.step[0])), f["top"])
        reads: dict[int, list[tuple[int, int]]] = {}  # row of x -> (row of out, row of tap)
        for r in range(side):
            for i in range(w.size[0]):
                reads.setdefault(r * w.step[0] + i * w.dilation[0], []).append((r, i))
        sources = {y: self._row_address(self.x, b.add(first, I64(y)), "x_pitch") for y in sorted(reads)}
        outs = [self._row_address(self.out, b.add(row, I64(r)), "out_pitch") for r in range(side)]
        is_fixed = w.flat and self.t.modulus == e.lanes  # all vectors use the same weights
        loaded = [self._weight(I64(tap), I64(0)) for tap in range(w.taps + 1)] if is_fixed else None

        def body(x: Value, out: Value, phase: Value, mask: Value | None) -> None:
            weights = loaded or [self._weight(I64(tap), phase) for tap in range(w.taps + 1)]
            sums = [self._initial_sum()] * side
            for (y, source), j in itertools.product(sources.items(), range(w.size[1])):
                address = e.at(source, b.add(x, I64(j * w.dilation[1] * w.channels)), FLOAT)
                value = self._load_vector(address, mask)
                for r, i in reads[y]:
                    sums[r] = self._add_tap(sums[r], weights[i * w.size[1] + j], value)
            for address, sum_ in zip(outs, sums, strict=True):
                self._write_vector(sum_, weights[-1], e.at(address, out, FLOAT), mask)

        self._each_vector(f["inner_unit"], f["inner_unit_end"], body)

    def _row_address(self, base: Value, row: Value, pitch: str) -> Value:
        return self.e.at(base, self.e.b.mul(row, self.field[pitch]), FLOAT)

    def _weight(self, tap: Value, phase: Value) -> Value | None:
        """The weights of a tap for a vector with this phase; after the last tap, the bias."""
        if self.w.mode != "conv":
            return None
        index = self.e.b.add(self.e.b.mul(tap, I64(self.t.pitch)), phase)
        return self.e.b.load(self.e.at(self.table, index, FLOAT), typ=self.e.vector, align=4)

    # -- initial, updated and final sums

    def _initial_sum(self) -> Value:
        return self.e.splat(-math.inf if self.w.mode == "max" else 0.0)

    def _add_tap(self, sum_: Value, weight: Value, value: Value) -> Value:
        e, b = self.e, self.e.b
        if self.w.mode == "conv":
            return e.fma(weight, value, sum_)
        if self.w.mode == "mean":
            return b.fadd(sum_, value)
        return e.largest(sum_, value)

    def _write_vector(self, sum_: Value, bias: Value, address: Value, mask: Value | None) -> None:
        """Write a vector. The bias is added after the taps, as in the AVX-512 kernels of oneDNN for
        windows without dilation, so results are bit-equal.
        """
        e = self.e
        if self.w.mode == "conv":
            sum_ = e.b.fadd(sum_, bias)
        if self.w.mode == "mean":
            sum_ = e.b.fdiv(sum_, e.splat(float(self.w.divisor)))
        if self.w.add:
            sum_ = e.b.fadd(sum_, self._load_vector(address, mask))
        value = activated(e, sum_, self.w.act)
        if mask is None:
            e.b.store(value, address, align=4)
        else:
            e.store_masked(value, address, mask)

    def _load_vector(self, address: Value, mask: Value | None, other: float = 0.0) -> Value:
        """A vector from memory; lanes outside of the mask are not read."""
        e = self.e
        if mask is None:
            return e.b.load(address, typ=e.vector, align=4)
        return e.load_masked(address, mask, other)

    # -- windows that cross the border

    def _compute_border(self, row: Value, x: Value, out: Value, phase: Value, mask: Value | None) -> None:
        """One vector of a row, whose windows may extend outside of the image."""
        e, b, w, f = self.e, self.e.b, self.w, self.field
        used_lanes = self._mask_within(out, f["floats_out"], mask)
        out_row, other = (self._row_address(self.out, row, "out_pitch"), -math.inf if w.mode == "max" else 0.0)
        bias = self._weight(I64(w.taps), phase)
        sum_ = e.variable(e.vector, self._initial_sum())
        columns = [b.add(x, I64(j * w.dilation[1] * w.channels)) for j in range(w.size[1])]
        masks = [self._mask_within(b.sub(c, f["left"]), f["floats_in"], used_lanes) for c in columns]
        first, taps = self._taps_inside(row)
        with e.loop(*taps) as i:
            source = self._row_address(self.x, b.add(first, b.mul(i, I64(w.dilation[0]))), "x_pitch")
            for j, (column, inside) in enumerate(zip(columns, masks, strict=True)):
                weight = self._weight(b.add(b.mul(i, I64(w.size[1])), I64(j)), phase)
                value = self._load_vector(e.at(source, column, FLOAT), inside, other)
                sum_.set(self._add_tap(sum_.get(), weight, value))
        self._write_vector(sum_.get(), bias, e.at(out_row, out, FLOAT), used_lanes)

    def _taps_inside(self, row: Value) -> tuple[Value, tuple[Value, Value]]:
        """The row of x for the first tap of a row of out, and the taps within the image."""
        b, w, zero = self.e.b, self.w, I64(0)
        first = b.sub(b.mul(row, I64(w.step[0])), self.field["top"])
        ends = []
        for edge in (b.neg(first), b.sub(self.field["rows_in"], first)):
            edge = b.select(b.icmp_signed("<", edge, zero), zero, edge)
            tap = b.udiv(b.add(edge, I64(w.dilation[0] - 1)), I64(w.dilation[0]))
            over = b.icmp_signed(">", tap, I64(w.size[0]))
            ends.append(b.select(over, I64(w.size[0]), tap))
        return first, (ends[0], ends[1])

    def _mask_within(self, begin: Value, floats: Value, mask: Value | None) -> Value:
        """Mask of the lanes that are within a row, for a vector at this index."""
        e, b = self.e, self.e.b
        index = b.add(e.splat(b.trunc(begin, I32)), self.lane_numbers)
        inside = b.icmp_unsigned("<", index, e.splat(b.trunc(floats, I32)))
        return inside if mask is None else b.and_(inside, mask)


class WindowSizes(NamedTuple):
    """Rows, columns and pitch in floats of x and out; rows and columns of padding before x."""

    rows_in: int
    columns_in: int
    rows_out: int
    columns_out: int
    x_pitch: int
    out_pitch: int
    top: int
    left: int


class WindowTask:
    """The calls of a kernel for inputs of one size, one per thread; not for two runs at once."""

    def __init__(self, window: WindowKernel, sizes: WindowSizes, threads: int, isa: Isa):
        table = -(-4 * window.table(isa.lanes).pitch * (window.taps + 1) // LINE) * LINE
        self.tables = np.zeros(threads * table + LINE, np.uint8)
        first = -self.tables.ctypes.data % LINE + self.tables.ctypes.data
        rows, units = _ranges(window, sizes, isa.lanes)
        by_rows = rows[3] >= threads
        calls = []
        for k in range(threads):
            shares = (_share(rows, k, threads) if by_rows else rows, units if by_rows else _share(units, k, threads))
            channels = window.channels
            fields = (
                *(0,) * ADDRESSES,
                first + k * table,
                sizes.x_pitch,
                sizes.out_pitch,
                sizes.rows_in,
                sizes.columns_in * channels,
                sizes.columns_out * channels,
                sizes.top,
                sizes.left * channels,
                *shares[0],
                *shares[1],
            )
            calls.append(fields)
        self.calls, self.threads = np.array(calls, CALL), threads
        self.addresses = self.calls.view(np.int64).reshape(threads, -1)[:, :ADDRESSES]
        self.job = job_of_calls(window, self.calls, isa)

    def run(self, addresses: tuple[int, int, int, int]) -> None:
        """Run for the addresses of x, out, weight and bias."""
        self.addresses[:] = addresses
        self.job.run(self.threads)


Range = tuple[int, int, int, int]  # begin, inner begin, inner end, end


def _ranges(window: WindowKernel, sizes: WindowSizes, lanes: int) -> tuple[Range, Range]:
    """The rows and the units of the output, with those that read only from the image."""
    (height, width), (down, along) = window.size, window.dilation
    rows = _range(sizes.rows_in, sizes.rows_out, sizes.top, window.step[0], (height - 1) * down)
    reach = (width - 1) * along
    if not window.flat:
        return rows, _range(sizes.columns_in, sizes.columns_out, sizes.left, window.step[1], reach)
    c, floats = window.channels, sizes.columns_out * window.channels
    inner = -(-sizes.left * c // lanes)
    inner_floats = (sizes.columns_in - reach + sizes.left) * c
    return rows, _clipped(inner, min(inner_floats, floats) // lanes, -(-floats // lanes))


def _range(into: int, out: int, before: int, step: int, reach: int) -> Range:
    return _clipped(-(-before // step), (into - 1 - reach + before) // step + 1, out)


def _clipped(inner: int, inner_end: int, end: int) -> Range:
    inner = min(inner, end)
    return 0, inner, max(min(inner_end, end), inner), end


def _share(rows: Range, k: int, count: int) -> Range:
    """The part of a range that thread k of `count` computes."""
    begin, end = rows[3] * k // count, rows[3] * (k + 1) // count
    inner = min(max(rows[1], begin), end)
    return begin, inner, max(min(rows[2], end), inner), end


class WindowRunner:
    """Runs a kernel on tiles of any size; several threads may use it at once."""

    def __init__(self, window: WindowKernel, isa: Isa | None = None):
        self.window, self.isa = window, isa or host()
        self.spare = SpareTasks[tuple[WindowSizes, int], WindowTask]()

    def compile(self) -> None:
        """Compile now rather than in the first run."""
        CODE.addresses([self.window], self.isa)

    def run(self, sizes: WindowSizes, threads: int, addresses: tuple[int, int, int, int]) -> None:
        """Fill the output.

        addresses: of x, out, weight (dense [channels, *size]) and bias (0: none).
        """
        work = sizes.rows_out * sizes.columns_out * self.window.channels * self.window.taps
        threads = max(1, min(threads, work // WORK))
        key = sizes, threads
        task = self.spare.take(key, lambda: WindowTask(self.window, sizes, threads, self.isa))
        task.run(addresses)
        self.spare.put(key, task)
