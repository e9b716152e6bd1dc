"""Convolutions as products with planes of images: where a nonzero reads, as one number.

An image is padded and lies in planes of `high` by `wide` pixels. With a stride of s there are s²
planes per channel, one per remainder of row and column, so that every window is a shift:

    y[o, t] = sum over nonzeros (o, c, dy, dx) of value · x[plane of (c, dy, dx)][t + shift]

for t over `length` pixels in one run: rows follow one another, a few pixels between them belong to
none and are dropped. A nonzero is an offset into x, and `kernels.csr` takes offsets as columns of a
matrix whose rows are one pixel apart. Of slopes the same holds with the signs of shifts turned:
they lie with gaps of zeros, wide enough that no shift meets another row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from demask.sparse.gpu_forms import form_of
from demask.sparse.matrix import Rows, row_of
from demask.sparse.program import MAX_SIZE, Conv, Pair


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of one convolution over images of one size; pairs are (height, width).

    out: pixels of the output; reach: how many places a kernel sees of a plane.
    """

    channels: int
    rows: int
    groups: int
    kernel: Pair
    stride: Pair
    dilation: Pair
    padding: tuple[Pair, Pair]
    size: Pair
    out: Pair
    reach: Pair

    @classmethod
    def of(cls, step: Conv, shape: tuple[int, ...]) -> Geometry:
        """Of a convolution that is not transposed, over [batch, channels, (height,) width]."""
        size = (shape[2], shape[3]) if len(shape) == 4 else (1, shape[2])
        out, reach = [], []
        for n, k, s, d, pad in zip(
            size, step.kernel, step.stride, step.dilation, step.padding, strict=True
        ):
            out.append((n + sum(pad) - d * (k - 1) - 1) // s + 1)
            reach.append(d * (k - 1) // s + 1)
        pairs = step.kernel, step.stride, step.dilation, step.padding
        return cls(
            shape[1], step.out, step.groups, *pairs, size, (out[0], out[1]), (reach[0], reach[1])
        )

    @property
    def high(self) -> int:
        return self.out[0] + self.reach[0] - 1

    @property
    def wide(self) -> int:
        return self.out[1] + self.reach[1] - 1

    @property
    def planes(self) -> int:
        return self.channels * math.prod(self.stride)

    @property
    def plane(self) -> int:
        """Pixels of a plane."""
        return self.high * self.wide

    @property
    def length(self) -> int:
        """Pixels from the first to the last of the output, in rows of `wide`."""
        return (self.out[0] - 1) * self.wide + self.out[1]

    @property
    def first(self) -> int:
        """Where slopes begin behind the zeros before them."""
        return (self.reach[0] - 1) * self.wide + self.reach[1] - 1

    @property
    def slopes(self) -> int:
        """Pixels that the slopes of one channel take, with their zeros."""
        return self.plane + self.first

    @property
    def too_large(self) -> bool:
        """Whether offsets do not fit 32 bits."""
        return max(self.planes * self.plane, self.rows * self.slopes) > MAX_SIZE

    def laid(self, x: Tensor) -> Tensor:
        """Images [batch, channels, (height,) width] in planes [batch, planes, high, wide]."""
        x = x.unsqueeze(2) if x.ndim == 3 else x
        pads = self._pads()
        x = F.pad(x, pads) if any(pads) else x
        if self.stride == (1, 1):
            return x.contiguous()
        (a, b), batch = self.stride, x.shape[0]
        parts = x.reshape(batch, self.channels, self.high, a, self.wide, b)
        return parts.permute(0, 3, 5, 1, 2, 4).reshape(batch, self.planes, self.high, self.wide)

    def back(self, made: Tensor) -> Tensor:
        """Of planes, the images that were laid: what `laid` is the transpose of."""
        batch, (a, b) = made.shape[0], self.stride
        if self.stride != (1, 1):
            parts = made.reshape(batch, a, b, self.channels, self.high, self.wide)
            made = parts.permute(0, 3, 4, 1, 5, 2)
            made = made.reshape(batch, self.channels, self.high * a, self.wide * b)
        pads = [-n for n in self._pads()]
        return F.pad(made, pads) if any(pads) else made

    def _pads(self) -> list[int]:
        """As F.pad takes them; less than zero where windows do not reach the end."""
        found = []
        for axis in (1, 0):
            before = self.padding[axis][0]
            whole = (self.high, self.wide)[axis] * self.stride[axis]
            found += [before, whole - self.size[axis] - before]
        return found

    def spread(self, slope: Tensor) -> Tensor:
        """Slopes [batch, rows, *out] among their zeros [batch, rows, slopes]."""
        made = slope.new_zeros(slope.shape[0], self.rows, self.slopes)
        strides = (self.rows * self.slopes, self.slopes, self.wide, 1)
        made.as_strided((slope.shape[0], self.rows, *self.out), strides, self.first).copy_(slope)
        return made


@dataclass(frozen=True, slots=True)
class Offsets:
    """What a nonzero reads. int32.

    there: of x, in the order of the nonzeros. crow, back, order: the transposed matrix, a row per
    plane: offsets into slopes, and which of the values its values are (int64). rows, planes: both
    matrices' rows, the longest first.
    """

    there: Tensor
    crow: Tensor
    back: Tensor
    order: Tensor
    rows: Tensor
    planes: Tensor


def offsets_of(m: Rows, g: Geometry) -> Offsets:
    """The offsets of a matrix of a convolution, made once per mask and size; BadInput for indices
    that do not fit."""
    return form_of(m).beside(g, lambda: _offsets(m, g))


def _offsets(m: Rows, g: Geometry) -> Offsets:
    row, col = row_of(m), m.col.long()
    high, wide = g.kernel
    channel = row // (g.rows // g.groups) * (g.channels // g.groups) + col // (high * wide)
    y, x = col // wide % high * g.dilation[0], col % wide * g.dilation[1]
    part = y % g.stride[0] * g.stride[1] + x % g.stride[1]
    plane, shift = part * g.channels + channel, y // g.stride[0] * g.wide + x // g.stride[1]
    order = torch.argsort(plane, stable=True)
    counts = torch.bincount(plane, minlength=g.planes)
    back = (row * g.slopes + g.first - shift)[order]
    there = plane * g.plane + shift
    crow = F.pad(counts.cumsum(0), (1, 0))
    longest = (torch.argsort(c, descending=True, stable=True) for c in (m.crow.diff(), counts))
    return Offsets(there.int(), crow.int(), back.int(), order, *(t.int() for t in longest))
