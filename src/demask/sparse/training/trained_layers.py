"""Layers with trained nonzeros: forward pass and gradients by kernels that read values in place.

A plan packs values, which pays if the next calls use it, too; but each training step changes them.
So a single layer that needs gradients runs as

    linear    y = W x by `demask::spmm`, whose gradients are the transposed product and SDDMM
    conv      kernels over planes of images (`conv_offsets`), by `demask::convolved`

on the CPU, also under torch.compile; float16 and bfloat16 are computed in float32. Data that
kernels need in addition to the indices is computed once per mask.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from demask.kernels.llvm import availability as llvm
from demask.ops.activations import Act, apply_activation
from demask.sparse import reference as dense
from demask.sparse.products.spmm_op import product
from demask.sparse.segment_program import SegmentProgram
from demask.sparse.segment_steps import ConvStep, LinearStep, Span, SparseWeight
from demask.sparse.training.conv_offsets import ConvGeometry
from demask.sparse.training.conv_op import convolved

TYPES = (torch.float32, torch.float16, torch.bfloat16)


def trained(program: SegmentProgram, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor | None:
    """The output of a program of one layer, differentiable; None if the kernels do not support it.

    Raises BadInput for shapes, dtypes and indices that do not match.
    """
    if not takes(program, inputs, weights):
        return None
    (x,), step = inputs, program.steps[0]
    dense.check(program, inputs, weights)
    if isinstance(step, LinearStep):
        z = _linear(step, x, weights)
    elif isinstance(step, ConvStep):
        z = _conv(step, program, x, weights)
    else:
        return None
    return None if z is None else apply_activation(z, step.act)


def takes(program: SegmentProgram, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> bool:
    """Whether a program is one layer on the CPU that kernels support and that needs gradients.

    Frozen layers count, too, if x needs a gradient.
    """
    if len(program.steps) != 1 or len(inputs) != 1 or program.outputs != (1,):
        return False
    step, x = program.steps[0], inputs[0]
    if not isinstance(step, ConvStep | LinearStep) or step.add is not None or not x.numel():
        return False
    if step.weight.csr is None:
        return False
    spans = [*step.weight.csr, *([] if step.bias is None else [step.bias])]
    if step.weight.scale is not None or not all(_whole(span, weights) for span in spans):
        return False
    values = weights[step.weight.values[0]]
    tensors = [x, values, *([] if step.bias is None else [weights[step.bias[0]]])]
    if x.dtype not in TYPES or any(t.dtype != x.dtype or not t.is_cpu for t in tensors):
        return False
    indices = [weights[span[0]] for span in step.weight.csr[1:]]
    if not any(t.requires_grad for t in tensors) or any(t.dtype != torch.int32 for t in indices):
        return False
    return llvm.is_installed()


def _whole(span: Span, weights: Sequence[Tensor]) -> bool:
    """Whether a span is a whole tensor."""
    number, first, end = span
    return number < len(weights) and first == 0 and weights[number].shape == (end,)


def _linear(step: LinearStep, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """x @ W.T + bias [..., out]."""
    values, crow, col = dense.matrix(step.weight, weights, x.shape[-1])
    tokens = x.reshape(-1, x.shape[-1])
    transposed = tokens.t().contiguous()  # also read by gradients
    size = (step.out, x.shape[-1])
    product_t = product(crow, col, values, None, size, transposed, dense.bias(step, weights))
    return product_t.t().contiguous().reshape(*x.shape[:-1], step.out)


def _conv(step: ConvStep, program: SegmentProgram, x: Tensor, weights: Sequence[Tensor]) -> Tensor | None:
    """The convolution, or None if offsets do not fit in 32 bits."""
    if ConvGeometry.of(step, tuple(x.shape)).too_large:
        return None
    assert step.weight.csr is not None  # `takes` tells
    values, crow, col = (weights[span[0]] for span in step.weight.csr)
    bias = dense.bias(step, weights)
    float_bias = None if bias is None else bias.float()
    return convolved(x.float(), values.float(), crow, col, float_bias, _without_activation(program)).to(x.dtype)


@functools.lru_cache(maxsize=256)
def _without_activation(program: SegmentProgram) -> str:
    """The text of the program without activation; weights: values, row starts, columns, bias."""
    step = program.steps[0]
    assert isinstance(step, ConvStep) and step.weight.csr is not None
    act: Act | None = None
    spans = enumerate(step.weight.csr)
    weight = SparseWeight(*((number, *span[1:]) for number, span in spans))
    bias = None if step.bias is None else (3, *step.bias[1:])
    return replace(program, steps=(replace(step, act=act, weight=weight, bias=bias),)).text()
