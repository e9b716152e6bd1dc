"""Products with sparse matrices: `spmm`, and `sddmm`, which computes a product of two dense matrices
only at the entries of a sparse one.

Matrices (torch.sparse_csr, torch.sparse_csc, DCSR) are read directly, without packing, so that they
may change from call to call. Layers with fixed weights are faster (`sparse.modules`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, overload

import torch
from torch import Tensor

from demask.errors import BadInput
from demask.exec.steps.segment_steps import MAX_SIZE
from demask.exec.steps.segment_weights import check_indices, traced
from demask.ops.activations import Act, ActivationLike, act_of, apply_activation
from demask.sparse.csr_matrix import CsrMatrix
from demask.sparse.products.gpu_formats import full
from demask.sparse.products.gradient_ops import kernels, sampled
from demask.sparse.products.sparse_rows_op import sparse_rows
from demask.sparse.products.spmm_op import NARROW, product


@overload
def sddmm(a: Tensor, b: Tensor, mask: Tensor, *, transposed: bool = False) -> Tensor: ...
@overload
def sddmm(a: Tensor, b: Tensor, mask: DCSR, *, transposed: bool = False) -> DCSR: ...
def sddmm(a: Tensor, b: Tensor, mask: Tensor | DCSR, *, transposed: bool = False) -> Tensor | DCSR:
    """The product a @ b at the stored positions of a sparse mask, as a sparse matrix like the mask.

    SDDMM is short for sampled dense-dense matrix multiplication. Element (i, j) of the result is
    the dot product of row i of `a` and column j of `b` for each position (i, j) that `mask` stores;
    other elements are neither computed nor stored.

    The result is a torch.sparse_csr tensor or a DCSR, as the mask is, with shape [m, n] and the
    dtype of `a`. It shares the indices of the mask, and it stores dot products that are zero.
    Gradients reach `a` and `b`. float16 and bfloat16 are summed in float32. If y = w @ x with a
    sparse w, then the gradient of w is sddmm(dy, x, w, transposed=True).

    Source: Gale et al. 2020, "Sparse GPU kernels for deep learning", section 6.

    Args:
        a: dense matrix [m, k], floating-point.
        b: dense matrix [k, n], or [n, k] if `transposed`, of the dtype and device of `a`.
        mask: torch.sparse_csr tensor or DCSR [m, n] on the device of `a`, with int32 or int64
            indices. Its values are not read and may have any dtype, as in
            torch.sparse.sampled_addmm with beta=0.
        transposed: False (the default) for a @ b with b [k, n]; True for a @ b.T with b [n, k].

    Raises:
        BadInput: `a` or `b` is not dense or not floating-point; `mask` is a tensor of another
            layout; shapes, dtypes or devices do not match; or an index of the mask is out of range.
        AttributeError: `mask` is neither a tensor nor a DCSR.

    Example:
        >>> import torch
        >>> from demask.sparse import sddmm
        >>> mask = torch.tensor([[0, 0, 0], [1, 0, 1]]).to_sparse_csr()
        >>> sddmm(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0, 4.0, 5.0]]), mask).to_dense()
        tensor([[ 0.,  0.,  0.],
                [ 6.,  0., 10.]])
    """
    is_dcsr = isinstance(mask, DCSR)
    size = mask.size if isinstance(mask, DCSR) else tuple(mask.shape)
    _check_sddmm(a, b, size, transposed)
    other = b if transposed else b.t()
    if is_dcsr:
        crow, col, values, names = mask.crow, mask.col, mask.values, mask.rows
    else:
        (crow, col, values), names = csr_parts(mask), None
    if col.device != a.device:
        raise BadInput(f"expected one device, got a on {a.device} and a mask on {col.device}")
    products = sampled(CsrMatrix(crow, col, values, names, (size[0], size[1])), a, other)
    if is_dcsr:
        return DCSR(mask.rows, crow, col, products, mask.size)
    return torch.sparse_csr_tensor(crow, col, products, size, check_invariants=False)


def _check_sddmm(a: Tensor, b: Tensor, size: tuple[int, ...], transposed: bool) -> None:
    """Raise BadInput if the product of the matrices does not have this size."""
    if not all(isinstance(t, Tensor) for t in (a, b)):
        types = f"{type(a).__name__} and {type(b).__name__}"
        raise BadInput(f"expected dense tensors, got {types}")
    if any(t.layout != torch.strided for t in (a, b)):
        raise BadInput(f"expected dense matrices, got {a.layout} and {b.layout}")
    if (a.dtype, a.device) != (b.dtype, b.device) or not a.is_floating_point():
        raise BadInput(
            f"expected floating-point matrices of one dtype on one device, got {a.dtype} on "
            f"{a.device} and {b.dtype} on {b.device}"
        )
    are_matrices = a.ndim == b.ndim == len(size) == 2
    inner_axis, outer_axis = (1, 0) if transposed else (0, 1)
    if not are_matrices or (a.shape[0], b.shape[outer_axis], a.shape[1]) != (*size, b.shape[inner_axis]):
        b_shape = "[n, k]" if transposed else "[k, n]"
        raise BadInput(
            f"expected a [m, k], b {b_shape} and a mask [m, n], got {tuple(a.shape)}, "
            f"{tuple(b.shape)} and {size}" + _transposed_hint(a, b, size, transposed)
        )


def _transposed_hint(a: Tensor, b: Tensor, size: tuple[int, ...], transposed: bool) -> str:
    """Hint for the case that b has the shape of the other value of `transposed`."""
    other = tuple(b.shape) if transposed else tuple(b.shape[::-1])  # [k, n]
    if b.ndim != 2 or (other[0], other[1]) != (a.shape[-1], size[-1]):
        return ""
    return f"; give transposed={not transposed}"


INDICES = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True, eq=False)
class DCSR:
    """A sparse matrix in doubly compressed sparse rows: CSR without its empty rows.

    `spmm` and `sddmm` accept it. Unlike torch's sparse tensors it supports torch.compile, since its
    fields are plain tensors, all on one device. The constructor takes the attributes in this order
    and copies no tensor. Below, r is the number of stored rows, and n that of stored elements.

    Source: Buluc and Gilbert 2008, "On the representation and multiplication of hypersparse
    matrices".

    Attributes:
        rows: index of each stored row, shape [r], int32 or int64, strictly increasing. Rows that
            are not listed are zero.
        crow: position in `col` and `values` of the first element of each stored row, then n; shape
            [r + 1], dtype of `rows`.
        col: column of each stored element, shape [n], dtype of `rows`, in any order within a row.
        values: stored elements, shape [n]. `spmm` requires a floating-point dtype.
        size: (number of rows, number of columns) of the full matrix, each from 0 to 2^31 - 1.

    Raises:
        BadInput: `rows`, `crow` and `col` differ in dtype or are neither int32 nor int64; a shape
            does not match; `size` has other numbers, or not two; an index is out of range; `rows`
            does not increase; or `crow` does not rise from 0 to n.
        AttributeError, TypeError: a field is not a tensor, or `size` is one number.

    Example:
        >>> import torch
        >>> from demask.sparse import DCSR
        >>> matrix = torch.zeros(1000, 4)
        >>> matrix[700, 2] = 5.0
        >>> compact = DCSR.from_csr(matrix.to_sparse_csr())
        >>> compact.rows, compact.crow, compact.col, compact.values
        (tensor([700]), tensor([0, 1]), tensor([2]), tensor([5.]))
    """

    rows: Tensor
    crow: Tensor
    col: Tensor
    values: Tensor
    size: tuple[int, int]

    def __post_init__(self) -> None:
        parts = (self.rows, self.crow, self.col)
        dtypes = {t.dtype for t in parts}
        if len(dtypes) != 1 or not dtypes <= set(INDICES) or any(t.ndim != 1 for t in parts):
            tensors = [f"{t.dtype} {tuple(t.shape)}" for t in parts]
            raise BadInput(f"expected rows, crow, col in int32 or int64, of one axis, got {tensors}")
        if self.crow.numel() != self.rows.numel() + 1 or self.values.shape != self.col.shape:
            sizes = [t.numel() for t in (*parts, self.values)]
            raise BadInput(f"expected r rows, r + 1 row starts, n columns and values, got {sizes}")
        _check_size(self.size)
        check_indices(self.crow, self.col, self.size[1])
        rows = self.rows
        if traced([rows]):
            return  # kernels check every index
        if rows.numel() and not (rows[0] >= 0 and rows[-1] < self.size[0]):
            raise BadInput(f"expected rows below {self.size[0]}, got {rows[0]} to {rows[-1]}")
        if (rows[1:] <= rows[:-1]).any():
            raise BadInput("expected rows that rise")

    @classmethod
    def from_csr(cls, matrix: Tensor) -> Self:
        """The DCSR matrix that equals a torch.sparse_csr matrix and omits its empty rows.

        Args:
            matrix: torch.sparse_csr tensor [m, k] with int32 or int64 indices, of any dtype. The
                result shares its column indices and values.

        Raises:
            BadInput: `matrix` is not a torch.sparse_csr tensor with two axes.

        Example:
            >>> import torch
            >>> from demask.sparse import DCSR
            >>> DCSR.from_csr(torch.tensor([[0.0, 0.0], [0.0, 2.0]]).to_sparse_csr()).rows
            tensor([1])
        """
        crow, col, values = csr_parts(matrix)
        # torch.compile and torch.export do not support views of a sparse tensor.
        values = values if values.requires_grad else values.detach()
        is_stored = crow.diff() != 0
        rows = is_stored.nonzero()[:, 0].to(crow.dtype)
        short_crow = torch.cat([crow[:1], crow[1:][is_stored]])
        return cls(rows, short_crow, col, values, (matrix.shape[0], matrix.shape[1]))

    def to_csr(self) -> Tensor:
        """The matrix as a torch.sparse_csr tensor of shape `size`, which shares `col` and `values`.

        Example:
            >>> import torch
            >>> from demask.sparse import DCSR
            >>> index = torch.tensor([0, 1])
            >>> DCSR(index[1:], index, index[1:], torch.ones(1), (2, 2)).to_csr().to_dense()
            tensor([[0., 0.],
                    [0., 1.]])
        """
        counts = torch.zeros(self.size[0], dtype=self.crow.dtype, device=self.crow.device)
        counts = counts.index_copy(0, self.rows.long(), self.crow.diff())
        crow = torch.cat([self.crow[:1], counts.cumsum(0).to(self.crow.dtype)])
        return torch.sparse_csr_tensor(crow, self.col, self.values, self.size, check_invariants=False)


def spmm(w: Tensor | DCSR, x: Tensor | DCSR, bias: Tensor | None = None, activation: ActivationLike = None) -> Tensor:
    """The matrix product activation(w @ x + bias), where `w`, `x` or both are sparse.

    These layouts of `w` [m, k] and `x` [k, n] are supported:

        w                   x                   result [m, n]  bias
        sparse_csr or DCSR  dense               dense          [m], one per row
        dense               sparse_csc          dense          [n], one per column
        sparse_csr or DCSR  sparse_csc          dense          [n], one per column
        sparse_csr or DCSR  sparse_csr or DCSR  sparse_csr     None, and activation None

    The result has the dtype of `w` and `x`. It is differentiable; torch cannot accumulate the
    gradient of a leaf tensor in sparse_csc, so use torch.autograd.grad instead of backward() there.
    Only stored elements of sparse matrices are multiplied, and float16 and bfloat16 are summed in
    float32. A sparse_csr result also stores sums that are zero. If w is sparse and x is sparse_csc,
    w is decompressed, which is faster, where more than 6 % of it are stored, or on a GPU; x never is.

    On the CPU, products are computed by kernels that are compiled at run time. Use DCSR under
    torch.compile, which does not support torch's sparse tensors. On a GPU, data computed from the
    indices is cached, so the indices of a torch sparse tensor must not be modified in place: torch
    does not report such writes.

    Args:
        w: left matrix [m, k], floating-point; int32 or int64 indices if sparse.
        x: right matrix [k, n], of the dtype and device of `w`.
        bias: dense vector of the dtype of `w`, see the table; default None, no bias.
        activation: function applied to each element: a name such as "relu", or a torch module; the
            choices are those of `SparseLinear`. Default None, no activation.

    Raises:
        BadInput: another pair of layouts (also dense @ dense); shapes, dtypes or devices that do
            not match; a dtype that is not floating-point; indices out of range; an unknown
            activation; or a bias or an activation with two sparse matrices.

    Example:
        >>> import torch
        >>> from demask.sparse import spmm
        >>> w = torch.tensor([[0.0, 0.0, 3.0], [0.0, 0.0, 0.0]]).to_sparse_csr()
        >>> spmm(w, torch.ones(3, 2), bias=torch.tensor([0.0, -1.0]), activation="relu")
        tensor([[3., 3.],
                [0., 0.]])
    """
    act = act_of(activation)
    right = _matrix_layout(x)
    if isinstance(w, Tensor) and isinstance(x, Tensor) and w.layout == torch.strided:
        if right != torch.sparse_csc:
            advice = "a sparse one, or w @ x" if right == torch.strided else "x.to_sparse_csc()"
            raise BadInput(f"{_PAIRS}, got {w.layout} @ {right}; give {advice}")
        # w @ x = (x.T @ w.T).T, and the CSC arrays of x are the CSR arrays of x.T
        _check_product(w, x)
        crow, col, values = _csr_parts(x, x.ccol_indices(), x.row_indices())
        parts = (crow, col, values, None, (x.shape[1], x.shape[0]))
        return product(*parts, w.T, bias, act).T.contiguous()
    if _matrix_layout(w) not in (torch.sparse_csr, "DCSR"):
        raise BadInput(f"{_PAIRS}, got {_matrix_layout(w)} @ {right}; give w.to_sparse_csr()")
    if isinstance(x, Tensor) and right == torch.strided:
        _check_product(w, x)
        if isinstance(w, DCSR):
            return product(w.crow, w.col, w.values, w.rows, w.size, x, bias, act)
        return product(*csr_parts(w), None, (w.shape[0], w.shape[1]), x, bias, act)
    if isinstance(x, Tensor) and right == torch.sparse_csc:
        _check_product(w, x)
        weight = CsrMatrix(*_csr_parts(x, x.ccol_indices(), x.row_indices()), None, (x.shape[1], x.shape[0]))
        return product_of_rows(w, weight, bias, act)
    if right not in (torch.sparse_csr, "DCSR"):
        raise BadInput(f"{_PAIRS}, got {_matrix_layout(w)} @ {right}; give x.to_sparse_csr()")
    w, x = (t.to_csr() if isinstance(t, DCSR) else t for t in (w, x))
    _check_product(w, x)
    if bias is not None or act is not None:
        raise BadInput("expected no bias and no activation for a sparse product")
    return sparse_product(w, x)


_PAIRS = (
    "expected sparse_csr or DCSR @ dense or sparse_csc, sparse_csr or DCSR @ sparse_csr or DCSR, or dense @ sparse_csc"
)


def product_of_rows(x: Tensor | DCSR, w: CsrMatrix, bias: Tensor | None, act: Act | None) -> Tensor:
    """act(x @ w.T + bias), dense [rows of x, rows of w], of a sparse_csr or DCSR matrix x.

    Raises BadInput for operands that do not match.
    """
    if isinstance(x, DCSR):
        m = full(CsrMatrix(x.crow, x.col, x.values, x.rows, x.size))
    else:
        m = CsrMatrix(*csr_parts(x), None, (x.shape[0], x.shape[1]))
    if bias is not None and (bias.shape, bias.dtype) != ((w.size[0],), w.values.dtype):
        raise BadInput(f"expected a bias of shape ({w.size[0]},) and one dtype, got {tuple(bias.shape)}, {bias.dtype}")
    y = sparse_rows(m, w, (m.values, w.values, None))
    return apply_activation(y if bias is None else y + bias, act)


def _matrix_layout(matrix: Tensor | DCSR) -> torch.layout | str:
    if isinstance(matrix, DCSR):
        return "DCSR"
    if not isinstance(matrix, Tensor):
        raise BadInput(f"expected tensors or DCSR, got {type(matrix).__name__}")
    return matrix.layout


def sparse_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of sparse_csr matrices, as sparse_csr; sums that are zero are stored, too.

    Every nonzero of a is multiplied with a row of b; products with the same position are summed.
    """
    (crow, col, values), (other_crow, other_col, other_values) = csr_parts(a), csr_parts(b)
    gpu, size = kernels(values), (a.shape[0], b.shape[1])
    if gpu is not None and not _needs_gradients(values, other_values):
        left = CsrMatrix(crow, col, values, None, (a.shape[0], a.shape[1]))
        right = CsrMatrix(other_crow, other_col, other_values, None, (b.shape[0], b.shape[1]))
        if gpu.takes(left, other_values):
            starts, columns, sums = gpu.sparse_product(left, right)
            return torch.sparse_csr_tensor(starts, columns, sums, size, check_invariants=False)
    check_indices(crow, col, a.shape[1])
    check_indices(other_crow, other_col, b.shape[1])
    rows = torch.arange(a.shape[0], device=col.device).repeat_interleave(crow.diff().long())
    begins, counts = other_crow[:-1].long()[col.long()], other_crow.diff().long()[col.long()]
    left_index = torch.arange(len(col), device=col.device).repeat_interleave(counts)
    within = torch.arange(len(left_index), device=col.device) - (counts.cumsum(0) - counts)[left_index]
    right_index = begins[left_index] + within
    positions = rows[left_index] * b.shape[1] + other_col.long()[right_index]
    unique_positions, inverse = torch.unique(positions, return_inverse=True)
    sum_dtype = torch.float32 if values.dtype in NARROW else values.dtype
    sums = torch.zeros(len(unique_positions), dtype=sum_dtype, device=values.device)
    sums = sums.index_add(0, inverse, values[left_index].to(sum_dtype) * other_values[right_index].to(sum_dtype))
    starts = torch.arange(a.shape[0] + 1, device=col.device) * b.shape[1]
    starts = torch.searchsorted(unique_positions, starts).to(crow.dtype)
    columns = (unique_positions % max(b.shape[1], 1)).to(crow.dtype)
    sums = sums.to(values.dtype)
    return torch.sparse_csr_tensor(starts, columns, sums, size, check_invariants=False)


def _needs_gradients(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def csr_parts(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Row starts, columns and values of a sparse_csr matrix; raises BadInput for other tensors."""
    if _matrix_layout(matrix) != torch.sparse_csr or matrix.ndim != 2:
        description = f"{tuple(matrix.shape)}, {matrix.layout}"
        raise BadInput(f"expected a sparse_csr matrix, as returned by to_sparse_csr(), got {description}")
    return _csr_parts(matrix, matrix.crow_indices(), matrix.col_indices())


def _csr_parts(matrix: Tensor, starts: Tensor, others: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values = matrix.values()
    if values.ndim != 1:
        raise BadInput(f"expected scalar values, got blocks {tuple(values.shape)}")
    return starts, others, values


def _check_product(w: Tensor | DCSR, x: Tensor) -> None:
    """Raise BadInput if the matrices cannot be multiplied."""
    size, values = (w.size, w.values) if isinstance(w, DCSR) else (w.shape, w)
    if len(size) != 2 or x.ndim != 2 or size[1] != x.shape[0]:
        raise BadInput(f"expected matrices [m, k] and [k, n], got {tuple(size)} and {tuple(x.shape)}")
    if x.layout not in (torch.strided, torch.sparse_csr, torch.sparse_csc):
        raise BadInput(f"expected a dense or compressed matrix, got {x.layout}")
    if values.dtype != x.dtype or not x.is_floating_point():
        dtypes = f"{values.dtype} and {x.dtype}"
        raise BadInput(f"expected floating-point matrices of one dtype, got {dtypes}")
    if values.device != x.device:
        raise BadInput(f"expected one device, got {values.device} and {x.device}")
    _check_size(size)
    _check_size(x.shape)


def _check_size(size: Sequence[int]) -> None:
    if len(size) == 2:
        rows, columns = size
        if type(rows) is type(columns) is int and 0 <= rows <= MAX_SIZE and 0 <= columns <= MAX_SIZE:
            return
    raise BadInput(f"expected (rows, columns) of at most {MAX_SIZE}, got {tuple(size)!r:.80}")
