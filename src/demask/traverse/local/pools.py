"""Pools on parts: windows that slide along the cut axes.

A max pool compares taps inside the image, so that it needs no border. An average pool runs the op
inside the image; at the border it divides sums by the number of positions of each window.
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
    write_result,
    writes_in_place,
)

aten = torch.ops.aten
_DIRECT = 9  # a max pool of more taps runs axis by axis
_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class LocalMaxPool(LocalWindows):
    """A max pool: a running maximum over the taps of the window."""

    def run(self, values: list[Any], window: Window, into: Tensor, scratch: Scratch) -> None:
        taps = self._taps(window)
        if self._direct():
            _largest(values[0], into, self.axes, taps)
            return
        x = values[0]
        for k, (s, axis_taps) in enumerate(zip(self.axes, taps, strict=True)):
            last = k == len(self.axes) - 1
            target = into if last else scratch(self._between(x.shape, window, k), self._layout(), x.dtype)
            _largest(x, target, (s,), (axis_taps,))
            x = target

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
        pairs = zip(self.axes, self.intervals(window), strict=True)
        return [_taps(s, interval) for s, interval in pairs]

    def scratch_bytes(self, window: Window) -> int:
        shape, total = self.operand(window), 0
        for k in range(0 if self._direct() else len(self.axes) - 1):
            shape = self._between(shape, window, k)
            total += nbytes(shape, self.call.dtype)
        return total


@dataclass(frozen=True, slots=True)
class _Tap:
    """One tap: positions [first, first + count) of a part read start, start + step, ..."""

    first: int
    count: int
    start: int
    step: int


def _taps(s: Sliding, interval: Interval) -> list[_Tap]:
    """The taps of a window along one axis, clipped to the image."""
    g, taps = s.geometry, []
    low = max(interval[0] * g.step - g.padding, 0)
    for k in range(g.kernel):
        offset = g.number("dilation", 1) * k - g.padding
        first = max(-(offset // g.step), interval[0])
        last = min((g.input - 1 - offset) // g.step, interval[1] - 1)
        if first <= last:
            start = first * g.step + offset - low
            taps.append(_Tap(first - interval[0], last - first + 1, start, g.step))
    return taps


def _largest(x: Tensor, into: Tensor, axes: Sequence[Sliding], taps: Sequence[list[_Tap]]) -> None:
    combinations = list(itertools.product(*taps))
    full = [into.shape[s.axis] for s in axes]
    start = next((c for c in combinations if [t.count for t in c] == full), None)
    if start is None:
        into.fill_(_lowest(into.dtype))
    else:
        into.copy_(_tapped(x, axes, start))
        combinations.remove(start)
    for combination in combinations:
        target = into
        for s, tap in zip(axes, combination, strict=True):
            target = target.narrow(s.axis, tap.first, tap.count)
        torch.maximum(target, _tapped(x, axes, combination), out=target)


def _tapped(x: Tensor, axes: Sequence[Sliding], taps: Sequence[_Tap]) -> Tensor:
    for s, tap in zip(axes, taps, strict=True):
        x = stepped(x, s.axis, tap.start, tap.count, tap.step)
    return x


def _lowest(dtype: torch.dtype) -> float | int:
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


@dataclass(frozen=True, slots=True, eq=False)
class LocalAvgPool(LocalWindows):
    """An average pool: the op inside the image; at a border sums, divided by window sizes."""

    def run(self, values: list[Any], window: Window, into: Tensor, scratch: Scratch) -> None:
        x, borders = values[0], self._borders(window)
        if all(borders):
            padding = [
                0 if border == "inside" else s.geometry.padding for s, border in zip(self.axes, borders, strict=True)
            ]
            divisor = self.call.bound.get("divisor_override")
            self._pool(x, into, padding, self.call.bound["ceil_mode"], divisor)
            return
        work = torch.float32 if x.dtype in _HALVES else x.dtype
        for s, interval in zip(self.axes, self.intervals(window), strict=True):
            x = x.narrow(s.axis, 0, s.margins(interval)[1])
        x = padded(x, self.call.cuts[0].axes, self._margins(window), 0, scratch, work)
        sums = into if work == into.dtype else scratch(into.shape, self.call.axes, work)
        override = self.call.bound.get("divisor_override")
        self._pool(x, sums, [0] * len(self.axes), False, override or 1)
        if not override:
            rounding = None if work.is_floating_point else "trunc"
            sums.div_(self._counts(window, work), rounding_mode=rounding)
        if sums is not into:
            into.copy_(sums)

    def _pool(self, x: Tensor, into: Tensor, padding, ceil: bool, divisor: int | None) -> None:
        """The op's `out` overload; sequences run as images of one row."""
        kernel = [s.geometry.kernel for s in self.axes]
        step = [s.geometry.step for s in self.axes]
        if len(kernel) == 1:
            x, into = x.unsqueeze(-2), into.unsqueeze(-2)
            kernel, step, padding = [1, *kernel], [1, *step], [0, *padding]
        include = self.call.bound["count_include_pad"]
        op: Any = aten.avg_pool3d if len(kernel) == 3 else aten.avg_pool2d
        write_result(op, into, x, kernel, step, padding, ceil, include, divisor)

    def _borders(self, window: Window) -> list[str]:
        """Per axis: "inside" the image, "all" of the axis, or "" where a border must be added."""
        borders = []
        for s, interval in zip(self.axes, self.intervals(window), strict=True):
            before, inside, after = s.margins(interval)
            # A stride may leave positions after the last window unread: those are no border.
            whole = interval == (0, s.geometry.output) and inside == s.geometry.input
            borders.append("inside" if not before and not after else "all" if whole else "")
        return borders

    def _margins(self, window: Window) -> dict[int, Interval]:
        margins = {}
        for s, interval in zip(self.axes, self.intervals(window), strict=True):
            before, _, after = s.margins(interval)
            margins[s.axis] = (before, after)
        return margins

    def _counts(self, window: Window, dtype: torch.dtype) -> Tensor:
        """Positions that each window counts: a tensor that broadcasts over the output."""
        counts = torch.ones([1] * len(self.axes), dtype=dtype)
        for k, (s, interval) in enumerate(zip(self.axes, self.intervals(window), strict=True)):
            g = s.geometry
            low = torch.arange(*interval) * g.step - g.padding
            high = (low + g.kernel).clamp(max=g.input + g.padding)
            if not self.call.bound["count_include_pad"]:
                low, high = low.clamp(min=0), high.clamp(max=g.input)
            shape = [-1 if k == i else 1 for i in range(len(self.axes))]
            counts = counts * (high - low).to(dtype).view(shape)
        return counts

    def scratch_bytes(self, window: Window) -> int:
        if all(self._borders(window)):
            return 0
        halves = self.call.dtype in _HALVES
        work = torch.float32 if halves else self.call.dtype
        shape = list(self.operand(window))
        for s, interval in zip(self.axes, self.intervals(window), strict=True):
            shape[s.axis] = sum(s.margins(interval))
        copy = nbytes(shape, work)
        return copy + (nbytes(self.call.sizes(window), work) if halves else 0)

    def allocated_bytes(self, window: Window) -> int:
        return 0 if writes_in_place(self.call, window) else self.call.bytes(window)


@dataclass(frozen=True, slots=True, eq=False)
class LocalAdaptivePool(LocalWindows):
    """An adaptive average pool: one call where all windows are alike, else window by window."""

    def run(self, values: list[Any], window: Window, into: Tensor, scratch: Scratch) -> None:
        x, pieces = values[0], []
        for s, interval in zip(self.axes, self.intervals(window), strict=True):
            pieces.append(self._pieces(s, interval))
        for combination in itertools.product(*pieces):
            source, target = x, into
            for s, (first, count, low, size) in zip(self.axes, combination, strict=True):
                source, target = (source.narrow(s.axis, low, size), target.narrow(s.axis, first, count))
            self._pool(source, target)

    def _pieces(self, s: Sliding, interval: Interval) -> list[tuple[int, int, int, int]]:
        """(first output, count, first input, size) of runs that the op pools in one call."""
        g, (start, end) = s.geometry, interval
        low = start * g.input // g.output
        if interval == (0, g.output) or g.input % g.output == 0:
            return [(0, end - start, 0, -(-end * g.input // g.output) - low)]
        runs = []
        for k in range(start, end):
            first, last = k * g.input // g.output, -(-(k + 1) * g.input // g.output)
            runs.append((k - start, 1, first - low, last - first))
        return runs

    def _pool(self, x: Tensor, into: Tensor) -> None:
        sizes = [into.shape[s.axis] for s in self.axes]
        if len(sizes) == 1:
            x, into, sizes = x.unsqueeze(-2), into.unsqueeze(-2), [1, *sizes]
        op: Any = aten._adaptive_avg_pool3d if len(sizes) == 3 else aten._adaptive_avg_pool2d
        packet: Any = aten.adaptive_avg_pool3d if len(sizes) == 3 else aten.adaptive_avg_pool2d
        write_result(op, into, x, sizes, over=packet)

    def allocated_bytes(self, window: Window) -> int:
        return 0 if writes_in_place(self.call, window) else self.call.bytes(window)


__all__ = ["LocalAdaptivePool", "LocalAvgPool", "LocalMaxPool"]
