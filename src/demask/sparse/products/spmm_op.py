"""The op `demask::spmm`: a matrix in CSR or DCSR times a dense one, with gradients.

torch.ops.demask.spmm(Tensor crow, Tensor col, Tensor values, Tensor? rows, int[] size,
                      Tensor x, Tensor? bias, str act, float[] numbers) -> Tensor

It runs CPU kernels (`cpu_products`), GPU kernels (`gpu_products`) or ATen ops, depending on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from demask.compat.dispatch import needs_no_dispatch
from demask.errors import BadInput
from demask.exec.steps.segment_weights import check_indices
from demask.kernels.llvm import availability as llvm
from demask.ops.activations import ACTIVATIONS, Act, apply_activation
from demask.sparse.csr_matrix import CsrMatrix, like, row_of
from demask.sparse.products.gradient_ops import kernels, parts, sampled, transposed_product

NARROW = (torch.float16, torch.bfloat16)
COMPILED = (torch.float32, *NARROW)  # dtypes that plans compute in float32
INDICES = (torch.int32, torch.int64)

_LIBRARY = Library("demask", "FRAGMENT")
_LIBRARY.define(
    "spmm(Tensor crow, Tensor col, Tensor values, Tensor? rows, int[] size, Tensor x, Tensor? bias,"
    " str act, float[] numbers) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def product(
    crow: Tensor,
    col: Tensor,
    values: Tensor,
    rows: Tensor | None,
    size: tuple[int, int],
    x: Tensor,
    bias: Tensor | None = None,
    act: Act | None = None,
) -> Tensor:
    """act(matrix @ x + bias) [size[0], n].

    rows: row index of each row of the CSR arrays; by default all rows are stored.
    """
    if needs_no_dispatch((crow, col, values, rows, x, bias)):
        m = CsrMatrix(crow, col, values, rows, size)
        check(m, x, bias, act)
        return _compute_on_cpu(m, x, bias, act)
    name, numbers = act or ("", ())
    return torch.ops.demask.spmm.default(crow, col, values, rows, size, x, bias, name, list(map(float, numbers)))


def check(m: CsrMatrix, x: Tensor, bias: Tensor | None, act: Act | None) -> None:
    """Raise BadInput for operands that cannot be multiplied; index values are not checked."""
    crow, col, values, names, size = m
    index_dtype, dtype, device = col.dtype, x.dtype, x.device
    if index_dtype not in INDICES or crow.dtype != index_dtype or (names is not None and names.dtype != index_dtype):
        raise BadInput(
            f"expected indices in int32 or int64, got {[t.dtype for t in (crow, col, names) if t is not None]}"
        )
    if not dtype.is_floating_point or values.dtype != dtype or (bias is not None and bias.dtype != dtype):
        dtypes = [t.dtype for t in (values, x, bias) if t is not None]
        raise BadInput(f"expected floating-point numbers of one dtype, got {dtypes}")
    for t in (crow, col, values, names, x, bias):
        if t is not None and (t.layout != torch.strided or t.device != device):
            raise BadInput(f"expected dense tensors on {device}")
    count = size[0] if names is None else names.numel()
    shapes = crow.shape, col.shape, x.shape[0] if x.ndim == 2 else None
    if shapes != ((count + 1,), values.shape, size[1]) or col.ndim != 1:
        raise BadInput(
            f"expected row starts, columns and x for a matrix of {size}, got {(*map(tuple, shapes[:2]), shapes[2])}"
        )
    if bias is not None and bias.shape != (size[0],):
        raise BadInput(f"expected a bias of shape ({size[0]},), got {tuple(bias.shape)}")
    if act is not None and (act[0] not in ACTIVATIONS or len(act[1]) != ACTIVATIONS[act[0]].count):
        raise BadInput(f"expected an activation, got {act}")


def _matrix_of(arguments: Sequence[Any]) -> tuple[CsrMatrix, Tensor, Tensor | None, Act | None]:
    """(matrix, x, bias, activation) from the arguments of the op. Raises BadInput."""
    crow, col, values, rows, size, x, bias, act, numbers = arguments
    if len(size) != 2:
        raise BadInput(f"expected two sizes, got {tuple(size)}")
    m = CsrMatrix(crow, col, values, rows, (size[0], size[1]))
    activation = (act, tuple(numbers)) if act else None
    check(m, x, bias, activation)
    return m, x, bias, activation


def on_cpu(*arguments: Any) -> Tensor:
    """The implementation for the CPU."""
    return _compute_on_cpu(*_matrix_of(arguments))


def _compute_on_cpu(m: CsrMatrix, x: Tensor, bias: Tensor | None, act: Act | None) -> Tensor:
    if x.dtype not in (*COMPILED, torch.float64) or (multiplied := _kernels_of_cpu()) is None:
        return _by_aten(m, x, bias, act)
    if x.dtype in NARROW:
        wide = None if bias is None else bias.float()
        return multiplied(m, x.float(), wide, act).to(x.dtype)
    return multiplied(m, x, bias, act)


@cache
def _kernels_of_cpu() -> Callable[[CsrMatrix, Tensor, Tensor | None, Act | None], Tensor] | None:
    """The product by kernels; None without llvmlite."""
    if not llvm.is_installed():
        return None
    from demask.sparse.products.cpu_products import multiplied

    return multiplied


def on_other_devices(*arguments: Any) -> Tensor:
    """The implementation for other devices; on a GPU, the output has the memory order of x."""
    m, x, bias, act = _matrix_of(arguments)
    gpu = kernels(x)
    if gpu is not None and gpu.takes(m, x):
        return gpu.spmm(m, x, bias, act)
    y = _by_aten(m, x, bias, act)
    return like(x, *y.shape).copy_(y) if x.is_cuda else y


def _by_aten(m: CsrMatrix, x: Tensor, bias: Tensor | None, act: Act | None) -> Tensor:
    """The product by ATen ops; float16 and bfloat16 in float32."""
    if x.dtype not in NARROW:
        return _gathered(m, x, bias, act)
    wide = None if bias is None else bias.float()
    return _gathered(m._replace(values=m.values.float()), x.float(), wide, act).to(x.dtype)


def _gathered(m: CsrMatrix, x: Tensor, bias: Tensor | None, act: Act | None) -> Tensor:
    """The product by ATen ops that gather rows of x."""
    check_indices(m.crow, m.col, m.size[1])
    row = row_of(m)
    if len(row) and not 0 <= int(row.min()) <= int(row.max()) < m.size[0]:
        raise BadInput(f"expected rows below {m.size[0]}, got {int(row.min())} to {int(row.max())}")
    sums = x.new_zeros(m.size[0], x.shape[1])
    for part in parts(len(row), x.shape[1]):
        sums.index_add_(0, row[part], m.values[part, None] * x[m.col[part].long()])
    return apply_activation(sums if bias is None else sums + bias[:, None], act)


def fake(*arguments: Any) -> Tensor:
    """The output without values, for tracing."""
    m, x, _, _ = _matrix_of(arguments)
    columns = x.shape[1]
    return like(x, m.size[0], columns) if x.is_cuda else x.new_empty(m.size[0], columns)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    crow, col, values, rows, size, x, bias, act, numbers = inputs
    ctx.save_for_backward(crow, col, values, rows, x, bias)
    ctx.size, ctx.act = size, (act, tuple(numbers)) if act else None


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of values, x and bias, by SDDMM and the transposed product."""
    crow, col, values, rows, x, bias = ctx.saved_tensors
    m = CsrMatrix(crow, col, values, rows, tuple(ctx.size))
    if ctx.act is not None:
        grad = _before_activation(m, x, bias, ctx.act, grad)
    if not grad.is_cuda:
        grad = grad.contiguous()  # once for both gradients: that of a layer is transposed
    of_x = of_values = None
    if ctx.needs_input_grad[5]:
        of_x = transposed_product(m, grad)
    if ctx.needs_input_grad[2]:
        of_values = sampled(m, grad, x)
    of_bias = grad.sum(1) if bias is not None and ctx.needs_input_grad[6] else None
    return None, None, of_values, None, None, of_x, of_bias, None, None


def _before_activation(m: CsrMatrix, x: Tensor, bias: Tensor | None, act: Act, grad: Tensor) -> Tensor:
    """The gradient of the input of the activation, which is computed again."""
    create_graph = torch.is_grad_enabled()
    z = product(*m[:3], m.names, m.size, x, bias)
    with torch.enable_grad():
        z = z.view_as(z) if create_graph else z.detach().requires_grad_()
        y = apply_activation(z, act)
        (z_grad,) = torch.autograd.grad(y, z, grad, create_graph=create_graph)
    return z_grad


_LIBRARY.impl("spmm", on_cpu, "CPU")
_LIBRARY.impl("spmm", on_other_devices, "CompositeExplicitAutograd")
torch.library.register_fake("demask::spmm", fake, lib=_LIBRARY)
torch.library.register_autograd("demask::spmm", _gradients, setup_context=_save, lib=_LIBRARY)
