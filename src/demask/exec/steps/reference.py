"""The reference implementation of a program in ATen ops, which defines the result of plans.

It supports any floating dtype, autograd and tracing. A graph pass that replaces a program by ATen
calls creates the weights once and uses `segment_rows.call` for every step, with its own values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from demask.errors import BadInput
from demask.exec.steps.segment_program import SegmentProgram
from demask.exec.steps.segment_rows import call, constants_of
from demask.exec.steps.segment_steps import Layer, is_layer

#: the output of a layer (step, kind of its operands, operands, weights); None for one of the reference
RunLayer = Callable[[Layer, str, Sequence[Tensor], Sequence[Tensor]], "Tensor | None"]


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
        operands = [values[value] for value in step.reads]
        kind = program.kinds[step.x]
        output = None
        if layer is not None and is_layer(step):
            output = layer(step, kind, operands, weights)
        if output is None:
            output = call(step, kind, operands, *constants_of(step, kind, operands[0], weights))
        values.append(output)
    return [values[value] for value in program.outputs]


def check(program: SegmentProgram, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """The shape of every value. Raises BadInput for tensors that do not match the program.

    `segment_weights.part` checks the sizes of weights, `matrix` the indices.
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
