"""Layers whose nonzeros are trained: forward and gradients by kernels that read values in place.

A plan packs values, which pays if the next calls use it too; a step of training changes them. So a
layer of its own that gradients are wanted of is run as

    linear    y = W x by `demask::spmm`, whose gradients are the transposed product and SDDMM
    conv      kernels over planes of images (`planes`), by `demask::convolved`

On the CPU, and under torch.compile as well; float16 and bfloat16 in float32. What kernels need
beside the indices is made once per mask.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from demask.kernels.llvm import availability as llvm
from demask.ops.activations import Act, activate
from demask.sparse import reference as dense
from demask.sparse.products.spmm_op import product
from demask.sparse.segment_program import ConvStep, LinearStep, SegmentProgram, Span, SparseWeight
from demask.sparse.training.conv_offsets import ConvGeometry
from demask.sparse.training.conv_op import convolved

TYPES = (torch.float32, torch.float16, torch.bfloat16)


def trained(
    program: SegmentProgram, inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> Tensor | None:
    """The output of a program of one layer, with gradients; None where this is no case for kernels.

    BadInput for shapes, dtypes and indices that do not fit.
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
    return None if z is None else activate(z, step.act)


def takes(program: SegmentProgram, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> bool:
    """Whether a program is one layer on the CPU, of one dtype that kernels compute, and something
    of it wants gradients: frozen layers pass them on to x."""
    if len(program.steps) != 1 or len(inputs) != 1 or program.outputs != (1,):
        return False
    step, x = program.steps[0], inputs[0]
    if not isinstance(step, ConvStep | LinearStep) or step.add is not None or not x.numel():
        return False
    spans = [step.weight.values, step.weight.crow, step.weight.col]
    spans += [] if step.bias is None else [step.bias]
    if step.weight.scale is not None or not all(_whole(span, weights) for span in spans):
        return False
    values = weights[step.weight.values[0]]
    given = [x, values, *([] if step.bias is None else [weights[step.bias[0]]])]
    if x.dtype not in TYPES or any(t.dtype != x.dtype or not t.is_cpu for t in given):
        return False
    indices = [weights[span[0]] for span in (step.weight.crow, step.weight.col)]
    if not any(t.requires_grad for t in given) or any(t.dtype != torch.int32 for t in indices):
        return False
    return llvm.installed()


def _whole(span: Span, weights: Sequence[Tensor]) -> bool:
    """Whether a span is all of a tensor."""
    place, first, end = span
    return place < len(weights) and first == 0 and weights[place].shape == (end,)


def _linear(step: LinearStep, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """x @ W.T + bias [..., out]."""
    values, crow, col = dense.matrix(step.weight, weights, x.shape[-1])
    flat = x.reshape(-1, x.shape[-1])
    across = flat.t().contiguous()  # gradients read it again
    size = (step.out, x.shape[-1])
    made = product(crow, col, values, None, size, across, dense.bias(step, weights))
    return made.t().contiguous().reshape(*x.shape[:-1], step.out)


def _conv(
    step: ConvStep, program: SegmentProgram, x: Tensor, weights: Sequence[Tensor]
) -> Tensor | None:
    if ConvGeometry.of(step, tuple(x.shape)).too_large:
        return None
    spans = step.weight.values, step.weight.crow, step.weight.col
    values, crow, col = (weights[span[0]] for span in spans)
    bias = dense.bias(step, weights)
    wide = None if bias is None else bias.float()
    return convolved(x.float(), values.float(), crow, col, wide, _bare(program)).to(x.dtype)


@functools.lru_cache(maxsize=256)
def _bare(program: SegmentProgram) -> str:
    """The program without its activation; its weights are values, row starts, columns, bias."""
    step = program.steps[0]
    assert isinstance(step, ConvStep)
    act: Act | None = None
    spans = step.weight.values, step.weight.crow, step.weight.col
    weight = SparseWeight(*((place, *span[1:]) for place, span in enumerate(spans)))
    bias = None if step.bias is None else (3, *step.bias[1:])
    return replace(program, steps=(replace(step, act=act, weight=weight, bias=bias),)).text()
