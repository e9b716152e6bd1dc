"""Forms that compute only the outputs of a strided convolution, with another order of sums.

space_to_depth: blocks of s positions become channels, and a kernel of stride s over positions
becomes one of stride 1 over blocks. Taps that complete its last block are zero.

    x[(i + q) s + r] w[q s + r], summed over q and r  ==  conv(blocks of x, blocks of w)

phase_split: each phase of the input (every s-th position) is convolved with its own taps of the
kernel, with stride 1. The sum over phases is the output. Every tap is used exactly once.
"""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from demask.stride.lowering.form_writers import FormWriter
from demask.stride.lowering.strided_conv import ConvAxis, FormInputs, StridedConv
from demask.stride.targets import Target

aten = torch.ops.aten
_CONVOLVE = {1: aten.conv1d.default, 2: aten.conv2d.default, 3: aten.conv3d.default}


def blocks(axis: ConvAxis) -> int:
    """Number of blocks that a kernel covers."""
    return -(-axis.span // axis.stride)


@cache
def _met(axis: ConvAxis) -> tuple[bool, bool]:
    """Whether any tap of the kernel in blocks is multiplied by a position of the input, and whether
    an added zero tap is."""
    taps = range(blocks(axis) * axis.stride)
    starts = [i * axis.stride - axis.before for i in range(axis.out)]
    meets = [any(0 <= start + t < axis.size for start in starts) for t in taps]
    zero = [t % axis.dilation != 0 or t >= axis.span for t in taps]
    return any(meets), any(m and z for m, z in zip(meets, zero, strict=True))


def zero_taps(site: StridedConv) -> bool:
    """Whether a zero weight that space_to_depth adds is multiplied by a position of the input."""
    met = [_met(axis) for axis in site.axes]
    return any(zero and all(any_tap for any_tap, _ in met[:k] + met[k + 1 :]) for k, (_, zero) in enumerate(met))


def space_to_depth(write: FormWriter, site: StridedConv, target: Target, call: FormInputs, functions: int) -> Any:
    """A convolution of stride 1 over blocks of the input. Arguments: see `StrideForm.built`."""
    del target, functions
    x = write.call(aten.constant_pad_nd.default, call.x, _block_pads(site), 0)
    x = _as_channels(write, site, x)
    weight = _weight(write, site, call)
    ones = [1] * site.rank
    return write.call(_CONVOLVE[site.rank], x, weight, call.bias, ones, [0] * site.rank, ones, site.groups)


def _block_pads(site: StridedConv) -> list[int]:
    """Zeros before and after each axis, the last axis first, that complete its blocks."""
    pads = []
    for axis in reversed(site.axes):
        length = _length(axis)
        after = length - axis.before - axis.size
        # A kernel that reads no position of the input: only padding remains.
        pads += [axis.before, after] if after >= -axis.size else [length, -axis.size]
    return pads


def _length(axis: ConvAxis) -> int:
    """Length of an axis in whole blocks."""
    return (axis.out - 1 + blocks(axis)) * axis.stride


def _as_channels(write: FormWriter, site: StridedConv, x: Any) -> Any:
    """(n, c, b0 s0, b1 s1) -> (n, c s0 s1, b0, b1)."""
    inner, rank = site.channels[0], site.rank
    parts = [n for axis in site.axes for n in (_length(axis) // axis.stride, axis.stride)]
    shape = list(x.shape) if isinstance(x, Tensor) else list(x.meta["val"].shape)
    lead = [-1] if len(shape) == rank + 2 else []
    first = len(lead) + 1
    counts, steps = range(first, first + 2 * rank, 2), range(first + 1, first + 2 * rank, 2)
    x = write.call(aten.reshape.default, x, [*lead, inner, *parts])
    x = write.call(aten.permute.default, x, [*range(first), *steps, *counts])
    merged = [*lead, inner * math.prod(site.stride), *parts[::2]]
    return write.call(aten.reshape.default, x, merged)


def _weight(write: FormWriter, site: StridedConv, call: FormInputs) -> Any:
    """The weight (o, i, k0, k1) in blocks: (o, i s0 s1, blocks, blocks)."""
    assert call.numbers is not None
    outer, inner = call.numbers.shape[:2]
    long = [blocks(axis) * axis.stride for axis in site.axes]
    spread = call.numbers.new_zeros([outer, inner, *long])
    index = tuple(slice(0, axis.span, axis.dilation) for axis in site.axes)
    spread[(slice(None), slice(None), *index)] = call.numbers
    parts = [n for axis in site.axes for n in (blocks(axis), axis.stride)]
    steps, counts = range(3, 3 + 2 * site.rank, 2), range(2, 2 + 2 * site.rank, 2)
    permuted = spread.reshape([outer, inner, *parts]).permute([0, 1, *steps, *counts])
    merged = permuted.reshape([outer, inner * math.prod(site.stride), *parts[::2]])
    return write.constant("blocks", merged.contiguous(), weight=True)


def phase_split(write: FormWriter, site: StridedConv, target: Target, call: FormInputs, functions: int) -> Any:
    """The sum of convolutions of stride 1, one for each phase of the input that has taps.
    Arguments: see `StrideForm.built`."""
    del target, functions
    x = call.x
    if any(axis.before or axis.after for axis in site.axes):
        pads = [n for axis in reversed(site.axes) for n in (axis.before, axis.after)]
        x = write.call(aten.constant_pad_nd.default, x, pads, 0)
    total, bias = None, call.bias
    for first in itertools.product(*(range(_phases(axis)) for axis in site.axes)):
        part = _phase(write, site, call, x, first, bias)
        total = part if total is None else write.call(aten.add.Tensor, total, part)
        bias = None
    return total


def _phases(axis: ConvAxis) -> int:
    """Number of phases: tap k is the first tap of phase k; later taps belong to these phases."""
    return min(axis.kernel, axis.stride // math.gcd(axis.stride, axis.dilation))


def _phase(write: FormWriter, site: StridedConv, call: FormInputs, x: Any, first: tuple[int, ...], bias: Any) -> Any:
    """The convolution of one phase. Its taps along each axis are j, j + s / g, ...; they read every
    s-th position from d j on with dilation d / g, where g = gcd(stride s, dilation d)."""
    dilation, taps = [], []
    for k, (axis, j) in enumerate(zip(site.axes, first, strict=True)):
        common = math.gcd(axis.stride, axis.dilation)
        every, gap = axis.stride // common, axis.dilation // common
        count = -(-(axis.kernel - j) // every)
        length = axis.out + (count - 1) * gap
        start = axis.dilation * j
        end = start + (length - 1) * axis.stride + 1
        x = write.call(aten.slice.Tensor, x, site.axis(k), start, end, axis.stride)
        dilation.append(gap)
        taps.append(slice(j, None, every))
    assert call.numbers is not None
    part = call.numbers[(slice(None), slice(None), *taps)]
    name = "phase_" + "_".join(map(str, first))
    weight = write.constant(name, part.contiguous(), weight=True)
    ones, none = [1] * site.rank, [0] * site.rank
    return write.call(_CONVOLVE[site.rank], x, weight, bias, ones, none, dilation, site.groups)


__all__ = ["blocks", "phase_split", "space_to_depth", "zero_taps"]
