"""Products with sparse matrices on a GPU, with measured kernel choice (`gpu_autotune`).

    spmm, spmm_transposed, sddmm, densified, sparse_product

A matrix is a `CsrMatrix`, with or without its empty rows, in float32, float16 or bfloat16. Sums are
in float32 in a fixed order, so that repeated calls return the same bits. Dense tiles multiply
zeros, too: where x is infinite, they return NaN as a dense product does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from demask.kernels import gpu
from demask.ops.activations import Act, apply_activation
from demask.sparse.csr_matrix import CsrMatrix, like, row_of
from demask.sparse.products.gpu_autotune import TRANSPOSED, KernelChoice, choose
from demask.sparse.products.gpu_formats import MatrixFormats, formats_of

TYPES = (torch.float32, torch.float16, torch.bfloat16)
FINISH, AREA = 256, 1024  # columns and elements of a program that sums parts
AT_ONCE = 256  # products, or outputs, per program of a sparse product


def takes(m: CsrMatrix, x: Tensor) -> bool:
    """Whether kernels support these dtypes and sizes (positions must fit in 32 bits)."""
    return m.values.dtype in TYPES and x.dtype == m.values.dtype and m.col.numel() < 2**31 - 64


def spmm(
    m: CsrMatrix, x: Tensor, bias: Tensor | None = None, act: Act | None = None, choice: KernelChoice | None = None
) -> Tensor:
    """act(m @ x + bias) [rows, n] with x [columns, n], in the memory order of x.

    Raises BadInput for invalid indices.
    """
    if act is not None and act[0] not in gpu.ACTIVATIONS:  # registered at run time
        return apply_activation(spmm(m, x, bias, None, choice), act)
    formats = formats_of(m)
    out = like(x, m.size[0], x.shape[1])
    if not out.numel():
        return out
    m = m._replace(values=_aligned(m.values))
    return run(m, formats, x, bias, act, choice or select_kernel("spmm", m, x), out)


def select_kernel(task: str, m: CsrMatrix, a: Tensor, b: Tensor | None = None) -> KernelChoice:
    """The kernel for "spmm" (a: x), TRANSPOSED (a: x) or "sddmm", measured at the first call,
    without bias and activation.
    """
    formats = formats_of(m)
    if task == "sddmm":
        out, other = a.new_empty(m.col.shape), a if b is None else b
        return choose(task, m, formats, a, lambda c, m, formats: run_sddmm(m, formats, a, other, c, out))
    if task == TRANSPOSED:
        out = like(a, m.size[1], a.shape[1])
        return choose(task, m, formats, a, lambda c, m, formats: run_transposed(m, formats, a, c, out))
    out = like(a, m.size[0], a.shape[1])
    return choose(task, m, formats, a, lambda c, m, formats: run(m, formats, a, None, None, c, out))


def spmm_transposed(m: CsrMatrix, x: Tensor, choice: KernelChoice | None = None) -> Tensor:
    """The transpose of m times x: [columns, n] with x [rows, n].

    It uses the bitmap of m, or a transposed CSR.
    """
    formats = formats_of(m)
    out = like(x, m.size[1], x.shape[1])
    if not out.numel():
        return out
    m = m._replace(values=_aligned(m.values))
    return run_transposed(m, formats, x, choice or select_kernel(TRANSPOSED, m, x), out)


def sddmm(m: CsrMatrix, a: Tensor, b: Tensor, choice: KernelChoice | None = None) -> Tensor:
    """a[row] · b[column] for every nonzero of m, in the order of CSR; values of m are not read.

    a [rows, k], b [columns, k]: that is a @ b.T sampled at m; for a @ c pass c.T.
    """
    formats = formats_of(m)
    out = torch.empty(m.col.shape, dtype=a.dtype, device=a.device)
    if not out.numel():
        return out
    return run_sddmm(m, formats, a, b, choice or select_kernel("sddmm", m, a, b), out)


def densified(m: CsrMatrix, formats: MatrixFormats | None = None) -> Tensor:
    """The dense matrix [rows, columns]; duplicate entries are summed."""
    bits = (formats or formats_of(m)).bitmap(m)
    rows, columns = m.size
    if bits is None:
        dense = torch.zeros(rows * columns, dtype=torch.float32, device=m.values.device)
        positions = row_of(m) * columns + m.col.long()
        return dense.index_add_(0, positions, m.values.float()).view(rows, columns).to(m.values.dtype)
    dense = torch.empty(rows, columns, dtype=m.values.dtype, device=m.values.device)
    if dense.numel():
        grid = (bits.high // 64, bits.tiles)
        _launch(
            gpu.decompress,
            grid,
            bits.masks,
            bits.starts,
            m.values,
            bits.high,
            dense,
            rows,
            columns,
            HEIGHT=64,
            num_warps=4,
        )
    return dense


def run(
    m: CsrMatrix,
    formats: MatrixFormats,
    x: Tensor,
    bias: Tensor | None,
    act: Act | None,
    choice: KernelChoice,
    out: Tensor,
) -> Tensor:
    """`spmm` with one kernel, into `out`."""
    if not m.col.numel():
        return _empty(out, bias, act)
    if choice.kind == "dense":
        return _dense(densified(m, formats), x, bias, act, out)
    if choice.kind == "bitmap":
        return _by_bitmap(m, formats, x, bias, act, choice, out, False)
    return _by_rows(m, formats, x, bias, act, choice, out)


def run_transposed(m: CsrMatrix, formats: MatrixFormats, x: Tensor, choice: KernelChoice, out: Tensor) -> Tensor:
    """`spmm_transposed` with one kernel, into `out`."""
    if not m.col.numel():
        return out.zero_()
    if choice.kind == "dense":
        return _dense(densified(m, formats).t(), x, None, None, out)
    if choice.kind == "bitmap":
        return _by_bitmap(m, formats, x, None, None, choice, out, True)
    transpose = formats.transposed(m)
    size = (m.size[1], m.size[0])
    transposed = CsrMatrix(transpose.crow, transpose.col, m.values[transpose.order], None, size)
    return _by_rows(transposed, formats_of(transposed), x, None, None, choice, out)


def run_sddmm(m: CsrMatrix, formats: MatrixFormats, a: Tensor, b: Tensor, choice: KernelChoice, out: Tensor) -> Tensor:
    """`sddmm` with one kernel, into `out`."""
    k = a.shape[1]
    if choice.kind == "dense":
        return out.copy_((a @ b.t())[row_of(m), m.col.long()])
    if choice.kind == "bitmap":
        bits = formats.bitmap(m)
        assert bits is not None
        grid = (bits.tiles, bits.high // choice.height)
        _launch(
            gpu.sddmm_bitmap, grid,
            bits.masks, bits.starts, bits.high, a, a.stride(0), a.stride(1), b, b.stride(0),
            b.stride(1), out, m.size[0], m.size[1], k, HEIGHT=choice.height, STEP=choice.width,
            WIDE=_interpreted(a), num_warps=choice.warps,
        )  # fmt: skip
        return out
    a, b = (t if t.stride(1) == 1 else t.contiguous() for t in (a, b))
    begins, ends, rows = formats.parts(m, choice.height)
    _launch(
        gpu.sddmm_rows,
        (len(begins),),
        begins,
        ends,
        rows,
        formats.narrow(m),
        a,
        a.stride(0),
        b,
        b.stride(0),
        out,
        k,
        ENTRIES=choice.height,
        STEP=choice.width,
        num_warps=choice.warps,
    )
    return out


def sparse_product(a: CsrMatrix, b: CsrMatrix) -> tuple[Tensor, Tensor, Tensor]:
    """a @ b as row starts, columns (in the dtype of those of a) and values.

    Sums that are zero are stored, too. Both matrices have their empty rows.
    """
    for operand in (a, b):
        formats_of(operand)  # checks indices
    columns, device = b.size[1], a.col.device
    begins = b.crow[:-1].long()[a.col.long()]
    counts = b.crow.diff().long()[a.col.long()]
    offsets = counts.cumsum(0) - counts
    total = int(counts.sum())
    keys = torch.empty(total, dtype=torch.int64, device=device)
    products = torch.empty(total, dtype=torch.float32, device=device)
    entries = a.col.numel()
    if total:
        _launch(
            gpu.expand,
            (-(-total // AT_ONCE),),
            offsets,
            entries,
            entries.bit_length(),
            row_of(a),
            begins,
            a.values,
            b.col,
            b.values,
            keys,
            products,
            total,
            columns,
            COUNT=AT_ONCE,
        )
    keys, order = torch.sort(keys, stable=True)
    unique_keys, counts = torch.unique_consecutive(keys, return_counts=True)
    values = torch.empty(len(unique_keys), dtype=a.values.dtype, device=device)
    if total:
        ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        grid = (-(-len(unique_keys) // AT_ONCE),)
        _launch(gpu.compress, grid, products, order, ends, values, len(unique_keys), COUNT=AT_ONCE)
    starts = torch.arange(a.size[0] + 1, device=device) * columns
    crow = torch.searchsorted(unique_keys, starts).to(a.crow.dtype)
    return crow, (unique_keys % max(columns, 1)).to(a.col.dtype), values


def _by_rows(
    m: CsrMatrix,
    formats: MatrixFormats,
    x: Tensor,
    bias: Tensor | None,
    act: Act | None,
    choice: KernelChoice,
    out: Tensor,
) -> Tensor:
    """`spmm` by `gpu.spmm_rows`."""
    n, (name, numbers) = x.shape[1], act or ("", ())
    first, second = (*numbers, 0.0, 0.0)[:2]
    x = x if x.stride(1) == 1 else x.contiguous()
    if m.names is not None:
        _empty(out, bias, act)  # rows that are not stored
    tasks = formats.tasks(m, choice.height)
    count = len(tasks.begins)
    if not count:
        return out
    partial = torch.empty(tasks.slots, n, dtype=torch.float32, device=x.device)
    bias_or_any = x if bias is None else bias
    grid = (-(-count // choice.height), -(-n // choice.width))
    _launch(
        gpu.spmm_rows, grid,
        tasks.begins, tasks.ends, tasks.targets, count, formats.narrow(m), m.values, x, x.stride(0),
        out, out.stride(0), out.stride(1), partial, bias_or_any, float(first), float(second), n,
        ROWS=choice.height, WIDTH=choice.width, SPLIT=tasks.slots > 0, BIASED=bias is not None,
        ACT=name, num_warps=choice.warps,
    )  # fmt: skip
    if tasks.slots:
        split_rows = tasks.rows, tasks.firsts, tasks.counts
        _finish(partial, split_rows, len(tasks.rows), (0, 1), out, bias, act)
    return out


def _by_bitmap(
    m: CsrMatrix,
    formats: MatrixFormats,
    x: Tensor,
    bias: Tensor | None,
    act: Act | None,
    choice: KernelChoice,
    out: Tensor,
    transposed: bool,
) -> Tensor:
    """`spmm`, or the transposed product, by `gpu.spmm_bitmap`."""
    bits, (name, numbers) = formats.bitmap(m), act or ("", ())
    assert bits is not None
    first, second = (*numbers, 0.0, 0.0)[:2]
    (rows, n), height = out.shape, choice.height
    steps = bits.high // height if transposed else bits.tiles
    share = -(-steps // choice.split)
    splits = -(-steps // share)
    blocks = bits.tiles if transposed else bits.high // height
    partial = torch.empty(splits if splits > 1 else 0, rows, n, device=x.device)
    bias_or_any = x if bias is None else bias
    grid = (blocks, -(-n // choice.width), splits)
    _launch(
        gpu.spmm_bitmap, grid,
        bits.masks, bits.starts, m.values, bits.high, bits.tiles, x, x.stride(0), x.stride(1), out,
        out.stride(0), out.stride(1), partial, bias_or_any, float(first), float(second), x.shape[0],
        rows, n, share, HEIGHT=height, WIDTH=choice.width, TRANSPOSED=transposed, SPLIT=splits > 1,
        BIASED=bias is not None, ACT=name, WIDE=_interpreted(x), num_warps=choice.warps,
    )  # fmt: skip
    if splits > 1:
        _finish(partial, None, rows, (splits, rows), out, bias, act)
    return out


def _finish(
    partial: Tensor,
    listed: tuple[Tensor, Tensor, Tensor] | None,
    count: int,
    parts: tuple[int, int],
    out: Tensor,
    bias: Tensor | None,
    act: Act | None,
) -> None:
    """Sum partial results by `gpu.finish`.

    listed: rows, first slots and numbers of parts of `count` rows; None for all rows. parts: number
    of parts of all rows, and slots from part to part.
    """
    n, (name, numbers) = out.shape[1], act or ("", ())
    first, second = (*numbers, 0.0, 0.0)[:2]
    width = min(max(16, 1 << (n - 1).bit_length()), FINISH)
    height = AREA // width
    _launch(
        gpu.finish, (-(-count // height), -(-n // width)), partial, *(listed or [partial] * 3),
        count, *parts, out, out.stride(0), out.stride(1), partial if bias is None else bias,
        float(first), float(second), n, HEIGHT=height, WIDTH=width, LISTED=listed is not None,
        BIASED=bias is not None, ACT=name,
    )  # fmt: skip


def _empty(out: Tensor, bias: Tensor | None, act: Act | None) -> Tensor:
    """`out`, filled with the values of rows without nonzeros."""
    value = out.new_zeros(1) if bias is None else bias
    value = value if act is None else apply_activation(value.float(), act)
    return out.copy_(value.reshape(-1, 1).expand_as(out))


def _dense(w: Tensor, x: Tensor, bias: Tensor | None, act: Act | None, out: Tensor) -> Tensor:
    """The product with the dense matrix, by torch."""
    if bias is None:
        torch.mm(w, x, out=out)
    else:
        torch.addmm(bias[:, None], w, x, out=out)
    return out if act is None else out.copy_(apply_activation(out, act))


def _aligned(values: Tensor) -> Tensor:
    """Values at an address that supports vector loads."""
    values = values.contiguous()
    return values.clone() if values.data_ptr() % 16 else values


def _launch(kernel: Any, grid: tuple[int, ...], first: Tensor, *arguments: Any, **options: Any) -> None:
    """Run a kernel on the device of its first tensor."""
    device = first.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[grid](first, *arguments, **options)
    else:
        kernel[grid](first, *arguments, **options)


def _interpreted(x: Tensor) -> bool:
    """Whether kernels run in Triton's interpreter, on tensors in host memory."""
    return not x.is_cuda
