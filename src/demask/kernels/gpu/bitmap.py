"""A sparse matrix as a bitmap beside its values, and what reads it: SpMM by dense tiles, SDDMM by
dense tiles, and the dense matrix itself.

Tile t is 64 columns wide. Of each row it has two words of bits, and where its values begin in CSR:

    masks [tiles, rows, 2] int32        bit j of word h: is there an entry at column 64 t + 32 h + j
    starts [tiles, rows] int32          the first of them among the values of CSR

The values stay where CSR has them: what is trained is not copied, and no column is stored twice. At
density d of 16-bit values that is 2 d + 3/16 bytes an element, where the dense matrix has 2.
Load as sparse, compute as dense: Xia et al., Flash-LLM, VLDB 2024 (arXiv 2309.10285); bits in place
of columns: Fan et al., SpInfer, EuroSys 2025.
"""

from __future__ import annotations

import triton
import triton.language as tl

from demask.kernels.gpu.activations import activated

TILE = tl.constexpr(64)  # columns
LONG = tl.constexpr(128)  # rows are padded to a multiple of this


@triton.jit
def ones(word):
    """How many bits of a uint32 are set; LLVM makes one POPC of it."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return (word * 0x01010101) >> 24


@triton.jit
def places(masks, starts, tile, rows, high, HEIGHT: tl.constexpr):
    """(where the value of each element is, is there one), [HEIGHT, 64]. high: rows, padded."""
    at = tile.to(tl.int64) * high + rows
    halves = tl.arange(0, 2)
    word = tl.load(masks + at[:, None] * 2 + halves[None, :]).to(tl.uint32, bitcast=True)
    low = tl.load(masks + at * 2).to(tl.uint32, bitcast=True)
    start = tl.load(starts + at)
    before = tl.where(halves[None, :] == 1, ones(low).to(tl.int32)[:, None], 0)
    begin = start[:, None] + before
    bit = tl.arange(0, 32).to(tl.uint32)[None, None, :]
    there = (word[:, :, None] >> bit) & 1
    below = word[:, :, None] & ((tl.full([1, 1, 1], 1, tl.uint32) << bit) - 1)
    place = begin[:, :, None] + ones(below).to(tl.int32)
    return tl.reshape(place, [HEIGHT, 64]), tl.reshape(there, [HEIGHT, 64]) != 0


@triton.jit
def spread(masks, starts, values, tile, rows, high, HEIGHT: tl.constexpr):
    """A dense tile [HEIGHT, 64]."""
    place, there = places(masks, starts, tile, rows, high, HEIGHT)
    return tl.load(values + place, mask=there, other=0.0)


@triton.jit
def multiplied(w, x, total, TURNED: tl.constexpr, WIDE: tl.constexpr):
    """total + w @ x, or w.T @ x. WIDE: in float32, for the interpreter has no bfloat16 products."""
    if TURNED:
        w = tl.trans(w)
    if WIDE:
        w, x = w.to(tl.float32), x.to(tl.float32)
    return tl.dot(w, x, total, input_precision="tf32x3")


@triton.jit
def spmm_bitmap(
    masks, starts, values, high, tiles, x, x_row, x_column, out, out_row, out_column, partial, bias,
    first, second, k, m, n, share,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TURNED: tl.constexpr, SPLIT: tl.constexpr,
    BIASED: tl.constexpr, ACT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """out [m, n] = act(w @ x + bias) with x [k, n]; TURNED: w.T @ x, by the same bitmap.

    Program (r, t, s): rows r · HEIGHT and on (TURNED: the 64 columns of tile r), columns t · WIDTH
    and on, steps s · share to (s + 1) · share of the sum: tiles of w (TURNED: HEIGHT rows of it).
    SPLIT: sums go to partial [s, m, n] in float32, without bias and activation. The next tile is
    asked for before the product with this one.
    """
    block, part = tl.program_id(0), tl.program_id(2)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = columns < n
    length: tl.constexpr = HEIGHT if TURNED else 64  # pyright: ignore[reportAssignmentType]
    wide: tl.constexpr = 64 if TURNED else HEIGHT  # pyright: ignore[reportAssignmentType]
    steps = high // HEIGHT if TURNED else tiles
    step = part * share
    stop = tl.minimum(step + share, steps)
    total = tl.zeros([wide, WIDTH], tl.float32)
    lane = tl.arange(0, length)
    across = columns.to(tl.int64)[None, :] * x_column
    rows = tl.arange(0, HEIGHT)
    if TURNED:
        now = spread(masks, starts, values, block, step * HEIGHT + rows, high, HEIGHT)
    else:
        now = spread(masks, starts, values, step, block * HEIGHT + rows, high, HEIGHT)
    while step < stop:
        along = step * length + lane
        more = (along < k)[:, None] & inside[None, :]
        part_x = tl.load(x + along.to(tl.int64)[:, None] * x_row + across, mask=more, other=0.0)
        ahead = tl.minimum(step + 1, stop - 1)
        if TURNED:
            later = spread(masks, starts, values, block, ahead * HEIGHT + rows, high, HEIGHT)
        else:
            later = spread(masks, starts, values, ahead, block * HEIGHT + rows, high, HEIGHT)
        total = multiplied(now, part_x, total, TURNED, WIDE)
        now = later
        step += 1
    row = block * wide + tl.arange(0, wide)
    good = (row < m)[:, None] & inside[None, :]
    if SPLIT:
        slot = (part * m + row).to(tl.int64)[:, None] * n + columns[None, :]
        tl.store(partial + slot, total, mask=good)
    else:
        if BIASED:
            total += tl.load(bias + row, mask=row < m, other=0.0).to(tl.float32)[:, None]
        total = activated(total, ACT, first, second).to(out.dtype.element_ty)
        place = row.to(tl.int64)[:, None] * out_row + columns.to(tl.int64)[None, :] * out_column
        tl.store(out + place, total, mask=good)


@triton.jit
def decompress(
    masks, starts, values, high, out, m, k, HEIGHT: tl.constexpr,
):  # fmt: skip
    """out [m, k] contiguous: the dense matrix. Program (r, t): rows r · HEIGHT and on of tile t."""
    rows = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    tile = tl.program_id(1)
    found = spread(masks, starts, values, tile, rows, high, HEIGHT)
    columns = tile * 64 + tl.arange(0, 64)
    good = (rows < m)[:, None] & (columns < k)[None, :]
    tl.store(out + rows.to(tl.int64)[:, None] * k + columns[None, :], found, mask=good)


@triton.jit
def sddmm_bitmap(
    masks, starts, high, a, a_row, a_step, b, b_row, b_step, out, m, n, k,
    HEIGHT: tl.constexpr, STEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """out[place of (i, j)] = a[i] · b[j] where the bitmap has an entry: the tile is computed whole,
    only its entries are written, in the order of CSR.

    a [m, k] and b [n, k], any strides. Program (t, r): rows r · HEIGHT and on of tile t.
    """
    tile = tl.program_id(0)
    rows = tl.program_id(1) * HEIGHT + tl.arange(0, HEIGHT)
    columns = tile * 64 + tl.arange(0, 64)
    total = tl.zeros([HEIGHT, 64], tl.float32)
    from_a = a + rows.to(tl.int64)[:, None] * a_row
    from_b = b + columns.to(tl.int64)[None, :] * b_row
    step = 0
    while step < k:
        along = step + tl.arange(0, STEP)
        more = along < k
        left = tl.load(from_a + along.to(tl.int64)[None, :] * a_step,
                       mask=(rows < m)[:, None] & more[None, :], other=0.0)  # fmt: skip
        right = tl.load(from_b + along.to(tl.int64)[:, None] * b_step,
                        mask=more[:, None] & (columns < n)[None, :], other=0.0)  # fmt: skip
        total = multiplied(left, right, total, TURNED=False, WIDE=WIDE)  # pyright: ignore
        step += STEP
    place, there = places(masks, starts, tile, rows, high, HEIGHT)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=there)
