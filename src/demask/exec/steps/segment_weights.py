"""The weights and other constants of steps, which are spans of flat tensors: read and checked.

Any floating dtype, autograd and tracing are supported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from demask.compat.dispatch import count_dispatch_modes, has_functorch_transforms
from demask.errors import BadInput
from demask.exec.steps.segment_steps import MAX_SIZE, Layer, Selection, Span, SparseWeight, Step, is_conv

STORED = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8)


def weight(
    step: Layer,
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
    if not is_conv(step):
        return make(step, weights, int(shape[-1]), dtype)
    window = step.fields
    group_inputs, kernel = int(shape[1]) // window.groups, window.kernel[4 - len(shape) :]
    matrix = make(step, weights, group_inputs * window.kernel[0] * window.kernel[1], dtype)
    if not window.transposed:
        return matrix.reshape(window.out, group_inputs, *kernel)
    group_outputs = window.out // window.groups
    matrix = matrix.reshape(window.groups, group_outputs, group_inputs, *kernel).transpose(1, 2)
    return matrix.reshape(window.groups * group_inputs, group_outputs, *kernel)


def bias(step: Layer, weights: Sequence[Tensor]) -> Tensor | None:
    """The bias [out] of a step, or None."""
    return None if step.bias is None else part(step.bias, weights)


def check_layer(step: Layer, weights: Sequence[Tensor]) -> None:
    """Raise BadInput for stored weights of a layer that are invalid for all inputs."""
    if step.weight.csr is None:
        dense_values(step.weight, weights)
    else:
        matrix(step.weight, weights, MAX_SIZE)
    for span in (step.bias, step.weight.scale):
        if span is not None:
            part(span, weights)


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


def positions(span: Span, weights: Sequence[Tensor]) -> Tensor:
    """The int32 elements of a span. Raises BadInput for another dtype."""
    numbers = part(span, weights)
    if numbers.dtype != torch.int32:
        raise BadInput(f"expected int32 numbers, got {numbers.dtype}")
    return numbers


def index(step: Step[Selection], channels: int, weights: Sequence[Tensor]) -> Tensor:
    """The channel numbers of a selection from `channels`, int32.

    Raises BadInput for another dtype and numbers out of range.
    """
    if step.index is None:
        raise BadInput("expected the channel numbers of a selection")
    numbers = positions(step.index, weights)
    if not traced([numbers]):
        least, most = int(numbers.min()), int(numbers.max())
        if least < (-1 if step.fields.padded else 0) or most >= channels:
            raise BadInput(f"expected channel numbers below {channels}, got {least} to {most}")
    return numbers


def traced(tensors: Sequence[Tensor]) -> bool:
    """Whether values of tensors are unknown or recorded, so that code cannot depend on them."""
    if torch.compiler.is_compiling():
        return True  # first, as torch.compile does not support the next two
    if count_dispatch_modes() or has_functorch_transforms():
        return True  # torch has no public API for these
    return any(t.is_meta for t in tensors)


def scattered(step: Layer, weights: Sequence[Tensor], columns: int, dtype: torch.dtype | None) -> Tensor:
    """The dense matrix [out, columns] of a step; duplicate entries are summed. It may be a view of
    the weights."""
    out = step.fields.out
    if out * columns > MAX_SIZE:
        shape = f"{out} x {columns}"
        raise BadInput(f"expected a matrix of at most {MAX_SIZE} entries, got {shape}")
    if step.weight.csr is None:
        values = dense_values(step.weight, weights)
        if values.numel() != out * columns:
            shape = f"{out} x {columns}"
            raise BadInput(f"expected a matrix {shape}, got {values.numel()} values")
        return (values if dtype is None else values.to(dtype)).reshape(out, columns)
    values, crow, col = matrix(step.weight, weights, columns)
    row = torch.arange(out, device=col.device)
    row = row.repeat_interleave(crow.diff(), output_size=len(values))
    if step.weight.scale is not None:
        scale = part(step.weight.scale, weights)
        values = values.to(scale.dtype) * scale[row]
    values = values if dtype is None else values.to(dtype)
    zeros = torch.zeros(out * columns, dtype=values.dtype, device=values.device)
    return zeros.index_add(0, row * columns + col, values).reshape(out, columns)
