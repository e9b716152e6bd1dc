"""The ops of convolutions whose nonzeros are trained: `demask::convolved` and its gradients.

torch.ops.demask.convolved(Tensor x, Tensor values, Tensor crow, Tensor col, Tensor? bias,
                           str program) -> Tensor
torch.ops.demask.convolved_slopes(Tensor slope, Tensor x, Tensor values, Tensor crow, Tensor col,
                                  str program, bool of_x, bool of_values) -> (Tensor, Tensor)

float32 on the CPU. A program is one convolution without activation, whose weights are (values, row
starts, columns, bias). Gradients have one number per nonzero, under torch.compile too; those of
gradients are those of ATen ops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from demask.errors import BadInput
from demask.sparse import reference as dense
from demask.sparse.csr_matrix import CsrMatrix
from demask.sparse.segment_program import ConvStep
from demask.sparse.training.recompute import parsed, recomputed

_LIBRARY = Library("demask", "FRAGMENT")
for _line in (
    "convolved(Tensor x, Tensor values, Tensor crow, Tensor col, Tensor? bias, str program)"
    " -> Tensor",
    "convolved_slopes(Tensor slope, Tensor x, Tensor values, Tensor crow, Tensor col, str program,"
    " bool of_x, bool of_values) -> (Tensor, Tensor)",
):
    _LIBRARY.define(_line, tags=(torch.Tag.pt2_compliant_tag,))


def convolved(
    x: Tensor, values: Tensor, crow: Tensor, col: Tensor, bias: Tensor | None, text: str
) -> Tensor:
    """The convolution of a program, with gradients. BadInput for shapes, dtypes and indices that do
    not fit."""
    return torch.ops.demask.convolved.default(x, values, crow, col, bias, text)


def _step(
    text: str, x: Tensor, values: Tensor, crow: Tensor, col: Tensor
) -> tuple[ConvStep, CsrMatrix]:
    """The convolution and its matrix, checked; indices are checked by their offsets."""
    program = parsed(text)
    step = program.steps[0]
    if (
        not isinstance(step, ConvStep)
        or len(program.steps) != 1
        or step.act
        or step.add is not None
    ):
        raise BadInput("expected a program of one convolution without activation and sum")
    dense.check(program, [x], [values, crow, col])
    kinds = (x.dtype, values.dtype, crow.dtype, col.dtype)
    if kinds != (torch.float32, torch.float32, torch.int32, torch.int32):
        raise BadInput(f"expected float32 numbers and int32 indices, got {kinds}")
    sizes = tuple(t.shape for t in (crow, values))
    if sizes != ((step.out + 1,), tuple(col.shape)) or col.ndim != 1:
        raise BadInput(f"expected {step.out + 1} row starts and n values and columns, got {sizes}")
    return step, CsrMatrix(crow, col, values, None, (step.out, 0))


def _convolved(
    x: Tensor, values: Tensor, crow: Tensor, col: Tensor, bias: Tensor | None, text: str
) -> Tensor:
    from demask.sparse.training.conv_kernels import convolved  # which needs LLVM

    step, m = _step(text, x, values, crow, col)
    if bias is not None and (bias.shape != (step.out,) or bias.dtype != x.dtype):
        raise BadInput(f"expected a bias of shape ({step.out},), got {tuple(bias.shape)}")
    return convolved(step, m, x, bias)


def _slopes(
    slope: Tensor, x: Tensor, values: Tensor, crow: Tensor, col: Tensor, text: str,
    of_x: bool, of_values: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from demask.sparse.training.conv_kernels import slope_of_values, slope_of_x  # which need LLVM

    step, m = _step(text, x, values, crow, col)
    made = x.new_empty(0), values.new_empty(0)
    return (
        slope_of_x(step, m, x, slope) if of_x else made[0],
        slope_of_values(step, m, x, slope) if of_values else made[1],
    )


def _fake(
    x: Tensor, values: Tensor, crow: Tensor, col: Tensor, bias: Tensor | None, text: str
) -> Tensor:
    _step(text, x, values, crow, col)
    return x.new_empty(parsed(text).shapes([x.shape])[1])


def _fake_slopes(
    slope: Tensor, x: Tensor, values: Tensor, crow: Tensor, col: Tensor, text: str,
    of_x: bool, of_values: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return x.new_empty(x.shape if of_x else (0,)), values.new_empty(
        col.shape if of_values else (0,)
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *given, ctx.text = inputs
    ctx.save_for_backward(*given)


def _backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
    x, values, crow, col, bias = ctx.saved_tensors
    needed = ctx.needs_input_grad
    if torch.is_grad_enabled():
        given = [x, values, crow, col, *([] if bias is None else [bias])]
        found = recomputed(ctx.text, 1, given, needed[: len(given)], [slope])
        return (*found, *[None] * (6 - len(given)))
    of_x = of_values = of_bias = None
    if needed[0] or needed[1]:
        of_x, of_values = torch.ops.demask.convolved_slopes.default(
            slope, x, values, crow, col, ctx.text, needed[0], needed[1]
        )
    if bias is not None and needed[4]:
        of_bias = slope.sum((0, *range(2, slope.ndim)))
    return (
        of_x if needed[0] else None, of_values if needed[1] else None, None, None, of_bias, None,
    )  # fmt: skip


_LIBRARY.impl("convolved", _convolved, "CPU")
_LIBRARY.impl("convolved_slopes", _slopes, "CPU")
torch.library.register_fake("demask::convolved", _fake, lib=_LIBRARY)
torch.library.register_fake("demask::convolved_slopes", _fake_slopes, lib=_LIBRARY)
torch.library.register_autograd("demask::convolved", _backward, setup_context=_keep, lib=_LIBRARY)
