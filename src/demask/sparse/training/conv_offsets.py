"""Convolutions as products with planes of images: where a nonzero reads, as one number.

An image is padded and lies in planes of `high` by `wide` pixels. With a stride of s there are s²
planes per channel, one per remainder of row and column, so that every window is a shift:

    y[o, t] = sum over nonzeros (o, c, dy, dx) of value · x[plane of (c, dy, dx)][t + shift]

for t over `length` pixels in one run: rows follow one another, a few pixels between them belong to
none and are dropped. A nonzero is an offset into x, and `kernels.csr` takes offsets as columns of a
matrix whose rows are one pixel apart. Of slopes the same holds with the signs of shifts turned:
they lie with gaps of zeros, wide enough that no shift meets another row.

A transposed convolution is the gradient of a plain one: its output is laid in planes, its input
lies with gaps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from demask.sparse.csr_matrix import CsrMatrix, row_of
from demask.sparse.products.gpu_formats import form_of
from demask.sparse.segment_program import MAX_SIZE, ConvStep, Pair


@dataclass(frozen=True, slots=True)
class ConvGeometry:
    """Sizes of one convolution over images of one size; pairs are (height, width).

    channels, size: of what is laid in planes, the input, or the output of a transposed convolution;
    rows, out: of the other. reach: how many places a kernel sees of a plane.
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
    transposed: bool = False

    @classmethod
    def of(cls, step: ConvStep, shape: tuple[int, ...]) -> ConvGeometry:
        """Of a convolution over [batch, channels, (height,) width]."""
        given = (shape[2], shape[3]) if len(shape) == 4 else (1, shape[2])
        made, reach = [], []
        for n, k, s, d, pad in zip(
            given, step.kernel, step.stride, step.dilation, step.padding, strict=True
        ):
            seen = d * (k - 1) + 1 - sum(pad)
            made.append((n - 1) * s + seen if step.transposed else (n - seen) // s + 1)
            reach.append(d * (k - 1) // s + 1)
        pairs = step.kernel, step.stride, step.dilation, step.padding
        sides = [(shape[1], given), (step.out, (made[0], made[1]))]
        (channels, size), (rows, out) = sides[::-1] if step.transposed else sides
        return cls(
            channels, rows, step.groups, *pairs, size, out, (reach[0], reach[1]), step.transposed
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
        parts = parts.permute(0, 3, 5, 1, 2, 4).contiguous()  # reshape alone may give a view
        return parts.view(batch, self.planes, self.high, self.wide)

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

    starts, there, sorted: a matrix with a row per channel of slopes: offsets into planes, and which
    of the values its values are (int64; None: they are in their order). crow, back, order: its
    transpose, a row per plane: offsets into slopes, and which of the values. rows, planes: both
    matrices' rows, the longest first.
    """

    starts: Tensor
    there: Tensor
    sorted: Tensor | None
    crow: Tensor
    back: Tensor
    order: Tensor
    rows: Tensor
    planes: Tensor


def offsets_of(m: CsrMatrix, g: ConvGeometry) -> Offsets:
    """The offsets of a matrix of a convolution, made once per mask and size; BadInput for indices
    that do not fit."""
    return form_of(m).beside(g, lambda: _offsets(m, g))


def _offsets(m: CsrMatrix, g: ConvGeometry) -> Offsets:
    row, col = row_of(m), m.col.long()
    high, wide = g.kernel
    inner, outer = g.channels // g.groups, g.rows // g.groups
    if g.transposed:  # rows of the matrix are channels of planes
        channel, row = row, row // inner * outer + col // (high * wide)
    else:
        channel = row // outer * inner + col // (high * wide)
    y, x = col // wide % high * g.dilation[0], col % wide * g.dilation[1]
    part = y % g.stride[0] * g.stride[1] + x % g.stride[1]
    plane, shift = part * g.channels + channel, y // g.stride[0] * g.wide + x // g.stride[1]
    order, crow = _grouped(plane, g.planes)
    back = (row * g.slopes + g.first - shift)[order]
    there, starts, sorted_ = plane * g.plane + shift, m.crow, None
    if g.transposed:
        sorted_, starts = _grouped(row, g.rows)
        there = there[sorted_]
    longest = (torch.argsort(c.diff(), descending=True, stable=True) for c in (starts, crow))
    return Offsets(
        starts, there.int(), sorted_, crow, back.int(), order, *(t.int() for t in longest)
    )


def _grouped(key: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The order (int64) that brings equal keys together, rising, and where each begins (int32)."""
    counts = torch.bincount(key, minlength=count)
    return torch.argsort(key, stable=True), F.pad(counts.cumsum(0), (1, 0)).int()
