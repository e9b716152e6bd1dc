"""Calls on parts, where windows slide along the cut axes: convolutions and pools.

What a window reads beyond the image, zeros or the lowest number, is there at the image's border
only. A border that both ends of a part share is the op's own; another is part of a padded copy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from demask.ops.entry import Declined, op_name
from demask.ops.regions import Interval
from demask.traverse import axes as parts
from demask.traverse.axes import Window
from demask.traverse.local_call import (
    Call,
    Kind,
    Scratch,
    Sliding,
    grown,
    nbytes,
    padded,
    slidings,
    stepped,
    written,
    written_in_place,
)
from demask.traverse.local_carried import spelled
from demask.tune.epilogues import CONVOLUTIONS, Epilogue, available, ops, plain_call

aten = torch.ops.aten
_DIRECT = 9  # taps of a max pool that are read one by one; more go axis by axis
_HALVES = (torch.bfloat16, torch.float16)


def windowed(call: Call) -> Kind | Declined:
    """The way to run a call whose windows slide along a cut axis."""
    entry, name = call.relation.entry, op_name(call.node.target)
    found = slidings(call.relation)
    if "weight" in call.found and _cuts_channels(call):
        return Declined(f"{name}: groups of channels have no parts yet")
    if entry.region == "conv" and "weight" in call.found:
        return Conv(call, found)
    if entry.region == "transposed":
        return Transposed(call, found)
    if entry.region == "conv" and name.startswith("aten.max_pool"):
        return MaxPool(call, found)
    if entry.region == "conv" and name.startswith("aten.avg_pool"):
        return AvgPool(call, found)
    if entry.region == "adaptive" and name.startswith("aten.adaptive_avg_pool"):
        return Adaptive(call, found)
    return Declined(f"{name}: its windows have no rule for parts yet")


def _cuts_channels(call: Call) -> bool:
    relation, cut = call.relation, [axis for axis in call.axes if axis is not None]
    letters = {letter for axis in cut for letter in relation.outs[0][axis]}
    return bool(letters & relation.letters(relation.ins[1]))


@dataclass(frozen=True, slots=True, eq=False)
class _Windows(Kind):
    call: Call
    axes: tuple[Sliding, ...]

    def intervals(self, window: Window) -> list[Interval]:
        rank = len(self.call.shape)
        return [self.call.window(rank + s.axis, window) for s in self.axes]

    def operand(self, window: Window) -> tuple[int, ...]:
        """The shape of the first operand's part."""
        return self.call.cuts[0].part(window)


@dataclass(frozen=True, slots=True, eq=False)
class Conv(_Windows):
    """A convolution: oneDNN adds onto zeros in the output's memory; other types are copied in."""

    adds = True

    def run_onto(
        self, values: list[Any], window: Window, into: Tensor, scratch: Scratch,
        after: Epilogue | None, add: bool,
    ) -> None:  # fmt: skip
        """Fill `into`, or add onto what it holds; then the activation."""
        x, weight, bias = [*values, None][:3]
        padding, margins = self._padding(window)
        if margins:
            x = padded(x, self.call.cuts[0].axes, margins, 0, scratch)
        if not available(x.dtype, x.device):
            self._plain(x, weight, bias, padding, into, after, add)
            return
        if not add:
            into.zero_()
        fused = "relu" if after is not None and after.name == "relu" else None
        _onto(into, x, weight, bias, (padding, *self._steps()), self.call.found["groups"], fused)
        if after is not None and fused is None:
            _activate(after, into)

    def _plain(self, x, weight, bias, padding, into: Tensor, after: Epilogue | None, add) -> None:
        stride, dilation = self._steps()
        target = CONVOLUTIONS[len(self.axes)]
        made = target(x, weight, bias, stride, padding, dilation, self.call.found["groups"])
        if add:
            into.add_(made)
        else:
            into.copy_(made)
        if after is not None:
            _activate(after, into)

    def _steps(self) -> tuple[list[int], list[int]]:
        stride = [s.geometry.step for s in self.axes]
        return stride, [s.geometry.number("dilation", 1) for s in self.axes]

    def _padding(self, window: Window) -> tuple[list[int], dict[int, Interval]]:
        """Per axis the op's own padding, and the borders to be put on a copy."""
        padding, margins = [], {}
        for s, interval in zip(self.axes, self.intervals(window), strict=True):
            before, inside, after = s.margins(interval)
            count = interval[1] - interval[0]
            made = (inside + 2 * before - s.geometry.reach - 1) // s.geometry.step + 1
            own = inside > 0 and made == count
            padding.append(before if own else 0)
            if not own and (before or after):
                margins[s.axis] = (before, after)
        return padding, margins

    def temporary(self, window: Window) -> int:
        value = self.call.node.args[0].meta["val"]  # type: ignore[union-attr]
        margins = self._padding(window)[1]
        return nbytes(grown(self.operand(window), margins), value.dtype) if margins else 0

    def beside(self, window: Window) -> int:
        """Of types that oneDNN does not take: the result, of groups another, the operand laid out
        anew, and the columns that ATen multiplies, group by group."""
        if available(self.call.dtype, self.call.node.meta["val"].device):
            return 0
        groups, weight = self.call.found["groups"], self.call.found["weight"].meta["val"].shape
        made, value = self.call.bytes(window), self.call.node.args[0].meta["val"]  # type: ignore[union-attr]
        channels = max(self.call.shape[-len(self.axes) - 1], 1)
        columns = math.prod(self.call.sizes(window)) // channels * math.prod(weight[1:])
        margins = self._padding(window)[1]
        read = nbytes(grown(self.operand(window), margins), value.dtype)
        return (1 + (groups > 1)) * made + nbytes((columns,), value.dtype) + read

    def macs(self, window: Window) -> int:
        weight = self.call.found["weight"].meta["val"].shape
        return math.prod(self.call.sizes(window)) * math.prod(weight[1:])

    def kernel(self, window: Window) -> Any:
        """The geometry of the call and the shapes of what it reads."""
        if not available(self.call.dtype, self.call.node.meta["val"].device):
            return None
        padding, margins = self._padding(window)
        weight = tuple(self.call.found["weight"].meta["val"].shape)
        shape = tuple(grown(self.operand(window), margins))
        return weight, shape, tuple(padding), str(self._steps()), self.call.found["groups"]

    @property
    def packs(self) -> int:
        """Bytes of the weight, which is padded to whole vectors of channels."""
        weight = self.call.found["weight"].meta["val"]
        if len(self.axes) == 1 or not available(weight.dtype, weight.device):
            return 0
        outer, inner, *window = weight.shape
        groups = self.call.found["groups"]
        whole = groups if groups > 1 else 1
        wide = -(-outer // whole // 16) * 16 * -(-inner // 16) * 16 * whole
        return wide * math.prod(window) * weight.dtype.itemsize

    def prepared(self, weight: Tensor, window: Window) -> Tensor:
        """The weight laid out once for such windows, to be given in place of `weight`."""
        if len(self.axes) == 1 or not available(weight.dtype, weight.device):
            return weight
        padding, margins = self._padding(window)
        shape = list(grown(self.operand(window), margins))
        shape = [1] * (len(self.axes) + 2 - len(shape)) + shape
        geometry = (padding, *self._steps(), self.call.found["groups"])
        return ops()._reorder_convolution_weight(weight, *geometry, shape)


def _activate(after: Epilogue, into: Tensor) -> None:
    made = plain_call(after, into)
    if made is not into:
        into.copy_(made)


def _onto(into: Tensor, x: Tensor, weight, bias, geometry, groups: int, relu: str | None) -> None:
    """oneDNN's convolution, added onto `into`; sequences as pictures of one row."""
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
class Transposed(_Windows):
    """A transposed convolution: of the parts, less what lies beside the window."""

    def run(self, values: list[Any], window: Window, into: Tensor, scratch: Scratch) -> None:
        x, weight, bias = [*values, None][:3]
        plans = self._plans(window)
        margins = {s.axis: p.zeros for s, p in zip(self.axes, plans, strict=True) if any(p.zeros)}
        if margins:
            x = padded(x, self.call.cuts[0].axes, margins, 0, scratch)
        target: Any = self.call.node.target
        values = [x, weight] if bias is None else [x, weight, bias]
        found = self.call.arguments(
            values, padding=[p.crop for p in plans], output_padding=[p.extra for p in plans]
        )
        args, kwargs = spelled(target, found)
        made = target(*args, **kwargs)
        for s, interval in zip(self.axes, self.intervals(window), strict=True):
            made = made.narrow(s.axis, 0, interval[1] - interval[0])
        into.copy_(made)

    def _plans(self, window: Window) -> list[_Plan]:
        found = zip(self.axes, self.intervals(window), strict=True)
        return [_plan(s, interval, self._rule(s)(*interval)) for s, interval in found]

    def _rule(self, s: Sliding):
        at = len(self.call.shape) + s.axis
        if at in self.call.axes:
            rule = self.call.cuts[0].rules[self.call.axes.index(at)]
            if rule is not None:
                return rule
        return lambda start, end: (0, s.geometry.input)

    def temporary(self, window: Window) -> int:
        plans = self._plans(window)
        margins = {s.axis: p.zeros for s, p in zip(self.axes, plans, strict=True) if any(p.zeros)}
        return nbytes(grown(self.operand(window), margins), self.call.dtype) if margins else 0

    def beside(self, window: Window) -> int:
        plans = self._plans(window)
        behind = {s.axis: (0, p.surplus) for s, p in zip(self.axes, plans, strict=True)}
        made = nbytes(grown(self.call.sizes(window), behind), self.call.dtype)
        return made + self._inside(window, made)

    def _inside(self, window: Window, made: int) -> int:
        """What is allocated in the call: by oneDNN, which takes pictures, the operand laid out
        anew, of groups the result; else the columns, a one for each position, and of groups the
        results."""
        weight = self.call.found["weight"].meta["val"]
        dtype, groups = self.call.dtype, self.call.found["groups"]
        shape = self.operand(window)
        if len(self.axes) == 2 and available(self.call.dtype, weight.device):
            return made if groups > 1 else nbytes(shape, dtype)
        positions = math.prod(shape) // max(weight.shape[0], 1)
        columns = nbytes((positions * math.prod(weight.shape[1:]),), dtype)
        ones = made // max(weight.shape[1] * groups, 1)
        return columns + ones + (made if groups > 1 else 0) + nbytes(shape, dtype)

    def macs(self, window: Window) -> int:
        """Each position read meets the whole kernel."""
        shape, weight = self.operand(window), self.call.found["weight"].meta["val"].shape
        return math.prod(shape) * math.prod(weight[1:])


@dataclass(frozen=True, slots=True)
class _Plan:
    """Of a transposed convolution along one axis: zeros put around the part, what the op crops at
    both ends, what it adds behind, and what is made behind the window."""

    zeros: Interval
    crop: int
    extra: int
    surplus: int


def _plan(s: Sliding, interval: Interval, needs: Interval) -> _Plan:
    """Position i of the operand writes [i * step - padding, that + reach]."""
    g, (start, end), (low, high) = s.geometry, interval, needs
    before = max(-(-(low * g.step - g.padding - start) // g.step), 0)
    behind = 0 if high - low + before else 1
    low, high = low - before, high + behind
    crop = start - (low * g.step - g.padding)
    most = max(g.step, g.number("dilation", 1)) - 1
    extra = end - ((high - 1) * g.step - g.padding + g.reach + 1) + crop
    more = max(-(-(extra - most) // g.step), 0)
    extra -= more * g.step
    return _Plan((before, behind + more), crop, max(extra, 0), max(-extra, 0))


@dataclass(frozen=True, slots=True, eq=False)
class MaxPool(_Windows):
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
class AvgPool(_Windows):
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
class Adaptive(_Windows):
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


__all__ = ["windowed"]
