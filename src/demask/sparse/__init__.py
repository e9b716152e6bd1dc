"""Sparse layers and products: of weights, only the nonzeros are stored and computed with."""

from demask.sparse.functional import DCSR, spmm
from demask.sparse.modules import (
    SparseConv1d,
    SparseConv2d,
    SparseConvTranspose1d,
    SparseConvTranspose2d,
    SparseLinear,
)
from demask.sparse.sddmm import sddmm

__all__ = [
    "DCSR",
    "SparseConv1d",
    "SparseConv2d",
    "SparseConvTranspose1d",
    "SparseConvTranspose2d",
    "SparseLinear",
    "sddmm",
    "spmm",
]
