"""Index maps of ops that move positions, computed by running the op on positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, fx

from demask.numerics import any_along
from demask.ops import schema
from demask.ops.notation import Axes, Line
from demask.ops.schema import Operand, fake

_STEP = 2.0**32  # float64 counts exactly to 2**53: the operand above this, the position below
MAX_POSITIONS = 2**27  # in one map: 1 GiB; a few maps are in memory at a time


@dataclass(frozen=True, slots=True)
class IndexMap:
    """The index map of one output axis with n positions: the source of each position.

    source: int64 [n], the number of the operand, or -1 for a padded position. position: int64 [n],
    the position along that operand's axis (0 if padded). value: the value at padded positions. For
    an output without the axis (select), n = 1.
    """

    source: Tensor
    position: Tensor
    value: float


def compute_index_maps(
    node: fx.Node,
    line: Line,
    letters: Mapping[str, int | None],
    which: tuple[Operand, ...],
    indices: Mapping[str, Tensor],
) -> list[dict[str, IndexMap]]:
    """Per output, the index maps of the moved axes, by letter (without "<0").

    Calls with a dynamic size on a moved axis or in an argument, and calls with more positions than
    `MAX_POSITIONS`, have no maps. which: the operands; indices: the values of arguments that are
    positions, by name.
    """
    bases = sorted({letter.partition("<")[0] for letter in line.moved if "<" in letter})
    call_arguments = schema.arguments(node)
    tensor_names = {operand.name for operand in which} | set(indices)
    if any(schema.is_dynamic(v) for name, v in call_arguments.items() if name not in tensor_names):
        return [{} for _ in line.outs]
    maps: list[dict[str, IndexMap]] = [{} for _ in line.outs]
    if any(letters[name] is None for name in line.moved):
        return maps
    values = [*(operand.value for operand in which), *schema.outputs(node)]
    if max(map(_moved_size, values, [*line.ins, *line.outs], repeat(line))) > MAX_POSITIONS:
        return maps
    for base in bases:
        shifted = [_run(node, line, base, shift, which, indices) for shift in (0.0, 1.0)]
        for out, (first, second) in enumerate(zip(*shifted, strict=True)):
            maps[out][base] = _read(first, second, line.outs[out], base)
    return maps


def _moved_size(value: Any, axes: Axes, line: Line) -> int:
    """The number of positions of an operand or output, its other axes reduced to one."""
    tensor = fake(value) if isinstance(value, fx.Node) else value
    sizes = zip(tensor.shape, axes, strict=True)
    return math.prod(schema.example_size(n) for n, letters in sizes if letters and letters[0] in line.moved)


def _base(letter: str) -> str:
    return letter.partition("<")[0].partition(">")[0]


def _run(
    node: fx.Node, line: Line, base: str, shift: float, which: tuple[Operand, ...], indices: Mapping[str, Tensor]
) -> list[Tensor]:
    """The outputs of the op for operands that contain their positions along axis `base`, plus
    `shift`; axes that do not move have size one."""
    values = []
    for k, operand in enumerate(which):
        shape = [1] * len(line.ins[k])
        full_shape = fake(operand.value).shape
        for axis, letters in enumerate(line.ins[k]):
            if letters and letters[0] in line.moved:
                shape[axis] = schema.example_size(full_shape[axis])
        values.append(_positions(line.ins[k], shape, base, k) + shift)
    names = {operand.name for operand in which}
    call_arguments = {
        name: schema.concrete(value) if name not in names and schema.is_dynamic(value) else value
        for name, value in (schema.arguments(node) | dict(indices)).items()
    }
    output = schema.call_with(node, schema.replace_operands(call_arguments, which, values))
    return list(output) if isinstance(output, (list, tuple)) else [output]


def _positions(axes: Axes, shape: list[int], base: str, operand: int) -> Tensor:
    """float64 of a shape: operand * _STEP + position along axis `base`."""
    base_axis = next((a for a, letters in enumerate(axes) if letters and _base(letters[0]) == base), None)
    if base_axis is None:
        return torch.full(shape, operand * _STEP, dtype=torch.float64)
    view = [shape[base_axis] if axis == base_axis else 1 for axis in range(len(shape))]
    codes = torch.arange(shape[base_axis], dtype=torch.float64) + operand * _STEP
    return codes.view(view).expand(shape).contiguous()


def _read(first: Tensor, second: Tensor, axes: Axes, base: str) -> IndexMap:
    """The index map along one axis, from outputs for shifts 0 and 1. Elements that are equal in
    both are padding; at each position the first other element is decoded."""
    base_axis = next((a for a, letters in enumerate(axes) if letters and _base(letters[0]) == base), None)
    n = 1 if base_axis is None else first.shape[base_axis]
    if not first.numel():
        nothing = torch.full((n,), -1)
        return IndexMap(nothing, nothing, 0.0)
    rows = first.movedim(base_axis, 0).reshape(n, -1) if base_axis is not None else first.reshape(1, -1)
    shifted_rows = second.movedim(base_axis, 0).reshape(n, -1) if base_axis is not None else second.reshape(1, -1)
    is_moved = rows != shifted_rows
    column = is_moved.to(torch.int8).argmax(1, keepdim=True)
    codes = rows.gather(1, column).squeeze(1)
    padded = ~any_along(is_moved, [1])
    source = torch.div(codes, _STEP, rounding_mode="floor").long()
    position = (codes - source * _STEP).long()
    value = float(rows[padded][0, 0]) if bool(padded.any()) else 0.0
    return IndexMap(source.masked_fill(padded, -1), position.masked_fill(padded, 0), value)
