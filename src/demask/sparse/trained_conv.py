"""A convolution whose nonzeros are trained: one call of kernels per image (`planes`).

Forward and the gradient of x are sparse products of planes, that of values SDDMM of slopes and x.
Padding, strides and gaps are copies around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.kernels import csr, sddmm
from demask.kernels.isa import host
from demask.kernels.jit import CODE
from demask.kernels.team import ENTRY, Job
from demask.sparse.matrix import Rows
from demask.sparse.multiply import LINE, WORK
from demask.sparse.op import Recomputed, parsed
from demask.sparse.planes import Geometry, Offsets, offsets_of
from demask.sparse.program import Conv


class Trained(torch.autograd.Function):
    """The program of one convolution without activation: (text, 1, x, *weights). Gradients of
    gradients are those of ATen ops."""

    @staticmethod
    def forward(ctx: Any, text: str, count: int, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.text, ctx.count = text, count
        ctx.save_for_backward(*given)
        step, m, g, where = _read(text, given)
        x, bias = g.laid(given[0]), None if step.bias is None else given[1 + step.bias[0]]
        batch, (high, wide) = x.shape[0], g.out
        # one pixel: the kernel for a single column writes rows side by side
        made = torch.empty(batch, g.rows, high * g.wide if g.length > 1 else 1)
        table = Rows(m.crow, where.there, m.values, None, (g.rows, x[0].numel()))
        _multiply(table, where.rows, x, made, g.length, bias)
        y = made.view(batch, g.rows, high, -1)[..., :wide].contiguous()
        return (y if given[0].ndim == 4 else y.squeeze(2),)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return Recomputed.backward(ctx, *slopes)
        given, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        step, m, g, where = _read(ctx.text, given)
        slope = slopes[0].unsqueeze(2) if slopes[0].ndim == 3 else slopes[0]
        found: list[Tensor | None] = [None] * len(given)
        spread = g.spread(slope)
        if needed[0]:
            found[0] = _of_x(m, g, where, spread).view(given[0].shape)
        place = 1 + step.weight.values[0]
        if needed[place]:
            found[place] = _of_values(m, g, where, spread, g.laid(given[0]))
        if step.bias is not None and needed[1 + step.bias[0]]:
            found[1 + step.bias[0]] = slope.sum((0, 2, 3))
        return (None, None, *found)


def _read(text: str, given: Sequence[Tensor]) -> tuple[Conv, Rows, Geometry, Offsets]:
    """The layer of a program; its matrix; where nonzeros read."""
    step = parsed(text).steps[0]
    assert isinstance(step, Conv)
    spans = step.weight.crow, step.weight.col, step.weight.values
    crow, col, values = (given[1 + span[0]].detach().contiguous() for span in spans)
    g = Geometry.of(step, tuple(given[0].shape))
    columns = g.channels // g.groups * g.kernel[0] * g.kernel[1]
    m = Rows(crow, col, values, None, (g.rows, columns))
    return step, m, g, offsets_of(m, g)


def _of_x(m: Rows, g: Geometry, where: Offsets, spread: Tensor) -> Tensor:
    """The slopes of images."""
    made = torch.empty(spread.shape[0], g.planes, g.high, g.wide)
    values = m.values.index_select(0, where.order)
    table = Rows(where.crow, where.back, values, None, (g.planes, spread[0].numel()))
    _multiply(table, where.planes, spread, made, g.plane, None)
    return g.back(made).contiguous()


def _of_values(m: Rows, g: Geometry, where: Offsets, spread: Tensor, x: Tensor) -> Tensor:
    """The slopes of nonzeros: every thread adds up those of its images."""
    batch, isa, count = x.shape[0], host(), m.col.numel()
    threads = _threads(batch, count * g.length)
    sums = torch.zeros(threads, count)
    table = Rows(m.crow, where.there, m.values, None, (g.rows, x[0].numel()))
    calls = _calls(sddmm.CALL, batch, table, where.rows)
    image = np.arange(batch)
    calls["begin"], calls["end"] = 0, g.rows
    calls["a"] = spread.data_ptr() + 4 * (g.first + image * spread[0].numel())
    calls["a_pitch"] = 4 * g.slopes
    calls["x"], calls["x_pitch"] = x.data_ptr() + 4 * image * x[0].numel(), 4
    calls["vectors"], calls["left"] = g.length // isa.lanes, g.length % isa.lanes
    calls["out"] = sums.data_ptr() + 4 * count * _owners(batch, threads)
    kernel = sddmm.Sampled(g.length % isa.lanes > 0, more=True)
    _run(calls, np.full(batch, CODE.addresses([kernel])[kernel]), batch, threads)
    return sums.sum(0)


def _multiply(
    m: Rows, order: Tensor, x: Tensor, made: Tensor, length: int, bias: Tensor | None
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


def _calls(kind: np.dtype[Any], count: int, m: Rows, order: Tensor) -> np.ndarray:
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
