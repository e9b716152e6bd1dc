"""Layers with trained nonzeros: forward pass and gradients by kernels that read values in place.

A plan packs values, which pays if the next calls use it, too; but each training step changes them.
So in a program that needs gradients, or has no plan, each sparse layer runs as

    linear    y = W x by `demask::spmm`, whose gradients are the transposed product and SDDMM
    conv      kernels over planes of images (`conv_products`), by `demask::convolved`

on the CPU, also under torch.compile; float16 and bfloat16 are computed in float32. Nothing as large
as a dense weight is created, also for derivatives of any order. Data that kernels need in addition
to the indices is computed once per mask.

The ops of convolutions with trained nonzeros, and of their gradients:

torch.ops.demask.convolved(Tensor x, Tensor values, Tensor crow, Tensor col, Tensor? bias,
                           str program) -> Tensor
torch.ops.demask.conv_gradients(Tensor gradient, Tensor x, Tensor values, Tensor crow, Tensor col,
                                  str program, bool of_x, bool of_values) -> (Tensor, Tensor)

float32 or float64 on the CPU. A program is one convolution without activation, with the weights
(values, row starts, columns, bias). Gradients have one number per nonzero, also under torch.compile.
The ops are linear in each of their operands, so they are each other's gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from demask.errors import BadInput
from demask.exec.steps import reference
from demask.exec.steps import segment_weights as stored
from demask.exec.steps.segment_program import SegmentProgram
from demask.exec.steps.segment_steps import Conv, Layer, SparseWeight, is_conv, is_layer
from demask.kernels.llvm import availability as llvm
from demask.ops.activations import apply_activation
from demask.sparse.csr_matrix import CsrMatrix
from demask.sparse.products.spmm_op import product


@functools.lru_cache(maxsize=64)
def parsed(text: str) -> SegmentProgram:
    """The program of a text."""
    return SegmentProgram.parse(text)


_LIBRARY = Library("demask", "FRAGMENT")
for _line in (
    "convolved(Tensor x, Tensor values, Tensor crow, Tensor col, Tensor? bias, str program) -> Tensor",
    "conv_gradients(Tensor gradient, Tensor x, Tensor values, Tensor crow, Tensor col, str program,"
    " bool of_x, bool of_values) -> (Tensor, Tensor)",
):
    _LIBRARY.define(_line, tags=(torch.Tag.pt2_compliant_tag,))


def convolved(x: Tensor, values: Tensor, crow: Tensor, col: Tensor, bias: Tensor | None, text: str) -> Tensor:
    """The convolution of a program, differentiable.

    Raises BadInput for shapes, dtypes and indices that do not match the program.
    """
    return torch.ops.demask.convolved.default(x, values, crow, col, bias, text)


COMPUTED = (torch.float32, torch.float64)


def _checked_step(text: str, x: Tensor, values: Tensor, crow: Tensor, col: Tensor) -> tuple[Conv, CsrMatrix]:
    """The convolution and its matrix, checked except for indices."""
    program = parsed(text)
    step = program.steps[0]
    if not is_conv(step) or len(program.steps) != 1 or step.act or step.add is not None:
        raise BadInput("expected a program of one convolution without activation and sum")
    reference.check(program, [x], [values, crow, col])
    kinds = (x.dtype, values.dtype, crow.dtype, col.dtype)
    if x.dtype not in COMPUTED or kinds[1:] != (x.dtype, torch.int32, torch.int32):
        raise BadInput(f"expected numbers in float32 or float64 and int32 indices, got {kinds}")
    sizes = tuple(t.shape for t in (crow, values))
    if sizes != ((step.fields.out + 1,), tuple(col.shape)) or col.ndim != 1:
        raise BadInput(f"expected {step.fields.out + 1} row starts and n values and columns, got {sizes}")
    return step, CsrMatrix(crow, col, values, None, (step.fields.out, 0))


def _convolve_on_cpu(x: Tensor, values: Tensor, crow: Tensor, col: Tensor, bias: Tensor | None, text: str) -> Tensor:
    from demask.sparse.products.conv_products import convolved  # needs llvmlite

    step, m = _checked_step(text, x, values, crow, col)
    if bias is not None and (bias.shape != (step.fields.out,) or bias.dtype != x.dtype):
        raise BadInput(f"expected a bias of shape ({step.fields.out},), got {tuple(bias.shape)}")
    return convolved(step, m, x, bias)


def _conv_gradients(
    grad: Tensor, x: Tensor, values: Tensor, crow: Tensor, col: Tensor, text: str, of_x: bool, of_values: bool
) -> tuple[Tensor, Tensor]:
    from demask.sparse.products.conv_products import gradient_of_values, gradient_of_x

    step, m = _checked_step(text, x, values, crow, col)
    unused = x.new_empty(0), values.new_empty(0)
    return (
        gradient_of_x(step, m, x, grad) if of_x else unused[0],
        gradient_of_values(step, m, x, grad) if of_values else unused[1],
    )


def _fake_convolved(x: Tensor, values: Tensor, crow: Tensor, col: Tensor, bias: Tensor | None, text: str) -> Tensor:
    _checked_step(text, x, values, crow, col)
    return x.new_empty(parsed(text).shapes([x.shape])[1])


def _fake_gradients(
    grad: Tensor, x: Tensor, values: Tensor, crow: Tensor, col: Tensor, text: str, of_x: bool, of_values: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if of_x else (0,)), values.new_empty(col.shape if of_values else (0,))


def _save_for_gradients(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.text = inputs
    ctx.save_for_backward(*tensors)


def _gradients_of_convolved(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, values, crow, col, bias = ctx.saved_tensors
    needed = ctx.needs_input_grad
    of_x = of_values = of_bias = None
    if needed[0] or needed[1]:
        of_x, of_values = torch.ops.demask.conv_gradients.default(
            grad, x, values, crow, col, ctx.text, needed[0], needed[1]
        )
    if bias is not None and needed[4]:
        of_bias = grad.sum((0, *range(2, grad.ndim)))
    return (of_x if needed[0] else None, of_values if needed[1] else None, None, None, of_bias, None)


def _save_for_second(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.text, ctx.of_x, ctx.of_values = inputs
    ctx.save_for_backward(*tensors)


def _second_gradients(ctx: Any, along_x: Tensor, along_values: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of grad, x and values. along_x, along_values: those of the two gradients, which replace
    x and values in the same ops."""
    grad, x, values, crow, col = ctx.saved_tensors
    of_grad = of_x = of_values = None
    if ctx.needs_input_grad[0]:
        pairs = [(along_x, values)] * ctx.of_x + [(x, along_values)] * ctx.of_values
        terms = [convolved(one, numbers, crow, col, None, ctx.text) for one, numbers in pairs]
        of_grad = sum(terms[1:], start=terms[0])
    gradients = torch.ops.demask.conv_gradients.default
    if ctx.needs_input_grad[1] and ctx.of_values:
        of_x, _ = gradients(grad, x, along_values, crow, col, ctx.text, True, False)
    if ctx.needs_input_grad[2] and ctx.of_x:
        _, of_values = gradients(grad, along_x, values, crow, col, ctx.text, False, True)
    return of_grad, of_x, of_values, None, None, None, None, None


_LIBRARY.impl("convolved", _convolve_on_cpu, "CPU")
_LIBRARY.impl("conv_gradients", _conv_gradients, "CPU")
torch.library.register_fake("demask::convolved", _fake_convolved, lib=_LIBRARY)
torch.library.register_fake("demask::conv_gradients", _fake_gradients, lib=_LIBRARY)
torch.library.register_autograd(
    "demask::convolved", _gradients_of_convolved, setup_context=_save_for_gradients, lib=_LIBRARY
)
torch.library.register_autograd(
    "demask::conv_gradients", _second_gradients, setup_context=_save_for_second, lib=_LIBRARY
)


TYPES = (*COMPUTED, torch.float16, torch.bfloat16)


def trained(program: SegmentProgram, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor] | None:
    """The outputs of a program, differentiable; None if kernels support none of its layers.

    Raises BadInput for shapes, dtypes and indices that do not match.
    """
    layers = [step for step in program.steps if is_layer(step)]
    if not inputs or not any(takes(step, inputs[0], weights) for step in layers):
        return None
    return reference.run(program, inputs, weights, run_layer)


def takes(step: Layer, x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether kernels support a layer whose operand is of the dtype of x, on the CPU."""
    if step.weight.csr is None or step.weight.scale is not None or not x.numel() or not llvm.is_installed():
        return False
    spans = [*step.weight.csr, *([] if step.bias is None else [step.bias])]
    if any(number >= len(weights) or weights[number].numel() < end for number, _, end in spans):
        return False
    values, crow, col, *rest = (weights[number] for number, _, _ in spans)
    is_indexed = (crow.dtype, col.dtype) == (torch.int32, torch.int32)
    return is_indexed and x.dtype in TYPES and all(t.dtype == x.dtype and t.is_cpu for t in (x, values, *rest))


def run_layer(step: Layer, kind: str, operands: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor | None:
    """The output of a layer, differentiable, by kernels that read nonzeros; None if they do not support it."""
    x = operands[0]
    if not takes(step, x, weights):
        return None
    z = _trained_conv(step, kind, x, weights) if is_conv(step) else _trained_linear(step, x, weights)
    if z is None:
        return None
    return apply_activation(z if step.add is None else z + operands[1], step.act)


def _trained_linear(step: Layer, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """x @ W.T + bias [..., out]."""
    values, crow, col = stored.matrix(step.weight, weights, x.shape[-1])
    tokens = x.reshape(-1, x.shape[-1])
    transposed = tokens.t().contiguous()  # also read by gradients
    size = (step.fields.out, x.shape[-1])
    product_t = product(crow, col, values, None, size, transposed, stored.bias(step, weights))
    return product_t.t().contiguous().reshape(*x.shape[:-1], step.fields.out)


def _trained_conv(step: Conv, kind: str, x: Tensor, weights: Sequence[Tensor]) -> Tensor | None:
    """The convolution, or None if offsets do not fit in 32 bits."""
    from demask.sparse.products.conv_products import ConvGeometry

    if ConvGeometry.of(step, tuple(x.shape)).too_large:
        return None
    assert step.weight.csr is not None  # `takes` tells
    values, crow, col = (stored.part(span, weights) for span in step.weight.csr)
    dtype, bias = torch.promote_types(x.dtype, torch.float32), stored.bias(step, weights)
    wide = None if bias is None else bias.to(dtype)
    return convolved(x.to(dtype), values.to(dtype), crow, col, wide, _single_layer(step, kind)).to(x.dtype)


@functools.lru_cache(maxsize=256)
def _single_layer(step: Conv, kind: str) -> str:
    """The text of a program of a layer without activation and sum; weights: values, row starts, columns, bias."""
    assert step.weight.csr is not None
    spans = ((number, 0, end - first) for number, (_, first, end) in enumerate(step.weight.csr))
    bias = None if step.bias is None else (3, 0, step.fields.out)
    layer = replace(step, reads=(0,), weight=SparseWeight(*spans), bias=bias, act=None, adds=False)
    return SegmentProgram((kind,), (layer,), (1,)).text()
