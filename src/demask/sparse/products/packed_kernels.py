"""Products of packed matrices (`packed`) on the CPU by kernels (`kernels.cpu.few_columns`)."""

from __future__ import annotations

import math
from itertools import pairwise
from struct import Struct

import numpy as np
import torch
from torch import Tensor

from demask.kernels.bitmap_layout import padded_columns
from demask.kernels.cpu.few_columns import (
    CALL,
    MOST,
    BitmapDecode,
    BitmapRows,
    ColumnsDecode,
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


def linear(packed: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor | None:
    """x @ matrix.T + bias [..., rows] in the dtype of x; None where decoded rows take less time. x: [..., columns]."""
    if packed.form == "columns":
        return _linear_of_nonzeros(packed, x, bias)
    *lead, columns = x.shape
    numbers, isa, n = NUMBERS[packed.dtype], host(), x.numel() // columns
    if packed.form == "bitmap":
        kind, is_few = BitmapRows, n <= BITMAP_VECTORS and is_bitmap_supported(numbers, isa)
    else:
        kind = DenseRows
        is_few = n <= MOST["dense"] and columns >= isa.lanes and is_supported(numbers, isa)
    if not is_few:
        return None
    key = kind, numbers, packed.group > 0, tuple(lead), packed.size, threads_for(n * packed.size[0] * columns)
    task: VectorsTask = TASKS.take(key, lambda: VectorsTask(*key))
    task.x.copy_(x)
    task.run(packed)
    if bias is None:
        out = task.sums.clone() if x.dtype == torch.float32 else task.sums.to(x.dtype)
    else:
        out = (task.sums + bias).to(x.dtype)
    TASKS.put(key, task)
    return out


def _linear_of_nonzeros(packed: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
    values, crow, col = packed.tensors
    tokens = x.float().reshape(-1, packed.size[1]).t().contiguous()
    scale = packed.scale
    wide = None if bias is None or scale is not None else bias.float()
    out = multiplied(CsrMatrix(crow, col, values, None, packed.size), tokens, wide, None).t()
    if scale is not None:
        out = out * scale if bias is None else out * scale + bias
    return out.to(x.dtype).contiguous().view(*x.shape[:-1], packed.size[0])


class VectorsTask(KernelCalls):
    """Products of any matrix of a size with a number of vectors, with memory for them and their sums.

    x, sums: of these shapes, float32, which calls read and write.
    """

    def __init__(
        self,
        kind: type[DenseRows | BitmapRows],
        numbers: str,
        grouped: bool,
        lead: tuple[int, ...],
        size: tuple[int, int],
        threads: int,
    ):
        n, (rows, columns) = math.prod(lead), size
        is_bitmap = kind is BitmapRows
        width, most = (padded_columns(columns), MOST["bitmap"]) if is_bitmap else (columns, MOST["dense"])
        firsts = range(0, n, most)
        super().__init__(tuple(kind(numbers, min(most, n - first), grouped) for first in firsts), threads, CALL)
        with torch.inference_mode(False):  # written by calls in any mode
            x, out = torch.zeros(n, width), torch.empty(n, rows + rows % 2)
        for k, first in enumerate(firsts):
            calls = self.structures[k :: len(firsts)]
            calls["x"], calls["x_pitch"] = x[first].data_ptr(), 4 * width
            calls["out"], calls["out_pitch"] = out[first].data_ptr(), 4 * out.shape[1]
        self.x, self.sums = x[:, :columns].view(*lead, columns), out[:, :rows].view(*lead, rows)
        self.memory = self.structures.view(np.uint8).data
        self.kernels = len(firsts)

    def run(self, packed: PackedMatrix) -> None:
        """Multiply a matrix with x."""
        first = 0
        for fields in packed.operands.get(self.threads) or _fields_of_threads(packed, self.threads):
            for _ in range(self.kernels):
                self.memory[first : first + len(fields)] = fields
                first += CALL.itemsize
        self.job.run(self.threads)


def decode(packed: PackedMatrix, first: int, last: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of a bitmap in float32, or in bfloat16 of such a matrix; not scaled. first: even."""
    if not is_bitmap_supported(NUMBERS[packed.dtype], host()):
        return packed.decode_bits(first, last).to(dtype)
    begin, end = first // 2, (last + 1) // 2
    out = torch.empty(2 * (end - begin), padded_columns(packed.size[1]), dtype=dtype)
    threads = threads_for(out.numel())
    key = (BitmapDecode(NUMBERS[packed.dtype], dtype == torch.bfloat16),), threads, CALL
    task = TASKS.take(key, lambda: KernelCalls(*key))
    ends = [begin + (end - begin) * k // threads for k in range(threads + 1)]
    for k, share in enumerate(pairwise(ends)):
        MATRIX.pack_into(task.calls, k * CALL.itemsize, *_operands(packed), *share)
    task.structures["out"], task.structures["out_pitch"] = out.data_ptr(), out.element_size() * out.stride(0)
    task.structures["first"] = begin
    task.job.run(threads)
    TASKS.put(key, task)
    return out[: last - first, : packed.size[1]]


def decode_columns(packed: PackedMatrix, first: int, last: int) -> Tensor:
    """Rows of nonzeros with columns, in the dtype of the matrix, not scaled."""
    values, crow, col = packed.tensors
    out = torch.zeros(last - first, packed.size[1], dtype=values.dtype)
    threads = threads_for(out.numel())
    key = (ColumnsDecode(NUMBERS[packed.dtype], col.dtype == torch.int16),), threads, CALL
    task = TASKS.take(key, lambda: KernelCalls(*key))
    for name, tensor in (("weights", values), ("bits", col), ("starts", crow), ("out", out)):
        task.structures[name] = tensor.data_ptr()
    task.structures["out_pitch"], task.structures["first"] = out.element_size() * out.shape[1], first
    task.structures["begin"] = [first + (last - first) * k // threads for k in range(threads)]
    task.structures["end"] = [first + (last - first) * k // threads for k in range(1, threads + 1)]
    task.job.run(threads)
    TASKS.put(key, task)
    return out


MATRIX = Struct(f"={1 + (CALL.names or ()).index('end')}q")  # fields of a call that are of the matrix


def _fields_of_threads(packed: PackedMatrix, threads: int) -> list[bytes]:
    """For each thread, what a call reads of the matrix: all but the vectors."""
    if packed.form == "bitmap":
        ends = shares(packed.tensors[2], threads)
    else:
        ends = [packed.size[0] * k // threads for k in range(threads + 1)]
    operands = _operands(packed)
    packed.operands[threads] = [MATRIX.pack(*operands, *share) for share in pairwise(ends)]
    return packed.operands[threads]


def _operands(packed: PackedMatrix) -> tuple[int, ...]:
    """The fields of a call that tell where the matrix is."""
    weights, bits, starts, table, (rows, columns) = packed.tensors[0].data_ptr(), 0, 0, 0, packed.size
    if packed.form == "bitmap":
        bits, starts = (t.data_ptr() for t in packed.tensors[1:])
        table, columns = permutations(NUMBERS[packed.dtype], host().is_arm).ctypes.data, padded_columns(columns)
    scale, groups = (0, 1) if packed.scale is None else (packed.scale.data_ptr(), packed.scale[0].numel())
    return weights, bits, starts, table, scale, groups, packed.group, rows, columns
