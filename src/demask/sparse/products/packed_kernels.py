"""Products of packed matrices (`packed`) on the CPU by kernels (`kernels.cpu.few_columns`)."""

from __future__ import annotations

from itertools import pairwise
from struct import Struct
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from demask.kernels.bitmap_layout import padded_columns
from demask.kernels.cpu.few_columns import (
    CALL,
    MOST,
    BitmapDecode,
    BitmapRows,
    DenseRows,
    is_bitmap_supported,
    permutations,
)
from demask.kernels.cpu.number_types import is_supported
from demask.kernels.llvm.isa import host
from demask.sparse.csr_matrix import NUMBERS, CsrMatrix
from demask.sparse.products.cpu_products import TASKS, KernelCalls, multiplied, shares, threads_for
from demask.sparse.products.packed import PackedMatrix

BITMAP_VECTORS = 2 * MOST["bitmap"]  # with more, decoded rows take less time


def has_bitmap(dtype: torch.dtype) -> bool:
    """Whether this processor has the instructions for bitmaps of a dtype."""
    return is_bitmap_supported(NUMBERS[dtype], host())


def product(packed: PackedMatrix, x: Tensor) -> Tensor | None:
    """x @ matrix.T in float32 [n, rows]; None where no kernel takes less time than decoded rows. x: [n, columns]."""
    n, columns = x.shape
    if packed.form == "columns":
        values, crow, col = packed.tensors
        out = multiplied(CsrMatrix(crow, col, values, None, packed.size), x.float().t().contiguous(), None, None).t()
        return out if packed.scale is None else out * packed.scale
    numbers, isa = NUMBERS[packed.dtype], host()
    if packed.form == "bitmap":
        return _multiply(packed, x, BitmapRows) if n <= BITMAP_VECTORS and is_bitmap_supported(numbers, isa) else None
    is_small = n <= MOST["dense"] and columns >= isa.lanes
    return _multiply(packed, x, DenseRows) if is_small and is_supported(numbers, isa) else None


def _multiply(packed: PackedMatrix, x: Tensor, kind: type[DenseRows | BitmapRows]) -> Tensor:
    n, (rows, columns) = x.shape[0], packed.size
    numbers, is_bitmap = NUMBERS[packed.dtype], kind is BitmapRows
    width, most = (padded_columns(columns), MOST["bitmap"]) if is_bitmap else (columns, MOST["dense"])
    x = x.float()
    x = F.pad(x, (0, width - columns)) if width > columns else x.contiguous()
    out = x.new_empty(n, rows + rows % 2)
    threads = threads_for(rows * columns * n)
    ends = shares(packed.tensors[2], threads) if is_bitmap else [rows * k // threads for k in range(threads + 1)]
    if n <= most:
        _run(kind(numbers, n), ends, packed, x, out)
    else:
        for first in range(0, n, most):
            vectors = x[first : first + most]
            _run(kind(numbers, len(vectors)), ends, packed, vectors, out[first:])
    return out if rows % 2 == 0 else out[:, :rows]


def decode(packed: PackedMatrix, first: int, last: int) -> Tensor:
    """Rows of a bitmap in float32, not scaled. first: even."""
    if not is_bitmap_supported(NUMBERS[packed.dtype], host()):
        return packed.decode_bits(first, last)
    begin, end = first // 2, (last + 1) // 2
    out = torch.empty(2 * (end - begin), padded_columns(packed.size[1]), dtype=torch.float32)
    threads = threads_for(out.numel())
    ends = [begin + (end - begin) * k // threads for k in range(threads + 1)]
    _run(BitmapDecode(NUMBERS[packed.dtype]), ends, packed, out[:0], out, begin)
    return out[: last - first, : packed.size[1]]


FIELDS = Struct(f"={len(CALL.names or ())}q")


def _run(kernel: Any, ends: list[int], packed: PackedMatrix, x: Tensor, out: Tensor, first: int = 0) -> None:
    """Run a kernel for shares of rows, or of pairs of rows, one for each thread."""
    matrix = packed.operands or _operands(packed)
    vectors = x.data_ptr(), 4 * x.stride(0), out.data_ptr(), 4 * out.stride(0), first
    key = (kernel,), len(ends) - 1
    task = TASKS.take(key, lambda: KernelCalls(*key, CALL))
    for k, share in enumerate(pairwise(ends)):
        FIELDS.pack_into(task.calls, k * CALL.itemsize, *matrix, *vectors, *share)
    task.job.run(task.threads)
    TASKS.put(key, task)


def _operands(packed: PackedMatrix) -> tuple[int, ...]:
    """The fields of a call that tell where the matrix is."""
    weights, bits, starts, table, (rows, columns) = packed.tensors[0].data_ptr(), 0, 0, 0, packed.size
    if packed.form == "bitmap":
        bits, starts = (t.data_ptr() for t in packed.tensors[1:])
        table, columns = permutations(NUMBERS[packed.dtype]).ctypes.data, padded_columns(columns)
    scale = 0 if packed.scale is None else packed.scale.data_ptr()
    packed.operands = weights, bits, starts, table, scale, rows, columns
    return packed.operands
