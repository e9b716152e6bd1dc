"""Products of packed matrices (`packed`), in float32, or in float64 of such a matrix.

With few vectors, as in language models token by token, the stored form is read by kernels. With many, some rows
at a time are decoded to float32 and multiplied, which is faster than torch's own products of bfloat16 on
processors without instructions for it.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from demask.kernels.llvm import availability as llvm
from demask.sparse.products.packed import BLOCK, PackedMatrix, column_numbers, form_of_density


def chosen_form(density: float, dtype: torch.dtype) -> str:
    """The form that takes the least time with one vector, of those that this processor has kernels for."""
    kernels = _kernels()
    return form_of_density(density, dtype, has_bitmap=kernels is not None and kernels.has_bitmap(dtype))


@functools.cache
def _kernels() -> ModuleType | None:
    """The module of kernels for packed matrices; None without llvmlite."""
    if not llvm.is_installed():
        return None
    from demask.sparse.products import packed_kernels

    return packed_kernels


def multiply(packed: PackedMatrix, x: Tensor) -> Tensor:
    """x @ matrix.T in the dtype of sums [n, rows]. x: [n, columns], of any floating-point dtype."""
    n, (rows, columns) = x.shape[0], packed.size
    if not n or not rows or not columns:
        return x.new_zeros(n, rows, dtype=_wide(packed))
    is_compiled = packed.dtype != torch.float64 and packed.tensors[0].is_cpu and x.is_cpu
    kernels = _kernels() if is_compiled else None
    out = None if kernels is None else kernels.product(packed, x)
    if out is None:
        x, out = x.to(_wide(packed)), x.new_empty(n, rows, dtype=_wide(packed))
        for first, last in _blocks(packed):
            out[:, first:last] = x @ decode_rows(packed, first, last).t()
    return out


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
    return block if packed.scale is None else block * packed.scale[first:last, None]


def _blocks(packed: PackedMatrix) -> list[tuple[int, int]]:
    step = max(BLOCK // max(packed.size[1], 1) // 2 * 2, 2)
    return [(first, min(first + step, packed.size[0])) for first in range(0, packed.size[0], step)]
