"""Products with sparse matrices on a GPU: which kernel runs is chosen by measuring (`gpu_choice`).

    spmm, spmm_turned, sddmm, densified, sparse_product

A matrix is `CsrMatrix`: CSR, or its rows that are not empty, with names. float32, float16, bfloat16;
sums in float32, in one order, so that a call gives the same bits again. Dense tiles multiply zeros
too: where x is infinite, they give NaN as a dense product does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from demask.kernels.gpu import activations, bitmap, epilogue
from demask.kernels.gpu import sddmm as sddmm_rows
from demask.kernels.gpu import spgemm as pairs
from demask.kernels.gpu import spmm as spmm_rows
from demask.ops.activations import Act, activate
from demask.sparse.csr_matrix import CsrMatrix, like, row_of
from demask.sparse.products.gpu_autotune import KernelChoice, choose
from demask.sparse.products.gpu_formats import MatrixFormats, form_of

TYPES = (torch.float32, torch.float16, torch.bfloat16)
FINISH, AREA = 256, 1024  # columns and elements of a program that sums parts
AT_ONCE = 256  # products, or outputs, of a program of a sparse product


def takes(m: CsrMatrix, x: Tensor) -> bool:
    """Whether kernels multiply these: types, and places that 32 bits count."""
    return m.values.dtype in TYPES and x.dtype == m.values.dtype and m.col.numel() < 2**31 - 64


def spmm(
    m: CsrMatrix, x: Tensor, bias: Tensor | None = None, act: Act | None = None,
    choice: KernelChoice | None = None,
) -> Tensor:  # fmt: skip
    """act(m @ x + bias) [rows, n] with x [columns, n]; it lies as x does: columns side by side, or
    rows where those of x are. BadInput for indices that do not fit."""
    if act is not None and act[0] not in activations.NAMES:  # registered at run time
        return activate(spmm(m, x, bias, None, choice), act)
    form = form_of(m)
    out = like(x, m.size[0], x.shape[1])
    if not out.numel():
        return out
    m = m._replace(values=_aligned(m.values))
    return run(m, form, x, bias, act, choice or chosen("spmm", m, x), out)


def chosen(task: str, m: CsrMatrix, a: Tensor, b: Tensor | None = None) -> KernelChoice:
    """How "spmm" (a: x), "turned" (a: x) or "sddmm" of these operands is run: measured at the first
    call, without bias and activation."""
    form = form_of(m)
    if task == "sddmm":
        out, other = a.new_empty(m.col.shape), a if b is None else b
        return choose(task, m, form, a, lambda c, m, form: run_sddmm(m, form, a, other, c, out))
    if task == "turned":
        out = like(a, m.size[1], a.shape[1])
        return choose(task, m, form, a, lambda c, m, form: run_turned(m, form, a, c, out))
    out = like(a, m.size[0], a.shape[1])
    return choose(task, m, form, a, lambda c, m, form: run(m, form, a, None, None, c, out))


def spmm_turned(m: CsrMatrix, x: Tensor, choice: KernelChoice | None = None) -> Tensor:
    """The transpose of m @ x: [columns, n] with x [rows, n]. From the same bitmap, or from a
    transposed CSR."""
    form = form_of(m)
    out = like(x, m.size[1], x.shape[1])
    if not out.numel():
        return out
    m = m._replace(values=_aligned(m.values))
    return run_turned(m, form, x, choice or chosen("turned", m, x), out)


def sddmm(m: CsrMatrix, a: Tensor, b: Tensor, choice: KernelChoice | None = None) -> Tensor:
    """a[row] · b[column] for every nonzero of m, in the order of CSR: values of m are not read.

    a [rows, k], b [columns, k], that is a @ b.T sampled at m; for a @ c give c.T.
    """
    form = form_of(m)
    out = torch.empty(m.col.shape, dtype=a.dtype, device=a.device)
    if not out.numel():
        return out
    return run_sddmm(m, form, a, b, choice or chosen("sddmm", m, a, b), out)


def densified(m: CsrMatrix, form: MatrixFormats | None = None) -> Tensor:
    """The dense matrix [rows, columns]; entries that are there twice are summed."""
    bits = (form or form_of(m)).bitmap(m)
    rows, columns = m.size
    if bits is None:
        made = torch.zeros(rows * columns, dtype=torch.float32, device=m.values.device)
        places = row_of(m) * columns + m.col.long()
        return made.index_add_(0, places, m.values.float()).view(rows, columns).to(m.values.dtype)
    made = torch.empty(rows, columns, dtype=m.values.dtype, device=m.values.device)
    if made.numel():
        grid = (bits.high // 64, bits.tiles)
        _launch(
            bitmap.decompress, grid,
            bits.masks, bits.starts, m.values, bits.high, made, rows, columns,
            HEIGHT=64, num_warps=4,
        )  # fmt: skip
    return made


def run(
    m: CsrMatrix, form: MatrixFormats, x: Tensor, bias: Tensor | None, act: Act | None, choice: KernelChoice,
    out: Tensor,
) -> Tensor:  # fmt: skip
    """`spmm` by one choice, into `out`."""
    if not m.col.numel():
        return _empty(out, bias, act)
    if choice.kind == "dense":
        return _dense(densified(m, form), x, bias, act, out)
    if choice.kind == "bitmap":
        return _by_bitmap(m, form, x, bias, act, choice, out, False)
    return _by_rows(m, form, x, bias, act, choice, out)


def run_turned(
    m: CsrMatrix, form: MatrixFormats, x: Tensor, choice: KernelChoice, out: Tensor
) -> Tensor:
    """`spmm_turned` by one choice, into `out`."""
    if not m.col.numel():
        return out.zero_()
    if choice.kind == "dense":
        return _dense(densified(m, form).t(), x, None, None, out)
    if choice.kind == "bitmap":
        return _by_bitmap(m, form, x, None, None, choice, out, True)
    there = form.turned(m)
    size = (m.size[1], m.size[0])
    turned = CsrMatrix(there.crow, there.col, m.values[there.order], None, size)
    return _by_rows(turned, form_of(turned), x, None, None, choice, out)


def run_sddmm(
    m: CsrMatrix, form: MatrixFormats, a: Tensor, b: Tensor, choice: KernelChoice, out: Tensor
) -> Tensor:
    """`sddmm` by one choice, into `out`."""
    k = a.shape[1]
    if choice.kind == "dense":
        return out.copy_((a @ b.t())[row_of(m), m.col.long()])
    if choice.kind == "bitmap":
        bits = form.bitmap(m)
        assert bits is not None
        grid = (bits.tiles, bits.high // choice.height)
        _launch(
            bitmap.sddmm_bitmap, grid,
            bits.masks, bits.starts, bits.high, a, a.stride(0), a.stride(1), b, b.stride(0),
            b.stride(1), out, m.size[0], m.size[1], k, HEIGHT=choice.height, STEP=choice.width,
            WIDE=_interpreted(a), num_warps=choice.warps,
        )  # fmt: skip
        return out
    a, b = (t if t.stride(1) == 1 else t.contiguous() for t in (a, b))
    begins, ends, rows = form.parts(m, choice.height)
    _launch(
        sddmm_rows.sddmm_rows, (len(begins),),
        begins, ends, rows, form.narrow(m), a, a.stride(0), b, b.stride(0), out, k,
        ENTRIES=choice.height, STEP=choice.width, num_warps=choice.warps,
    )  # fmt: skip
    return out


def sparse_product(a: CsrMatrix, b: CsrMatrix) -> tuple[Tensor, Tensor, Tensor]:
    """a @ b as row starts, columns (in the type of a's) and values: what any nonzeros meet in is
    stored, zero or not. Both without names."""
    for one in (a, b):
        form_of(one)  # indices are checked
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
            pairs.expand, (-(-total // AT_ONCE),),
            offsets, entries, entries.bit_length(), row_of(a), begins, a.values, b.col, b.values,
            keys, products, total, columns, COUNT=AT_ONCE,
        )  # fmt: skip
    keys, order = torch.sort(keys, stable=True)
    kept, counts = torch.unique_consecutive(keys, return_counts=True)
    values = torch.empty(len(kept), dtype=a.values.dtype, device=device)
    if total:
        ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        grid = (-(-len(kept) // AT_ONCE),)
        _launch(pairs.compress, grid, products, order, ends, values, len(kept), COUNT=AT_ONCE)
    starts = torch.arange(a.size[0] + 1, device=device) * columns
    crow = torch.searchsorted(kept, starts).to(a.crow.dtype)
    return crow, (kept % max(columns, 1)).to(a.col.dtype), values


def _by_rows(
    m: CsrMatrix, form: MatrixFormats, x: Tensor, bias: Tensor | None, act: Act | None, choice: KernelChoice,
    out: Tensor,
) -> Tensor:  # fmt: skip
    """By kernels.gpu.spmm_rows."""
    n, (name, numbers) = x.shape[1], act or ("", ())
    first, second = (*numbers, 0.0, 0.0)[:2]
    x = x if x.stride(1) == 1 else x.contiguous()
    if m.names is not None:
        _empty(out, bias, act)  # rows that are not there
    tasks = form.tasks(m, choice.height)
    count = len(tasks.begins)
    if not count:
        return out
    partial = torch.empty(tasks.slots, n, dtype=torch.float32, device=x.device)
    given = x if bias is None else bias
    grid = (-(-count // choice.height), -(-n // choice.width))
    _launch(
        spmm_rows.spmm_rows, grid,
        tasks.begins, tasks.ends, tasks.targets, count, form.narrow(m), m.values, x, x.stride(0),
        out, out.stride(0), out.stride(1), partial, given, float(first), float(second), n,
        ROWS=choice.height, WIDTH=choice.width, SPLIT=tasks.slots > 0, BIASED=bias is not None,
        ACT=name, num_warps=choice.warps,
    )  # fmt: skip
    if tasks.slots:
        ends = tasks.rows, tasks.firsts, tasks.counts
        _finish(partial, ends, len(tasks.rows), (0, 1), out, bias, act)
    return out


def _by_bitmap(
    m: CsrMatrix, form: MatrixFormats, x: Tensor, bias: Tensor | None, act: Act | None, choice: KernelChoice,
    out: Tensor, turned: bool,
) -> Tensor:  # fmt: skip
    """By kernels.gpu.bitmap."""
    bits, (name, numbers) = form.bitmap(m), act or ("", ())
    assert bits is not None
    first, second = (*numbers, 0.0, 0.0)[:2]
    (rows, n), height = out.shape, choice.height
    steps = bits.high // height if turned else bits.tiles
    share = -(-steps // choice.split)
    splits = -(-steps // share)
    blocks = bits.tiles if turned else bits.high // height
    partial = torch.empty(splits if splits > 1 else 0, rows, n, device=x.device)
    given = x if bias is None else bias
    grid = (blocks, -(-n // choice.width), splits)
    _launch(
        bitmap.spmm_bitmap, grid,
        bits.masks, bits.starts, m.values, bits.high, bits.tiles, x, x.stride(0), x.stride(1), out,
        out.stride(0), out.stride(1), partial, given, float(first), float(second), x.shape[0], rows,
        n, share, HEIGHT=height, WIDTH=choice.width, TRANSPOSED=turned, SPLIT=splits > 1,
        BIASED=bias is not None, ACT=name, WIDE=_interpreted(x), num_warps=choice.warps,
    )  # fmt: skip
    if splits > 1:
        _finish(partial, None, rows, (splits, rows), out, bias, act)
    return out


def _finish(
    partial: Tensor, listed: tuple[Tensor, Tensor, Tensor] | None, count: int,
    parts: tuple[int, int], out: Tensor, bias: Tensor | None, act: Act | None,
) -> None:  # fmt: skip
    """By kernels.gpu.epilogue: `count` rows, that are listed, or all in so many parts, so far
    apart."""
    n, (name, numbers) = out.shape[1], act or ("", ())
    first, second = (*numbers, 0.0, 0.0)[:2]
    width = min(max(16, 1 << (n - 1).bit_length()), FINISH)
    height = AREA // width
    _launch(
        epilogue.finish, (-(-count // height), -(-n // width)), partial, *(listed or [partial] * 3),
        count, *parts, out, out.stride(0), out.stride(1), partial if bias is None else bias,
        float(first), float(second), n, HEIGHT=height, WIDTH=width, LISTED=listed is not None,
        BIASED=bias is not None, ACT=name,
    )  # fmt: skip


def _empty(out: Tensor, bias: Tensor | None, act: Act | None) -> Tensor:
    """`out`, filled with what rows without nonzeros are."""
    one = out.new_zeros(1) if bias is None else bias
    one = one if act is None else activate(one.float(), act)
    return out.copy_(one.reshape(-1, 1).expand_as(out))


def _dense(w: Tensor, x: Tensor, bias: Tensor | None, act: Act | None, out: Tensor) -> Tensor:
    """By torch's product with the dense matrix."""
    if bias is None:
        torch.mm(w, x, out=out)
    else:
        torch.addmm(bias[:, None], w, x, out=out)
    return out if act is None else out.copy_(activate(out, act))


def _aligned(values: Tensor) -> Tensor:
    """At an address that vectors may be loaded from."""
    values = values.contiguous()
    return values.clone() if values.data_ptr() % 16 else values


def _launch(kernel: Any, grid: tuple[int, ...], first: Tensor, *given: Any, **options: Any) -> None:
    """Run a kernel where its first tensor is."""
    device = first.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[grid](first, *given, **options)
    else:
        kernel[grid](first, *given, **options)


def _interpreted(x: Tensor) -> bool:
    """Kernels see memory of the host only in Triton's interpreter."""
    return not x.is_cuda
