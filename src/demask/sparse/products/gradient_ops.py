"""The ops of gradients: `demask::spmm_transposed` and `demask::sampled` (SDDMM).

    torch.ops.demask.spmm_transposed(Tensor crow, Tensor col, Tensor values, Tensor? rows,
                            int[] size, Tensor y) -> Tensor
    torch.ops.demask.sampled(Tensor crow, Tensor col, Tensor? rows, int[] size, Tensor a,
                             Tensor b) -> Tensor

Kernels compute them on a GPU and on the CPU; otherwise, ATen ops. They are the gradients
of each other and of `demask::spmm`.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from demask.exec.steps.segment_weights import check_indices
from demask.kernels.llvm import availability as llvm
from demask.sparse.csr_matrix import CsrMatrix, like, row_of
from demask.sparse.products.gpu_formats import formats_of

AT_ONCE = 1 << 22  # elements that ATen ops gather at once

_LIBRARY = Library("demask", "FRAGMENT")
for _line in (
    "spmm_transposed(Tensor crow, Tensor col, Tensor values, Tensor? rows, int[] size, Tensor y) -> Tensor",
    "sampled(Tensor crow, Tensor col, Tensor? rows, int[] size, Tensor a, Tensor b) -> Tensor",
):
    _LIBRARY.define(_line, tags=(torch.Tag.pt2_compliant_tag,))


def kernels(x: Tensor) -> ModuleType | None:
    """`gpu_products` for tensors on a GPU if Triton is installed, else None."""
    return _load_gpu_products() if x.is_cuda else None


@lru_cache(maxsize=1)
def _load_gpu_products() -> ModuleType | None:
    if find_spec("triton") is None:
        return None
    from demask.sparse.products import gpu_products as gpu

    return gpu


def transposed_product(m: CsrMatrix, y: Tensor) -> Tensor:
    """The transpose of m times y: [columns, n] with y [rows, n]."""
    return torch.ops.demask.spmm_transposed.default(m.crow, m.col, m.values, m.names, m.size, y)


def sampled(m: CsrMatrix, a: Tensor, b: Tensor) -> Tensor:
    """a[row] · b[column] at every nonzero, in the order of m: a [rows, n], b [columns, n].

    Values of m are not read.
    """
    return torch.ops.demask.sampled.default(m.crow, m.col, m.names, m.size, a, b)


def parts(count: int, n: int) -> list[slice]:
    """Slices of nonzeros whose products with n columns fit in memory at once."""
    step = max(1, AT_ONCE // max(n, 1))
    return [slice(first, first + step) for first in range(0, count, step)]


def _transposed_product(crow: Tensor, col: Tensor, values: Tensor, rows: Tensor | None, size: Any, y: Tensor) -> Tensor:
    m = CsrMatrix(crow, col, values, rows, (size[0], size[1]))
    gpu = kernels(y)
    if gpu is not None and gpu.takes(m, y):
        return gpu.spmm_transposed(m, y)
    transpose = formats_of(m).transposed(m)
    transposed = transpose.crow, transpose.col, values.index_select(0, transpose.order)
    return torch.ops.demask.spmm.default(*transposed, None, [m.size[1], m.size[0]], y, None, "", [])


def _sampled(crow: Tensor, col: Tensor, rows: Tensor | None, size: Any, a: Tensor, b: Tensor) -> Tensor:
    m = CsrMatrix(crow, col, a, rows, (size[0], size[1]))
    gpu = kernels(a)
    if gpu is not None and gpu.takes(m, b):
        return gpu.sddmm(m, a, b)
    if a.dtype in (torch.float16, torch.bfloat16):
        return _sampled(crow, col, rows, size, a.float(), b.float()).to(a.dtype)
    if a.device.type == "cpu" and a.dtype in (torch.float32, torch.float64) and llvm.is_installed():
        from demask.sparse.products import cpu_products

        return cpu_products.sddmm(m, a, b)
    check_indices(m.crow, m.col, m.size[1])
    row = row_of(m)
    sums = [(a[row[p]] * b[col[p].long()]).sum(1) for p in parts(len(row), a.shape[1])]
    return torch.cat(sums) if sums else a.new_zeros(0)


def _fake_transposed_product(
    crow: Tensor, col: Tensor, values: Tensor, rows: Tensor | None, size: Any, y: Tensor
) -> Tensor:
    return like(y, size[1], y.shape[1]) if y.is_cuda else y.new_empty(size[1], y.shape[1])


def _fake_sampled(crow: Tensor, col: Tensor, rows: Tensor | None, size: Any, a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(col.shape[0])


def _save_transposed(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    crow, col, values, rows, ctx.size, y = inputs
    ctx.save_for_backward(crow, col, values, rows, y)


def _save_sampled(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    crow, col, rows, ctx.size, a, b = inputs
    ctx.save_for_backward(crow, col, rows, a, b)


def _transposed_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    crow, col, values, rows, y = ctx.saved_tensors
    m = CsrMatrix(crow, col, values, rows, tuple(ctx.size))
    of_values = sampled(m, y, grad) if ctx.needs_input_grad[2] else None
    of_y = _product(m, grad) if ctx.needs_input_grad[5] else None
    return None, None, of_values, None, None, of_y


def _sampled_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    crow, col, rows, a, b = ctx.saved_tensors
    m = CsrMatrix(crow, col, grad, rows, tuple(ctx.size))
    of_a = _product(m, b) if ctx.needs_input_grad[4] else None
    of_b = transposed_product(m, a) if ctx.needs_input_grad[5] else None
    return None, None, None, None, of_a, of_b


def _product(m: CsrMatrix, x: Tensor) -> Tensor:
    return torch.ops.demask.spmm.default(m.crow, m.col, m.values, m.names, m.size, x, None, "", [])


_LIBRARY.impl("spmm_transposed", _transposed_product, "CompositeExplicitAutograd")
_LIBRARY.impl("sampled", _sampled, "CompositeExplicitAutograd")
torch.library.register_fake("demask::spmm_transposed", _fake_transposed_product, lib=_LIBRARY)
torch.library.register_fake("demask::sampled", _fake_sampled, lib=_LIBRARY)
torch.library.register_autograd(
    "demask::spmm_transposed", _transposed_gradients, setup_context=_save_transposed, lib=_LIBRARY
)
torch.library.register_autograd("demask::sampled", _sampled_gradients, setup_context=_save_sampled, lib=_LIBRARY)
