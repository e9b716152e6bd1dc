"""SDDMM by 1-D tiles of nonzeros: each task computes a few entries of one row of the output."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sddmm_rows(begins, ends, rows, col, a, a_row, b, b_row, out, k, ENTRIES: tl.constexpr, STEP: tl.constexpr):
    """out[p] = a[row] · b[col[p]] for the entries p of a task: at most ENTRIES of one row.

    begins, ends, rows [tasks] int32. a [m, k], b [n, k]: rows are contiguous. Each thread has its
    own sums, which are added across threads once, after the loop. Program t: task t.
    """
    task = tl.program_id(0)
    begin, end = tl.load(begins + task), tl.load(ends + task)
    row = tl.load(rows + task).to(tl.int64)
    position = begin + tl.arange(0, ENTRIES)
    valid = position < end
    column = tl.load(col + position, mask=valid, other=0).to(tl.int64)
    lane = tl.arange(0, STEP)
    total = tl.zeros([ENTRIES, STEP], tl.float32)
    step = 0
    while step < k:
        along = step + lane
        inside = along < k
        left = tl.load(a + row * a_row + along, mask=inside, other=0.0).to(tl.float32)
        from_b = b + column[:, None] * b_row + along[None, :]
        right = tl.load(from_b, mask=valid[:, None] & inside[None, :], other=0.0)
        total += left[None, :] * right.to(tl.float32)
        step += STEP
    tl.store(out + position, tl.sum(total, axis=1).to(out.dtype.element_ty), mask=valid)
