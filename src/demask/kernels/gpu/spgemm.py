"""Sparse times sparse: every nonzero of a is multiplied with a row of b. The products are sorted by
their position in the output, and those with the same position are summed (expand, sort, compress).

    Bell, Dalton, Olson: Exposing Fine-Grained Parallelism in Algebraic Multigrid Methods, SIAM 2012
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def expand(
    offsets,
    entries,
    halvings,
    rows,
    begins,
    values,
    other_col,
    other_values,
    keys,
    products,
    total,
    n,
    COUNT: tl.constexpr,
):
    """Write key row * n + column (int64) and value (float32) of each product.

    offsets [entries] int64: number of products of the nonzeros of a before this one; begins: start
    of the row of b that it is multiplied with. Each program computes COUNT consecutive products and
    finds their nonzeros by bisection, so that long rows of b do not delay a program.
    """
    number = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    valid = number < total
    low = tl.zeros([COUNT], tl.int32)
    high = tl.full([COUNT], 0, tl.int32) + entries
    step = 0
    while step < halvings:  # the last nonzero with offset <= number
        middle = (low + high) // 2
        offset = tl.load(offsets + middle, mask=valid & (middle < entries), other=0)
        not_after = offset <= number
        is_open = high - low > 1
        low = tl.where(is_open & not_after, middle, low)
        high = tl.where(is_open & (offset > number), middle, high)
        step += 1
    position = tl.load(begins + low, mask=valid, other=0)
    position += number - tl.load(offsets + low, mask=valid, other=0)
    row = tl.load(rows + low, mask=valid, other=0).to(tl.int64)
    column = tl.load(other_col + position, mask=valid, other=0).to(tl.int64)
    left = tl.load(values + low, mask=valid, other=0.0).to(tl.float32)
    right = tl.load(other_values + position, mask=valid, other=0.0).to(tl.float32)
    tl.store(keys + number, row * n + column, mask=valid)
    tl.store(products + number, left * right, mask=valid)


@triton.jit
def compress(products, order, begins, out, count, COUNT: tl.constexpr):
    """out[e] = sum of products[order[p]] for p from begins[e] to begins[e + 1], in this order.

    Program t: entries from t * COUNT.
    """
    entry = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    valid = entry < count
    begin = tl.load(begins + entry, mask=valid, other=0)
    end = tl.load(begins + entry + 1, mask=valid, other=0)
    longest = tl.max(end - begin, axis=0)
    total = tl.zeros([COUNT], tl.float32)
    step = 0
    while step < longest:  # pyright: ignore[reportOperatorIssue]
        unfinished = valid & (begin + step < end)
        position = tl.load(order + begin + step, mask=unfinished, other=0)
        total += tl.load(products + position, mask=unfinished, other=0.0)
        step += 1
    tl.store(out + entry, total.to(out.dtype.element_ty), mask=valid)
