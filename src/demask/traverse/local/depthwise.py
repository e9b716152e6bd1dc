"""Depthwise convolutions and pools on parts, by a kernel of our own (`kernels.window`).

It reads rows as parts have them, treats what lies beside the image as zeros, and writes into the
output's memory at once: nothing is padded, filled with zeros or allocated.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from demask.kernels.cpu.window import LARGEST, Runner, WindowKernel, WindowSizes
from demask.kernels.llvm import availability as llvm
from demask.kernels.llvm.isa import host
from demask.ops.activations import Act, by_onednn
from demask.ops.entry import Declined
from demask.ops.regions import Interval
from demask.traverse.axes import COLUMNS, ROWS
from demask.traverse.axes import Window as Part
from demask.traverse.local.call import LocalCall, LocalKind, Scratch, Sliding
from demask.traverse.local.pools import AvgPool, MaxPool
from demask.traverse.local.windows import LocalConv
from demask.tune.epilogue import Epilogue, plain_call

LLVM = 40 * 2**20  # bytes of the compiler, measured


def quicker(kind: LocalKind | Declined) -> LocalKind | Declined:
    """The same call by the kernel of this file, where it can be; else the kind as it is."""
    if isinstance(kind, LocalConv) and available(kind):
        return Depthwise.of(kind)
    if isinstance(kind, (AvgPool, MaxPool)) and available(kind):
        return LocalPool.of(kind)
    return kind


def available(kind: LocalConv | AvgPool | MaxPool) -> bool:
    """Can the kernel run this call? It takes float32 on the CPU, one image, rows and columns as the
    two axes along which windows slide (or a sequence), kernels of at most 7 x 7."""
    call, value = kind.call, kind.call.node.meta["val"]
    wide = [s.geometry.kernel > LARGEST for s in kind.axes]
    tensors = [value, *(o.value.meta["val"] for o in call.relation.operands
                        if hasattr(o.value, "meta"))]  # fmt: skip
    if any(t.dtype is not torch.float32 or t.device.type != "cpu" for t in tensors):
        return False
    if any(wide) or not _laid_out(call, kind.axes) or not _compiles():
        return False
    return not isinstance(kind, LocalConv) or _is_depthwise(call)


def _is_depthwise(call: LocalCall) -> bool:
    """Has each channel one kernel, and each kernel one channel?"""
    weight = call.found["weight"].meta["val"]
    return weight.shape[1] == 1 and weight.shape[0] == call.found["groups"]


def _laid_out(call: LocalCall, axes: tuple[Sliding, ...]) -> bool:
    """Do parts lie as rows, columns, channels, of one image?"""
    rank, cut = len(call.shape), call.cuts[0]
    sliding, cut_axes = {s.axis + rank for s in axes}, [a for a in call.axes if a is not None]
    channels = rank - len(sliding) - 1
    same = cut.axes == call.axes and all(cut.arrives[: len(cut_axes)])
    alone = channels >= 0 and math.prod(call.shape[:channels]) == 1
    return same and alone and sliding == set(cut_axes) and len(cut_axes) == len(axes) <= 2


@functools.cache
def _compiles() -> bool:
    """Whether LLVM compiles for this machine, and the kernels run on this system."""
    try:
        return llvm.installed() and host().lanes > 0
    except (OSError, RuntimeError):
        return False


def _across(call: LocalCall, axes: tuple[Sliding, ...]) -> tuple[Sliding | None, Sliding]:
    """The windows along rows and columns. A sequence is one row: its axis gives the columns."""
    found = {s.axis + len(call.shape): s for s in axes}
    if call.axes[COLUMNS] is None:
        return None, found[call.axes[ROWS]]  # type: ignore[index]
    return found[call.axes[ROWS]], found[call.axes[COLUMNS]]  # type: ignore[index]


class _PartDims(NamedTuple):
    """Where a part's rows (None in a sequence), columns and channels are; their number."""

    rows: int | None
    columns: int
    channels: int
    width: int

    def of(self, part: Tensor) -> tuple[int, int, int] | None:
        """Rows, columns and floats from row to row; None where columns are not dense."""
        shape, strides = part.shape, part.stride()
        columns, width = shape[self.columns], self.width
        if columns > 1 and strides[self.columns] != width:
            return None
        if width > 1 and strides[self.channels] != 1:
            return None
        if self.rows is None:
            return 1, columns, columns * width
        return shape[self.rows], columns, strides[self.rows]


@dataclass(frozen=True, slots=True, eq=False)
class _Kernels(LocalKind):
    """across: windows along rows (None for a sequence) and columns. other: how the call runs
    without the kernel. runners: those made so far."""

    call: LocalCall
    across: tuple[Sliding | None, Sliding]
    layout: _PartDims
    other: LocalConv | AvgPool | MaxPool
    runners: dict[tuple[Act | None, bool], Runner] = field(default_factory=dict)

    @classmethod
    def of(cls, kind: LocalConv | AvgPool | MaxPool) -> Self:
        call, across = kind.call, _across(kind.call, kind.axes)
        rows, columns = (None if s is None else s.axis for s in across)
        channels = -1 - len(kind.axes)
        return cls(call, across, _PartDims(rows, columns, channels, call.shape[channels]), kind)  # type: ignore[arg-type]

    def macs(self, window: Part) -> int:
        return self.other.macs(window)

    def _runner(self, mode: str, divisor: int, act: Act | None, add: bool) -> Runner:
        found = self.runners.get((act, add))
        if found is None:
            shape = [(1, 1, 1) if s is None else (s.geometry.kernel, s.geometry.step,
                                                  s.geometry.number("dilation", 1))
                     for s in self.across]  # fmt: skip
            size, step, dilation = zip(*shape, strict=True)
            made = WindowKernel(size, step, dilation, self.layout.width, mode, divisor, act, add)
            found = self.runners.setdefault((act, add), Runner(made))
        return found

    def _sizes(self, x: Tensor, into: Tensor, window: Part) -> WindowSizes | None:
        """What the kernel must know of these parts; None where they are laid out otherwise."""
        source, target, (rows, columns) = self.layout.of(x), self.layout.of(into), self.across
        if source is None or target is None:
            return None
        top = 0 if rows is None else _before(rows, window[ROWS])
        left = _before(columns, window[ROWS if rows is None else COLUMNS])
        return WindowSizes(*source[:2], *target[:2], source[2], target[2], top, left)


def _before(s: Sliding, interval: Interval) -> int:
    """Positions before the operand's first that an interval of the output reads."""
    return max(s.geometry.padding - interval[0] * s.geometry.step, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Depthwise(_Kernels):
    """A convolution of each channel by itself, an activation or a sum behind it."""

    adds = True

    def run_onto(
        self, values: list[Tensor], window: Part, into: Tensor, scratch: Scratch,
        after: Epilogue | None, add: bool,
    ) -> None:  # fmt: skip
        """Fill `into`, or add onto what it holds; then the activation."""
        x, weight, bias = [*values, None][:3]
        sizes = self._sizes(x, into, window)  # type: ignore[arg-type]
        if sizes is None:
            self.other.run_onto(values, window, into, scratch, after, add)  # type: ignore[union-attr]
            return
        act = fused(after)
        first, last = self.across
        if first is not None and first.axis > last.axis:
            weight = weight.transpose(-1, -2)  # type: ignore[union-attr]
        # The kernel lays both out at each call, so that they may change in between.
        weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()  # type: ignore[union-attr]
        places = (x.data_ptr(), into.data_ptr(), weight.data_ptr(),  # type: ignore[union-attr]
                  0 if bias is None else bias.data_ptr())  # fmt: skip
        self._runner("conv", 1, act, add).run(sizes, torch.get_num_threads(), places)
        if after is not None and act is None:
            made = plain_call(after, into)
            if made is not into:
                into.copy_(made)

    def compiled(self, after: Epilogue | None, add: bool) -> int:
        self._runner("conv", 1, fused(after), add).compile()
        return LLVM

    def prepared(self, weight: Tensor, window: Part) -> Tensor:
        """The weight as it is: the kernel lays it out itself."""
        return weight


def fused(after: Epilogue | None) -> Act | None:
    """An activation as the kernel computes it; None for those left to torch: with an exponential,
    or with NaN as a number."""
    if after is None or any(map(math.isnan, after.scalars)):
        return None
    activation = by_onednn(after.name, after.algorithm)
    if activation is None or activation.exponential:
        return None
    return activation.name, tuple(after.scalars)


@dataclass(frozen=True, slots=True, eq=False)
class LocalPool(_Kernels):
    """A max pool, or an average pool where all windows are divided by one number."""

    def compiled(self, after: Epilogue | None, add: bool) -> int:
        whole: Any = tuple((0, 1 if k is None else self.call.shape[k]) for k in self.call.axes)
        self._runner(self._mode, self._divisor(whole) or self._places, None, False).compile()
        return LLVM

    @property
    def _mode(self) -> str:
        return "mean" if isinstance(self.other, AvgPool) else "max"

    @property
    def _places(self) -> int:
        return math.prod(s.geometry.kernel for s in self.other.axes)

    def run(self, values: list[Tensor], window: Part, into: Tensor, scratch: Scratch) -> None:
        divisor, sizes = self._divisor(window), self._sizes(values[0], into, window)
        if divisor is None or sizes is None:
            self.other.run(values, window, into, scratch)
            return
        places = values[0].data_ptr(), into.data_ptr(), 0, 0
        self._runner(self._mode, divisor, None, False).run(sizes, torch.get_num_threads(), places)

    def temporary(self, window: Part) -> int:
        return 0 if self._divisor(window) is not None else self.other.temporary(window)

    def beside(self, window: Part) -> int:
        return 0 if self._divisor(window) is not None else self.other.beside(window)

    def _divisor(self, window: Part) -> int | None:
        """What all windows of a part are divided by; None where they differ."""
        if isinstance(self.other, MaxPool):
            return 1
        axes, found = self.other.axes, self.call.found
        given = found.get("divisor_override")
        if given:
            return given
        if found["count_include_pad"]:
            inside = all(_last(s) <= s.geometry.input + s.geometry.padding for s in axes)
        else:
            rank = len(self.call.shape)
            margins = [s.margins(self.call.window(rank + s.axis, window)) for s in axes]
            inside = all(not before and not after for before, _, after in margins)
        return self._places if inside else None


def _last(s: Sliding) -> int:
    """Where the last window ends: ceil_mode may let it end behind the padding."""
    g = s.geometry
    return (g.output - 1) * g.step - g.padding + g.kernel


__all__ = ["available", "quicker"]
