"""Programs on a GPU.

A layer that is one product runs as `demask::spmm`, other layers with their dense weights, which a
kernel decompresses, and other steps as ATen ops. Gradients are those of the ops: of x by the
transposed product, of values by SDDMM.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from demask.exec.steps import reference
from demask.exec.steps import segment_weights as stored
from demask.exec.steps.segment_program import SegmentProgram
from demask.exec.steps.segment_rows import call
from demask.exec.steps.segment_steps import Layer, is_conv, is_pixelwise
from demask.ops.activations import apply_activation
from demask.sparse.csr_matrix import CsrMatrix
from demask.sparse.products.gradient_ops import kernels


def run(program: SegmentProgram, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    """The outputs, as those of `reference.run`; they may be inputs, or views of one another."""
    return reference.run(program, inputs, weights, _run_layer)


def _run_layer(step: Layer, kind: str, operands: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The output of a layer."""
    x, bias = operands[0], stored.bias(step, weights)
    bias = None if bias is None else bias.to(x.dtype)
    values = stored.part(step.weight.values, weights)
    csr, fits = step.weight.csr, step.weight.scale is None and values.dtype == x.dtype
    if csr is None or not fits or not _is_product(step):
        needs_gradient = torch.is_grad_enabled() and values.requires_grad
        matrix = None if needs_gradient or step.weight.scale is not None else _dense_matrix
        weight = stored.weight(step, weights, x.shape, x.dtype, matrix)
        return call(step, kind, operands, weight, bias)
    crow, col = (stored.part(span, weights) for span in csr[1:])
    tokens = x.movedim(1, -1) if is_conv(step) else x
    positions = tokens.reshape(-1, tokens.shape[-1])
    fused_act = step.act if step.add is None else None
    name, numbers = fused_act or ("", ())
    product = torch.ops.demask.spmm.default(
        crow, col, values, None, [step.fields.out, positions.shape[1]], positions.t(), bias, name, list(numbers)
    )
    y = product.t().reshape(*tokens.shape[:-1], step.fields.out)
    y = y.movedim(-1, 1) if is_conv(step) else y
    return y if step.add is None else apply_activation(y + operands[1], step.act)


def _is_product(step: Layer) -> bool:
    return is_pixelwise(step) and not (is_conv(step) and step.fields.groups > 1)


def _dense_matrix(step: Layer, weights: Sequence[Tensor], columns: int, dtype: torch.dtype | None) -> Tensor:
    """The matrix of a step [out, columns], by a GPU kernel if possible."""
    if step.weight.csr is None:
        return stored.scattered(step, weights, columns, dtype)
    values, crow, col = (stored.part(span, weights) for span in step.weight.csr)
    m = CsrMatrix(crow, col, values, None, (step.fields.out, columns))
    gpu = kernels(values)
    if gpu is None or not gpu.takes(m, values):
        return stored.scattered(step, weights, columns, dtype)
    return gpu.dense_of(m).to(dtype or values.dtype)
