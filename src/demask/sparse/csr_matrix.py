"""A sparse matrix as an operand of products."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: dtypes of packed weights, by the names of `kernels.cpu.number_types`
NUMBERS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.int8: "i8"}
#: dtypes of values that kernels read in CSR
CSR_NUMBERS = {**NUMBERS, torch.float64: "f64"}


class CsrMatrix(NamedTuple):
    """A matrix [size] in CSR.

    names [stored rows]: the row indices if empty rows are not stored (DCSR), otherwise None.
    """

    crow: Tensor
    col: Tensor
    values: Tensor
    names: Tensor | None
    size: tuple[int, int]


def like(x: Tensor, rows: int, columns: int) -> Tensor:
    """An empty tensor [rows, columns] in the memory order of x (row-major or column-major).

    >>> import torch
    >>> like(torch.ones(4, 2).t(), 3, 4).stride()
    (1, 3)
    """
    if x.stride(0) == 1 and x.stride(1) != 1:
        return x.new_empty(columns, rows).t()
    return x.new_empty(rows, columns)


def row_of(m: CsrMatrix) -> Tensor:
    """The row of each nonzero [nonzeros], int64."""
    count = m.crow.shape[0] - 1
    rows = torch.arange(count, device=m.crow.device) if m.names is None else m.names.long()
    return rows.repeat_interleave(m.crow.diff(), output_size=m.col.shape[0])
