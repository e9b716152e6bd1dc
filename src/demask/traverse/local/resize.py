"""Resizing on parts: the same taps with the same weights as on the whole value.

Where the factor is a power of two, positions are exact in single precision, and the op itself is
run on the part. Elsewhere the op would round positions that begin at another place differently:
its weights are read off once, by resizing signals of single ones, and applied along the cut axis.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from demask.ops.entry import Declined, op_name
from demask.ops.regions import Geometry, Interval, Rule
from demask.traverse.axes import COLUMNS, ROWS, Axes, Window
from demask.traverse.local.call import (
    LocalCall,
    LocalKind,
    Scratch,
    Sliding,
    nbytes,
    slidings,
    stepped,
    written,
    written_in_place,
)

_PERIOD = 8  # signals; more than the taps of any position
_PHASES = 8  # the largest repeat of positions that is looked for
_BEFORE = {"linear": 1, "cubic": 2}  # taps before the middle of the source
_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class Taps:
    """Along one axis, what each position of the output reads: `count` positions from `start` on,
    times weights [output, _PERIOD]; None: the position itself."""

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
    """An interval as combs of positions whose sources keep a step; low: where the part begins."""
    found: list[Comb] = []
    k = interval[0]
    while k < interval[1]:
        last = k
        while last < interval[1] and taps.count[last] == taps.count[k]:
            last += 1
        starts = list(taps.start[k:last])
        every = next((f for f in range(1, _PHASES + 1) if _keeps(starts, f)), len(starts))
        for phase in range(min(every, len(starts))):
            mine = starts[phase::every]
            step = mine[1] - mine[0] if len(mine) > 1 else 1
            first = k - interval[0] + phase
            found.append(Comb(first, every, len(mine), mine[0] - low, step, taps.count[k]))
        k = last
    return found


def _keeps(starts: list[int], every: int) -> bool:
    steps = {b - a for a, b in zip(starts, starts[every:], strict=False)}
    return len(steps) <= 1


@dataclass(frozen=True, slots=True, eq=False)
class Resize(LocalKind):
    """A resize, native or by taps. factors: of axes that are resized by a power of two."""

    call: LocalCall
    axes: tuple[Sliding, ...]
    factors: tuple[int | None, ...]
    tables: dict[tuple[int, torch.dtype], Taps] = field(default_factory=dict)

    @staticmethod
    def of(call: LocalCall) -> Resize | Declined:
        found, region = slidings(call.relation), call.relation.entry.region
        if region in ("linear", "cubic") and not call.dtype.is_floating_point:
            return Declined(f"{op_name(call.node.target)} of integers")
        align = bool(call.found.get("align_corners"))
        return Resize(call, found, tuple(_factor(s, align) for s in found))

    def made(self, window: Window) -> Window:
        if not self._native(window) or self._head(window):
            return window
        pair = list(window)
        for s, factor in zip(self.axes, self.factors, strict=True):
            if (dim := self._dim(s)) is not None and self._partial(s, window):
                pair[dim] = _distinct(factor or 1, self._needs(s, window), window[dim][1])
        return pair[0], pair[1]

    def _dim(self, s: Sliding) -> int | None:
        axis = len(self.call.shape) + s.axis
        return self.call.axes.index(axis) if axis in self.call.axes else None

    def _needs(self, s: Sliding, window: Window) -> Interval:
        rule: Rule | None = self.call.cuts[0].rules[self._dim(s) or 0]
        assert rule is not None
        return rule(*window[self._dim(s) or 0])

    def _partial(self, s: Sliding, window: Window) -> bool:
        """Does a part of an axis arrive, or is one asked for? All of it is the op's business."""
        dim, g = self._dim(s), s.geometry
        if dim is None:
            return False
        return window[dim] != (0, g.output) or self._needs(s, window) != (0, g.input)

    def _native(self, window: Window) -> bool:
        return all(factor is not None or not self._partial(s, window)
                   for s, factor in zip(self.axes, self.factors, strict=True))  # fmt: skip

    def run(self, values: list[Any], window: Window, into: Tensor, scratch: Scratch) -> None:
        x = values[0]
        if self._native(window):
            self._run_native(x, window, into, scratch)
            return
        work = torch.float32 if x.dtype in _HALVES else x.dtype
        made = into if work == into.dtype else scratch(into.shape, self.call.axes, work)
        passes = [s for s in self.axes if self._partial(s, window)]
        rest = self._rest(window)
        for k, s in enumerate(passes):
            interval = window[self._dim(s) or 0]
            last = k == len(passes) - 1 and not rest
            shape = list(x.shape)
            shape[s.axis] = interval[1] - interval[0]
            target = made if last else scratch(shape, self._layout(), work)
            taps = self._taps(s, work)
            resample(x, target, s.axis, combs(taps, interval, self._needs(s, window)[0]),
                     taps.weights, interval[0])  # fmt: skip
            x = target
        if rest:
            self._op(x, made, window, skip=True)
        if made is not into:
            into.copy_(made)

    def _run_native(self, x: Tensor, window: Window, into: Tensor, scratch: Scratch) -> None:
        """Rows in place, as if the image began where the window does; then the first ones anew."""
        count = self._head(window)
        if not count:
            self._op(x, into, window)
            return
        rows, head = self.call.axes[ROWS], self._first(window, count)
        assert rows is not None
        made, before = self.made(head), self._before(window)
        self._op(x.narrow(rows, before, x.shape[rows] - before), into, window)
        beside = scratch(self.call.sizes(made), self.call.axes, into.dtype)
        needs = self._needs(self._rows(), head)
        self._op(x.narrow(rows, 0, needs[1] - needs[0]), beside, head)
        first = beside.narrow(rows, head[ROWS][0] - made[ROWS][0], count)
        into.narrow(rows, 0, count).copy_(first)

    def _rows(self) -> Sliding:
        rank = len(self.call.shape)
        return next(s for s in self.axes if rank + s.axis == self.call.axes[ROWS])

    def _before(self, window: Window) -> int:
        """Rows that are read before the one on which the window's first lies."""
        s, (start, _) = self._rows(), window[ROWS]
        factor = self.factors[self.axes.index(s)] or 1
        return start // factor - self._needs(s, window)[0]

    def _first(self, window: Window, count: int) -> Window:
        return (window[ROWS][0], window[ROWS][0] + count), window[COLUMNS]

    def _head(self, window: Window) -> int:
        """Rows that differ where the image would begin with the window: those are few, so that
        the others can be written in place; 0 where all are made beside, or none differ."""
        partial = [s for s in self.axes if self._partial(s, window)]
        if len(partial) != 1 or self._dim(partial[0]) != ROWS:
            return 0
        factor, (start, end) = self.factors[self.axes.index(partial[0])] or 1, window[ROWS]
        if factor == 1 or start % factor or self._before(window) <= 0:
            return 0
        count = factor * (_BEFORE[self.call.relation.entry.region] - 1) + factor // 2
        kept = self._needs(partial[0], window)[1] - start // factor
        even = _distinct(factor, (0, kept), end - start) == (0, end - start)
        return count if even and 0 < count < end - start else 0

    def _layout(self) -> Axes:
        return self.call.cuts[0].axes

    def _rest(self, window: Window) -> bool:
        """Are there axes that the op itself must resize behind the passes?"""
        rest = [s.geometry for s in self.axes if not self._partial(s, window)]
        return any(g.input != g.output or g.number("scale_factors", 1) != 1 for g in rest)

    def _op(self, x: Tensor, into: Tensor, window: Window, *, skip: bool = False) -> None:
        """torch's op. skip: what is cut has been resized already."""
        sizes, scales = [], []
        for s, factor in zip(self.axes, self.factors, strict=True):
            partial = self._partial(s, window)
            sizes.append(into.shape[s.axis])
            own = s.geometry.number("scale_factors", None)
            scales.append((None if skip else float(factor or 1)) if partial else own)
        align = [self.call.found["align_corners"]] if "align_corners" in self.call.found else []
        written(self._packet(), into, x, sizes, *align, *scales)

    def _packet(self) -> Any:
        target: Any = self.call.node.target
        return target.overloadpacket

    def _taps(self, s: Sliding, dtype: torch.dtype) -> Taps:
        """Read once per axis and type."""
        index = self.axes.index(s)
        if (index, dtype) not in self.tables:
            rule = self.call.cuts[0].rules[self._dim(s) or 0]
            align = self.call.found.get("align_corners")
            made = _read_taps(self._packet(), len(self.axes), index, s.geometry, rule, align, dtype)
            self.tables[index, dtype] = made
        return self.tables[index, dtype]

    def beside(self, window: Window) -> int:
        """A result that cannot be written where it belongs."""
        if not self._native(window) and not self._rest(window):
            return 0
        made = self.made(window)
        return 0 if written_in_place(self.call, made) else self.call.bytes(made)

    def temporary(self, window: Window) -> int:
        if count := self._head(window):
            return self.call.bytes(self.made(self._first(window, count)))
        if self._native(window):
            return 0
        halves = self.call.dtype in _HALVES
        work = torch.float32 if halves else self.call.dtype
        shape, total = list(self.call.cuts[0].part(window)), 0
        passes = [s for s in self.axes if self._partial(s, window)]
        for s in passes if self._rest(window) else passes[:-1]:
            interval = window[self._dim(s) or 0]
            shape[s.axis] = interval[1] - interval[0]
            total += nbytes(shape, work)
        return total + (nbytes(self.call.sizes(window), work) if halves else 0)


def _distinct(factor: int, needs: Interval, end: int) -> Interval:
    """What the op makes of a part along an axis: from the part's first position on. A size that is
    the part's own, or twice it, would make the op leave the scale aside."""
    low, high = needs
    start, own = factor * low, {high - low, *([2 * (high - low)] if factor != 2 else [])}
    while factor > 1 and end - start in own:
        end += 1
    return start, end


def _factor(s: Sliding, align: bool) -> int | None:
    """The power of two by which an axis grows, if it does."""
    g = s.geometry
    factor = g.output // max(g.input, 1)
    given = g.number("scale_factors", None)
    exact = factor * g.input == g.output and factor & (factor - 1) == 0 and given in (None, factor)
    return factor if factor and exact and not align else None


def _read_taps(
    packet: Any,
    rank: int,
    index: int,
    g: Geometry,
    rule: Any,
    align: bool | None,
    dtype: torch.dtype,
) -> Taps:
    """What the op reads along one axis, told by resizing signals that are one at every
    `_PERIOD`-th position."""
    nearest = align is None
    signals = torch.arange(g.input).double()[None] if nearest else _signals(g.input, dtype)
    shape: list[int] = [1, signals.shape[0], *[1] * rank]
    shape[2 + index] = g.input
    # Of two, as the op only copies where no size changes.
    sizes, scales = [2] * rank, [None] * rank
    sizes[index], scales[index] = g.output, g.number("scale_factors", None)
    made = packet.default(signals.reshape(shape), sizes, *([] if nearest else [align]), *scales)
    made = made[0].movedim(1 + index, 1).reshape(*signals.shape[:1], g.output, -1)[..., 0]
    if nearest:
        return Taps(tuple(map(int, made[0].tolist())), (1,) * g.output, None)
    intervals = [rule(k, k + 1) for k in range(g.output)]
    order = [[(low + t) % _PERIOD for t in range(_PERIOD)] for low, _ in intervals]
    weights = made.t().gather(1, torch.tensor(order))
    return Taps(tuple(a for a, _ in intervals), tuple(b - a for a, b in intervals), weights)


def _signals(length: int, dtype: torch.dtype) -> Tensor:
    places = torch.arange(length) % _PERIOD
    return (places == torch.arange(_PERIOD)[:, None]).to(dtype)


def resample(
    x: Tensor, into: Tensor, axis: int, pieces: list[Comb], weights: Tensor | None, origin: int
) -> None:
    """Fill `into` along an axis by combs; origin: its first position, a row of `weights`."""
    shape = [1] * into.ndim
    for c in pieces:
        made = stepped(into, axis, c.first, c.count, c.every)
        for tap in range(c.taps):
            place = c.start + tap
            taken = stepped(x, axis, place, c.count, c.step) if c.step else x.narrow(axis, place, 1)
            if weights is None:
                made.copy_(taken)
                continue
            shape[axis] = c.count
            rows = slice(origin + c.first, origin + c.first + (c.count - 1) * c.every + 1, c.every)
            factor = weights[rows, tap].view(shape)
            if tap:
                made.addcmul_(taken, factor)
            else:
                torch.mul(taken, factor, out=made)


__all__ = ["Resize", "Taps", "combs", "resample"]
