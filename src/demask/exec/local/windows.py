"""Convolutions and pools on parts, where windows slide along the cut axes.

Only windows at the image's border read beyond the image. Convolutions read zeros there: a border of
equal size at both ends of a part is the op's padding; any other is part of a padded copy. A max pool
compares taps inside the image, so that it needs no border. An average pool runs the op inside the
image; at the border it divides sums by the number of positions of each window.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from demask.compat.onednn import available, ops
from demask.exec.axes import Window
from demask.exec.local.call import (
    LocalCall,
    LocalKind,
    LocalWindows,
    Scratch,
    Sliding,
    activate,
    grown,
    nbytes,
    padded,
    slidings,
    stepped,
    write_result,
    writes_in_place,
)
from demask.exec.local.carried import bind_arguments
from demask.ops.entry import Declined, op_name
from demask.ops.regions import Interval
from demask.ops.schema import fake
from demask.ops.traits import CONV_OF_AXES
from demask.tune.epilogue import Epilogue

aten = torch.ops.aten
_DIRECT = 9  # a max pool of more taps runs axis by axis
_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class LocalMaxPool(LocalWindows):
    """A max pool: a running maximum over the taps of the window."""

    def run(self, values: list[Any], window: Window, into: Tensor, scratch: Scratch) -> None:
        taps = self._taps(window)
        if self._direct():
            _running_maximum(values[0], into, self.axes, taps)
            return
        x = values[0]
        for k, (s, axis_taps) in enumerate(zip(self.axes, taps, strict=True)):
            last = k == len(self.axes) - 1
            target = into if last else scratch(self._between(x.shape, window, k), self.call.cuts[0].axes, x.dtype)
            _running_maximum(x, target, (s,), (axis_taps,))
            x = target

    def _direct(self) -> bool:
        return len(self.axes) == 1 or math.prod(s.geometry.kernel for s in self.axes) <= _DIRECT

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


def _running_maximum(x: Tensor, into: Tensor, axes: Sequence[Sliding], taps: Sequence[list[_Tap]]) -> None:
    combinations = list(itertools.product(*taps))
    full = [into.shape[s.axis] for s in axes]
    start = next((c for c in combinations if [t.count for t in c] == full), None)
    if start is None:
        into.fill_(-math.inf if into.is_floating_point() else torch.iinfo(into.dtype).min)
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
        x = padded(x, self.call.cuts[0].axes, self.margins(window), 0, scratch, work)
        sums = into if work == into.dtype else scratch(into.shape, self.call.axes, work)
        override = self.call.bound.get("divisor_override")
        self._pool(x, sums, [0] * len(self.axes), False, override or 1)
        if not override:
            rounding = None if work.is_floating_point else "trunc"
            sums.div_(self.divisors(window, work), rounding_mode=rounding)
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
            is_all = interval == (0, s.geometry.output) and inside == s.geometry.input
            borders.append("inside" if not before and not after else "all" if is_all else "")
        return borders

    def divisors(self, window: Window, dtype: torch.dtype) -> Tensor:
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
            pieces.append(self._pooled_runs(s, interval))
        for combination in itertools.product(*pieces):
            source, target = x, into
            for s, (first, count, low, size) in zip(self.axes, combination, strict=True):
                source, target = (source.narrow(s.axis, low, size), target.narrow(s.axis, first, count))
            self._pool(source, target)

    def _pooled_runs(self, s: Sliding, interval: Interval) -> list[tuple[int, int, int, int]]:
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


def windowed(call: LocalCall) -> LocalKind | Declined:
    """The way to run a call whose windows slide along a cut axis."""
    entry, name = call.relation.entry, op_name(call.node.target)
    axes = slidings(call.relation)
    if "weight" in call.bound and _cuts_channels(call):
        return Declined(f"{name}: groups of channels have no parts yet")
    if entry.region == "conv" and "weight" in call.bound:
        return LocalConv(call, axes)
    if entry.region == "transposed":
        return LocalTransposedConv(call, axes)
    if entry.region == "conv" and name.startswith("aten.max_pool"):
        return LocalMaxPool(call, axes)
    if entry.region == "conv" and name.startswith("aten.avg_pool"):
        return LocalAvgPool(call, axes)
    if entry.region == "adaptive" and name.startswith("aten.adaptive_avg_pool"):
        return LocalAdaptivePool(call, axes)
    return Declined(f"{name}: its windows have no rule for parts yet")


def _cuts_channels(call: LocalCall) -> bool:
    relation, cut = call.relation, [axis for axis in call.axes if axis is not None]
    letters = {letter for axis in cut for letter in relation.outs[0][axis]}
    return bool(letters & relation.letters(relation.ins[1]))


@dataclass(frozen=True, slots=True, eq=False)
class LocalConv(LocalWindows):
    """A convolution: oneDNN adds to zeros in the output's memory. Dtypes without oneDNN use ATen,
    and the result is copied."""

    adds = True

    def run_onto(
        self, values: list[Any], window: Window, into: Tensor, scratch: Scratch, after: Epilogue | None, add: bool
    ) -> None:
        """Fill `into`, or add to its values; then apply the activation."""
        x, weight, bias = [*values, None][:3]
        padding, margins = self.padding(window)
        if margins:
            x = padded(x, self.call.cuts[0].axes, margins, 0, scratch)
        if not available(x.dtype, x.device):
            self._run_aten(x, weight, bias, padding, into, after, add)
            return
        if not add:
            into.zero_()
        fused = "relu" if after is not None and after.name == "relu" else None
        _add_onednn(into, x, weight, bias, (padding, *self.steps()), self.call.bound["groups"], fused)
        if after is not None and fused is None:
            activate(after, into)

    def _run_aten(self, x, weight, bias, padding, into: Tensor, after: Epilogue | None, add) -> None:
        stride, dilation = self.steps()
        target = CONV_OF_AXES[len(self.axes)]
        result = target(x, weight, bias, stride, padding, dilation, self.call.bound["groups"])
        if add:
            into.add_(result)
        else:
            into.copy_(result)
        if after is not None:
            activate(after, into)

    def steps(self) -> tuple[list[int], list[int]]:
        """The stride and the dilation per axis."""
        stride = [s.geometry.step for s in self.axes]
        return stride, [s.geometry.number("dilation", 1) for s in self.axes]

    def padding(self, window: Window) -> tuple[list[int], dict[int, Interval]]:
        """The op's padding per axis, and the borders of a padded copy."""
        padding, margins = [], {}
        for s, interval in zip(self.axes, self.intervals(window), strict=True):
            before, inside, after = s.margins(interval)
            count = interval[1] - interval[0]
            windows = (inside + 2 * before - s.geometry.reach - 1) // s.geometry.step + 1
            is_own = inside > 0 and windows == count
            padding.append(before if is_own else 0)
            if not is_own and (before or after):
                margins[s.axis] = (before, after)
        return padding, margins

    def scratch_bytes(self, window: Window) -> int:
        value = fake(self.call.node.args[0])
        margins = self.padding(window)[1]
        return nbytes(grown(self.operand(window), margins), value.dtype) if margins else 0

    def allocated_bytes(self, window: Window) -> int:
        """For dtypes without oneDNN: the result, a second one for groups, a contiguous copy of the
        operand, and the columns (im2col) that ATen multiplies, group by group."""
        if available(self.call.dtype, fake(self.call.node).device):
            return 0
        groups, weight = self.call.bound["groups"], fake(self.call.bound["weight"]).shape
        result, value = self.call.bytes(window), fake(self.call.node.args[0])
        channels = max(self.call.shape[-len(self.axes) - 1], 1)
        columns = math.prod(self.call.sizes(window)) // channels * math.prod(weight[1:])
        margins = self.padding(window)[1]
        copy = nbytes(grown(self.operand(window), margins), value.dtype)
        return (1 + (groups > 1)) * result + nbytes((columns,), value.dtype) + copy

    def macs(self, window: Window) -> int:
        weight = fake(self.call.bound["weight"]).shape
        return math.prod(self.call.sizes(window)) * math.prod(weight[1:])

    def onednn_key(self, window: Window) -> Any:
        """The geometry of the call and the shapes of its operands."""
        if not available(self.call.dtype, fake(self.call.node).device):
            return None
        padding, margins = self.padding(window)
        weight = tuple(fake(self.call.bound["weight"]).shape)
        shape = tuple(grown(self.operand(window), margins))
        return weight, shape, tuple(padding), str(self.steps()), self.call.bound["groups"]

    @property
    def packed_bytes(self) -> int:
        """Bytes of the weight, its channels padded to multiples of 16."""
        weight = fake(self.call.bound["weight"])
        if len(self.axes) == 1 or not available(weight.dtype, weight.device):
            return 0
        outer, inner, *window = weight.shape
        groups = self.call.bound["groups"]
        groups_packed = groups if groups > 1 else 1
        elements = -(-outer // groups_packed // 16) * 16 * -(-inner // 16) * 16 * groups_packed
        return elements * math.prod(window) * weight.dtype.itemsize

    def pack_weight(self, weight: Tensor, window: Window) -> Tensor:
        """The weight in oneDNN's layout for such windows, to be passed in place of `weight`."""
        if len(self.axes) == 1 or not available(weight.dtype, weight.device):
            return weight
        padding, margins = self.padding(window)
        shape = list(grown(self.operand(window), margins))
        shape = [1] * (len(self.axes) + 2 - len(shape)) + shape
        geometry = (padding, *self.steps(), self.call.bound["groups"])
        return ops()._reorder_convolution_weight(weight, *geometry, shape)


def _add_onednn(into: Tensor, x: Tensor, weight, bias, geometry, groups: int, relu: str | None) -> None:
    """oneDNN's convolution, added to `into`; sequences run as images of one row."""
    padding, stride, dilation = geometry
    if len(padding) == 1:
        into, x, weight = (v.unsqueeze(-2) for v in (into, x, weight))
        padding, stride, dilation = [0, *padding], [1, *stride], [1, *dilation]
    if x.ndim < len(padding) + 2:
        into, x = into.unsqueeze(0), x.unsqueeze(0)
    ops()._convolution_pointwise_.binary(
        into, x, weight, bias, padding, stride, dilation, groups, "add", 1.0, relu, [], ""
    )


@dataclass(frozen=True, slots=True, eq=False)
class LocalTransposedConv(LocalWindows):
    """A transposed convolution of the parts, cropped to the window."""

    def run(self, values: list[Any], window: Window, into: Tensor, scratch: Scratch) -> None:
        x, weight, bias = [*values, None][:3]
        plans = self._plans(window)
        if margins := self._margins(plans):
            x = padded(x, self.call.cuts[0].axes, margins, 0, scratch)
        target: Any = self.call.node.target
        values = [x, weight] if bias is None else [x, weight, bias]
        arguments = self.call.arguments(
            values, padding=[p.crop for p in plans], output_padding=[p.extra for p in plans]
        )
        args, kwargs = bind_arguments(target, arguments)
        result = target(*args, **kwargs)
        for s, interval in zip(self.axes, self.intervals(window), strict=True):
            result = result.narrow(s.axis, 0, interval[1] - interval[0])
        into.copy_(result)

    def _plans(self, window: Window) -> list[_TransposedWindow]:
        pairs = zip(self.axes, self.intervals(window), strict=True)
        return [_plan_transposed(s, interval, self._rule(s)(*interval)) for s, interval in pairs]

    def _rule(self, s: Sliding):
        axis = len(self.call.shape) + s.axis
        if axis in self.call.axes:
            rule = self.call.cuts[0].rules[self.call.axes.index(axis)]
            if rule is not None:
                return rule
        return lambda start, end: (0, s.geometry.input)

    def _margins(self, plans: list[_TransposedWindow]) -> dict[int, Interval]:
        return {s.axis: p.zeros for s, p in zip(self.axes, plans, strict=True) if any(p.zeros)}

    def scratch_bytes(self, window: Window) -> int:
        margins = self._margins(self._plans(window))
        return nbytes(grown(self.operand(window), margins), self.call.dtype) if margins else 0

    def allocated_bytes(self, window: Window) -> int:
        plans = self._plans(window)
        surplus = {s.axis: (0, p.surplus) for s, p in zip(self.axes, plans, strict=True)}
        result = nbytes(grown(self.call.sizes(window), surplus), self.call.dtype)
        return result + self._bytes_inside_op(window, result)

    def _bytes_inside_op(self, window: Window, result_bytes: int) -> int:
        """Bytes that the op allocates. oneDNN, for images: a copy of the operand, or with groups
        the result. ATen: the columns, a one for each position, and with groups the results."""
        weight = fake(self.call.bound["weight"])
        dtype, groups = self.call.dtype, self.call.bound["groups"]
        shape = self.operand(window)
        if len(self.axes) == 2 and available(self.call.dtype, weight.device):
            return result_bytes if groups > 1 else nbytes(shape, dtype)
        positions = math.prod(shape) // max(weight.shape[0], 1)
        columns = nbytes((positions * math.prod(weight.shape[1:]),), dtype)
        ones = result_bytes // max(weight.shape[1] * groups, 1)
        return columns + ones + (result_bytes if groups > 1 else 0) + nbytes(shape, dtype)

    def macs(self, window: Window) -> int:
        """Multiply-adds: each position read is multiplied by all taps of the kernel."""
        shape, weight = self.operand(window), fake(self.call.bound["weight"]).shape
        return math.prod(shape) * math.prod(weight[1:])


@dataclass(frozen=True, slots=True)
class _TransposedWindow:
    """A transposed convolution of a part along one axis.

    zeros: padded before and after the part. crop: positions that the op removes at both ends
    (`padding`). extra: positions that it appends (`output_padding`). surplus: positions computed
    after the window's end.
    """

    zeros: Interval
    crop: int
    extra: int
    surplus: int


def _plan_transposed(s: Sliding, interval: Interval, needs: Interval) -> _TransposedWindow:
    """The padding and cropping of an interval of the output.

    Position i of the operand writes positions [i * step - padding, i * step - padding + reach].
    """
    g, (start, end), (low, high) = s.geometry, interval, needs
    before = max(-(-(low * g.step - g.padding - start) // g.step), 0)
    zeros_after = 0 if high - low + before else 1
    low, high = low - before, high + zeros_after
    crop = start - (low * g.step - g.padding)
    largest_extra = max(g.step, g.number("dilation", 1)) - 1
    extra = end - ((high - 1) * g.step - g.padding + g.reach + 1) + crop
    added = max(-(-(extra - largest_extra) // g.step), 0)
    extra -= added * g.step
    return _TransposedWindow((before, zeros_after + added), crop, max(extra, 0), max(-extra, 0))
