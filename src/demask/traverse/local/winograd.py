"""Convolutions of 3 x 3 taps on parts, by a compiled kernel (`kernels.cpu.winograd`).

It needs 16 products where others need 36, or 9 after a nearest-neighbor resize by 2, reads rows in
the layout of parts, takes positions outside of the image as zeros, and writes straight into the
output's memory. Tiles begin at even positions of the whole image, so that results do not depend on
the part. Sums differ from those of direct kernels by rounding; where one of the products overflows,
or an input is infinite, an output may be NaN that is infinite in direct kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from demask.kernels.cpu.winograd import (
    UNROLLED,
    WinogradKernel,
    WinogradRunner,
    WinogradSizes,
    pack_winograd,
    scratch_bytes,
)
from demask.kernels.llvm.isa import host
from demask.machine.arena import align_size
from demask.ops import schema
from demask.ops.activations import Act
from demask.ops.entry import op_name
from demask.ops.schema import fake
from demask.traverse.axes import COLUMNS, NONE, ROWS, empty
from demask.traverse.axes import Window as Part
from demask.traverse.local.call import LocalKind, Scratch, Sliding, nbytes
from demask.traverse.local.compiled import LLVM, PartDims, across, compiles, fused, is_float32, is_laid_out
from demask.traverse.local.windows import LocalConv
from demask.tune.epilogue import Epilogue, apply_activation

# Bytes of memory of a call, which its threads share: about what fits in the L2 caches.
SCRATCH = 2**20
CHANNELS = 32, 512  # at least, and at most: with more, a block has few tiles
LEAST_POSITIONS = 64 * 64  # of the whole output, from which packing the weight pays
RESIZES = ("aten.upsample_nearest2d.", "aten._upsample_nearest_exact2d.")


def compiled_winograd(kind: LocalKind) -> LocalKind | None:
    """The convolution with the compiled kernel; None where that does not apply."""
    if not isinstance(kind, LocalConv) or not is_supported(kind):
        return None
    rows, columns = across(kind.call, kind.axes)
    assert rows is not None
    outer, inner = fake(kind.call.bound["weight"]).shape[:2]
    kernel = WinogradKernel(inner, outer, (_doubled(kind, rows), _doubled(kind, columns)))
    return CompiledWinograd(kind, (rows, columns), kernel)


def is_supported(kind: LocalConv) -> bool:
    """Whether the compiled kernel can run this call, and pays.

    It takes float32 on the CPU, one image whose windows of 3 x 3 slide along rows and columns in
    steps of one, and numbers of channels that fill whole vectors.
    """
    call = kind.call
    windows = [(s.geometry.kernel, s.geometry.step, s.geometry.reach) for s in kind.axes]
    if windows != [(3, 1, 2)] * 2 or call.bound["groups"] != 1:
        return False
    if not is_float32(call) or not is_laid_out(call, kind.axes) or not compiles():
        return False
    outer, inner = fake(call.bound["weight"]).shape[:2]
    is_whole = outer % host().lanes == 0 and inner % max(host().lanes, UNROLLED) == 0
    positions = math.prod(call.shape) // max(outer, 1)
    least, most = CHANNELS
    return is_whole and least <= min(inner, outer) and max(inner, outer) <= most and positions >= LEAST_POSITIONS


def _doubled(kind: LocalConv, s: Sliding) -> bool:
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
class CompiledWinograd(LocalKind):
    """A convolution with a sum and an activation in the same kernel.

    fallback: runs the call without the kernel. across: windows along rows and columns. kernel: the
    one without a sum and an activation. runners: those compiled so far.
    """

    fallback: LocalConv
    across: tuple[Sliding, Sliding]
    kernel: WinogradKernel
    runners: dict[tuple[Act | None, bool], WinogradRunner] = field(default_factory=dict)

    adds = True
    compiler_bytes = LLVM

    @property
    def without_compiler(self) -> LocalKind:
        return self.fallback

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
        source, target = self._dense(x, 0), self._dense(into, 1)
        act = fused(after)
        addresses = (
            source.tensor.data_ptr(),
            target.tensor.data_ptr(),
            packed.data_ptr(),
            0 if bias is None else bias.data_ptr(),
        )
        self._runner(act, add).run(
            self._sizes(source, target, window), torch.get_num_threads(), addresses, (memory.data_ptr(), memory.nbytes)
        )
        if target.tensor is not into:
            into.copy_(target.tensor)
        if after is not None and act is None:
            activated = apply_activation(after, into)
            if activated is not into:
                into.copy_(activated)

    def _dense(self, part: Tensor, which: int) -> _Dense:
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

    def _sizes(self, source: _Dense, target: _Dense, window: Part) -> WinogradSizes:
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

    def macs(self, window: Part) -> int:
        """Those of a direct convolution: what plans count."""
        return self.fallback.macs(window)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the transformed weight."""
        return 4 * self.kernel.count * self.kernel.inner * self.kernel.outer

    def pack_weight(self, weight: Tensor, window: Part) -> Tensor:
        """The weight transformed, to be passed in place of `weight`."""
        if self.across[ROWS].axis > self.across[COLUMNS].axis:
            weight = weight.transpose(-1, -2)
        return pack_winograd(weight, self.kernel)


__all__ = ["CompiledWinograd", "compiled_winograd"]
