"""The reference implementation of a program in ATen ops, which defines the result of plans.

It supports any floating dtype, autograd and tracing. `run` executes a full program. A graph pass
that replaces a program by ATen calls creates the weights once (`weight`, `bias`) and uses `call`
for every step, with its own values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from demask.compat.dispatch import count_dispatch_modes, has_functorch_transforms
from demask.errors import BadInput
from demask.ops.activations import apply_activation
from demask.sparse.called_op import POSITIONS
from demask.sparse.segment_calls import CALLED
from demask.sparse.segment_program import SegmentProgram
from demask.sparse.segment_steps import (
    MAX_SIZE,
    NAMES,
    AddStep,
    CallStep,
    ConcatStep,
    ConvStep,
    FlattenStep,
    LinearStep,
    MeanStep,
    PoolStep,
    ScaleStep,
    SelectStep,
    Span,
    SparseWeight,
    Step,
    channel_axis,
    reads,
)

STORED = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8)


#: the output of a layer (step, kind of its operands, operands, weights); None for one of the reference
RunLayer = Callable[["ConvStep | LinearStep", str, Sequence[Tensor], Sequence[Tensor]], "Tensor | None"]


def run(
    program: SegmentProgram, inputs: Sequence[Tensor], weights: Sequence[Tensor], layer: RunLayer | None = None
) -> list[Tensor]:
    """The outputs of a program, tensors in the dtype of the inputs.

    They may be inputs, or views of one another. layer: computes layers otherwise. Raises BadInput for
    shapes, dtypes and indices that do not match the program.
    """
    check(program, inputs, weights)
    values = list(inputs)
    for step in program.steps:
        operands = [values[value] for value in reads(step)]
        kind = program.kinds[reads(step)[0]]
        output = None
        if layer is not None and isinstance(step, ConvStep | LinearStep):
            output = layer(step, kind, operands, weights)
        if output is None:
            output = call(step, kind, operands, *operand_tensors(step, kind, operands[0], weights))
        values.append(output)
    return [values[value] for value in program.outputs]


def check(program: SegmentProgram, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """The shape of every value. Raises BadInput for tensors that do not match the program.

    `part` checks the sizes of weights, `matrix` the indices.
    """
    shapes = program.shapes([x.shape for x in inputs])
    for x in inputs:
        if not x.is_floating_point() or x.layout != torch.strided:
            raise BadInput(f"expected dense floating-point inputs, got {x.dtype}, {x.layout}")
        if (x.dtype, x.device) != (inputs[0].dtype, inputs[0].device):
            description = [f"{x.dtype} on {x.device}" for x in inputs]
            raise BadInput(f"expected inputs of one dtype on one device, got {description}")
    for w in weights:
        if (w.device, w.layout) != (inputs[0].device, torch.strided):
            description = f"a {w.layout} one on {w.device}"
            raise BadInput(f"expected dense weights on {inputs[0].device}, got {description}")
    return shapes


def weight(
    step: ConvStep | LinearStep,
    weights: Sequence[Tensor],
    shape: Sequence[int],
    dtype: torch.dtype | None = None,
    make: Callable[..., Tensor] | None = None,
) -> Tensor:
    """The weight of a step for linear, conv1d, conv2d, conv_transpose1d or conv_transpose2d.

    shape: of the input. dtype: of the result; by default that of the values, or float32 if they
    have scales. make: function (step, weights, columns, dtype) -> matrix [out, columns]; by default
    `scattered`. Raises BadInput for columns outside of the matrix and row starts that decrease.
    """
    make = make or scattered
    if isinstance(step, LinearStep):
        return make(step, weights, int(shape[-1]), dtype)
    group_inputs, kernel = int(shape[1]) // step.groups, step.kernel[4 - len(shape) :]
    matrix = make(step, weights, group_inputs * step.kernel[0] * step.kernel[1], dtype)
    if not step.transposed:
        return matrix.reshape(step.out, group_inputs, *kernel)
    group_outputs = step.out // step.groups
    matrix = matrix.reshape(step.groups, group_outputs, group_inputs, *kernel).transpose(1, 2)
    return matrix.reshape(step.groups * group_inputs, group_outputs, *kernel)


def bias(step: ConvStep | LinearStep, weights: Sequence[Tensor]) -> Tensor | None:
    """The bias [out] of a step, or None."""
    return None if step.bias is None else part(step.bias, weights)


def part(span: Span, weights: Sequence[Tensor]) -> Tensor:
    """The elements [end - first] of a span. Raises BadInput if the tensor has fewer."""
    number, first, end = span
    if number >= len(weights):
        raise BadInput(f"expected at least {number + 1} weight tensors, got {len(weights)}")
    tensor = weights[number]
    if tensor.layout != torch.strided or tensor.numel() < end:
        description = f"{tuple(tensor.shape)}, {tensor.layout}"
        raise BadInput(f"expected weight tensor {number} to hold {end} elements, got {description}")
    return tensor.reshape(-1)[first:end]


def matrix(weight: SparseWeight, weights: Sequence[Tensor], columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values, row starts and columns of a matrix in CSR. Raises BadInput for indices out of range
    and for a dense matrix."""
    if weight.csr is None:
        raise BadInput(f"expected a matrix in CSR, got {weight}")
    values, crow, col = (part(span, weights) for span in weight.csr)
    if (crow.dtype, col.dtype) != (torch.int32, torch.int32):
        raise BadInput(f"expected int32 row starts and columns, got {crow.dtype} and {col.dtype}")
    if values.dtype not in STORED or (values.dtype == torch.int8) != (weight.scale is not None):
        raise BadInput(f"expected float values, or int8 with scales, got {values.dtype}")
    check_indices(crow, col, columns)
    return values, crow, col


def dense_values(weight: SparseWeight, weights: Sequence[Tensor]) -> Tensor:
    """The values of a dense matrix, row by row. Raises BadInput for values that are not floats."""
    values = part(weight.values, weights)
    if values.dtype not in STORED or values.dtype == torch.int8:
        raise BadInput(f"expected float values, got {values.dtype}")
    return values


def check_indices(crow: Tensor, col: Tensor, columns: int) -> None:
    """Raise BadInput unless row starts rise from 0 to the number of nonzeros and columns fit."""
    if traced([crow, col]):
        return
    are_complete = len(crow) > 0 and crow[0] == 0 and crow[-1] == len(col)
    if not are_complete or (crow[1:] < crow[:-1]).any():  # differences might overflow
        raise BadInput(f"expected row starts that rise from 0 to {len(col)}")
    if len(col) and not 0 <= int(col.min()) <= int(col.max()) < columns:
        smallest, largest = int(col.min()), int(col.max())
        raise BadInput(f"expected columns below {columns}, got {smallest} to {largest}")


def call(
    step: Step, kind: str, operands: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """The output of a step for its operands (in the order of `reads`), computed by ATen ops.

    kind: of the operands, as in `SegmentProgram.kinds`. weight: the result of `weight`; weight and
    bias are in the dtype of the operands.
    """
    x = operands[0]
    if isinstance(step, CallStep):
        return CALLED[step.call].call(operands, step.numbers, weight)
    if isinstance(step, (ConvStep, LinearStep)):
        if weight is None:
            raise BadInput(f"expected the weight of a {NAMES[type(step)]}")
        conv = isinstance(step, ConvStep)
        y = _conv(step, x, weight, bias) if conv else F.linear(x, weight, bias)
        return apply_activation(y if step.add is None else y + operands[1], step.act)
    if isinstance(step, PoolStep):
        return _pool(step, x)
    if isinstance(step, MeanStep):
        return x.mean((2, 3), keepdim=step.keep)
    if isinstance(step, FlattenStep):
        return x.flatten(1)
    if isinstance(step, SelectStep):
        return _select(step, kind, x, weight)
    if isinstance(step, ScaleStep):
        return apply_activation(x * operands[1], step.act)
    if isinstance(step, ConcatStep):
        return torch.cat(list(operands), dim=channel_axis(kind))
    return apply_activation(x + operands[1] if isinstance(step, AddStep) else x, step.act)


def operand_tensors(step: Step, kind: str, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias of a step in the dtype of x, or (numbers, None) of a selection, (constants,
    None) of a call, or (None, None)."""
    if isinstance(step, CallStep):
        return call_constants(step, weights, x.dtype), None
    if isinstance(step, SelectStep):
        return index(step, x.shape[channel_axis(kind)], weights), None
    if not isinstance(step, (ConvStep, LinearStep)):
        return None, None
    step_bias = bias(step, weights)
    return weight(step, weights, x.shape, x.dtype), None if step_bias is None else step_bias.to(x.dtype)


def call_constants(step: CallStep, weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """The constants of a call: int32 positions, or factors in this dtype; None if there are none.
    Raises BadInput for another dtype."""
    if step.index is None:
        return None
    if CALLED[step.call].constants == POSITIONS:
        return positions(step.index, weights)
    factors = part(step.index, weights)
    if not factors.is_floating_point():
        raise BadInput(f"expected factors, got {factors.dtype}")
    return factors.to(dtype)


def positions(span: Span, weights: Sequence[Tensor]) -> Tensor:
    """The int32 elements of a span. Raises BadInput for another dtype."""
    numbers = part(span, weights)
    if numbers.dtype != torch.int32:
        raise BadInput(f"expected int32 numbers, got {numbers.dtype}")
    return numbers


def index(step: SelectStep, channels: int, weights: Sequence[Tensor]) -> Tensor:
    """The channel numbers of a selection from `channels`, int32.

    Raises BadInput for another dtype and numbers out of range.
    """
    numbers = positions(step.index, weights)
    if not traced([numbers]):
        least, most = int(numbers.min()), int(numbers.max())
        if least < (-1 if step.padded else 0) or most >= channels:
            raise BadInput(f"expected channel numbers below {channels}, got {least} to {most}")
    return numbers


def _select(step: SelectStep, kind: str, x: Tensor, numbers: Tensor | None) -> Tensor:
    if numbers is None:
        raise BadInput("expected the channel numbers of a selection")
    axis = channel_axis(kind) % x.ndim
    if step.padded:
        x = F.pad(x, [0, 0] * (x.ndim - 1 - axis) + [1, 0])
        numbers = numbers + 1  # no size: segments are converted by calls traced with other sizes
    if kind == "image" and step.stride != (1, 1):
        x = x[:, :, :: step.stride[0], :: step.stride[1]]
    return x.index_select(axis, numbers)


def traced(tensors: Sequence[Tensor]) -> bool:
    """Whether values of tensors are unknown or recorded, so that code cannot depend on them."""
    if torch.compiler.is_compiling():
        return True  # first, as torch.compile does not support the next two
    if count_dispatch_modes() or has_functorch_transforms():
        return True  # torch has no public API for these
    return any(t.is_meta for t in tensors)


def scattered(
    step: ConvStep | LinearStep, weights: Sequence[Tensor], columns: int, dtype: torch.dtype | None
) -> Tensor:
    """The dense matrix [out, columns] of a step; duplicate entries are summed. It may be a view of
    the weights."""
    if step.out * columns > MAX_SIZE:
        shape = f"{step.out} x {columns}"
        raise BadInput(f"expected a matrix of at most {MAX_SIZE} entries, got {shape}")
    if step.weight.csr is None:
        values = dense_values(step.weight, weights)
        if values.numel() != step.out * columns:
            shape = f"{step.out} x {columns}"
            raise BadInput(f"expected a matrix {shape}, got {values.numel()} values")
        return (values if dtype is None else values.to(dtype)).reshape(step.out, columns)
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
    """A convolution of images or signals, with padding that may differ before and after an axis."""
    axes = x.dim() - 2
    stride, dilation = step.stride[-axes:], step.dilation[-axes:]
    padding_before, padding_after = zip(*step.padding[-axes:], strict=True)
    if step.transposed:
        return _transposed(step, x, weight, bias)
    if padding_before != padding_after:
        x, padding_before = F.pad(x, _pad_ends(padding_before, padding_after)), (0,) * axes
    function = torch.conv1d if axes == 1 else torch.conv2d
    return function(x, weight, bias, stride, padding_before, dilation, step.groups)


def _transposed(step: ConvStep, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A transposed convolution, cropped where torch does not support the output padding."""
    axes = x.dim() - 2
    stride, dilation = step.stride[-axes:], step.dilation[-axes:]
    padding_before, padding_after = zip(*step.padding[-axes:], strict=True)
    function: Any = torch.conv_transpose1d if axes == 1 else torch.conv_transpose2d
    output_padding = tuple(a - b for a, b in zip(padding_before, padding_after, strict=True))
    if all(0 <= n < max(s, d) for n, s, d in zip(output_padding, stride, dilation, strict=True)):
        return function(x, weight, bias, stride, padding_before, output_padding, step.groups, dilation)
    full = function(x, weight, None, stride, 0, 0, step.groups, dilation)
    cropped = F.pad(full, _pad_ends([-n for n in padding_before], [-n for n in padding_after]))
    return cropped if bias is None else cropped + bias.reshape(-1, *[1] * axes)


def _pad_ends(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Padding before and after each axis in the order of F.pad: the last axis first."""
    pairs = zip(reversed(before), reversed(after), strict=True)
    return [n for pair in pairs for n in pair]


def _pool(step: PoolStep, x: Tensor) -> Tensor:
    if step.mean:
        return F.avg_pool2d(x, step.kernel, step.stride, step.padding, step.ceil, step.counted)
    return F.max_pool2d(x, step.kernel, step.stride, step.padding, step.dilation, step.ceil)
