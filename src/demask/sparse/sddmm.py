"""SDDMM: the product of two dense matrices, computed only where a sparse one has entries."""

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
    """a @ b at the entries of the mask; with `transposed`, a @ b.T.

        dense [m, k] @ dense [k, n] at sparse_csr or DCSR [m, n]   -> the kind of the mask, [m, n]
        transposed: dense [m, k] and dense [n, k]

    The mask says where alone: its values are not read and may have any dtype, as in
    torch.sparse.sampled_addmm with beta=0. The result shares the mask's indices, of 32 or 64 bits,
    and stores every entry of it, zero or not. a and b: floating-point, of one dtype, differentiable
    (the gradients are sparse products). float32 is computed by kernels, float16 and bfloat16 in
    float32. BadInput for shapes, types and indices that do not fit.

    This is the gradient of a sparse weight: of w in y = w @ x it is sddmm(dy, x, w,
    transposed=True). Source: feature 004-c; Gale et al. 2020, "Sparse GPU kernels for deep
    learning", section 6.

    >>> here = DCSR(torch.tensor([1]), torch.tensor([0, 2]), torch.tensor([0, 2]), torch.ones(2),
    ...             (2, 3))  # (1, 0) and (1, 2)
    >>> sddmm(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0, 4.0, 5.0]]), here).values
    tensor([ 6., 10.])
    """
    short = isinstance(mask, DCSR)
    size = mask.size if isinstance(mask, DCSR) else tuple(mask.shape)
    _check(a, b, size, transposed)
    other = b if transposed else b.t()
    if short:
        crow, col, values, names = mask.crow, mask.col, mask.values, mask.rows
    else:
        (crow, col, values), names = csr_parts(mask), None
    if col.device != a.device:
        raise BadInput(f"expected one device, got a on {a.device} and a mask on {col.device}")
    found = sampled(CsrMatrix(crow, col, values, names, (size[0], size[1])), a, other)
    if short:
        return DCSR(mask.rows, crow, col, found, mask.size)
    return torch.sparse_csr_tensor(crow, col, found, size, check_invariants=False)


def _check(a: Tensor, b: Tensor, size: tuple[int, ...], transposed: bool) -> None:
    """Raise BadInput for matrices whose product does not have this size."""
    if not all(isinstance(t, Tensor) for t in (a, b)):
        found = f"{type(a).__name__} and {type(b).__name__}"
        raise BadInput(f"expected dense tensors, got {found}")
    if any(t.layout != torch.strided for t in (a, b)):
        raise BadInput(f"expected dense matrices, got {a.layout} and {b.layout}")
    if (a.dtype, a.device) != (b.dtype, b.device) or not a.is_floating_point():
        raise BadInput(
            f"expected floating-point matrices of one dtype on one device, got {a.dtype} on "
            f"{a.device} and {b.dtype} on {b.device}"
        )
    there = a.ndim == b.ndim == len(size) == 2
    inner, outer = (1, 0) if transposed else (0, 1)
    if not there or (a.shape[0], b.shape[outer], a.shape[1]) != (*size, b.shape[inner]):
        wanted = "[n, k]" if transposed else "[k, n]"
        raise BadInput(
            f"expected a [m, k], b {wanted} and a mask [m, n], got {tuple(a.shape)}, "
            f"{tuple(b.shape)} and {size}" + _advice(a, b, size, transposed)
        )


def _advice(a: Tensor, b: Tensor, size: tuple[int, ...], transposed: bool) -> str:
    """What to do where the other reading of b would fit."""
    other = tuple(b.shape) if transposed else tuple(b.shape[::-1])  # [k, n]
    if b.ndim != 2 or (other[0], other[1]) != (a.shape[-1], size[-1]):
        return ""
    return f"; give transposed={not transposed}"
