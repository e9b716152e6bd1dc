"""GPU kernels in Triton, imported when a tensor on a GPU is multiplied for the first time;
`sparse.products.gpu_products` launches them.

They need Triton 3.6 or newer and also run in its interpreter: loops with bounds known at run time
are `while` loops, and functions that the interpreter lacks are not called.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from demask.kernels.llvm import activations as formulas

# Activations, with the formulas of `kernels.llvm.activations`, in float32.

INVERSE_LN2 = tl.constexpr(1 / math.log(2))
LN2_HIGH = tl.constexpr(formulas.LN2_HIGH)
LN2_LOW = tl.constexpr(math.log(2) - formulas.LN2_HIGH)
DOUBLE_ROOT = tl.constexpr(2 * math.sqrt(2 / math.pi))
TAIL = tl.constexpr(formulas.TAIL)
TAIL_COEFFICIENTS = tl.constexpr(formulas.TAIL_COEFFICIENTS)
#: the activations that `activated` computes
ACTIVATIONS = (
    "relu",
    "leaky_relu",
    "clamp",
    "sigmoid",
    "silu",
    "mish",
    "tanh",
    "hardsigmoid",
    "hardswish",
    "gelu",
    "gelu_tanh",
)


@triton.jit
def activated(x, ACT: tl.constexpr, first, second):
    """act(x) in float32. ACT: a name in `ops.activations`; first, second: parameters. Keeps NaN."""
    if ACT == "relu":
        x = tl.where(x < 0, 0.0, x)
    elif ACT == "leaky_relu":
        x = tl.where(x > 0, x, first * x)
    elif ACT == "clamp":
        x = tl.where(x < first, first, tl.where(x > second, second, x))
    elif ACT == "sigmoid":
        x = logistic(x, 1.0)
    elif ACT == "silu":
        x = logistic(x, x)
    elif ACT == "mish":
        x = mish(x)
    elif ACT == "tanh":
        x = tanh(x)
    elif ACT == "hardsigmoid":
        x = gate(x)
    elif ACT == "hardswish":
        x = x * gate(x)
    elif ACT == "gelu":
        x = gelu(x)
    elif ACT == "gelu_tanh":
        x = logistic(x * (DOUBLE_ROOT + (0.044715 * DOUBLE_ROOT) * (x * x)), x)
    else:
        tl.static_assert(ACT == "", "no such activation")
    return x


@triton.jit
def logistic(x, factor):
    """factor / (1 + e**-x), as factor * z / (1 + z) with z = e**x where x is negative."""
    z = small_exp(-tl.abs(x))
    return tl.where(x < 0, factor * z, factor) / (1.0 + z)


@triton.jit
def mish(x):
    """x tanh(ln(1 + e**x)) == x p / (p + q), as `kernels.llvm.activations._mish`."""
    z = small_exp(-tl.abs(x))
    p = tl.where(x < 0, z * z + 2.0 * z, 1.0 + 2.0 * z)
    return x * p / (p + tl.where(x < 0, 2.0, 2.0 * z * z))


@triton.jit
def tanh(x):
    """m / (m + 2) with m = e**2|x| - 1, and the sign of x: nothing cancels near 0."""
    magnitude = tl.abs(x)
    magnitude = tl.where(magnitude > 10, 10.0, magnitude)
    power, power_minus_1 = reduced(magnitude + magnitude, tl.constexpr(0))
    m = power * power_minus_1 + (power - 1.0)
    m = m / (m + 2.0)
    return tl.where(x == 0, x, tl.where(x < 0, -m, m))


@triton.jit
def gelu(x):
    """x * normal_cdf(x), with the tail of the CDF as e**(-x * x / 2) * polynomial."""
    magnitude = tl.abs(x)
    magnitude = tl.where(magnitude > 16, 16.0, magnitude)
    half = 0.5 * magnitude
    square = magnitude * half
    power = small_exp(-square)
    power -= power * tl.fma(magnitude, half, -square)
    t = 1.0 / (1.0 + TAIL * magnitude)
    tail = t * TAIL_COEFFICIENTS[9] + TAIL_COEFFICIENTS[8]
    for k in tl.static_range(7, -1, -1):  # pyright: ignore[reportGeneralTypeIssues]
        tail = t * tail + TAIL_COEFFICIENTS[k]
    tail *= t * power
    return x * tl.where(x < 0, tail, 1.0 - tail)


@triton.jit
def small_exp(x):
    """e**x of x <= 0; 0 below -104."""
    power, power_minus_1 = reduced(tl.where(x < -104, -104.0, x), tl.constexpr(64))
    return (1.0 + power_minus_1) * power * 5.421010862427522e-20  # 2**-64


@triton.jit
def reduced(x, ROOM: tl.constexpr):
    """2**(n + ROOM) and e**r - 1 of x = n ln 2 + r, as `kernels.llvm.activations._reduced`."""
    shifted = x * INVERSE_LN2 + (12582912.0 + 127 + ROOM)
    n = shifted - (12582912.0 + 127 + ROOM)
    r = x - n * LN2_HIGH
    r = r - n * LN2_LOW
    y = r * (1 / 5040) + 1 / 720
    y = y * r + 1 / 120
    y = y * r + 1 / 24
    y = y * r + 1 / 6
    y = y * r + 1 / 2
    power = (shifted.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)
    return power, y * r * r + r


@triton.jit
def gate(x):
    """(x + 3) / 6, clamped to 0 and 1."""
    x = (x + 3.0) / 6.0
    return tl.where(x < 0, 0.0, tl.where(x > 1, 1.0, x))


# The end of a sum: the total of the partial sums of split rows, bias and activation.


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


# Sparse times dense by rows: the tiles of the output are one row high (Sputnik).
#
#     Gale, Zaharia, Young, Elsen: Sparse GPU Kernels for Deep Learning, SC20 (arXiv 2006.10901)
#
# Tasks are rows, or parts of long ones, sorted by length. A program computes ROWS of them together,
# so that its threads load full vectors even with few columns. LANES lanes share the nonzeros of a
# row, a vector each at a time; their sums are added once, after the loop: 1 for many columns of x,
# whose rows fill the threads, and up to a warp for few. The start of a task is moved back to an
# aligned position, from which columns and values are loaded as vectors; elements of the previous row
# are masked.


@triton.jit
def four(t, COUNT: tl.constexpr):
    """The four columns of t [COUNT, 4], each [COUNT]."""
    even, odd = tl.split(tl.reshape(t, [COUNT, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def eight(t, COUNT: tl.constexpr):
    """The eight columns of t [COUNT, 8], each [COUNT]."""
    even, odd = tl.split(tl.reshape(t, [COUNT, 4, 2]))
    t0, t2, t4, t6 = four(even, COUNT)
    t1, t3, t5, t7 = four(odd, COUNT)
    return t0, t1, t2, t3, t4, t5, t6, t7


@triton.jit
def spmm_rows(
    begins, ends, targets, tasks, col, values, x, x_row, out, out_row, out_column, partial, bias,
    first, second, n,
    ROWS: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr,
    BIASED: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """out[target] = act(bias[target] + sum of values * x[col] over the nonzeros of a task).

    begins, ends, targets [tasks] int32: targets below zero (SPLIT) are the slots ~target of partial
    [slots, n] float32, written without bias and activation. col uint16 or int32; values and x [k, n]
    of one dtype, rows of x contiguous, and with several LANES padded: x [k, WIDTH]. col and values
    are aligned to 32 bytes and readable up to the next multiple of 32. Program (g, t): tasks from
    g * ROWS, columns from t * WIDTH.
    """
    count: tl.constexpr = ROWS * LANES  # pyright: ignore[reportAssignmentType]
    # 16 bytes of 16-bit columns; for one lane fewer, as each of its threads loads all of them
    vector: tl.constexpr = 4 if LANES == 1 else 8  # pyright: ignore[reportAssignmentType]
    pitch = x_row if LANES == 1 else WIDTH
    strand = tl.arange(0, count)
    task = tl.program_id(0) * ROWS + strand // LANES
    begin = tl.load(begins + task, mask=task < tasks, other=0)
    end = tl.load(ends + task, mask=task < tasks, other=0)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = columns < n
    total = tl.zeros([count, WIDTH], tl.float32)
    aligned = begin // vector * vector
    steps = tl.max(end - aligned, axis=0)
    lane = aligned + strand % LANES * vector
    step = 0
    while step < steps:  # pyright: ignore[reportOperatorIssue]
        position = lane + step
        # vectors of a finished task are not loaded: the mask is the same for a full vector
        unfinished = tl.broadcast_to((position < end)[:, None], [count, vector])
        elements = position[:, None] + tl.arange(0, vector)[None, :]
        column = tl.load(col + elements, mask=unfinished, other=0)
        value = tl.load(values + elements, mask=unfinished, other=0.0)
        c, v = (four(column, count), four(value, count)) if LANES == 1 else (eight(column, count), eight(value, count))
        for j in tl.static_range(vector):  # pyright: ignore[reportGeneralTypeIssues, reportArgumentType]
            there = (position + j >= begin) & (position + j < end)
            read = there[:, None] & inside[None, :] if LANES == 1 else there[:, None]
            row = x + c[j].to(tl.int64)[:, None] * pitch + columns[None, :]
            row = tl.load(row, mask=read, other=0.0).to(tl.float32)
            total += tl.where(there, v[j].to(tl.float32), 0.0)[:, None] * row  # other rows may have infinite values
        step += LANES * vector
    if LANES > 1:
        total = tl.sum(tl.reshape(total, [ROWS, LANES, WIDTH]), axis=1)
    task = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = task < tasks
    target = tl.load(targets + task, mask=valid, other=0)
    is_row = valid & (target >= 0)
    if SPLIT:
        slot = partial + (-1 - target).to(tl.int64)[:, None] * n + columns[None, :]
        tl.store(slot, total, mask=(valid & (target < 0))[:, None] & inside[None, :])
    if BIASED:
        total += tl.load(bias + target, mask=is_row, other=0.0).to(tl.float32)[:, None]
    total = activated(total, ACT, first, second).to(out.dtype.element_ty)
    address = out + target.to(tl.int64)[:, None] * out_row
    address += columns.to(tl.int64)[None, :] * out_column
    tl.store(address, total, mask=is_row[:, None] & inside[None, :])


# SpMM and SDDMM with a sparse matrix stored as a bitmap and its CSR values, and the dense matrix.
#
# Tile t is 64 columns wide. For each row it has a word of bits, and the position of its first value
# in CSR:
#
#     masks [tiles, rows] int64           bit j: is there an entry at column 64 t + j
#     starts [tiles, rows] int32          position of the first of them among the values of CSR
#
# The values stay in CSR order: trained values are not copied, and no column index is stored twice. At
# density d of 16-bit values that is 2 d + 3/16 bytes per element; the dense matrix has 2.
# Load as sparse, compute as dense: Xia et al., Flash-LLM, VLDB 2024 (arXiv 2309.10285); bits in place
# of columns: Fan et al., SpInfer, EuroSys 2025.
#
# A thread decodes an octet, eight elements of a row: it counts the bits before them once, and from one
# element to the next adds a bit.

TILE = tl.constexpr(64)  # columns
LONG = tl.constexpr(128)  # rows are padded to a multiple of this


@triton.jit
def ones(word):
    """Number of set bits of a uint64; LLVM compiles it to two POPC."""
    word = word - ((word >> 1) & 0x5555555555555555)
    word = (word & 0x3333333333333333) + ((word >> 2) & 0x3333333333333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F0F0F0F0F
    return (word * 0x0101010101010101) >> 56


@triton.jit
def octets(masks, starts, tile, first, high, HEIGHT: tl.constexpr):
    """(position of the first value, bits) of each octet of a tile, [HEIGHT * 8] int32.

    first: row of the tile's first. high: number of rows, padded.
    """
    octet = tl.arange(0, HEIGHT * 8)
    row = tile.to(tl.int64) * high + first + octet // 8
    shift = (octet % 8 * 8).to(tl.uint64)
    word = tl.load(masks + row).to(tl.uint64, bitcast=True)
    below = word & ((tl.full([HEIGHT * 8], 1, tl.uint64) << shift) - 1)
    position = tl.load(starts + row) + ones(below).to(tl.int32)
    return position, (word >> shift).to(tl.int32) & 255


@triton.jit
def taken(values, position, bits, J: tl.constexpr):
    """(element J of each octet, the position of the next)."""
    exists = (bits >> J) & 1
    return tl.load(values + position, mask=exists != 0, other=0.0), position + exists


@triton.jit
def spread(values, position, bits, HEIGHT: tl.constexpr):
    """A tile of the dense matrix, [HEIGHT, 64], from its octets."""
    v0, position = taken(values, position, bits, tl.constexpr(0))
    v1, position = taken(values, position, bits, tl.constexpr(1))
    v2, position = taken(values, position, bits, tl.constexpr(2))
    v3, position = taken(values, position, bits, tl.constexpr(3))
    v4, position = taken(values, position, bits, tl.constexpr(4))
    v5, position = taken(values, position, bits, tl.constexpr(5))
    v6, position = taken(values, position, bits, tl.constexpr(6))
    v7, position = taken(values, position, bits, tl.constexpr(7))
    even = tl.join(tl.join(v0, v4), tl.join(v2, v6))
    odd = tl.join(tl.join(v1, v5), tl.join(v3, v7))
    return tl.reshape(tl.join(even, odd), [HEIGHT, 64])


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
    bits of the next tile are loaded together with the values of the current one.
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
    tile, first_row = (block, step * HEIGHT) if TRANSPOSED else (step, block * HEIGHT)
    position, bits = octets(masks, starts, tile, first_row, high, HEIGHT)
    while step < stop:
        along = step * length + lane
        valid = (along < k)[:, None] & inside[None, :]
        part_x = tl.load(x + along.to(tl.int64)[:, None] * x_row + across, mask=valid, other=0.0)
        w = spread(values, position, bits, HEIGHT)
        step += 1
        following = tl.minimum(step, stop - 1)
        tile, first_row = (block, following * HEIGHT) if TRANSPOSED else (following, block * HEIGHT)
        position, bits = octets(masks, starts, tile, first_row, high, HEIGHT)
        total = multiplied(w, part_x, total, TRANSPOSED, WIDE)
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
    first, tile = tl.program_id(0) * HEIGHT, tl.program_id(1)
    position, bits = octets(masks, starts, tile, first, high, HEIGHT)
    dense = spread(values, position, bits, HEIGHT)
    rows = first + tl.arange(0, HEIGHT)
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

    The full tile is computed, but only its entries are written. a [m, k] and b [n, k] have any
    strides.
    Program (t, r): rows from r * HEIGHT of tile t.
    """
    tile = tl.program_id(0)
    first_row = tl.program_id(1) * HEIGHT
    rows = first_row + tl.arange(0, HEIGHT)
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
    position, bits = octets(masks, starts, tile, first_row, high, HEIGHT)
    elements = eight(tl.reshape(total.to(out.dtype.element_ty), [HEIGHT * 8, 8]), HEIGHT * 8)
    for j in tl.static_range(8):  # pyright: ignore[reportGeneralTypeIssues]
        exists = (bits >> j) & 1
        tl.store(out + position, elements[j], mask=exists != 0)
        position += exists


# SDDMM by 1-D tiles of nonzeros: each task computes a few entries of one row of the output.


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


# Sparse times sparse: every nonzero of a is multiplied with a row of b. The products are sorted by
# their position in the output, and those with the same position are summed (expand, sort, compress).
#
#     Bell, Dalton, Olson: Exposing Fine-Grained Parallelism in Algebraic Multigrid Methods, SIAM 2012


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
