"""Convolutions as products with planes of images: each nonzero reads at one offset.

A padded image is stored in planes of `high` by `wide` pixels. With a stride of s there are s²
planes per channel, one per remainder of row and column, so that every window is a shift:

    y[o, t] = sum over nonzeros (o, c, dy, dx) of value * x[plane of (c, dy, dx)][t + shift]

for t over `length` consecutive pixels: rows follow one another, and the few pixels between them are
dropped. A nonzero is an offset into x; `kernels.cpu.csr` treats offsets as columns of a matrix with
rows one pixel from one another. The gradient of x is the same with shifts of opposite sign: output
gradients are stored with gaps of zeros, wide enough that no shift reaches another row.

A transposed convolution is the gradient of a plain one: its output is stored in planes, its input
with gaps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from demask.sparse.csr_matrix import CsrMatrix, row_of
from demask.sparse.products.gpu_formats import formats_of
from demask.sparse.segment_steps import MAX_SIZE, ConvStep, Pair


@dataclass(frozen=True, slots=True)
class ConvGeometry:
    """Sizes of one convolution over images of one size; pairs are (height, width).

    channels, size: of the side stored in planes, that is the input, or the output of a transposed
    convolution; rows, out: of the other side. reach: number of positions of a plane that a kernel
    reads.
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
        """The geometry of a convolution over [batch, channels, (height,) width]."""
        input_size = (shape[2], shape[3]) if len(shape) == 4 else (1, shape[2])
        output_size, reach = [], []
        for n, k, s, d, pad in zip(input_size, step.kernel, step.stride, step.dilation, step.padding, strict=True):
            span = d * (k - 1) + 1 - sum(pad)
            output_size.append((n - 1) * s + span if step.transposed else (n - span) // s + 1)
            reach.append(d * (k - 1) // s + 1)
        pairs = step.kernel, step.stride, step.dilation, step.padding
        sides = [(shape[1], input_size), (step.out, (output_size[0], output_size[1]))]
        (channels, size), (rows, out) = sides[::-1] if step.transposed else sides
        return cls(channels, rows, step.groups, *pairs, size, out, (reach[0], reach[1]), step.transposed)

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
        """Number of zeros before the spread gradient of a channel."""
        return (self.reach[0] - 1) * self.wide + self.reach[1] - 1

    @property
    def spread_size(self) -> int:
        """Pixels of the spread gradient of one channel, with its zeros."""
        return self.plane + self.first

    @property
    def too_large(self) -> bool:
        """Whether offsets do not fit in 32 bits."""
        return max(self.planes * self.plane, self.rows * self.spread_size) > MAX_SIZE

    def to_planes(self, x: Tensor) -> Tensor:
        """Images [batch, channels, (height,) width] as planes [batch, planes, high, wide]."""
        x = x.unsqueeze(2) if x.ndim == 3 else x
        pads = self._pads()
        x = F.pad(x, pads) if any(pads) else x
        if self.stride == (1, 1):
            return x.contiguous()
        (a, b), batch = self.stride, x.shape[0]
        parts = x.reshape(batch, self.channels, self.high, a, self.wide, b)
        parts = parts.permute(0, 3, 5, 1, 2, 4).contiguous()  # reshape alone may return a view
        return parts.view(batch, self.planes, self.high, self.wide)

    def from_planes(self, images: Tensor) -> Tensor:
        """Images from planes: the transpose of `to_planes`."""
        batch, (a, b) = images.shape[0], self.stride
        if self.stride != (1, 1):
            parts = images.reshape(batch, a, b, self.channels, self.high, self.wide)
            images = parts.permute(0, 3, 4, 1, 5, 2)
            images = images.reshape(batch, self.channels, self.high * a, self.wide * b)
        pads = [-n for n in self._pads()]
        return F.pad(images, pads) if any(pads) else images

    def _pads(self) -> list[int]:
        """Padding in the order of F.pad; negative where windows do not reach the end."""
        pads = []
        for axis in (1, 0):
            before = self.padding[axis][0]
            padded = (self.high, self.wide)[axis] * self.stride[axis]
            pads += [before, padded - self.size[axis] - before]
        return pads

    def spread(self, grad: Tensor) -> Tensor:
        """Output gradients [batch, rows, *out] with their zeros [batch, rows, spread_size]."""
        spread_grad = grad.new_zeros(grad.shape[0], self.rows, self.spread_size)
        strides = (self.rows * self.spread_size, self.spread_size, self.wide, 1)
        spread_grad.as_strided((grad.shape[0], self.rows, *self.out), strides, self.first).copy_(grad)
        return spread_grad


@dataclass(frozen=True, slots=True)
class Offsets:
    """The offsets that nonzeros read. int32.

    starts, there, sorted: a matrix with a row per output channel: offsets into planes, and the
    number of the value of each entry (int64; None: in order). crow, back, order: its transpose, a
    row per plane: offsets into spread gradients, and the numbers of values. rows, planes: rows of
    both matrices, the longest first.
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
    """The offsets of the matrix of a convolution, cached per mask and size.

    Raises BadInput for invalid indices.
    """
    return formats_of(m).cached(g, lambda: _offsets(m, g))


def _offsets(m: CsrMatrix, g: ConvGeometry) -> Offsets:
    """The offsets of a matrix."""
    row, col = row_of(m), m.col.long()
    kernel_height, kernel_width = g.kernel
    group_inputs, group_outputs = g.channels // g.groups, g.rows // g.groups
    if g.transposed:  # rows of the matrix are channels of planes
        channel, row = (row, row // group_inputs * group_outputs + col // (kernel_height * kernel_width))
    else:
        channel = row // group_outputs * group_inputs + col // (kernel_height * kernel_width)
    y, x = col // kernel_width % kernel_height * g.dilation[0], col % kernel_width * g.dilation[1]
    part = y % g.stride[0] * g.stride[1] + x % g.stride[1]
    plane, shift = part * g.channels + channel, y // g.stride[0] * g.wide + x // g.stride[1]
    order, crow = _sort_by_key(plane, g.planes)
    back = (row * g.spread_size + g.first - shift)[order]
    there, starts, sorted_ = plane * g.plane + shift, m.crow, None
    if g.transposed:
        sorted_, starts = _sort_by_key(row, g.rows)
        there = there[sorted_]
    longest = (torch.argsort(c.diff(), descending=True, stable=True) for c in (starts, crow))
    return Offsets(starts, there.int(), sorted_, crow, back.int(), order, *(t.int() for t in longest))


def _sort_by_key(key: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The order (int64) that sorts the keys, and the start of each key (int32)."""
    counts = torch.bincount(key, minlength=count)
    return torch.argsort(key, stable=True), F.pad(counts.cumsum(0), (1, 0)).int()
