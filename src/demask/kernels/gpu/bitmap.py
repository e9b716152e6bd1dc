"""SpMM and SDDMM with a sparse matrix stored as a bitmap and its CSR values, and the dense matrix.

Tile t is 64 columns wide. For each row it has two words of bits, and the position of its first
value in CSR:

    masks [tiles, rows, 2] int32        bit j of word h: is there an entry at column 64 t + 32 h + j
    starts [tiles, rows] int32          position of the first of them among the values of CSR

The values stay in CSR order: trained values are not copied, and no column index is stored twice. At
density d of 16-bit values that is 2 d + 3/16 bytes per element; the dense matrix has 2.
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
    """Number of set bits of a uint32; LLVM compiles it to one POPC."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return (word * 0x01010101) >> 24


@triton.jit
def positions(masks, starts, tile, rows, high, HEIGHT: tl.constexpr):
    """(position of the value of each element, whether it exists), both [HEIGHT, 64].

    high: number of rows, padded.
    """
    row = tile.to(tl.int64) * high + rows
    halves = tl.arange(0, 2)
    word = tl.load(masks + row[:, None] * 2 + halves[None, :]).to(tl.uint32, bitcast=True)
    low = tl.load(masks + row * 2).to(tl.uint32, bitcast=True)
    start = tl.load(starts + row)
    before = tl.where(halves[None, :] == 1, ones(low).to(tl.int32)[:, None], 0)
    first = start[:, None] + before
    bit = tl.arange(0, 32).to(tl.uint32)[None, None, :]
    exists = (word[:, :, None] >> bit) & 1
    below = word[:, :, None] & ((tl.full([1, 1, 1], 1, tl.uint32) << bit) - 1)
    position = first[:, :, None] + ones(below).to(tl.int32)
    return tl.reshape(position, [HEIGHT, 64]), tl.reshape(exists, [HEIGHT, 64]) != 0


@triton.jit
def spread(masks, starts, values, tile, rows, high, HEIGHT: tl.constexpr):
    """Tile `tile` of the dense matrix, [HEIGHT, 64]."""
    position, exists = positions(masks, starts, tile, rows, high, HEIGHT)
    return tl.load(values + position, mask=exists, other=0.0)


@triton.jit
def multiplied(w, x, total, TRANSPOSED: tl.constexpr, WIDE: tl.constexpr):
    """total + w @ x, or w.T @ x. WIDE: in float32, as the interpreter has no bfloat16 products."""
    if TRANSPOSED:
        w = tl.trans(w)
    if WIDE:
        w, x = w.to(tl.float32), x.to(tl.float32)
    return tl.dot(w, x, total, input_precision="tf32x3")


@triton.jit
def spmm_bitmap(
    masks, starts, values, high, tiles, x, x_row, x_column, out, out_row, out_column, partial, bias,
    first, second, k, m, n, share,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TRANSPOSED: tl.constexpr, SPLIT: tl.constexpr,
    BIASED: tl.constexpr, ACT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """out [m, n] = act(w @ x + bias) with x [k, n]; TRANSPOSED: w.T @ x, with the same bitmap.

    Program (r, t, s): rows from r * HEIGHT (TRANSPOSED: the 64 columns of tile r), columns from t *
    WIDTH, steps s * share to (s + 1) * share of the sum: tiles of w (TRANSPOSED: HEIGHT rows of
    it). SPLIT: sums are written to partial [s, m, n] in float32, without bias and activation. The
    next tile is loaded before the product with the current one.
    """
    block, part = tl.program_id(0), tl.program_id(2)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = columns < n
    length: tl.constexpr = HEIGHT if TRANSPOSED else 64  # pyright: ignore[reportAssignmentType]
    wide: tl.constexpr = 64 if TRANSPOSED else HEIGHT  # pyright: ignore[reportAssignmentType]
    steps = high // HEIGHT if TRANSPOSED else tiles
    step = part * share
    stop = tl.minimum(step + share, steps)
    total = tl.zeros([wide, WIDTH], tl.float32)
    lane = tl.arange(0, length)
    across = columns.to(tl.int64)[None, :] * x_column
    rows = tl.arange(0, HEIGHT)
    if TRANSPOSED:
        current = spread(masks, starts, values, block, step * HEIGHT + rows, high, HEIGHT)
    else:
        current = spread(masks, starts, values, step, block * HEIGHT + rows, high, HEIGHT)
    while step < stop:
        along = step * length + lane
        valid = (along < k)[:, None] & inside[None, :]
        part_x = tl.load(x + along.to(tl.int64)[:, None] * x_row + across, mask=valid, other=0.0)
        ahead = tl.minimum(step + 1, stop - 1)
        if TRANSPOSED:
            following = spread(masks, starts, values, block, ahead * HEIGHT + rows, high, HEIGHT)
        else:
            following = spread(masks, starts, values, ahead, block * HEIGHT + rows, high, HEIGHT)
        total = multiplied(current, part_x, total, TRANSPOSED, WIDE)
        current = following
        step += 1
    row = block * wide + tl.arange(0, wide)
    inside_out = (row < m)[:, None] & inside[None, :]
    if SPLIT:
        slot = (part * m + row).to(tl.int64)[:, None] * n + columns[None, :]
        tl.store(partial + slot, total, mask=inside_out)
    else:
        if BIASED:
            total += tl.load(bias + row, mask=row < m, other=0.0).to(tl.float32)[:, None]
        total = activated(total, ACT, first, second).to(out.dtype.element_ty)
        offset = row.to(tl.int64)[:, None] * out_row + columns.to(tl.int64)[None, :] * out_column
        tl.store(out + offset, total, mask=inside_out)


@triton.jit
def decompress(masks, starts, values, high, out, m, k, HEIGHT: tl.constexpr):
    """out [m, k] contiguous: the dense matrix. Program (r, t): rows from r * HEIGHT of tile t."""
    rows = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    tile = tl.program_id(1)
    dense = spread(masks, starts, values, tile, rows, high, HEIGHT)
    columns = tile * 64 + tl.arange(0, 64)
    inside = (rows < m)[:, None] & (columns < k)[None, :]
    tl.store(out + rows.to(tl.int64)[:, None] * k + columns[None, :], dense, mask=inside)


@triton.jit
def sddmm_bitmap(
    masks,
    starts,
    high,
    a,
    a_row,
    a_step,
    b,
    b_row,
    b_step,
    out,
    m,
    n,
    k,
    HEIGHT: tl.constexpr,
    STEP: tl.constexpr,
    WIDE: tl.constexpr,
):
    """out[position of (i, j)] = a[i] · b[j] where the bitmap has an entry, in the order of CSR.

    The whole tile is computed, but only its entries are written. a [m, k] and b [n, k] have any
    strides.
    Program (t, r): rows from r * HEIGHT of tile t.
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
        valid = along < k
        left = tl.load(
            from_a + along.to(tl.int64)[None, :] * a_step, mask=(rows < m)[:, None] & valid[None, :], other=0.0
        )
        right = tl.load(
            from_b + along.to(tl.int64)[:, None] * b_step, mask=valid[:, None] & (columns < n)[None, :], other=0.0
        )
        total = multiplied(left, right, total, TRANSPOSED=False, WIDE=WIDE)  # pyright: ignore
        step += STEP
    position, exists = positions(masks, starts, tile, rows, high, HEIGHT)
    tl.store(out + position, total.to(out.dtype.element_ty), mask=exists)
