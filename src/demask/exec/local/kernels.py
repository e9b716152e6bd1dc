"""Which kernel runs a call on parts: one of ours where it applies, torch's ops elsewhere.

Depthwise convolutions and pools run by `kernels.cpu.window`, 3 x 3 convolutions by
`kernels.cpu.winograd`. Both read rows in the layout of parts, take positions outside of the image
as zeros, and write straight into the output's memory: nothing is padded, filled with zeros or
allocated.

The latter needs 16 products where others need 36, or 9 after a nearest-neighbor resize by 2. Tiles
begin at even positions of the full image, so that results do not depend on the part. Sums differ
from those of direct kernels by rounding; where one of the products overflows, or an input is
infinite, an output may be NaN that is infinite in direct kernels.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, fx

from demask.exec.axes import COLUMNS, NONE, ROWS, empty
from demask.exec.axes import Window as Part
from demask.exec.local.call import LocalCall, LocalKind, Scratch, Sliding, activate, nbytes
from demask.exec.local.windows import LocalAvgPool, LocalConv, LocalMaxPool
from demask.kernels.cpu.window import LARGEST_WINDOW, WindowKernel, WindowRunner, WindowSizes
from demask.kernels.cpu.winograd import (
    UNROLLED,
    WinogradKernel,
    WinogradRunner,
    WinogradSizes,
    pack_winograd,
    scratch_bytes,
)
from demask.kernels.llvm import availability as llvm
from demask.kernels.llvm.isa import host
from demask.machine.arena import align_size
from demask.ops import schema
from demask.ops.activations import Act, find_onednn_activation
from demask.ops.entry import Declined, op_name
from demask.ops.regions import Interval
from demask.ops.schema import fake
from demask.tune.epilogue import Epilogue

# Bytes of memory of a Winograd call, which its threads share: about what fits in the L2 caches.
SCRATCH = 2**20
CHANNELS = 32, 512  # at least, and at most: with more, a block has few tiles
LEAST_POSITIONS = 64 * 64  # of the full output, from which packing the weight pays
RESIZES = ("aten.upsample_nearest2d.", "aten._upsample_nearest_exact2d.")


def faster_kind(kind: LocalKind | Declined) -> LocalKind | Declined:
    """The call with a compiled kernel, where one applies; else the kind as it is.

    The choice depends on the sizes of the full image, not on those of parts: results are the same
    for all bands.
    """
    if isinstance(kind, (LocalConv, LocalAvgPool, LocalMaxPool)) and window_kernel_applies(kind):
        return (CompiledDepthwise if isinstance(kind, LocalConv) else CompiledPool).of(kind)
    if isinstance(kind, LocalConv) and winograd_applies(kind):
        return CompiledWinograd.of(kind)
    return kind


def is_float32(call: LocalCall) -> bool:
    """Whether the call reads and writes float32 in the memory of the CPU."""
    operands = (fake(o.value) for o in call.relation.operands if hasattr(o.value, "meta"))
    tensors = (fake(call.node), *operands)
    return all(t.dtype is torch.float32 and t.device.type == "cpu" for t in tensors)


def is_laid_out(call: LocalCall, axes: tuple[Sliding, ...]) -> bool:
    """Whether parts are stored as rows, columns, channels of one image."""
    rank, cut = len(call.shape), call.cuts[0]
    sliding, cut_axes = {s.axis + rank for s in axes}, [a for a in call.axes if a is not None]
    channels = rank - len(sliding) - 1
    is_cut_alike = cut.axes == call.axes and all(cut.arrives[: len(cut_axes)])
    is_one_image = channels >= 0 and math.prod(call.shape[:channels]) == 1
    return is_cut_alike and is_one_image and sliding == set(cut_axes) and len(cut_axes) == len(axes) <= 2


@functools.cache
def compiles() -> bool:
    """Whether LLVM compiles for this machine, and the kernels run on this system."""
    try:
        return llvm.is_installed() and host().lanes > 0
    except (OSError, RuntimeError):
        return False


def across(call: LocalCall, axes: tuple[Sliding, ...]) -> tuple[Sliding | None, Sliding]:
    """The windows along rows and columns. A sequence is one row: its axis is that of columns."""
    by_axis = {s.axis + len(call.shape): s for s in axes}
    if call.axes[COLUMNS] is None:
        return None, by_axis[call.axes[ROWS]]  # type: ignore[index]
    return by_axis[call.axes[ROWS]], by_axis[call.axes[COLUMNS]]  # type: ignore[index]


class PartDims(NamedTuple):
    """A part's axes of rows (None in a sequence), columns and channels; width: its channels."""

    rows: int | None
    columns: int
    channels: int
    width: int

    def of(self, part: Tensor) -> tuple[int, int, int] | None:
        """Rows, columns and the stride of rows in floats; None where columns are not dense."""
        shape, strides = part.shape, part.stride()
        columns, width = shape[self.columns], self.width
        if columns > 1 and strides[self.columns] != width:
            return None
        if width > 1 and strides[self.channels] != 1:
            return None
        if self.rows is None:
            return 1, columns, columns * width
        return shape[self.rows], columns, strides[self.rows]


def fused(after: Epilogue | None) -> Act | None:
    """An activation for the kernel; None where torch computes it: with an exponential, or a NaN
    parameter."""
    if after is None or any(map(math.isnan, after.scalars)):
        return None
    activation = find_onednn_activation(after.name, after.algorithm)
    if activation is None or activation.exponential:
        return None
    return activation.name, tuple(after.scalars)


@dataclass(frozen=True, slots=True, eq=False)
class _CompiledKind(LocalKind):
    """A call that runs by kernels compiled in this process. fallback: runs it without them."""

    fallback: LocalConv | LocalAvgPool | LocalMaxPool

    compiler_bytes = 40 * 2**20  # measured

    @property
    def without_compiler(self) -> LocalKind:
        return self.fallback

    def macs(self, window: Part) -> int:
        """Those of the fallback: what plans count."""
        return self.fallback.macs(window)


def window_kernel_applies(kind: LocalConv | LocalAvgPool | LocalMaxPool) -> bool:
    """Whether the compiled kernel can run this call.

    It takes float32 on the CPU, one image (or sequence) whose windows slide along rows and columns,
    kernels of at most 7 x 7; of convolutions depthwise ones.
    """
    call = kind.call
    is_too_large = any(s.geometry.kernel > LARGEST_WINDOW for s in kind.axes)
    if is_too_large or not is_float32(call) or not is_laid_out(call, kind.axes) or not compiles():
        return False
    if not isinstance(kind, LocalConv):
        return True
    weight = fake(call.bound["weight"])
    return weight.shape[1] == 1 and weight.shape[0] == call.bound["groups"]


@dataclass(frozen=True, slots=True, eq=False)
class _CompiledWindows(_CompiledKind):
    """A depthwise convolution or pool.

    across: windows along rows (None for a sequence) and columns. runners: those compiled so far.
    """

    call: LocalCall
    across: tuple[Sliding | None, Sliding]
    layout: PartDims
    runners: dict[tuple[Act | None, bool], WindowRunner] = field(default_factory=dict)

    @classmethod
    def of(cls, kind: LocalConv | LocalAvgPool | LocalMaxPool) -> Self:
        call, windows = kind.call, across(kind.call, kind.axes)
        rows, columns = (None if s is None else s.axis for s in windows)
        channels = -1 - len(kind.axes)
        return cls(kind, call, windows, PartDims(rows, columns, channels, call.shape[channels]))  # type: ignore[arg-type]

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

    def _kernel_sizes(self, x: Tensor, into: Tensor, window: Part) -> WindowSizes | None:
        """The sizes of these parts for the kernel; None where their layout does not fit."""
        source, target, (rows, columns) = self.layout.of(x), self.layout.of(into), self.across
        if source is None or target is None:
            return None
        top = 0 if rows is None else _count_before(rows, window[ROWS])
        left = _count_before(columns, window[ROWS if rows is None else COLUMNS])
        return WindowSizes(*source[:2], *target[:2], source[2], target[2], top, left)


def _count_before(s: Sliding, interval: Interval) -> int:
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
        sizes = self._kernel_sizes(x, into, window)
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
            activate(after, into)

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
        self._runner(self._mode, self._divisor(window) or self._tap_count, None, False).compile()

    @property
    def _mode(self) -> str:
        return "mean" if isinstance(self.fallback, LocalAvgPool) else "max"

    @property
    def _tap_count(self) -> int:
        return math.prod(s.geometry.kernel for s in self.fallback.axes)

    def run(self, values: list[Tensor], window: Part, into: Tensor, scratch: Scratch) -> None:
        divisor, sizes = self._divisor(window), self._kernel_sizes(values[0], into, window)
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
            # ceil_mode may put the last window after the padding
            ends = [(g.output - 1) * g.step - g.padding + g.kernel for g in (s.geometry for s in axes)]
            inside = all(end <= s.geometry.input + s.geometry.padding for end, s in zip(ends, axes, strict=True))
        else:
            rank = len(self.call.shape)
            margins = [s.margins(self.call.window(rank + s.axis, window)) for s in axes]
            inside = all(not before and not after for before, _, after in margins)
        return self._tap_count if inside else None


def winograd_applies(kind: LocalConv) -> bool:
    """Whether the compiled kernel can run this call, and pays.

    It takes float32 on the CPU, one image whose windows of 3 x 3 slide along rows and columns in
    steps of one, and numbers of channels that fill full vectors.
    """
    call = kind.call
    windows = [(s.geometry.kernel, s.geometry.step, s.geometry.reach) for s in kind.axes]
    if windows != [(3, 1, 2)] * 2 or call.bound["groups"] != 1:
        return False
    if not is_float32(call) or not is_laid_out(call, kind.axes) or not compiles():
        return False
    outer, inner = fake(call.bound["weight"]).shape[:2]
    fills_vectors = outer % host().lanes == 0 and inner % max(host().lanes, UNROLLED) == 0
    positions = math.prod(call.shape) // max(outer, 1)
    least, most = CHANNELS
    return fills_vectors and least <= min(inner, outer) and max(inner, outer) <= most and positions >= LEAST_POSITIONS


def _reads_copies(kind: LocalConv, s: Sliding) -> bool:
    """Whether tiles along an axis begin between a position and its copy: the input is resized by 2,
    nearest neighbor, and the first tile begins before the image."""
    x = kind.call.node.args[0]
    if not isinstance(x, fx.Node) or x.op != "call_function" or s.geometry.padding % 2 == 0:
        return False
    if not op_name(x.target).startswith(RESIZES):
        return False
    resized: Any = x.args[0]
    source, value, axis = fake(resized), fake(x), s.axis + 2
    arguments = schema.arguments(x)
    names = ("scales_h", "scales_w")
    factors = arguments.get("scale_factors") or [arguments.get(name) for name in names]
    return value.shape[s.axis] == 2 * source.shape[s.axis] and factors[axis] in (None, 2.0)


class _Dense(NamedTuple):
    """A part that the kernel can read or write, with its rows, columns and pitch in floats."""

    tensor: Tensor
    rows: int
    columns: int
    pitch: int


@dataclass(frozen=True, slots=True, eq=False)
class CompiledWinograd(_CompiledKind):
    """A convolution with a sum and an activation in the same kernel.

    across: windows along rows and columns. kernel: the one without a sum and an activation.
    runners: those compiled so far.
    """

    across: tuple[Sliding, Sliding]
    kernel: WinogradKernel
    runners: dict[tuple[Act | None, bool], WinogradRunner] = field(default_factory=dict)

    adds = True

    @staticmethod
    def of(kind: LocalConv) -> CompiledWinograd:
        rows, columns = across(kind.call, kind.axes)
        assert rows is not None
        outer, inner = fake(kind.call.bound["weight"]).shape[:2]
        kernel = WinogradKernel(inner, outer, (_reads_copies(kind, rows), _reads_copies(kind, columns)))
        return CompiledWinograd(kind, (rows, columns), kernel)

    def run_onto(
        self, values: list[Any], window: Part, into: Tensor, scratch: Scratch, after: Epilogue | None, add: bool
    ) -> None:
        """Fill `into`, or add to its values; then apply the activation.

        The weight may be one that `pack_weight` has returned.
        """
        x, weight, bias = [*values, None][:3]
        packed = self.pack_weight(weight, window) if weight.ndim > 2 else weight
        bias = None if bias is None else bias.contiguous()
        memory = scratch((self._scratch_floats(window),), NONE, torch.float32)
        source, target = self._with_dense_columns(x, 0), self._with_dense_columns(into, 1)
        act = fused(after)
        addresses = (
            source.tensor.data_ptr(),
            target.tensor.data_ptr(),
            packed.data_ptr(),
            0 if bias is None else bias.data_ptr(),
        )
        self._runner(act, add).run(
            self._kernel_sizes(source, target, window),
            torch.get_num_threads(),
            addresses,
            (memory.data_ptr(), memory.nbytes),
        )
        if target.tensor is not into:
            into.copy_(target.tensor)
        if after is not None and act is None:
            activate(after, into)

    def _with_dense_columns(self, part: Tensor, which: int) -> _Dense:
        """A part with dense columns. which: 0 for the operand, 1 for the output."""
        rows, columns = (s.axis for s in self.across)
        dims = PartDims(rows, columns, -3, part.shape[-3])
        sizes = dims.of(part)
        if sizes is None:
            axes = self.fallback.call.axes if which else self.fallback.call.cuts[0].axes
            part = empty(part.shape, axes, part.dtype).copy_(part)
            sizes = dims.of(part)
        assert sizes is not None
        return _Dense(part, *sizes)

    def _kernel_sizes(self, source: _Dense, target: _Dense, window: Part) -> WinogradSizes:
        firsts, skipped = [], []
        for s, (begin, _) in zip(self.across, window, strict=True):
            g, tile = s.geometry, begin // 2 * 2
            part_begin = min(max(begin - g.padding, 0), g.input)
            firsts.append(tile - g.padding - part_begin)
            skipped.append(begin - tile)
        return WinogradSizes(
            source.rows, source.columns, target.rows, target.columns, source.pitch, target.pitch, *firsts, *skipped
        )

    def _runner(self, act: Act | None, add: bool) -> WinogradRunner:
        runner = self.runners.get((act, add))
        if runner is None:
            kernel = replace(self.kernel, act=act, add=add)
            runner = self.runners.setdefault((act, add), WinogradRunner(kernel))
        return runner

    def compile(self, after: Epilogue | None, add: bool) -> None:
        self._runner(fused(after), add).compile()

    def _scratch_floats(self, window: Part) -> int:
        """Floats of memory for the tiles of a window: of all, or of blocks of them."""
        tiles = math.prod(-(-end // 2) - begin // 2 for begin, end in window)
        most = max(SCRATCH, scratch_bytes(self.kernel, 1))
        return align_size(min(scratch_bytes(self.kernel, tiles), most)) // 4

    def scratch_bytes(self, window: Part) -> int:
        return nbytes((self._scratch_floats(window),), torch.float32)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the transformed weight."""
        return 4 * self.kernel.count * self.kernel.inner * self.kernel.outer

    def pack_weight(self, weight: Tensor, window: Part) -> Tensor:
        """The weight transformed, to be passed in place of `weight`."""
        if self.across[ROWS].axis > self.across[COLUMNS].axis:
            weight = weight.transpose(-1, -2)
        return pack_winograd(weight, self.kernel)
