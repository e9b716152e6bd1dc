"""The op `demask::sparse_rows`: products of two sparse matrices as a dense one, and their gradients.

    torch.ops.demask.sparse_rows(Tensor crow, Tensor col, Tensor? values, Tensor w_crow, Tensor w_col,
                                 Tensor? w_values, Tensor? y, int columns) -> Tensor

    sum over t, o, i of x[t, i] * w[o, i] * y[t, o]

with x [rows, columns] and w [n, columns] in CSR and y [rows, n] dense. One of values, w_values and y is
None, and the result is its factor: x @ w.T, or the gradients of its nonzeros for the gradient y. So the
op is its own gradient, of any order, and results have one number per nonzero.

On the CPU only the nonzeros are multiplied where x has few (`FEW`); else, and on other devices, x is
decompressed (never w).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.library import Library

from demask.errors import BadInput
from demask.exec.steps.segment_steps import MAX_SIZE
from demask.exec.steps.segment_weights import check_indices
from demask.kernels.llvm import availability as llvm
from demask.sparse.csr_matrix import CSR_NUMBERS, CsrMatrix, row_of
from demask.sparse.products.gpu_formats import formats_of
from demask.sparse.products.gradient_ops import sampled, transposed_product
from demask.sparse.products.spmm_op import COMPILED, INDICES, NARROW, product

FEW = 1 / 16  # share of nonzeros of x up to which multiplying them one by one takes less time

_LIBRARY = Library("demask", "FRAGMENT")
_LIBRARY.define(
    "sparse_rows(Tensor crow, Tensor col, Tensor? values, Tensor w_crow, Tensor w_col, Tensor? w_values, Tensor? y,"
    " int columns) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
Operands = Sequence[Tensor | None]


def sparse_rows(x: CsrMatrix, w: CsrMatrix, operands: Operands) -> Tensor:
    """The factor of the operand (values of x, values of w, y) that is None; values of the matrices are not read.

    Raises BadInput for indices, shapes and dtypes that do not match.
    """
    values, w_values, y = operands
    return torch.ops.demask.sparse_rows.default(x.crow, x.col, values, w.crow, w.col, w_values, y, x.size[1])


def _checked(arguments: tuple[Any, ...]) -> tuple[CsrMatrix, CsrMatrix, Operands, int, tuple[int, ...]]:
    """(x, w, operands, number and shape of the one that is None), except for indices."""
    crow, col, values, w_crow, w_col, w_values, y, columns = arguments
    operands: Operands = (values, w_values, y)
    numbers = [t for t in operands if t is not None]
    x, w = (
        CsrMatrix(start, number, numbers[0] if len(numbers) else number, None, (start.numel() - 1, columns))
        for start, number in ((crow, col), (w_crow, w_col))
    )
    tensors = [*x[:2], *w[:2], *numbers]
    if len(numbers) != 2 or any(t.layout != torch.strided or t.device != crow.device for t in tensors):
        raise BadInput("expected two dense operands on one device")
    if any(t.ndim != 1 or t.dtype not in INDICES for t in tensors[:4]) or not crow.numel() or not w_crow.numel():
        raise BadInput(f"expected row starts and columns in int32 or int64, got {[t.dtype for t in tensors[:4]]}")
    if len({t.dtype for t in numbers}) != 1 or not numbers[0].is_floating_point():
        raise BadInput(f"expected floating-point numbers of one dtype, got {[t.dtype for t in numbers]}")
    shapes = (tuple(col.shape), tuple(w_col.shape), (x.size[0], w.size[0]))
    if any(t is not None and t.shape != shape for t, shape in zip(operands, shapes, strict=True)):
        raise BadInput(f"expected operands {shapes}, got {[None if t is None else tuple(t.shape) for t in operands]}")
    number = next(k for k, t in enumerate(operands) if t is None)
    return x, w, operands, number, shapes[number]


def _compute(*arguments: Any) -> Tensor:
    x, w, operands, number, shape = _checked(arguments)
    check_indices(x.crow, x.col, x.size[1])
    if max(*x.size, *w.size, x.col.numel(), w.col.numel()) > MAX_SIZE:
        raise BadInput(f"expected at most {MAX_SIZE} rows, columns and nonzeros")
    dtype = x.values.dtype
    if dtype in NARROW:
        operands = [None if t is None else t.float() for t in operands]
    is_few = x.col.numel() <= FEW * x.size[0] * x.size[1]
    if is_few and x.crow.device.type == "cpu" and dtype in (*COMPILED, torch.float64) and llvm.is_installed():
        return _by_kernel(x, w, operands, number, shape).to(dtype)
    return _decompressed(x, w, operands, number).to(dtype)


def _by_kernel(x: CsrMatrix, w: CsrMatrix, operands: Operands, number: int, shape: tuple[int, ...]) -> Tensor:
    """The result, in the dtype of the operands, by `kernels.cpu.sparse_rows`."""
    from demask.kernels.cpu.sparse_rows import CALL, OPERANDS, SparseRows  # needs llvmlite
    from demask.kernels.llvm.isa import host
    from demask.kernels.thread_team import job_of_calls
    from demask.sparse.products.cpu_products import shares, threads_for

    transpose = formats_of(w).transposed(w)
    example = next(t for t in operands if t is not None)
    threads = threads_for(x.col.numel() * (w.col.numel() // max(w.size[1], 1)))
    # each thread sums over its rows, which share the nonzeros of w
    result = example.new_zeros((threads, *shape) if number == 1 else shape)
    sources = [
        result if t is None else t.index_select(0, transpose.order) if k == 1 else t.contiguous()
        for k, t in enumerate(operands)
    ]
    crow, col = (t.to(torch.int32).contiguous() for t in x[:2])
    ends, calls = shares(crow, threads), np.zeros(threads, CALL)
    indices = {"crow": crow, "col": col, "w_crow": transpose.crow, "w_col": transpose.col}
    for name, t in {**indices, **dict(zip(OPERANDS, sources, strict=True))}.items():
        calls[name] = t.data_ptr()
    if number == 1:
        calls["w_values"] += result.element_size() * shape[0] * np.arange(threads)
    calls["pitch"] = w.size[0] * result.element_size()
    calls["begin"], calls["end"] = ends[:-1], ends[1:]
    job_of_calls(SparseRows(OPERANDS[number], CSR_NUMBERS[result.dtype]), calls, host()).run(threads)
    if number != 1:
        return result
    totals = result.sum(0)
    return torch.empty_like(totals).index_copy_(0, transpose.order, totals)


def _decompressed(x: CsrMatrix, w: CsrMatrix, operands: Operands, number: int) -> Tensor:
    """The result by products of w and dense matrices."""
    values, w_values, y = operands
    position = row_of(x) * x.size[1] + x.col
    if values is None:
        assert w_values is not None and y is not None
        of_x = transposed_product(w._replace(values=w_values), y.t().contiguous())  # [columns, rows]
        return of_x.t().reshape(-1).index_select(0, position)
    dense = values.new_zeros(x.size[0] * x.size[1]).index_add_(0, position, values).view(x.size).t().contiguous()
    if y is not None:
        return sampled(w, y.t().contiguous(), dense)
    assert w_values is not None
    return product(w.crow, w.col, w_values, None, w.size, dense).t().contiguous()


def _fake(*arguments: Any) -> Tensor:
    x, _, _, _, shape = _checked(arguments)
    return x.values.new_empty(shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.columns = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients: the factors of the two operands, with the gradient of the result in place of the third."""
    crow, col, values, w_crow, w_col, w_values, y = ctx.saved_tensors
    operands = [grad if t is None else t for t in (values, w_values, y)]
    gradients: list[Tensor | None] = [None] * 8
    for k, argument in enumerate((2, 5, 6)):
        if ctx.needs_input_grad[argument]:
            others = [None if k == j else t for j, t in enumerate(operands)]
            gradients[argument] = torch.ops.demask.sparse_rows.default(
                crow, col, others[0], w_crow, w_col, *others[1:], ctx.columns
            )
    return tuple(gradients)


_LIBRARY.impl("sparse_rows", _compute, "CompositeExplicitAutograd")
torch.library.register_fake("demask::sparse_rows", _fake, lib=_LIBRARY)
torch.library.register_autograd("demask::sparse_rows", _gradients, setup_context=_save, lib=_LIBRARY)
