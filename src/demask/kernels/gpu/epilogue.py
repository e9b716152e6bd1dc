"""The end of a sum: the total of the partial sums of split rows, bias and activation."""

from __future__ import annotations

import triton
import triton.language as tl

from demask.kernels.gpu.activations import activated


@triton.jit
def finish(
    partial, rows, firsts, counts, tasks, parts, step, out, out_row, out_column, bias, first,
    second, n,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, LISTED: tl.constexpr, BIASED: tl.constexpr,
    ACT: tl.constexpr,
):  # fmt: skip
    """out[row] = act(bias[row] + sum of its parts), in the order of the parts.

    partial [slots, n] float32: the `counts` parts of a row start at slot `firsts`, `step` slots
    from one to the next. Not LISTED: row r starts at slot r and has `parts` parts. Program (r, t):
    tasks from r * HEIGHT, columns from t * WIDTH.
    """
    task = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    valid = task < tasks
    inside = valid[:, None] & (columns < n)[None, :]
    total = tl.zeros([HEIGHT, WIDTH], tl.float32)
    if LISTED:
        row = tl.load(rows + task, mask=valid, other=0)
        slot = tl.load(firsts + task, mask=valid, other=0)
        count = tl.load(counts + task, mask=valid, other=0)
    else:
        row, slot, count = task, task, task * 0 + parts
    longest = tl.max(count, axis=0)
    k = 0
    while k < longest:  # pyright: ignore[reportOperatorIssue]
        unfinished = inside & (count > k)[:, None]
        offset = (slot + k * step).to(tl.int64)[:, None] * n + columns[None, :]
        total += tl.load(partial + offset, mask=unfinished, other=0.0)
        k += 1
    if BIASED:
        total += tl.load(bias + row, mask=valid, other=0.0).to(tl.float32)[:, None]
    total = activated(total, ACT, first, second)
    out_offset = row.to(tl.int64)[:, None] * out_row + columns.to(tl.int64)[None, :] * out_column
    tl.store(out + out_offset, total.to(out.dtype.element_ty), mask=inside)
