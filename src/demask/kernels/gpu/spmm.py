"""Sparse times dense by rows: the tiles of the output are one row high (Sputnik).

    Gale, Zaharia, Young, Elsen: Sparse GPU Kernels for Deep Learning, SC20 (arXiv 2006.10901)

Tasks are rows, or parts of long ones, sorted by length. A program computes ROWS of them together,
so that its threads load whole vectors even with few columns. The start of a task is moved back to
an aligned position, from which columns and values are loaded as vectors; elements of the previous
row are masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from demask.kernels.gpu.activations import activated

VECTOR = tl.constexpr(4)  # nonzeros per load: 16 bytes of columns


@triton.jit
def four(t, ROWS: tl.constexpr):
    """The four columns of t [ROWS, 4], each [ROWS]."""
    even, odd = tl.split(tl.reshape(t, [ROWS, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def added(total, value, column, there, x, x_row, columns, inside):
    """total + value * x[column] where `there` is set; other elements are not read."""
    address = x + column.to(tl.int64)[:, None] * x_row + columns[None, :]
    row = tl.load(address, mask=there[:, None] & inside[None, :], other=0.0)
    return total + value[:, None] * row.to(tl.float32)


@triton.jit
def spmm_rows(
    begins, ends, targets, tasks, col, values, x, x_row, out, out_row, out_column, partial, bias,
    first, second, n,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr, BIASED: tl.constexpr,
    ACT: tl.constexpr,
):  # fmt: skip
    """out[target] = act(bias[target] + sum of values * x[col] over the nonzeros of a task).

    begins, ends, targets [tasks] int32: targets below zero (SPLIT) are the slots ~target of partial
    [slots, n] float32, written without bias and activation. col int32; values and x [k, n] of one
    dtype, rows of x contiguous; col and values aligned to 16 bytes and readable up to the next
    multiple of 16. Program (g, t): tasks from g * ROWS, columns from t * WIDTH.
    """
    task = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = task < tasks
    begin = tl.load(begins + task, mask=valid, other=0)
    end = tl.load(ends + task, mask=valid, other=0)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = columns < n
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    lane = tl.arange(0, VECTOR)
    aligned = begin // VECTOR * VECTOR
    steps = tl.max(end - aligned, axis=0)
    step = 0
    while step < steps:  # pyright: ignore[reportOperatorIssue]
        # vectors of a finished task are not loaded: the mask is the same for a whole vector
        position = (aligned + step)[:, None] + lane[None, :]
        unfinished = tl.broadcast_to((aligned + step < end)[:, None], [ROWS, VECTOR])
        column = tl.load(col + position, mask=unfinished, other=0)
        value = tl.load(values + position, mask=unfinished, other=0.0).to(tl.float32)
        there = ((position >= begin[:, None]) & (position < end[:, None])).to(tl.int32)
        value = tl.where(there != 0, value, 0.0)  # values of other rows may be infinite
        c0, c1, c2, c3 = four(column, ROWS)
        v0, v1, v2, v3 = four(value, ROWS)
        t0, t1, t2, t3 = four(there, ROWS)
        total = added(total, v0, c0, t0 != 0, x, x_row, columns, inside)
        total = added(total, v1, c1, t1 != 0, x, x_row, columns, inside)
        total = added(total, v2, c2, t2 != 0, x, x_row, columns, inside)
        total = added(total, v3, c3, t3 != 0, x, x_row, columns, inside)
        step += VECTOR
    target = tl.load(targets + task, mask=valid, other=0)
    is_whole = valid & (target >= 0)
    if SPLIT:
        slot = partial + (-1 - target).to(tl.int64)[:, None] * n + columns[None, :]
        tl.store(slot, total, mask=(valid & (target < 0))[:, None] & inside[None, :])
    if BIASED:
        total += tl.load(bias + target, mask=is_whole, other=0.0).to(tl.float32)[:, None]
    total = activated(total, ACT, first, second).to(out.dtype.element_ty)
    address = out + target.to(tl.int64)[:, None] * out_row
    address += columns.to(tl.int64)[None, :] * out_column
    tl.store(address, total, mask=is_whole[:, None] & inside[None, :])
