"""Depthwise convolutions and pools on parts, by a compiled kernel (`kernels.cpu.window`).

It reads rows in the layout of parts, takes positions outside of the image as zeros, and writes
straight into the output's memory: nothing is padded, filled with zeros or allocated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from demask.kernels.cpu.window import LARGEST_WINDOW, WindowKernel, WindowRunner, WindowSizes
from demask.ops.activations import Act
from demask.ops.regions import Interval
from demask.ops.schema import fake
from demask.traverse.axes import COLUMNS, ROWS
from demask.traverse.axes import Window as Part
from demask.traverse.local.call import LocalCall, LocalKind, Scratch, Sliding
from demask.traverse.local.compiled import LLVM, PartDims, across, compiles, fused, is_float32, is_laid_out
from demask.traverse.local.pools import LocalAvgPool, LocalMaxPool
from demask.traverse.local.windows import LocalConv
from demask.tune.epilogue import Epilogue, apply_activation


def compiled_windows(kind: LocalKind) -> LocalKind | None:
    """The depthwise convolution or pool with the compiled kernel; None where none applies."""
    if isinstance(kind, LocalConv):
        return CompiledDepthwise.of(kind) if is_supported(kind) else None
    if isinstance(kind, (LocalAvgPool, LocalMaxPool)):
        return CompiledPool.of(kind) if is_supported(kind) else None
    return None


def is_supported(kind: LocalConv | LocalAvgPool | LocalMaxPool) -> bool:
    """Whether the compiled kernel can run this call.

    It takes float32 on the CPU, one image (or sequence) whose windows slide along rows and columns,
    kernels of at most 7 x 7.
    """
    call = kind.call
    is_too_large = any(s.geometry.kernel > LARGEST_WINDOW for s in kind.axes)
    if is_too_large or not is_float32(call) or not is_laid_out(call, kind.axes) or not compiles():
        return False
    return not isinstance(kind, LocalConv) or _is_depthwise(call)


def _is_depthwise(call: LocalCall) -> bool:
    """Whether each channel has one kernel, and each kernel one channel."""
    weight = fake(call.bound["weight"])
    return weight.shape[1] == 1 and weight.shape[0] == call.bound["groups"]


@dataclass(frozen=True, slots=True, eq=False)
class _CompiledWindows(LocalKind):
    """A call that runs by compiled kernels.

    across: windows along rows (None for a sequence) and columns. fallback: runs the call without
    the kernel. runners: those compiled so far.
    """

    call: LocalCall
    across: tuple[Sliding | None, Sliding]
    layout: PartDims
    fallback: LocalConv | LocalAvgPool | LocalMaxPool
    runners: dict[tuple[Act | None, bool], WindowRunner] = field(default_factory=dict)

    @classmethod
    def of(cls, kind: LocalConv | LocalAvgPool | LocalMaxPool) -> Self:
        call, windows = kind.call, across(kind.call, kind.axes)
        rows, columns = (None if s is None else s.axis for s in windows)
        channels = -1 - len(kind.axes)
        return cls(call, windows, PartDims(rows, columns, channels, call.shape[channels]), kind)  # type: ignore[arg-type]

    compiler_bytes = LLVM

    @property
    def without_compiler(self) -> LocalKind:
        return self.fallback

    def macs(self, window: Part) -> int:
        return self.fallback.macs(window)

    def _runner(self, mode: str, divisor: int, act: Act | None, add: bool) -> WindowRunner:
        runner = self.runners.get((act, add))
        if runner is None:
            geometries = [
                (1, 1, 1) if s is None else (s.geometry.kernel, s.geometry.step, s.geometry.number("dilation", 1))
                for s in self.across
            ]
            sizes, steps, dilations = zip(*geometries, strict=True)
            kernel = WindowKernel(sizes, steps, dilations, self.layout.width, mode, divisor, act, add)
            runner = self.runners.setdefault((act, add), WindowRunner(kernel))
        return runner

    def _sizes(self, x: Tensor, into: Tensor, window: Part) -> WindowSizes | None:
        """The sizes of these parts for the kernel; None where their layout does not fit."""
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
class CompiledDepthwise(_CompiledWindows):
    """A convolution of each channel by itself, with a sum and an activation in the same kernel."""

    adds = True

    def run_onto(
        self, values: list[Tensor], window: Part, into: Tensor, scratch: Scratch, after: Epilogue | None, add: bool
    ) -> None:
        """Fill `into`, or add to its values; then apply the activation."""
        x, weight, bias = [*values, None][:3]
        sizes = self._sizes(x, into, window)
        if sizes is None:
            self.fallback.run_onto(values, window, into, scratch, after, add)  # type: ignore[union-attr]
            return
        act = fused(after)
        first, last = self.across
        if first is not None and first.axis > last.axis:
            weight = weight.transpose(-1, -2)
        # The kernel packs both at each call, so that they may change in between.
        weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
        addresses = (x.data_ptr(), into.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr())
        self._runner("conv", 1, act, add).run(sizes, torch.get_num_threads(), addresses)
        if after is not None and act is None:
            activated = apply_activation(after, into)
            if activated is not into:
                into.copy_(activated)

    def compile(self, after: Epilogue | None, add: bool) -> None:
        self._runner("conv", 1, fused(after), add).compile()

    def pack_weight(self, weight: Tensor, window: Part) -> Tensor:
        """The weight as it is: the kernel packs it itself."""
        return weight


@dataclass(frozen=True, slots=True, eq=False)
class CompiledPool(_CompiledWindows):
    """A max pool, or an average pool whose windows are all divided by the same number."""

    def compile(self, after: Epilogue | None, add: bool) -> None:
        window: Any = tuple((0, 1 if k is None else self.call.shape[k]) for k in self.call.axes)
        self._runner(self._mode, self._divisor(window) or self._taps, None, False).compile()

    @property
    def _mode(self) -> str:
        return "mean" if isinstance(self.fallback, LocalAvgPool) else "max"

    @property
    def _taps(self) -> int:
        return math.prod(s.geometry.kernel for s in self.fallback.axes)

    def run(self, values: list[Tensor], window: Part, into: Tensor, scratch: Scratch) -> None:
        divisor, sizes = self._divisor(window), self._sizes(values[0], into, window)
        if divisor is None or sizes is None:
            self.fallback.run(values, window, into, scratch)
            return
        addresses = values[0].data_ptr(), into.data_ptr(), 0, 0
        self._runner(self._mode, divisor, None, False).run(sizes, torch.get_num_threads(), addresses)

    def scratch_bytes(self, window: Part) -> int:
        return 0 if self._divisor(window) is not None else self.fallback.scratch_bytes(window)

    def allocated_bytes(self, window: Part) -> int:
        return 0 if self._divisor(window) is not None else self.fallback.allocated_bytes(window)

    def _divisor(self, window: Part) -> int | None:
        """The divisor of all windows of a part; None where divisors differ."""
        if isinstance(self.fallback, LocalMaxPool):
            return 1
        axes, bound = self.fallback.axes, self.call.bound
        override = bound.get("divisor_override")
        if override:
            return override
        if bound["count_include_pad"]:
            inside = all(_last(s) <= s.geometry.input + s.geometry.padding for s in axes)
        else:
            rank = len(self.call.shape)
            margins = [s.margins(self.call.window(rank + s.axis, window)) for s in axes]
            inside = all(not before and not after for before, _, after in margins)
        return self._taps if inside else None


def _last(s: Sliding) -> int:
    """The end of the last window, which ceil_mode may put after the padding."""
    g = s.geometry
    return (g.output - 1) * g.step - g.padding + g.kernel


__all__ = ["compiled_windows", "is_supported"]
