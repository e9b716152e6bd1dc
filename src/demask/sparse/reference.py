"""A program in ATen ops: what plans are held to, in any floating dtype, under autograd, traceable.

`run` is the whole program. A graph pass that spells a program in ATen calls makes the weights once
(`weight`, `bias`) and calls `call` for every step, with values of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from demask.compat.dispatch import count_dispatch_modes, has_functorch_transforms
from demask.errors import BadInput
from demask.ops.activations import activate
from demask.sparse.segment_program import (
    MAX_SIZE,
    NAMES,
    Add,
    Cat,
    ConvStep,
    Flat,
    LinearStep,
    MeanStep,
    PoolStep,
    SegmentProgram,
    Span,
    SparseWeight,
    Step,
    reads,
)

STORED = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8)


def run(
    program: SegmentProgram, inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> list[Tensor]:
    """The outputs of the program: tensors like the inputs, in their dtype.

    They may be inputs, or views of one another. BadInput for shapes, dtypes and indices that do not
    fit the program.
    """
    check(program, inputs, weights)
    made = list(inputs)
    for step in program.steps:
        operands = [made[value] for value in reads(step)]
        kind = program.kinds[reads(step)[0]]
        made.append(call(step, kind, operands, *_layer(step, operands[0], weights)))
    return [made[value] for value in program.outputs]


def check(
    program: SegmentProgram, inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> list[tuple[Any, ...]]:
    """The shape of every value; BadInput for tensors that are none of a program's.

    Sizes of weights are checked by `part`, indices by `matrix`.
    """
    shapes = program.shapes([x.shape for x in inputs])
    for x in inputs:
        if not x.is_floating_point() or x.layout != torch.strided:
            raise BadInput(f"expected dense floating-point inputs, got {x.dtype}, {x.layout}")
        if (x.dtype, x.device) != (inputs[0].dtype, inputs[0].device):
            found = [f"{x.dtype} on {x.device}" for x in inputs]
            raise BadInput(f"expected inputs of one dtype on one device, got {found}")
    for w in weights:
        if (w.device, w.layout) != (inputs[0].device, torch.strided):
            found = f"a {w.layout} one on {w.device}"
            raise BadInput(f"expected dense weights on {inputs[0].device}, got {found}")
    return shapes


def weight(
    step: ConvStep | LinearStep, weights: Sequence[Tensor], shape: Sequence[int],
    dtype: torch.dtype | None = None, make: Callable[..., Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """The weight of a step as torch's layer has it: that of linear, conv1d, conv2d,
    conv_transpose1d or conv_transpose2d, for an input of this shape.

    dtype: what it is wanted in; by default that of the values, float32 where they have scales.
    make: of (step, weights, columns, dtype), the matrix [out, columns]; by default `scattered`.
    BadInput for columns outside of the matrix and row starts that do not rise.
    """
    make = make or scattered
    if isinstance(step, LinearStep):
        return make(step, weights, int(shape[-1]), dtype)
    inner, kernel = int(shape[1]) // step.groups, step.kernel[4 - len(shape) :]
    found = make(step, weights, inner * step.kernel[0] * step.kernel[1], dtype)
    if not step.transposed:
        return found.reshape(step.out, inner, *kernel)
    outer = step.out // step.groups
    found = found.reshape(step.groups, outer, inner, *kernel).transpose(1, 2)
    return found.reshape(step.groups * inner, outer, *kernel)


def bias(step: ConvStep | LinearStep, weights: Sequence[Tensor]) -> Tensor | None:
    """The bias of a step [out], or None."""
    return None if step.bias is None else part(step.bias, weights)


def part(span: Span, weights: Sequence[Tensor]) -> Tensor:
    """The elements of a span [end - first]; BadInput where there are fewer."""
    place, first, end = span
    if place >= len(weights):
        raise BadInput(f"expected at least {place + 1} weight tensors, got {len(weights)}")
    found = weights[place]
    if found.layout != torch.strided or found.numel() < end:
        got = f"{tuple(found.shape)}, {found.layout}"
        raise BadInput(f"expected weight tensor {place} to hold {end} elements, got {got}")
    return found.reshape(-1)[first:end]


def matrix(
    weight: SparseWeight, weights: Sequence[Tensor], columns: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Values, row starts and columns of a matrix; BadInput for indices that lead outside of it."""
    values, crow, col = (part(span, weights) for span in (weight.values, weight.crow, weight.col))
    if (crow.dtype, col.dtype) != (torch.int32, torch.int32):
        raise BadInput(f"expected int32 row starts and columns, got {crow.dtype} and {col.dtype}")
    if values.dtype not in STORED or (values.dtype == torch.int8) != (weight.scale is not None):
        raise BadInput(f"expected float values, or int8 with scales, got {values.dtype}")
    check_indices(crow, col, columns)
    return values, crow, col


def check_indices(crow: Tensor, col: Tensor, columns: int) -> None:
    """Raise BadInput for row starts that do not rise to the number of columns that are there, and
    for columns that are not below `columns`."""
    if traced([crow, col]):
        return
    starts = len(crow) > 0 and crow[0] == 0 and crow[-1] == len(col)
    if not starts or (crow[1:] < crow[:-1]).any():  # not by differences, which may overflow
        raise BadInput(f"expected row starts that rise from 0 to {len(col)}")
    if len(col) and not 0 <= int(col.min()) <= int(col.max()) < columns:
        least, largest = int(col.min()), int(col.max())
        raise BadInput(f"expected columns below {columns}, got {least} to {largest}")


def call(
    step: Step, kind: str, operands: Sequence[Tensor], weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """What a step makes of the values it reads (in the order of `reads`), in ATen ops alone.

    kind: of these values, as `Program.kinds` has it. weight: as `weight` has it; it and the bias in
    the dtype of the values.
    """
    x = operands[0]
    if isinstance(step, (ConvStep, LinearStep)):
        if weight is None:
            raise BadInput(f"expected the weight of a {NAMES[type(step)]}")
        conv = isinstance(step, ConvStep)
        y = _conv(step, x, weight, bias) if conv else F.linear(x, weight, bias)
        return activate(y if step.add is None else y + operands[1], step.act)
    if isinstance(step, PoolStep):
        return _pool(step, x)
    if isinstance(step, MeanStep):
        return x.mean((2, 3), keepdim=step.keep)
    if isinstance(step, Flat):
        return x.flatten(1)
    if isinstance(step, Cat):
        return torch.cat(list(operands), dim=-1 if kind == "tokens" else 1)
    return activate(x + operands[1] if isinstance(step, Add) else x, step.act)


def _layer(step: Step, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias of a step in the dtype of x; None where it has none."""
    if not isinstance(step, (ConvStep, LinearStep)):
        return None, None
    found = bias(step, weights)
    return weight(step, weights, x.shape, x.dtype), None if found is None else found.to(x.dtype)


def traced(tensors: Sequence[Tensor]) -> bool:
    """Whether values of tensors are unknown or recorded, so that code cannot depend on them."""
    if torch.compiler.is_compiling():
        return True  # first, for torch.compile does not know the next two
    if count_dispatch_modes() or has_functorch_transforms():
        return True  # torch has no public names for these
    return any(t.is_meta for t in tensors)


def scattered(
    step: ConvStep | LinearStep, weights: Sequence[Tensor], columns: int, dtype: torch.dtype | None
) -> Tensor:
    """The matrix of a step [out, columns]; entries that are there twice are summed."""
    if step.out * columns > MAX_SIZE:
        found = f"{step.out} x {columns}"
        raise BadInput(f"expected a matrix of at most {MAX_SIZE} entries, got {found}")
    values, crow, col = matrix(step.weight, weights, columns)
    row = torch.arange(step.out, device=col.device)
    row = row.repeat_interleave(crow.diff(), output_size=len(values))
    if step.weight.scale is not None:
        scale = part(step.weight.scale, weights)
        values = values.to(scale.dtype) * scale[row]
    values = values if dtype is None else values.to(dtype)
    zeros = torch.zeros(step.out * columns, dtype=values.dtype, device=values.device)
    return zeros.index_add(0, row * columns + col, values).reshape(step.out, columns)


def _conv(step: ConvStep, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    axes = x.dim() - 2
    stride, dilation = step.stride[-axes:], step.dilation[-axes:]
    before, behind = zip(*step.padding[-axes:], strict=True)
    if step.transposed:
        return _transposed(step, x, weight, bias)
    if before != behind:
        x, before = F.pad(x, _ends(before, behind)), (0,) * axes
    function = torch.conv1d if axes == 1 else torch.conv2d
    return function(x, weight, bias, stride, before, dilation, step.groups)


def _transposed(step: ConvStep, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    axes = x.dim() - 2
    stride, dilation = step.stride[-axes:], step.dilation[-axes:]
    before, behind = zip(*step.padding[-axes:], strict=True)
    function: Any = torch.conv_transpose1d if axes == 1 else torch.conv_transpose2d
    more = tuple(a - b for a, b in zip(before, behind, strict=True))
    if all(0 <= n < max(s, d) for n, s, d in zip(more, stride, dilation, strict=True)):
        return function(x, weight, bias, stride, before, more, step.groups, dilation)
    full = function(x, weight, None, stride, 0, 0, step.groups, dilation)
    cut = F.pad(full, _ends([-n for n in before], [-n for n in behind]))
    return cut if bias is None else cut + bias.reshape(-1, *[1] * axes)


def _ends(before: Sequence[int], behind: Sequence[int]) -> list[int]:
    """Sizes before and behind each axis, as F.pad takes them: the last axis first."""
    pairs = zip(reversed(before), reversed(behind), strict=True)
    return [n for pair in pairs for n in pair]


def _pool(step: PoolStep, x: Tensor) -> Tensor:
    if step.mean:
        return F.avg_pool2d(x, step.kernel, step.stride, step.padding, step.ceil, step.counted)
    return F.max_pool2d(x, step.kernel, step.stride, step.padding, step.dilation, step.ceil)
