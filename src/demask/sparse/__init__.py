"""Sparse layers and products, which store and compute only the nonzeros of weights."""

from demask.sparse.functional import DCSR, sddmm, spmm
from demask.sparse.modules import SparseConv1d, SparseConv2d, SparseConvTranspose1d, SparseConvTranspose2d, SparseLinear

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
