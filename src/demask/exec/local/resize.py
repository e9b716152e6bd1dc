"""Resizing on parts: the same taps with the same weights as on the full value.

Where the factor is a power of two, positions are exact in single precision, and the op runs on the
part. For other factors the op would round the positions of a part differently: its weights are
measured once, by resizing unit impulses, and applied along the cut axis.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from demask.exec.axes import COLUMNS, ROWS, Window
from demask.exec.local.call import (
    LocalCall,
    LocalKind,
    Scratch,
    Sliding,
    nbytes,
    slidings,
    stepped,
    write_result,
    writes_in_place,
)
from demask.ops.entry import Declined, op_name
from demask.ops.regions import Geometry, Interval, Rule

_PERIOD = 8  # of impulses; more than the taps of any position
_PHASES = 8  # the longest period of positions that is searched for
_BEFORE = {"linear": 1, "cubic": 2}  # taps before the middle of the source
_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class Taps:
    """The taps of each output position along one axis.

    Position k reads `count[k]` positions from `start[k]` on, times weights [output, _PERIOD]. None:
    the position itself.
    """

    start: tuple[int, ...]
    count: tuple[int, ...]
    weights: Tensor | None


@dataclass(frozen=True, slots=True)
class Comb:
    """Positions first, first + every, ... (`count` of them) read start, start + step, ..."""

    first: int
    every: int
    count: int
    start: int
    step: int
    taps: int


def combs(taps: Taps, interval: Interval, low: int) -> list[Comb]:
    """An interval as combs of positions whose sources are progressions.

    low: the operand's position at which the part begins.
    """
    result: list[Comb] = []
    k = interval[0]
    while k < interval[1]:
        last = k
        while last < interval[1] and taps.count[last] == taps.count[k]:
            last += 1
        starts = list(taps.start[k:last])
        period = next((f for f in range(1, _PHASES + 1) if _is_periodic(starts, f)), len(starts))
        for phase in range(min(period, len(starts))):
            progression = starts[phase::period]
            step = progression[1] - progression[0] if len(progression) > 1 else 1
            first = k - interval[0] + phase
            result.append(Comb(first, period, len(progression), progression[0] - low, step, taps.count[k]))
        k = last
    return result


def _is_periodic(starts: list[int], every: int) -> bool:
    steps = {b - a for a, b in zip(starts, starts[every:], strict=False)}
    return len(steps) <= 1


@dataclass(frozen=True, slots=True, eq=False)
class LocalResize(LocalKind):
    """A resize, by the op or by taps.

    factors: of axes that are resized by a power of two; None for others. tables: taps, filled on
    first use.
    """

    call: LocalCall
    axes: tuple[Sliding, ...]
    factors: tuple[int | None, ...]
    tables: dict[tuple[int, torch.dtype], Taps] = field(default_factory=dict)

    @staticmethod
    def of(call: LocalCall) -> LocalResize | Declined:
        axes, region = slidings(call.relation), call.relation.entry.region
        if region in ("linear", "cubic") and not call.dtype.is_floating_point:
            return Declined(f"{op_name(call.node.target)} of integers")
        align = bool(call.bound.get("align_corners"))
        return LocalResize(call, axes, tuple(_factor(s, align) for s in axes))

    def computed_window(self, window: Window) -> Window:
        if not self._uses_op(window) or self._count_wrong_rows(window):
            return window
        pair = list(window)
        for s, factor in zip(self.axes, self.factors, strict=True):
            if (dim := self._dim(s)) is not None and self._is_cut(s, window):
                pair[dim] = _distinct(factor or 1, self._needs(s, window), window[dim][1])
        return pair[0], pair[1]

    def _dim(self, s: Sliding) -> int | None:
        axis = len(self.call.shape) + s.axis
        return self.call.axes.index(axis) if axis in self.call.axes else None

    def _needs(self, s: Sliding, window: Window) -> Interval:
        rule: Rule | None = self.call.cuts[0].rules[self._dim(s) or 0]
        assert rule is not None
        return rule(*window[self._dim(s) or 0])

    def _is_cut(self, s: Sliding, window: Window) -> bool:
        """Whether only a part of an axis is read or written."""
        dim, g = self._dim(s), s.geometry
        if dim is None:
            return False
        return window[dim] != (0, g.output) or self._needs(s, window) != (0, g.input)

    def _uses_op(self, window: Window) -> bool:
        return all(
            factor is not None or not self._is_cut(s, window) for s, factor in zip(self.axes, self.factors, strict=True)
        )

    def run(self, values: list[Any], window: Window, into: Tensor, scratch: Scratch) -> None:
        x = values[0]
        if self._uses_op(window):
            self._run_by_op(x, window, into, scratch)
            return
        work = torch.float32 if x.dtype in _HALVES else x.dtype
        target = into if work == into.dtype else scratch(into.shape, self.call.axes, work)
        passes = [s for s in self.axes if self._is_cut(s, window)]
        rest = self._has_uncut_axes(window)
        for k, s in enumerate(passes):
            interval = window[self._dim(s) or 0]
            last = k == len(passes) - 1 and not rest
            shape = list(x.shape)
            shape[s.axis] = interval[1] - interval[0]
            pass_target = target if last else scratch(shape, self.call.cuts[0].axes, work)
            taps = self._taps(s, work)
            resample(
                x, pass_target, s.axis, combs(taps, interval, self._needs(s, window)[0]), taps.weights, interval[0]
            )
            x = pass_target
        if rest:
            self._call_op(x, target, window, skip=True)
        if target is not into:
            into.copy_(target)

    def _run_by_op(self, x: Tensor, window: Window, into: Tensor, scratch: Scratch) -> None:
        count = self._count_wrong_rows(window)
        if not count:
            self._call_op(x, into, window)
            return
        rows, head = self.call.axes[ROWS], self._first_rows(window, count)
        assert rows is not None
        computed, before = self.computed_window(head), self._rows_before(window)
        self._call_op(x.narrow(rows, before, x.shape[rows] - before), into, window)
        head_rows = scratch(self.call.sizes(computed), self.call.axes, into.dtype)
        needs = self._needs(self._row_axis(), head)
        self._call_op(x.narrow(rows, 0, needs[1] - needs[0]), head_rows, head)
        corrected = head_rows.narrow(rows, head[ROWS][0] - computed[ROWS][0], count)
        into.narrow(rows, 0, count).copy_(corrected)

    def _row_axis(self) -> Sliding:
        rank = len(self.call.shape)
        return next(s for s in self.axes if rank + s.axis == self.call.axes[ROWS])

    def _rows_before(self, window: Window) -> int:
        """Rows that are read before the one under the window's first row."""
        s, (start, _) = self._row_axis(), window[ROWS]
        factor = self.factors[self.axes.index(s)] or 1
        return start // factor - self._needs(s, window)[0]

    def _first_rows(self, window: Window, count: int) -> Window:
        return (window[ROWS][0], window[ROWS][0] + count), window[COLUMNS]

    def _count_wrong_rows(self, window: Window) -> int:
        """Rows at the window's start that differ if the image began there; the others can be
        written in place. 0 where none differ, or all rows must be computed in scratch."""
        partial = [s for s in self.axes if self._is_cut(s, window)]
        if len(partial) != 1 or self._dim(partial[0]) != ROWS:
            return 0
        factor, (start, end) = self.factors[self.axes.index(partial[0])] or 1, window[ROWS]
        if factor == 1 or start % factor or self._rows_before(window) <= 0:
            return 0
        count = factor * (_BEFORE[self.call.relation.entry.region] - 1) + factor // 2
        rows_read = self._needs(partial[0], window)[1] - start // factor
        is_exact = _distinct(factor, (0, rows_read), end - start) == (0, end - start)
        return count if is_exact and 0 < count < end - start else 0

    def _has_uncut_axes(self, window: Window) -> bool:
        """Whether the op must resize further axes after the passes."""
        rest = [s.geometry for s in self.axes if not self._is_cut(s, window)]
        return any(g.input != g.output or g.number("scale_factors", 1) != 1 for g in rest)

    def _call_op(self, x: Tensor, into: Tensor, window: Window, *, skip: bool = False) -> None:
        """Run torch's op. skip: the cut axes have been resized already."""
        sizes, scales = [], []
        for s, factor in zip(self.axes, self.factors, strict=True):
            partial = self._is_cut(s, window)
            sizes.append(into.shape[s.axis])
            scale = s.geometry.number("scale_factors", None)
            scales.append((None if skip else float(factor or 1)) if partial else scale)
        align = [self.call.bound["align_corners"]] if "align_corners" in self.call.bound else []
        write_result(self._packet(), into, x, sizes, *align, *scales)

    def _packet(self) -> Any:
        target: Any = self.call.node.target
        return target.overloadpacket

    def _taps(self, s: Sliding, dtype: torch.dtype) -> Taps:
        """The taps of an axis for a dtype, measured once."""
        index = self.axes.index(s)
        if (index, dtype) not in self.tables:
            rule = self.call.cuts[0].rules[self._dim(s) or 0]
            align = self.call.bound.get("align_corners")
            taps = _measure_taps(self._packet(), len(self.axes), index, s.geometry, rule, align, dtype)
            self.tables[index, dtype] = taps
        return self.tables[index, dtype]

    def allocated_bytes(self, window: Window) -> int:
        """The result, where it cannot be written in place."""
        if not self._uses_op(window) and not self._has_uncut_axes(window):
            return 0
        computed = self.computed_window(window)
        return 0 if writes_in_place(self.call, computed) else self.call.bytes(computed)

    def scratch_bytes(self, window: Window) -> int:
        if count := self._count_wrong_rows(window):
            return self.call.bytes(self.computed_window(self._first_rows(window, count)))
        if self._uses_op(window):
            return 0
        is_half = self.call.dtype in _HALVES
        work = torch.float32 if is_half else self.call.dtype
        shape, total = list(self.call.cuts[0].part(window)), 0
        passes = [s for s in self.axes if self._is_cut(s, window)]
        for s in passes if self._has_uncut_axes(window) else passes[:-1]:
            interval = window[self._dim(s) or 0]
            shape[s.axis] = interval[1] - interval[0]
            total += nbytes(shape, work)
        return total + (nbytes(self.call.sizes(window), work) if is_half else 0)


def _distinct(factor: int, needs: Interval, end: int) -> Interval:
    """The interval to compute of a part along an axis: from the part's first position to `end` or
    later. At the part's own size, or twice it, the op would ignore the scale."""
    low, high = needs
    start, ignored_sizes = factor * low, {high - low, *([2 * (high - low)] if factor != 2 else [])}
    while factor > 1 and end - start in ignored_sizes:
        end += 1
    return start, end


def _factor(s: Sliding, align: bool) -> int | None:
    """The power of two by which an axis grows; None for other factors."""
    g = s.geometry
    factor = g.output // max(g.input, 1)
    scale = g.number("scale_factors", None)
    is_exact = factor * g.input == g.output and factor & (factor - 1) == 0 and scale in (None, factor)
    return factor if factor and is_exact and not align else None


def _measure_taps(
    packet: Any, rank: int, index: int, g: Geometry, rule: Any, align: bool | None, dtype: torch.dtype
) -> Taps:
    """The op's taps along one axis, from resizing signals that are one at every `_PERIOD`-th
    position."""
    nearest = align is None
    positions = torch.arange(g.input)
    if nearest:
        signals = positions.double()[None]
    else:
        signals = (positions % _PERIOD == torch.arange(_PERIOD)[:, None]).to(dtype)
    shape: list[int] = [1, signals.shape[0], *[1] * rank]
    shape[2 + index] = g.input
    # Size 2 along other axes: the op only copies where no size changes.
    sizes, scales = [2] * rank, [None] * rank
    sizes[index], scales[index] = g.output, g.number("scale_factors", None)
    response = packet.default(signals.reshape(shape), sizes, *([] if nearest else [align]), *scales)
    response = response[0].movedim(1 + index, 1).reshape(*signals.shape[:1], g.output, -1)[..., 0]
    if nearest:
        return Taps(tuple(map(int, response[0].tolist())), (1,) * g.output, None)
    intervals = [rule(k, k + 1) for k in range(g.output)]
    columns = [[(low + t) % _PERIOD for t in range(_PERIOD)] for low, _ in intervals]
    weights = response.t().gather(1, torch.tensor(columns))
    return Taps(tuple(a for a, _ in intervals), tuple(b - a for a, b in intervals), weights)


def resample(x: Tensor, into: Tensor, axis: int, parts: list[Comb], weights: Tensor | None, origin: int) -> None:
    """Fill `into` along an axis by combs. origin: its first position, an index into `weights`."""
    shape = [1] * into.ndim
    for c in parts:
        target = stepped(into, axis, c.first, c.count, c.every)
        for tap in range(c.taps):
            position = c.start + tap
            source = stepped(x, axis, position, c.count, c.step) if c.step else x.narrow(axis, position, 1)
            if weights is None:
                target.copy_(source)
                continue
            shape[axis] = c.count
            rows = slice(origin + c.first, origin + c.first + (c.count - 1) * c.every + 1, c.every)
            factor = weights[rows, tap].view(shape)
            if tap:
                target.addcmul_(source, factor)
            else:
                torch.mul(source, factor, out=target)
