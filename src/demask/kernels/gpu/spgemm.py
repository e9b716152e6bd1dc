"""Sparse times sparse: every nonzero of a meets a row of b; the products are sorted by their place
in the output and those of one place are summed (expand, sort, compress).

    Bell, Dalton, Olson: Exposing Fine-Grained Parallelism in Algebraic Multigrid Methods, SIAM 2012
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def expand(
    offsets, entries, halvings, rows, begins, values, other_col, other_values, keys, products,
    total, n,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Of each product: its place row · n + column (int64), and its value in float32.

    offsets [entries] int64: how many products the nonzeros of a before this one have; begins: where
    the row of b that it meets begins. Products are dealt by their number, COUNT to a program, and
    find their nonzero by halving, so that long rows of b keep no program waiting.
    """
    number = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    good = number < total
    low = tl.zeros([COUNT], tl.int32)
    high = tl.full([COUNT], 0, tl.int32) + entries
    turn = 0
    while turn < halvings:  # the last nonzero whose offset is not beyond the number
        middle = (low + high) // 2
        found = tl.load(offsets + middle, mask=good & (middle < entries), other=0)
        behind = found <= number
        open_ = high - low > 1
        low = tl.where(open_ & behind, middle, low)
        high = tl.where(open_ & (found > number), middle, high)
        turn += 1
    met = tl.load(begins + low, mask=good, other=0)
    met += number - tl.load(offsets + low, mask=good, other=0)
    row = tl.load(rows + low, mask=good, other=0).to(tl.int64)
    column = tl.load(other_col + met, mask=good, other=0).to(tl.int64)
    left = tl.load(values + low, mask=good, other=0.0).to(tl.float32)
    right = tl.load(other_values + met, mask=good, other=0.0).to(tl.float32)
    tl.store(keys + number, row * n + column, mask=good)
    tl.store(products + number, left * right, mask=good)


@triton.jit
def compress(products, order, begins, out, count, COUNT: tl.constexpr):
    """out[e] = sum of products[order[p]], p from begins[e] to begins[e + 1], in this order.
    Program t: entries t · COUNT and on."""
    entry = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    good = entry < count
    begin = tl.load(begins + entry, mask=good, other=0)
    end = tl.load(begins + entry + 1, mask=good, other=0)
    longest = tl.max(end - begin, axis=0)
    total = tl.zeros([COUNT], tl.float32)
    step = 0
    while step < longest:  # pyright: ignore[reportOperatorIssue]
        more = good & (begin + step < end)
        at = tl.load(order + begin + step, mask=more, other=0)
        total += tl.load(products + at, mask=more, other=0.0)
        step += 1
    tl.store(out + entry, total.to(out.dtype.element_ty), mask=good)
