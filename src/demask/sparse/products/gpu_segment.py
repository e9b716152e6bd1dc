"""Programs on a GPU.

A layer that is one product runs as `demask::spmm`, other layers with their dense weights, which a
kernel decompresses, and other steps as ATen ops. Gradients are those of the ops: of x by the
transposed product, of values by SDDMM.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from demask.ops.activations import apply_activation
from demask.sparse import reference as dense
from demask.sparse.csr_matrix import CsrMatrix
from demask.sparse.products.gradient_ops import kernels
from demask.sparse.segment_program import SegmentProgram
from demask.sparse.segment_steps import ConvStep, LinearStep


def run(program: SegmentProgram, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    """The outputs, as those of `reference.run`; they may be inputs, or views of one another."""
    return dense.run(program, inputs, weights, _run_layer)


def _run_layer(step: ConvStep | LinearStep, kind: str, operands: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The output of a layer."""
    x, bias = operands[0], dense.bias(step, weights)
    bias = None if bias is None else bias.to(x.dtype)
    values = dense.part(step.weight.values, weights)
    csr, fits = step.weight.csr, step.weight.scale is None and values.dtype == x.dtype
    if csr is None or not fits or not _is_product(step):
        needs_gradient = torch.is_grad_enabled() and values.requires_grad
        matrix = None if needs_gradient or step.weight.scale is not None else _dense_matrix
        weight = dense.weight(step, weights, x.shape, x.dtype, matrix)
        return dense.call(step, kind, operands, weight, bias)
    crow, col = (dense.part(span, weights) for span in csr[1:])
    tokens = x if isinstance(step, LinearStep) else x.movedim(1, -1)
    positions = tokens.reshape(-1, tokens.shape[-1])
    fused_act = step.act if step.add is None else None
    name, numbers = fused_act or ("", ())
    product = torch.ops.demask.spmm.default(
        crow, col, values, None, [step.out, positions.shape[1]], positions.t(), bias, name, list(numbers)
    )
    y = product.t().reshape(*tokens.shape[:-1], step.out)
    y = y if isinstance(step, LinearStep) else y.movedim(-1, 1)
    return y if step.add is None else apply_activation(y + operands[1], step.act)


def _is_product(step: ConvStep | LinearStep) -> bool:
    if isinstance(step, LinearStep):
        return True
    is_pointwise = (step.kernel, step.stride, step.groups) == ((1, 1), (1, 1), 1)
    return is_pointwise and step.padding == ((0, 0), (0, 0)) and not step.transposed


def _dense_matrix(
    step: ConvStep | LinearStep, weights: Sequence[Tensor], columns: int, dtype: torch.dtype | None
) -> Tensor:
    """The matrix of a step [out, columns], by a GPU kernel if possible."""
    if step.weight.csr is None:
        return dense.scattered(step, weights, columns, dtype)
    values, crow, col = (dense.part(span, weights) for span in step.weight.csr)
    m = CsrMatrix(crow, col, values, None, (step.out, columns))
    gpu = kernels(values)
    if gpu is None or not gpu.takes(m, values):
        return dense.scattered(step, weights, columns, dtype)
    return gpu.densified(m).to(dtype or values.dtype)
