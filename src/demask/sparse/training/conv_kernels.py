"""A convolution whose nonzeros are trained: one call of kernels per image (`planes`).

Forward and the gradient of x are sparse products of planes, that of values SDDMM of slopes and x.
Padding, strides and gaps are copies around them. In a transposed convolution they change places.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.kernels.cpu import csr, sddmm
from demask.kernels.cpu.thread_team import ENTRY, Job
from demask.kernels.llvm.isa import host
from demask.kernels.llvm.jit import CODE
from demask.sparse.csr_matrix import CsrMatrix
from demask.sparse.products.spmm_cpu import LINE, WORK
from demask.sparse.segment_program import ConvStep
from demask.sparse.training.conv_offsets import ConvGeometry, Offsets, offsets_of


def convolved(step: ConvStep, m: CsrMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution of x [batch, channels, (height,) width] without its activation, contiguous.

    m: the matrix of its kernel, float32 on the CPU, indices int32; BadInput for ones that do not
    fit.
    """
    m, g, where = _read(step, m, x)
    bias = None if bias is None else bias.contiguous()
    if not g.transposed:
        return _like(_down(m, g, where, g.laid(x), bias), x)
    made = _up(m, g, where, g.spread(_image(x)))
    return _like(made if bias is None else made.add_(bias[:, None, None]), x)


def slope_of_x(step: ConvStep, m: CsrMatrix, x: Tensor, slope: Tensor) -> Tensor:
    """What the slopes of the output are for x: slopes of its shape, contiguous."""
    m, g, where = _read(step, m, x)
    if g.transposed:
        return _like(_down(m, g, where, g.laid(slope), None), x)
    return _like(_up(m, g, where, g.spread(_image(slope))), x)


def slope_of_values(step: ConvStep, m: CsrMatrix, x: Tensor, slope: Tensor) -> Tensor:
    """What the slopes of the output are for the nonzeros [nonzeros]: every thread adds up those of
    its images."""
    m, g, where = _read(step, m, x)
    near, far = (x, slope) if g.transposed else (slope, x)
    spread, laid = g.spread(_image(near)), g.laid(far)
    batch, isa, count = laid.shape[0], host(), m.col.numel()
    threads = _threads(batch, count * g.length)
    sums = torch.zeros(threads, count)
    table = CsrMatrix(where.starts, where.there, m.values, None, (g.rows, laid[0].numel()))
    calls = _calls(sddmm.CALL, batch, table, where.rows)
    image = np.arange(batch)
    calls["begin"], calls["end"] = 0, g.rows
    calls["a"] = spread.data_ptr() + 4 * (g.first + image * spread[0].numel())
    calls["a_pitch"] = 4 * g.slopes
    calls["x"], calls["x_pitch"] = laid.data_ptr() + 4 * image * laid[0].numel(), 4
    calls["vectors"], calls["left"] = g.length // isa.lanes, g.length % isa.lanes
    calls["out"] = sums.data_ptr() + 4 * count * _owners(batch, threads)
    kernel = sddmm.Sampled(g.length % isa.lanes > 0, more=True)
    _run(calls, np.full(batch, CODE.addresses([kernel])[kernel]), batch, threads)
    made = sums.sum(0)
    return made if where.sorted is None else torch.empty(count).index_copy_(0, where.sorted, made)


def _read(step: ConvStep, m: CsrMatrix, x: Tensor) -> tuple[CsrMatrix, ConvGeometry, Offsets]:
    """The matrix, as kernels take it; where its nonzeros read."""
    g = ConvGeometry.of(step, tuple(x.shape))
    inner = x.shape[1] // g.groups
    size = step.out, inner * g.kernel[0] * g.kernel[1]
    m = CsrMatrix(m.crow.contiguous(), m.col.contiguous(), m.values.contiguous(), None, size)
    return m, g, offsets_of(m, g)


def _image(x: Tensor) -> Tensor:
    """Signals as images of one row."""
    return x.unsqueeze(2) if x.ndim == 3 else x


def _like(made: Tensor, x: Tensor) -> Tensor:
    """Images as signals, where x is some."""
    return (made.squeeze(2) if x.ndim == 3 else made).contiguous()


def _down(
    m: CsrMatrix, g: ConvGeometry, where: Offsets, laid: Tensor, bias: Tensor | None
) -> Tensor:
    """From planes to slopes without gaps [batch, rows, *out]: what each nonzero reads, summed."""
    batch, (high, wide) = laid.shape[0], g.out
    values = m.values if where.sorted is None else m.values.index_select(0, where.sorted)
    # one pixel: the kernel for a single column writes rows side by side
    made = torch.empty(batch, g.rows, high * g.wide if g.length > 1 else 1)
    table = CsrMatrix(where.starts, where.there, values, None, (g.rows, laid[0].numel()))
    _multiply(table, where.rows, laid, made, g.length, bias)
    return made.view(batch, g.rows, high, -1)[..., :wide]


def _up(m: CsrMatrix, g: ConvGeometry, where: Offsets, spread: Tensor) -> Tensor:
    """From slopes to images [batch, channels, *size]: the transpose of `_down`."""
    made = torch.empty(spread.shape[0], g.planes, g.high, g.wide)
    values = m.values.index_select(0, where.order)
    table = CsrMatrix(where.crow, where.back, values, None, (g.planes, spread[0].numel()))
    _multiply(table, where.planes, spread, made, g.plane, None)
    return g.back(made)


def _multiply(
    m: CsrMatrix, order: Tensor, x: Tensor, made: Tensor, length: int, bias: Tensor | None
) -> None:
    """made[image, row, t] = sum of values · x[image, offset + t] for t below `length`. Columns of m
    are offsets; x and made are contiguous, images first, rows of made second."""
    batch = x.shape[0]
    parts = csr.pieces(length, host(), {"biased": bias is not None})
    codes = CODE.addresses(part.kernel for part in parts)
    calls = _calls(csr.CALL, batch * len(parts), m, order)
    image = np.repeat(np.arange(batch), len(parts))
    first = np.tile([4 * part.first for part in parts], batch)
    side = np.tile([getattr(part.kernel, "side", 1) for part in parts], batch)
    calls["values"], calls["bias"] = m.values.data_ptr(), 0 if bias is None else bias.data_ptr()
    calls["begin"], calls["end"], calls["together"] = 0, m.size[0], m.size[0] // side * side
    calls["x"], calls["x_pitch"] = x.data_ptr() + first + 4 * image * x[0].numel(), 4
    calls["out"] = made.data_ptr() + first + 4 * image * made[0].numel()
    calls["out_pitch"] = 4 * (made[0].numel() // m.size[0])
    calls["tiles"] = np.tile([part.tiles for part in parts], batch)
    calls["left"] = np.tile([part.left for part in parts], batch)
    code = np.tile([codes[part.kernel] for part in parts], batch)
    _run(calls, code, batch, _threads(batch, m.col.numel() * length))


def _calls(kind: np.dtype[Any], count: int, m: CsrMatrix, order: Tensor) -> np.ndarray:
    """Calls over all rows of a matrix, in this order (int32)."""
    calls = np.zeros(count, kind)
    calls["crow"], calls["col"] = m.crow.data_ptr(), m.col.data_ptr()
    calls["order"] = order.data_ptr()
    calls["rows"], calls["columns"], calls["entries"] = *m.size, m.col.numel()
    return calls


def _threads(batch: int, work: int) -> int:
    """Threads for so many images of so many products each."""
    return max(1, min(torch.get_num_threads(), batch, batch * work // WORK))


def _owners(batch: int, threads: int) -> np.ndarray:
    """The thread of each image: as many for each, in one run."""
    return np.arange(batch) * threads // batch


def _run(calls: np.ndarray, codes: np.ndarray, batch: int, threads: int) -> None:
    """Make the calls, as many for every image."""
    each, owner = len(calls) // batch, _owners(batch, threads)
    bad = np.zeros(threads * LINE // 8, np.int64)
    calls["bad"] = bad.ctypes.data + LINE * np.repeat(owner, each)
    entries = np.zeros(len(calls), ENTRY)
    entries["code"] = codes
    entries["call"] = calls.ctypes.data + calls.dtype.itemsize * np.arange(len(calls))
    ends = each * np.searchsorted(owner, np.arange(threads + 1)).astype(np.int64)
    Job(entries, ends, threads, np.zeros(1, np.int64)).run(threads)
    if bad.any():
        raise BadInput("expected row starts and columns that nobody writes to during a call")
