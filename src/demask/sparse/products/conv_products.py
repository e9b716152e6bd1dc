"""Convolutions with trained nonzeros: one kernel call per image.

The forward pass and the gradient of x are sparse products of planes; the gradient of values is
SDDMM of the output gradient and x. Padding, strides and gaps are applied by copies before and
after. A transposed convolution swaps the two sparse products.

Convolutions are products with planes of images, in which each nonzero reads at one offset. A padded
image is stored in planes of `high` by `wide` pixels. With a stride of s there are s² planes per
channel, one per remainder of row and column, so that every window is a shift:

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
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from demask.errors import BadInput
from demask.exec.steps.segment_steps import MAX_SIZE, Conv, Pair
from demask.kernels.cpu import csr, sddmm
from demask.kernels.llvm.isa import host
from demask.kernels.llvm.jit import CODE
from demask.kernels.thread_team import ENTRY, Job
from demask.sparse.csr_matrix import CSR_NUMBERS, CsrMatrix, row_of
from demask.sparse.products.cpu_products import threads_for
from demask.sparse.products.gpu_formats import formats_of


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
    def of(cls, step: Conv, shape: tuple[int, ...]) -> ConvGeometry:
        """The geometry of a convolution over [batch, channels, (height,) width]."""
        input_size = (shape[2], shape[3]) if len(shape) == 4 else (1, shape[2])
        output_size, reach = [], []
        for n, k, s, d, pad in zip(
            input_size, step.fields.kernel, step.fields.stride, step.fields.dilation, step.fields.padding, strict=True
        ):
            span = d * (k - 1) + 1 - sum(pad)
            output_size.append((n - 1) * s + span if step.fields.transposed else (n - span) // s + 1)
            reach.append(d * (k - 1) // s + 1)
        pairs = step.fields.kernel, step.fields.stride, step.fields.dilation, step.fields.padding
        sides = [(shape[1], input_size), (step.fields.out, (output_size[0], output_size[1]))]
        (channels, size), (rows, out) = sides[::-1] if step.fields.transposed else sides
        return cls(channels, rows, step.fields.groups, *pairs, size, out, (reach[0], reach[1]), step.fields.transposed)

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
    row per plane: offsets into spread gradients, and the numbers of values.
    """

    starts: Tensor
    there: Tensor
    sorted: Tensor | None
    crow: Tensor
    back: Tensor
    order: Tensor


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
    return Offsets(starts, there.int(), sorted_, crow, back.int(), order)


def _sort_by_key(key: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The order (int64) that sorts the keys, and the start of each key (int32)."""
    counts = torch.bincount(key, minlength=count)
    return torch.argsort(key, stable=True), F.pad(counts.cumsum(0), (1, 0)).int()


def convolved(step: Conv, m: CsrMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution of x [batch, channels, (height,) width] without its activation, contiguous.

    m: the matrix of the kernel in the dtype of x, float32 or float64, with int32 indices. Raises
    BadInput for invalid indices.
    """
    m, g, offsets = _prepare_operands(step, m, x)
    bias = None if bias is None else bias.contiguous()
    if not g.transposed:
        return _as_signal(_scatter_input(m, g, offsets, g.to_planes(x), bias), x)
    images = _gather_gradients(m, g, offsets, g.spread(_as_image(x)))
    return _as_signal(images if bias is None else images.add_(bias[:, None, None]), x)


def gradient_of_x(step: Conv, m: CsrMatrix, x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of x, contiguous. grad: the gradient of the output."""
    m, g, offsets = _prepare_operands(step, m, x)
    if g.transposed:
        return _as_signal(_scatter_input(m, g, offsets, g.to_planes(grad), None), x)
    return _as_signal(_gather_gradients(m, g, offsets, g.spread(_as_image(grad))), x)


def gradient_of_values(step: Conv, m: CsrMatrix, x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the nonzeros [nonzeros]; each thread sums over its images.

    grad: the gradient of the output.
    """
    m, g, offsets = _prepare_operands(step, m, x)
    spread_source, planes_source = (x, grad) if g.transposed else (grad, x)
    spread, planes = g.spread(_as_image(spread_source)), g.to_planes(planes_source)
    batch, size, count = planes.shape[0], x.element_size(), m.col.numel()
    numbers = CSR_NUMBERS[x.dtype]
    lanes = csr.isa_of_sums(host(), numbers).lanes
    threads = _thread_count(batch, count * g.length)
    sums = x.new_zeros(threads, count)
    table = CsrMatrix(offsets.starts, offsets.there, m.values, None, (g.rows, planes[0].numel()))
    calls = _row_calls(sddmm.CALL, batch, table)
    image = np.arange(batch)
    calls["a"] = spread.data_ptr() + size * (g.first + image * spread[0].numel())
    calls["a_pitch"] = size * g.spread_size
    calls["x"], calls["x_pitch"] = planes.data_ptr() + size * image * planes[0].numel(), size
    calls["vectors"], calls["left"] = g.length // lanes, g.length % lanes
    calls["out"] = sums.data_ptr() + size * count * _thread_of_images(batch, threads)
    kernel = sddmm.Sampled(g.length % lanes > 0, more=True, numbers=numbers)
    _run(calls, np.full(batch, CODE.addresses([kernel])[kernel]), batch, threads)
    totals = sums.sum(0)
    return totals if offsets.sorted is None else x.new_empty(count).index_copy_(0, offsets.sorted, totals)


def _prepare_operands(step: Conv, m: CsrMatrix, x: Tensor) -> tuple[CsrMatrix, ConvGeometry, Offsets]:
    g = ConvGeometry.of(step, tuple(x.shape))
    group_inputs = x.shape[1] // g.groups
    size = step.fields.out, group_inputs * g.kernel[0] * g.kernel[1]
    m = CsrMatrix(m.crow.contiguous(), m.col.contiguous(), m.values.contiguous(), None, size)
    return m, g, offsets_of(m, g)


def _as_image(x: Tensor) -> Tensor:
    """Signals as images of one row."""
    return x.unsqueeze(2) if x.ndim == 3 else x


def _as_signal(images: Tensor, x: Tensor) -> Tensor:
    """Images as signals, if x is one."""
    return (images.squeeze(2) if x.ndim == 3 else images).contiguous()


def _scatter_input(m: CsrMatrix, g: ConvGeometry, offsets: Offsets, planes: Tensor, bias: Tensor | None) -> Tensor:
    """Products from planes to outputs [batch, rows, *out]: the sum over the offsets of nonzeros."""
    batch, (height, width) = planes.shape[0], g.out
    values = m.values if offsets.sorted is None else m.values.index_select(0, offsets.sorted)
    # one pixel: the kernel for a single column writes contiguous rows
    out = planes.new_empty(batch, g.rows, height * g.wide if g.length > 1 else 1)
    table = CsrMatrix(offsets.starts, offsets.there, values, None, (g.rows, planes[0].numel()))
    _multiply(table, planes, out, g.length, bias)
    return out.view(batch, g.rows, height, -1)[..., :width]


def _gather_gradients(m: CsrMatrix, g: ConvGeometry, offsets: Offsets, spread: Tensor) -> Tensor:
    """Products from spread gradients to images [batch, channels, *size]: transposes `_scatter_input`."""
    planes = spread.new_empty(spread.shape[0], g.planes, g.high, g.wide)
    values = m.values.index_select(0, offsets.order)
    table = CsrMatrix(offsets.crow, offsets.back, values, None, (g.planes, spread[0].numel()))
    _multiply(table, spread, planes, g.plane, None)
    return g.from_planes(planes)


def _multiply(m: CsrMatrix, x: Tensor, out: Tensor, length: int, bias: Tensor | None) -> None:
    """out[image, row, t] = sum of values * x[image, offset + t] for t below `length`.

    Columns of m are offsets. x and out are contiguous, images first, rows of out second.
    """
    batch, size = x.shape[0], x.element_size()
    parts = csr.pieces(length, host(), {"biased": bias is not None, "numbers": CSR_NUMBERS[x.dtype]})
    codes = CODE.addresses(part.kernel for part in parts)
    calls = _row_calls(csr.CALL, batch * len(parts), m)
    image = np.repeat(np.arange(batch), len(parts))
    first = np.tile([size * part.first for part in parts], batch)
    calls["values"], calls["bias"] = m.values.data_ptr(), 0 if bias is None else bias.data_ptr()
    calls["x"], calls["x_pitch"] = x.data_ptr() + first + size * image * x[0].numel(), size
    calls["out"] = out.data_ptr() + first + size * image * out[0].numel()
    calls["out_pitch"] = size * (out[0].numel() // m.size[0])
    calls["tiles"] = np.tile([part.tiles for part in parts], batch)
    calls["left"] = np.tile([part.left for part in parts], batch)
    code = np.tile([codes[part.kernel] for part in parts], batch)
    _run(calls, code, batch, _thread_count(batch, m.col.numel() * length))


def _row_calls(kind: np.dtype[Any], count: int, m: CsrMatrix) -> np.ndarray:
    """Calls for all rows of a matrix."""
    calls = np.zeros(count, kind)
    calls["crow"], calls["col"] = m.crow.data_ptr(), m.col.data_ptr()
    calls["begin"], calls["end"] = 0, m.size[0]
    calls["rows"], calls["columns"], calls["entries"] = *m.size, m.col.numel()
    return calls


def _thread_count(batch: int, work: int) -> int:
    return max(1, min(batch, threads_for(batch * work)))


def _thread_of_images(batch: int, threads: int) -> np.ndarray:
    return np.arange(batch) * threads // batch


def _run(calls: np.ndarray, codes: np.ndarray, batch: int, threads: int) -> None:
    """Make the calls; every image has the same number."""
    calls_per_image, owner = len(calls) // batch, _thread_of_images(batch, threads)
    bad = np.zeros(threads, np.int64)
    calls["bad"] = bad.ctypes.data + 8 * np.repeat(owner, calls_per_image)
    entries = np.zeros(len(calls), ENTRY)
    entries["code"] = codes
    entries["call"] = calls.ctypes.data + calls.dtype.itemsize * np.arange(len(calls))
    ends = calls_per_image * np.searchsorted(owner, np.arange(threads + 1)).astype(np.int64)
    Job(entries, ends, threads, np.zeros(1, np.int64)).run(threads)
    if bad.any():
        raise BadInput("expected row starts and columns that do not change during a call")
