"""Products of packed matrices (`packed`), in float32, or in float64 of such a matrix.

With few vectors, as in language models token by token, the stored form is read by kernels. With many, some rows
at a time are decoded and multiplied by torch: in float32, or in bfloat16 where torch's products of that are faster,
as on processors with instructions for it, which add in float32 too.
"""

from __future__ import annotations

import functools
import math
from functools import partial
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from demask.kernels.llvm import availability as llvm
from demask.machine.clock import race
from demask.sparse.products.packed import BLOCK, PackedMatrix, column_numbers

TOKENS, WIDTH = 128, 512  # of the products that are timed
#: Vectors and density from which decoded rows take less time than nonzeros with columns, in bfloat16 where torch
#: multiplies that faster. Measured with AVX512-BF16: rows of the page `language_model.md`.
MANY, DENSE_FROM = 128, 0.2


def has_bitmap(dtype: torch.dtype) -> bool:
    """Whether this processor has kernels for bitmaps of a dtype."""
    kernels = _kernels()
    return kernels is not None and kernels.has_bitmap(dtype)


@functools.cache
def _kernels() -> ModuleType | None:
    """The module of kernels for packed matrices; None without llvmlite."""
    if not llvm.is_installed():
        return None
    from demask.sparse.products import packed_kernels

    return packed_kernels


def linear(packed: PackedMatrix, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ matrix.T + bias [..., rows] in the dtype of x, floating-point, contiguous. x: [..., columns]."""
    rows, columns = packed.size
    is_compiled = packed.dtype != torch.float64 and packed.tensors[0].is_cpu and x.is_cpu
    kernels = _kernels() if is_compiled else None
    has_products = x.numel() > 0 and rows > 0
    is_narrow = is_compiled and has_products and x.dtype == packed.dtype == torch.bfloat16
    if kernels is not None and has_products and not (is_narrow and _decodes_columns(packed, x)):
        out = kernels.linear(packed, x, bias)
        if out is not None:
            return out
    if is_narrow and multiplies_in_bfloat16(torch.get_num_threads()):
        return _linear_in_bfloat16(packed, x, bias)
    tokens = x.to(_wide(packed)).reshape(-1, columns) if columns else x.new_zeros(math.prod(x.shape[:-1]), 0)
    out = x.new_zeros(len(tokens), rows, dtype=_wide(packed))
    for first, last in _blocks(packed) if x.numel() else ():
        out[:, first:last] = tokens @ decode_rows(packed, first, last).t()
    out = out if bias is None else out + bias
    return out.to(x.dtype).reshape(*x.shape[:-1], rows)


def _decodes_columns(packed: PackedMatrix, x: Tensor) -> bool:
    """Whether nonzeros with columns are decoded for products in bfloat16."""
    rows, columns = packed.size
    is_many = x.numel() >= MANY * columns and packed.tensors[0].numel() >= DENSE_FROM * rows * columns
    return packed.form == "columns" and is_many and multiplies_in_bfloat16(torch.get_num_threads())


def _linear_in_bfloat16(packed: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
    """The same by torch's products of bfloat16."""
    bias = None if bias is None else bias.to(x.dtype)
    if packed.form == "dense":
        return F.linear(x, packed.tensors[0], bias)
    kernels, out = _kernels(), x.new_empty(x.numel() // packed.size[1], packed.size[0])
    tokens = x.reshape(-1, packed.size[1])
    for first, last in _blocks(packed):
        if kernels is None:
            block = decode_rows(packed, first, last).to(x.dtype)
        elif packed.form == "bitmap":
            block = kernels.decode(packed, first, last, x.dtype)
        else:
            block = kernels.decode_columns(packed, first, last)
        out[:, first:last] = F.linear(tokens, block, None if bias is None else bias[first:last])
    return out.view(*x.shape[:-1], packed.size[0])


@functools.cache
def multiplies_in_bfloat16(threads: int) -> bool:
    """Whether torch multiplies matrices faster in bfloat16 than in float32 on this machine: measured once in a process,
    which takes some milliseconds."""

    x, weight = torch.ones(TOKENS, WIDTH, dtype=torch.bfloat16), torch.ones(WIDTH, WIDTH, dtype=torch.bfloat16)

    def multiply(dtype: torch.dtype) -> Tensor:
        return F.linear(x.to(dtype), weight.to(dtype)).to(x.dtype)

    with torch.no_grad():
        taken = race({str(dtype): partial(multiply, dtype) for dtype in (torch.bfloat16, torch.float32)}, rounds=3)
    return min(taken[str(torch.bfloat16)]) < min(taken[str(torch.float32)])


def _wide(packed: PackedMatrix) -> torch.dtype:
    """The dtype of sums."""
    return torch.float64 if packed.dtype == torch.float64 else torch.float32


def to_dense(packed: PackedMatrix, dtype: torch.dtype) -> Tensor:
    """The matrix in a floating-point dtype."""
    if packed.form == "dense" and packed.scale is None:
        return packed.tensors[0].to(dtype)
    out = packed.tensors[0].new_empty(packed.size, dtype=dtype)
    for first, last in _blocks(packed):
        out[first:last] = decode_rows(packed, first, last)
    return out


def decode_rows(packed: PackedMatrix, first: int, last: int) -> Tensor:
    """Rows in float32, or float64. first: even."""
    values = packed.tensors[0]
    if packed.form == "dense":
        block = values[first:last].to(_wide(packed))
    elif packed.form == "bitmap":
        kernels = _kernels() if values.is_cpu and packed.dtype != torch.float64 else None
        block = packed.decode_bits(first, last) if kernels is None else kernels.decode(packed, first, last)
    else:
        crow = packed.tensors[1][first : last + 1]
        span = slice(int(crow[0]), int(crow[-1]))
        rows = torch.arange(last - first, device=values.device).repeat_interleave(crow.diff())
        block = values.new_zeros(last - first, packed.size[1], dtype=_wide(packed))
        block[rows, column_numbers(packed.tensors[2][span])] = values[span].to(block.dtype)
    return packed.scaled(block, first, last)


def _blocks(packed: PackedMatrix) -> list[tuple[int, int]]:
    step = max(BLOCK // max(packed.size[1], 1) // 2 * 2, 2)
    return [(first, min(first + step, packed.size[0])) for first in range(0, packed.size[0], step)]
