"""A sparse matrix as products take it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class CsrMatrix(NamedTuple):
    """A matrix in CSR; rows that are there have names if most of them are empty."""

    crow: Tensor
    col: Tensor
    values: Tensor
    names: Tensor | None
    size: tuple[int, int]


def like(x: Tensor, rows: int, columns: int) -> Tensor:
    """An empty [rows, columns] that lies as x does: columns side by side, or rows where those of x
    are. What products on a GPU return.

    >>> import torch
    >>> like(torch.ones(4, 2).t(), 3, 4).stride()
    (1, 3)
    """
    if x.stride(0) == 1 and x.stride(1) != 1:
        return x.new_empty(columns, rows).t()
    return x.new_empty(rows, columns)


def row_of(m: CsrMatrix) -> Tensor:
    """The row of each nonzero, int64."""
    count = m.crow.shape[0] - 1
    rows = torch.arange(count, device=m.crow.device) if m.names is None else m.names.long()
    return rows.repeat_interleave(m.crow.diff(), output_size=m.col.shape[0])
