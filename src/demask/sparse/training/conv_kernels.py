"""A convolution with trained nonzeros: one kernel call per image (`conv_offsets`).

The forward pass and the gradient of x are sparse products of planes; the gradient of values is
SDDMM of the output gradient and x. Padding, strides and gaps are applied by copies before and
after. A transposed convolution swaps the two sparse products.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.kernels.cpu import csr, sddmm
from demask.kernels.llvm.isa import host
from demask.kernels.llvm.jit import CODE
from demask.kernels.thread_team import ENTRY, Job
from demask.sparse.csr_matrix import CsrMatrix
from demask.sparse.products.cpu_products import LINE, WORK
from demask.sparse.segment_steps import ConvStep
from demask.sparse.training.conv_offsets import ConvGeometry, Offsets, offsets_of


def convolved(step: ConvStep, m: CsrMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution of x [batch, channels, (height,) width] without its activation, contiguous.

    m: the matrix of the kernel in float32, with int32 indices. Raises BadInput for invalid indices.
    """
    m, g, offsets = _prepare_operands(step, m, x)
    bias = None if bias is None else bias.contiguous()
    if not g.transposed:
        return _as_signal(_scatter_input(m, g, offsets, g.to_planes(x), bias), x)
    images = _gather_gradients(m, g, offsets, g.spread(_as_image(x)))
    return _as_signal(images if bias is None else images.add_(bias[:, None, None]), x)


def gradient_of_x(step: ConvStep, m: CsrMatrix, x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of x, contiguous. grad: the gradient of the output."""
    m, g, offsets = _prepare_operands(step, m, x)
    if g.transposed:
        return _as_signal(_scatter_input(m, g, offsets, g.to_planes(grad), None), x)
    return _as_signal(_gather_gradients(m, g, offsets, g.spread(_as_image(grad))), x)


def gradient_of_values(step: ConvStep, m: CsrMatrix, x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the nonzeros [nonzeros]; each thread sums over its images.

    grad: the gradient of the output.
    """
    m, g, offsets = _prepare_operands(step, m, x)
    spread_source, planes_source = (x, grad) if g.transposed else (grad, x)
    spread, planes = g.spread(_as_image(spread_source)), g.to_planes(planes_source)
    batch, isa, count = planes.shape[0], host(), m.col.numel()
    threads = _thread_count(batch, count * g.length)
    sums = torch.zeros(threads, count)
    table = CsrMatrix(offsets.starts, offsets.there, m.values, None, (g.rows, planes[0].numel()))
    calls = _row_calls(sddmm.CALL, batch, table, offsets.rows)
    image = np.arange(batch)
    calls["begin"], calls["end"] = 0, g.rows
    calls["a"] = spread.data_ptr() + 4 * (g.first + image * spread[0].numel())
    calls["a_pitch"] = 4 * g.spread_size
    calls["x"], calls["x_pitch"] = planes.data_ptr() + 4 * image * planes[0].numel(), 4
    calls["vectors"], calls["left"] = g.length // isa.lanes, g.length % isa.lanes
    calls["out"] = sums.data_ptr() + 4 * count * _thread_of_images(batch, threads)
    kernel = sddmm.Sampled(g.length % isa.lanes > 0, more=True)
    _run(calls, np.full(batch, CODE.addresses([kernel])[kernel]), batch, threads)
    totals = sums.sum(0)
    return totals if offsets.sorted is None else torch.empty(count).index_copy_(0, offsets.sorted, totals)


def _prepare_operands(step: ConvStep, m: CsrMatrix, x: Tensor) -> tuple[CsrMatrix, ConvGeometry, Offsets]:
    g = ConvGeometry.of(step, tuple(x.shape))
    group_inputs = x.shape[1] // g.groups
    size = step.out, group_inputs * g.kernel[0] * g.kernel[1]
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
    out = torch.empty(batch, g.rows, height * g.wide if g.length > 1 else 1)
    table = CsrMatrix(offsets.starts, offsets.there, values, None, (g.rows, planes[0].numel()))
    _multiply(table, offsets.rows, planes, out, g.length, bias)
    return out.view(batch, g.rows, height, -1)[..., :width]


def _gather_gradients(m: CsrMatrix, g: ConvGeometry, offsets: Offsets, spread: Tensor) -> Tensor:
    """Products from spread gradients to images [batch, channels, *size]: transposes `_scatter_input`."""
    planes = torch.empty(spread.shape[0], g.planes, g.high, g.wide)
    values = m.values.index_select(0, offsets.order)
    table = CsrMatrix(offsets.crow, offsets.back, values, None, (g.planes, spread[0].numel()))
    _multiply(table, offsets.planes, spread, planes, g.plane, None)
    return g.from_planes(planes)


def _multiply(m: CsrMatrix, order: Tensor, x: Tensor, out: Tensor, length: int, bias: Tensor | None) -> None:
    """out[image, row, t] = sum of values * x[image, offset + t] for t below `length`.

    Columns of m are offsets. x and out are contiguous, images first, rows of out second.
    """
    batch = x.shape[0]
    parts = csr.pieces(length, host(), {"biased": bias is not None})
    codes = CODE.addresses(part.kernel for part in parts)
    calls = _row_calls(csr.CALL, batch * len(parts), m, order)
    image = np.repeat(np.arange(batch), len(parts))
    first = np.tile([4 * part.first for part in parts], batch)
    side = np.tile([getattr(part.kernel, "side", 1) for part in parts], batch)
    calls["values"], calls["bias"] = m.values.data_ptr(), 0 if bias is None else bias.data_ptr()
    calls["begin"], calls["end"], calls["together"] = 0, m.size[0], m.size[0] // side * side
    calls["x"], calls["x_pitch"] = x.data_ptr() + first + 4 * image * x[0].numel(), 4
    calls["out"] = out.data_ptr() + first + 4 * image * out[0].numel()
    calls["out_pitch"] = 4 * (out[0].numel() // m.size[0])
    calls["tiles"] = np.tile([part.tiles for part in parts], batch)
    calls["left"] = np.tile([part.left for part in parts], batch)
    code = np.tile([codes[part.kernel] for part in parts], batch)
    _run(calls, code, batch, _thread_count(batch, m.col.numel() * length))


def _row_calls(kind: np.dtype[Any], count: int, m: CsrMatrix, order: Tensor) -> np.ndarray:
    """Calls for all rows of a matrix, in this order (int32)."""
    calls = np.zeros(count, kind)
    calls["crow"], calls["col"] = m.crow.data_ptr(), m.col.data_ptr()
    calls["order"] = order.data_ptr()
    calls["rows"], calls["columns"], calls["entries"] = *m.size, m.col.numel()
    return calls


def _thread_count(batch: int, work: int) -> int:
    return max(1, min(torch.get_num_threads(), batch, batch * work // WORK))


def _thread_of_images(batch: int, threads: int) -> np.ndarray:
    return np.arange(batch) * threads // batch


def _run(calls: np.ndarray, codes: np.ndarray, batch: int, threads: int) -> None:
    """Make the calls; every image has the same number."""
    calls_per_image, owner = len(calls) // batch, _thread_of_images(batch, threads)
    bad = np.zeros(threads * LINE // 8, np.int64)
    calls["bad"] = bad.ctypes.data + LINE * np.repeat(owner, calls_per_image)
    entries = np.zeros(len(calls), ENTRY)
    entries["code"] = codes
    entries["call"] = calls.ctypes.data + calls.dtype.itemsize * np.arange(len(calls))
    ends = calls_per_image * np.searchsorted(owner, np.arange(threads + 1)).astype(np.int64)
    Job(entries, ends, threads, np.zeros(1, np.int64)).run(threads)
    if bad.any():
        raise BadInput("expected row starts and columns that do not change during a call")
