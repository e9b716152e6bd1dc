"""Sparse layers and products, which store and compute only the nonzeros of weights."""

from demask.sparse.functional import DCSR, spmm
from demask.sparse.modules import SparseConv1d, SparseConv2d, SparseConvTranspose1d, SparseConvTranspose2d, SparseLinear
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
