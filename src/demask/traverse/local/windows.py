"""Convolutions on parts, where windows slide along the cut axes; `pools` has the pools.

Only windows at the image's border read beyond the image: zeros, or the lowest number. A border of
equal size at both ends of a part is the op's padding; any other is part of a padded copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from demask.compat.onednn import available, ops
from demask.ops.entry import Declined, op_name
from demask.ops.regions import Interval
from demask.ops.schema import fake
from demask.ops.traits import CONV_OF_AXES
from demask.traverse.axes import Window
from demask.traverse.local.call import (
    LocalCall,
    LocalKind,
    LocalWindows,
    Scratch,
    Sliding,
    grown,
    nbytes,
    padded,
    slidings,
)
from demask.traverse.local.carried import bind_arguments
from demask.traverse.local.pools import LocalAdaptivePool, LocalAvgPool, LocalMaxPool
from demask.tune.epilogue import Epilogue, apply_activation

aten = torch.ops.aten


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
        padding, margins = self._padding(window)
        if margins:
            x = padded(x, self.call.cuts[0].axes, margins, 0, scratch)
        if not available(x.dtype, x.device):
            self._plain(x, weight, bias, padding, into, after, add)
            return
        if not add:
            into.zero_()
        fused = "relu" if after is not None and after.name == "relu" else None
        _onto(into, x, weight, bias, (padding, *self._steps()), self.call.bound["groups"], fused)
        if after is not None and fused is None:
            _activate(after, into)

    def _plain(self, x, weight, bias, padding, into: Tensor, after: Epilogue | None, add) -> None:
        stride, dilation = self._steps()
        target = CONV_OF_AXES[len(self.axes)]
        result = target(x, weight, bias, stride, padding, dilation, self.call.bound["groups"])
        if add:
            into.add_(result)
        else:
            into.copy_(result)
        if after is not None:
            _activate(after, into)

    def _steps(self) -> tuple[list[int], list[int]]:
        stride = [s.geometry.step for s in self.axes]
        return stride, [s.geometry.number("dilation", 1) for s in self.axes]

    def _padding(self, window: Window) -> tuple[list[int], dict[int, Interval]]:
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
        margins = self._padding(window)[1]
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
        margins = self._padding(window)[1]
        copy = nbytes(grown(self.operand(window), margins), value.dtype)
        return (1 + (groups > 1)) * result + nbytes((columns,), value.dtype) + copy

    def macs(self, window: Window) -> int:
        weight = fake(self.call.bound["weight"]).shape
        return math.prod(self.call.sizes(window)) * math.prod(weight[1:])

    def onednn_key(self, window: Window) -> Any:
        """The geometry of the call and the shapes of its operands."""
        if not available(self.call.dtype, fake(self.call.node).device):
            return None
        padding, margins = self._padding(window)
        weight = tuple(fake(self.call.bound["weight"]).shape)
        shape = tuple(grown(self.operand(window), margins))
        return weight, shape, tuple(padding), str(self._steps()), self.call.bound["groups"]

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
        padding, margins = self._padding(window)
        shape = list(grown(self.operand(window), margins))
        shape = [1] * (len(self.axes) + 2 - len(shape)) + shape
        geometry = (padding, *self._steps(), self.call.bound["groups"])
        return ops()._reorder_convolution_weight(weight, *geometry, shape)


def _activate(after: Epilogue, into: Tensor) -> None:
    activated = apply_activation(after, into)
    if activated is not into:
        into.copy_(activated)


def _onto(into: Tensor, x: Tensor, weight, bias, geometry, groups: int, relu: str | None) -> None:
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
        margins = {s.axis: p.zeros for s, p in zip(self.axes, plans, strict=True) if any(p.zeros)}
        if margins:
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
        return [_plan(s, interval, self._rule(s)(*interval)) for s, interval in pairs]

    def _rule(self, s: Sliding):
        axis = len(self.call.shape) + s.axis
        if axis in self.call.axes:
            rule = self.call.cuts[0].rules[self.call.axes.index(axis)]
            if rule is not None:
                return rule
        return lambda start, end: (0, s.geometry.input)

    def scratch_bytes(self, window: Window) -> int:
        plans = self._plans(window)
        margins = {s.axis: p.zeros for s, p in zip(self.axes, plans, strict=True) if any(p.zeros)}
        return nbytes(grown(self.operand(window), margins), self.call.dtype) if margins else 0

    def allocated_bytes(self, window: Window) -> int:
        plans = self._plans(window)
        surplus = {s.axis: (0, p.surplus) for s, p in zip(self.axes, plans, strict=True)}
        result = nbytes(grown(self.call.sizes(window), surplus), self.call.dtype)
        return result + self._inside(window, result)

    def _inside(self, window: Window, result_bytes: int) -> int:
        """Bytes allocated inside the op. oneDNN, for images: a copy of the operand, or with groups
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
        """Multiply-adds: each position read is multiplied by the whole kernel."""
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


def _plan(s: Sliding, interval: Interval, needs: Interval) -> _TransposedWindow:
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


__all__ = ["windowed"]
