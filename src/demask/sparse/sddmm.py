"""SDDMM: the product of two dense matrices, computed only at the entries of a sparse one."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from demask.errors import BadInput
from demask.sparse.csr_matrix import CsrMatrix
from demask.sparse.functional import DCSR, csr_parts
from demask.sparse.products.gradient_ops import sampled


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
    _check(a, b, size, transposed)
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


def _check(a: Tensor, b: Tensor, size: tuple[int, ...], transposed: bool) -> None:
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
            f"{tuple(b.shape)} and {size}" + _advice(a, b, size, transposed)
        )


def _advice(a: Tensor, b: Tensor, size: tuple[int, ...], transposed: bool) -> str:
    """Hint for the case that b has the shape of the other value of `transposed`."""
    other = tuple(b.shape) if transposed else tuple(b.shape[::-1])  # [k, n]
    if b.ndim != 2 or (other[0], other[1]) != (a.shape[-1], size[-1]):
        return ""
    return f"; give transposed={not transposed}"
