"""The ops of gradients: `demask::turned`, the transposed product, and `demask::sampled`, SDDMM; and
whether there are kernels for a GPU.

    torch.ops.demask.turned(Tensor crow, Tensor col, Tensor values, Tensor? rows, int[] size,
                            Tensor y) -> Tensor
    torch.ops.demask.sampled(Tensor crow, Tensor col, Tensor? rows, int[] size, Tensor a,
                             Tensor b) -> Tensor

Kernels compute them on a GPU, and in float32 on the CPU; ATen ops otherwise. Each is the other's
gradient, and `demask::spmm`.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from demask.kernels.llvm import availability as llvm
from demask.sparse.csr_matrix import CsrMatrix, like, row_of
from demask.sparse.products.gpu_formats import form_of
from demask.sparse.reference import check_indices

AT_ONCE = 1 << 22  # elements that are gathered at once where nothing multiplies in place

_LIBRARY = Library("demask", "FRAGMENT")
for _line in (
    "turned(Tensor crow, Tensor col, Tensor values, Tensor? rows, int[] size, Tensor y) -> Tensor",
    "sampled(Tensor crow, Tensor col, Tensor? rows, int[] size, Tensor a, Tensor b) -> Tensor",
):
    _LIBRARY.define(_line, tags=(torch.Tag.pt2_compliant_tag,))


def kernels(x: Tensor) -> ModuleType | None:
    """`sparse.gpu` for tensors on a GPU, if Triton is there."""
    return _loaded() if x.is_cuda else None


@lru_cache(maxsize=1)
def _loaded() -> ModuleType | None:
    if find_spec("triton") is None:
        return None
    from demask.sparse.products import gpu_products as gpu

    return gpu


def turned(m: CsrMatrix, y: Tensor) -> Tensor:
    """The transposed matrix @ y: [columns, n] with y [rows, n]."""
    return torch.ops.demask.turned.default(m.crow, m.col, m.values, m.names, m.size, y)


def sampled(m: CsrMatrix, a: Tensor, b: Tensor) -> Tensor:
    """a[row] · b[column] at every nonzero, in the order of m: a [rows, n], b [columns, n]. The
    values of m are not read."""
    return torch.ops.demask.sampled.default(m.crow, m.col, m.names, m.size, a, b)


def parts(count: int, n: int) -> list[slice]:
    """Nonzeros in parts whose products with n columns are held at once."""
    step = max(1, AT_ONCE // max(n, 1))
    return [slice(first, first + step) for first in range(0, count, step)]


def _turned(
    crow: Tensor, col: Tensor, values: Tensor, rows: Tensor | None, size: Any, y: Tensor
) -> Tensor:
    m = CsrMatrix(crow, col, values, rows, (size[0], size[1]))
    gpu = kernels(y)
    if gpu is not None and gpu.takes(m, y):
        return gpu.spmm_turned(m, y)
    there = form_of(m).turned(m)
    across = there.crow, there.col, values.index_select(0, there.order)
    return torch.ops.demask.spmm.default(*across, None, [m.size[1], m.size[0]], y, None, "", [])


def _sampled(
    crow: Tensor, col: Tensor, rows: Tensor | None, size: Any, a: Tensor, b: Tensor
) -> Tensor:
    m = CsrMatrix(crow, col, a, rows, (size[0], size[1]))
    gpu = kernels(a)
    if gpu is not None and gpu.takes(m, b):
        return gpu.sddmm(m, a, b)
    if a.dtype in (torch.float16, torch.bfloat16):
        return _sampled(crow, col, rows, size, a.float(), b.float()).to(a.dtype)
    if a.device.type == "cpu" and a.dtype == torch.float32 and llvm.installed():
        from demask.sparse.products import sddmm_cpu as sample

        return sample.sampled(m, a, b)
    check_indices(m.crow, m.col, m.size[1])
    row = row_of(m)
    made = [(a[row[p]] * b[col[p].long()]).sum(1) for p in parts(len(row), a.shape[1])]
    return torch.cat(made) if made else a.new_zeros(0)


def _fake_turned(
    crow: Tensor, col: Tensor, values: Tensor, rows: Tensor | None, size: Any, y: Tensor
) -> Tensor:
    return like(y, size[1], y.shape[1]) if y.is_cuda else y.new_empty(size[1], y.shape[1])


def _fake_sampled(
    crow: Tensor, col: Tensor, rows: Tensor | None, size: Any, a: Tensor, b: Tensor
) -> Tensor:
    return a.new_empty(col.shape[0])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    crow, col, values, rows, ctx.size, y = inputs
    ctx.save_for_backward(crow, col, values, rows, y)


def _keep_sampled(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    crow, col, rows, ctx.size, a, b = inputs
    ctx.save_for_backward(crow, col, rows, a, b)


def _slopes(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
    crow, col, values, rows, y = ctx.saved_tensors
    m = CsrMatrix(crow, col, values, rows, tuple(ctx.size))
    of_values = sampled(m, y, slope) if ctx.needs_input_grad[2] else None
    of_y = _product(m, slope) if ctx.needs_input_grad[5] else None
    return None, None, of_values, None, None, of_y


def _slopes_sampled(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
    crow, col, rows, a, b = ctx.saved_tensors
    m = CsrMatrix(crow, col, slope, rows, tuple(ctx.size))
    of_a = _product(m, b) if ctx.needs_input_grad[4] else None
    of_b = turned(m, a) if ctx.needs_input_grad[5] else None
    return None, None, None, None, of_a, of_b


def _product(m: CsrMatrix, x: Tensor) -> Tensor:
    """m @ x, without bias and activation."""
    return torch.ops.demask.spmm.default(m.crow, m.col, m.values, m.names, m.size, x, None, "", [])


_LIBRARY.impl("turned", _turned, "CompositeExplicitAutograd")
_LIBRARY.impl("sampled", _sampled, "CompositeExplicitAutograd")
torch.library.register_fake("demask::turned", _fake_turned, lib=_LIBRARY)
torch.library.register_fake("demask::sampled", _fake_sampled, lib=_LIBRARY)
torch.library.register_autograd("demask::turned", _slopes, setup_context=_keep, lib=_LIBRARY)
torch.library.register_autograd(
    "demask::sampled", _slopes_sampled, setup_context=_keep_sampled, lib=_LIBRARY
)
