"""Pools on parts: windows that slide along the cut axes.

A max pool compares what its taps read inside the image, so that no border is needed. An average
pool is the op itself inside; at the image's border its sum is divided by what each window counts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from demask.ops.regions import Interval
from demask.traverse import axes as parts
from demask.traverse.axes import Window
from demask.traverse.local.call import (
    LocalWindows,
    Scratch,
    Sliding,
    nbytes,
    padded,
    stepped,
    written,
    written_in_place,
)

aten = torch.ops.aten
_DIRECT = 9  # taps of a max pool that are read one by one; more go axis by axis
_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class MaxPool(LocalWindows):
    """A max pool: the larger of the output so far and what each tap of the window reads."""

    def run(self, values: list[Any], window: Window, into: Tensor, scratch: Scratch) -> None:
        taps = self._taps(window)
        if self._direct():
            _largest(values[0], into, self.axes, taps)
            return
        x = values[0]
        for k, (s, these) in enumerate(zip(self.axes, taps, strict=True)):
            last = k == len(self.axes) - 1
            made = (
                into
                if last
                else scratch(self._between(x.shape, window, k), self._layout(), x.dtype)
            )
            _largest(x, made, (s,), (these,))
            x = made

    def _direct(self) -> bool:
        return len(self.axes) == 1 or math.prod(s.geometry.kernel for s in self.axes) <= _DIRECT

    def _layout(self) -> parts.Axes:
        return self.call.cuts[0].axes

    def _between(self, shape: Sequence[int], window: Window, k: int) -> tuple[int, ...]:
        sizes = list(shape)
        interval = self.intervals(window)[k]
        sizes[self.axes[k].axis] = interval[1] - interval[0]
        return tuple(sizes)

    def _taps(self, window: Window) -> list[list[_Tap]]:
        found = zip(self.axes, self.intervals(window), strict=True)
        return [_taps(s, interval) for s, interval in found]

    def temporary(self, window: Window) -> int:
        shape, total = self.operand(window), 0
        for k in range(0 if self._direct() else len(self.axes) - 1):
            shape = self._between(shape, window, k)
            total += nbytes(shape, self.call.dtype)
        return total


@dataclass(frozen=True, slots=True)
class _Tap:
    """Positions [first, first + count) of a part read position `start`, and every `step` on."""

    first: int
    count: int
    start: int
    step: int


def _taps(s: Sliding, interval: Interval) -> list[_Tap]:
    """What each place of the window reads inside the image, along one axis."""
    g, found = s.geometry, []
    low = max(interval[0] * g.step - g.padding, 0)
    for k in range(g.kernel):
        offset = g.number("dilation", 1) * k - g.padding
        first = max(-(offset // g.step), interval[0])
        last = min((g.input - 1 - offset) // g.step, interval[1] - 1)
        if first <= last:
            start = first * g.step + offset - low
            found.append(_Tap(first - interval[0], last - first + 1, start, g.step))
    return found


def _largest(x: Tensor, into: Tensor, axes: Sequence[Sliding], taps: Sequence[list[_Tap]]) -> None:
    combined = list(itertools.product(*taps))
    full = [into.shape[s.axis] for s in axes]
    start = next((c for c in combined if [t.count for t in c] == full), None)
    if start is None:
        into.fill_(_lowest(into.dtype))
    else:
        into.copy_(_tapped(x, axes, start))
        combined.remove(start)
    for taken in combined:
        made = into
        for s, tap in zip(axes, taken, strict=True):
            made = made.narrow(s.axis, tap.first, tap.count)
        torch.maximum(made, _tapped(x, axes, taken), out=made)


def _tapped(x: Tensor, axes: Sequence[Sliding], taps: Sequence[_Tap]) -> Tensor:
    for s, tap in zip(axes, taps, strict=True):
        x = stepped(x, s.axis, tap.start, tap.count, tap.step)
    return x


def _lowest(dtype: torch.dtype) -> float | int:
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


@dataclass(frozen=True, slots=True, eq=False)
class AvgPool(LocalWindows):
    """An average pool: the op itself inside; at a border the sum, divided by what each window
    counts."""

    def run(self, values: list[Any], window: Window, into: Tensor, scratch: Scratch) -> None:
        x, own = values[0], self._own(window)
        if all(own):
            padding = [0 if here == "inside" else s.geometry.padding
                       for s, here in zip(self.axes, own, strict=True)]  # fmt: skip
            divisor = self.call.found.get("divisor_override")
            self._pool(x, into, padding, self.call.found["ceil_mode"], divisor)
            return
        wide = torch.float32 if x.dtype in _HALVES else x.dtype
        for s, interval in zip(self.axes, self.intervals(window), strict=True):
            x = x.narrow(s.axis, 0, s.margins(interval)[1])
        x = padded(x, self.call.cuts[0].axes, self._margins(window), 0, scratch, wide)
        made = into if wide == into.dtype else scratch(into.shape, self.call.axes, wide)
        given = self.call.found.get("divisor_override")
        self._pool(x, made, [0] * len(self.axes), False, given or 1)
        if not given:
            rounding = None if wide.is_floating_point else "trunc"
            made.div_(self._counts(window, wide), rounding_mode=rounding)
        if made is not into:
            into.copy_(made)

    def _pool(self, x: Tensor, into: Tensor, padding, ceil: bool, divisor: int | None) -> None:
        """The op's `out`; sequences as pictures of one row."""
        kernel = [s.geometry.kernel for s in self.axes]
        step = [s.geometry.step for s in self.axes]
        if len(kernel) == 1:
            x, into = x.unsqueeze(-2), into.unsqueeze(-2)
            kernel, step, padding = [1, *kernel], [1, *step], [0, *padding]
        include = self.call.found["count_include_pad"]
        op: Any = aten.avg_pool3d if len(kernel) == 3 else aten.avg_pool2d
        written(op, into, x, kernel, step, padding, ceil, include, divisor)

    def _own(self, window: Window) -> list[str]:
        """Per axis: "inside" the image, "all" of the axis, or "" where a border must be added."""
        found = []
        for s, interval in zip(self.axes, self.intervals(window), strict=True):
            before, inside, after = s.margins(interval)
            # A stride may leave positions behind the last window unread: no window's border.
            whole = interval == (0, s.geometry.output) and inside == s.geometry.input
            found.append("inside" if not before and not after else "all" if whole else "")
        return found

    def _margins(self, window: Window) -> dict[int, Interval]:
        found = {}
        for s, interval in zip(self.axes, self.intervals(window), strict=True):
            before, _, after = s.margins(interval)
            found[s.axis] = (before, after)
        return found

    def _counts(self, window: Window, dtype: torch.dtype) -> Tensor:
        """How many positions each window of the output counts, to be broadcast over it."""
        found = torch.ones([1] * len(self.axes), dtype=dtype)
        for k, (s, interval) in enumerate(zip(self.axes, self.intervals(window), strict=True)):
            g = s.geometry
            low = torch.arange(*interval) * g.step - g.padding
            high = (low + g.kernel).clamp(max=g.input + g.padding)
            if not self.call.found["count_include_pad"]:
                low, high = low.clamp(min=0), high.clamp(max=g.input)
            shape = [-1 if k == i else 1 for i in range(len(self.axes))]
            found = found * (high - low).to(dtype).view(shape)
        return found

    def temporary(self, window: Window) -> int:
        if all(self._own(window)):
            return 0
        halves = self.call.dtype in _HALVES
        wide = torch.float32 if halves else self.call.dtype
        shape = list(self.operand(window))
        for s, interval in zip(self.axes, self.intervals(window), strict=True):
            shape[s.axis] = sum(s.margins(interval))
        copy = nbytes(shape, wide)
        return copy + (nbytes(self.call.sizes(window), wide) if halves else 0)

    def beside(self, window: Window) -> int:
        return 0 if written_in_place(self.call, window) else self.call.bytes(window)


@dataclass(frozen=True, slots=True, eq=False)
class Adaptive(LocalWindows):
    """An adaptive average pool: the op itself where all windows are alike, else one by one."""

    def run(self, values: list[Any], window: Window, into: Tensor, scratch: Scratch) -> None:
        x, pieces = values[0], []
        for s, interval in zip(self.axes, self.intervals(window), strict=True):
            pieces.append(self._pieces(s, interval))
        for taken in itertools.product(*pieces):
            source, made = x, into
            for s, (first, count, low, size) in zip(self.axes, taken, strict=True):
                source, made = source.narrow(s.axis, low, size), made.narrow(s.axis, first, count)
            self._pool(source, made)

    def _pieces(self, s: Sliding, interval: Interval) -> list[tuple[int, int, int, int]]:
        """First output and count, first input and size: of runs that the op pools as they are."""
        g, (start, end) = s.geometry, interval
        low = start * g.input // g.output
        if interval == (0, g.output) or g.input % g.output == 0:
            return [(0, end - start, 0, -(-end * g.input // g.output) - low)]
        found = []
        for k in range(start, end):
            first, last = k * g.input // g.output, -(-(k + 1) * g.input // g.output)
            found.append((k - start, 1, first - low, last - first))
        return found

    def _pool(self, x: Tensor, into: Tensor) -> None:
        sizes = [into.shape[s.axis] for s in self.axes]
        if len(sizes) == 1:
            x, into, sizes = x.unsqueeze(-2), into.unsqueeze(-2), [1, *sizes]
        op: Any = aten._adaptive_avg_pool3d if len(sizes) == 3 else aten._adaptive_avg_pool2d
        over: Any = aten.adaptive_avg_pool3d if len(sizes) == 3 else aten.adaptive_avg_pool2d
        written(op, into, x, sizes, over=over)

    def beside(self, window: Window) -> int:
        return 0 if written_in_place(self.call, window) else self.call.bytes(window)


__all__ = ["Adaptive", "AvgPool", "MaxPool"]
