"""Sparse layers and products, which store and compute only the nonzeros of weights."""

from demask.sparse.functional import DCSR, sddmm, spmm
from demask.sparse.modules import SparseConv1d, SparseConv2d, SparseConvTranspose1d, SparseConvTranspose2d, SparseLinear
from demask.sparse.packed_linear import PackedLinear
from demask.sparse.prepared import PreparedMatrix, prepare
from demask.sparse.products.keep import keep
from demask.sparse.segment.segment_plans import segment_plans
from demask.sparse.sharded import ShardedMatrix, shard
from demask.sparse.sparsified import LayerChange, Sparsified, sparsify

__all__ = [
    "DCSR",
    "LayerChange",
    "PackedLinear",
    "PreparedMatrix",
    "ShardedMatrix",
    "SparseConv1d",
    "SparseConv2d",
    "SparseConvTranspose1d",
    "SparseConvTranspose2d",
    "SparseLinear",
    "Sparsified",
    "keep",
    "prepare",
    "sddmm",
    "segment_plans",
    "shard",
    "sparsify",
    "spmm",
]
