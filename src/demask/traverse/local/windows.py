"""Calls on parts, where windows slide along the cut axes: convolutions; pools in `local_pools`.

What a window reads beyond the image, zeros or the lowest number, is there at the image's border
only. A border that both ends of a part share is the op's own; another is part of a padded copy.
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
from demask.traverse.local.carried import spelled
from demask.traverse.local.pools import Adaptive, AvgPool, MaxPool
from demask.tune.epilogue import Epilogue, plain_call

aten = torch.ops.aten


def windowed(call: LocalCall) -> LocalKind | Declined:
    """The way to run a call whose windows slide along a cut axis."""
    entry, name = call.relation.entry, op_name(call.node.target)
    found = slidings(call.relation)
    if "weight" in call.found and _cuts_channels(call):
        return Declined(f"{name}: groups of channels have no parts yet")
    if entry.region == "conv" and "weight" in call.found:
        return LocalConv(call, found)
    if entry.region == "transposed":
        return Transposed(call, found)
    if entry.region == "conv" and name.startswith("aten.max_pool"):
        return MaxPool(call, found)
    if entry.region == "conv" and name.startswith("aten.avg_pool"):
        return AvgPool(call, found)
    if entry.region == "adaptive" and name.startswith("aten.adaptive_avg_pool"):
        return Adaptive(call, found)
    return Declined(f"{name}: its windows have no rule for parts yet")


def _cuts_channels(call: LocalCall) -> bool:
    relation, cut = call.relation, [axis for axis in call.axes if axis is not None]
    letters = {letter for axis in cut for letter in relation.outs[0][axis]}
    return bool(letters & relation.letters(relation.ins[1]))


@dataclass(frozen=True, slots=True, eq=False)
class LocalConv(LocalWindows):
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
        target = CONV_OF_AXES[len(self.axes)]
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
class Transposed(LocalWindows):
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

    def _plans(self, window: Window) -> list[_TransposedWindow]:
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
class _TransposedWindow:
    """Of a transposed convolution along one axis: zeros put around the part, what the op crops at
    both ends, what it adds behind, and what is made behind the window."""

    zeros: Interval
    crop: int
    extra: int
    surplus: int


def _plan(s: Sliding, interval: Interval, needs: Interval) -> _TransposedWindow:
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
    return _TransposedWindow((before, behind + more), crop, max(extra, 0), max(-extra, 0))


__all__ = ["windowed"]
