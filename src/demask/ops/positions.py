"""Index maps of ops that move positions, had by running the op itself on positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, fx

from demask.ops import schema
from demask.ops.notation import Axes, Line
from demask.ops.schema import Operand

_STEP = 2.0**32  # float64 counts exactly to 2**53: the operand above this, the position below
MAX_POSITIONS = 2**27  # in one map: a GiB of them, of which a few are held at a time


@dataclass(frozen=True, slots=True)
class Move:
    """Where each position of one output axis comes from.

    source: int64 [n], the operand, or -1 for a padded position. position: int64 [n], along that
    operand's axis (0 where padded). value: what stands at padded positions. An output without the
    axis (select) has n = 1.
    """

    source: Tensor
    position: Tensor
    value: float


def moves(
    node: fx.Node,
    line: Line,
    letters: Mapping[str, int | None],
    which: tuple[Operand, ...],
    indices: Mapping[str, Tensor],
) -> list[dict[str, Move]]:
    """Per output, the map of every moved axis whose sizes are static, by the letter without mark.

    Calls with a dynamic size on a moved axis, or in an argument, or with more positions than
    `MAX_POSITIONS` have no map: they are opaque.
    which: the operands; indices: the values of arguments that hold positions.
    """
    bases = sorted({letter.partition("<")[0] for letter in line.moved if "<" in letter})
    found = schema.arguments(node)
    taken = {operand.name for operand in which} | set(indices)
    if any(schema.is_dynamic(v) for name, v in found.items() if name not in taken):
        return [{} for _ in line.outs]
    maps: list[dict[str, Move]] = [{} for _ in line.outs]
    if any(letters[name] is None for name in line.moved):
        return maps
    values = [*(operand.value for operand in which), *schema.outputs(node)]
    if max(map(_moved_size, values, [*line.ins, *line.outs], repeat(line))) > MAX_POSITIONS:
        return maps
    for base in bases:
        runs = [_run(node, line, base, shift, which, indices) for shift in (0.0, 1.0)]
        for out, (first, second) in enumerate(zip(*runs, strict=True)):
            maps[out][base] = _read(first, second, line.outs[out], base)
    return maps


def _moved_size(value: Any, axes: Axes, line: Line) -> int:
    """How many positions the moved axes of an operand or output have."""
    tensor = value.meta["val"] if isinstance(value, fx.Node) else value
    sizes = zip(tensor.shape, axes, strict=True)
    return math.prod(schema.hint(n) for n, letters in sizes if letters and letters[0] in line.moved)


def _base(letter: str) -> str:
    return letter.partition("<")[0].partition(">")[0]


def _run(
    node: fx.Node,
    line: Line,
    base: str,
    shift: float,
    which: tuple[Operand, ...],
    indices: Mapping[str, Tensor],
) -> list[Tensor]:
    """The op on positions along axis `base`, axes that do not move shrunk to one."""
    values = []
    for k, operand in enumerate(which):
        shape = [1] * len(line.ins[k])
        real = operand.value.meta["val"].shape
        for axis, letters in enumerate(line.ins[k]):
            if letters and letters[0] in line.moved:
                shape[axis] = schema.hint(real[axis])
        values.append(_positions(line.ins[k], shape, base, k) + shift)
    names = {operand.name for operand in which}
    found = {
        name: schema.concrete(value) if name not in names and schema.is_dynamic(value) else value
        for name, value in (schema.arguments(node) | dict(indices)).items()
    }
    args, kwargs = schema.call(node.target, schema.replaced(found, which, values))
    result = node.target(*args, **kwargs)  # type: ignore[operator]
    return list(result) if isinstance(result, (list, tuple)) else [result]


def _positions(axes: Axes, shape: list[int], base: str, operand: int) -> Tensor:
    at = next((a for a, letters in enumerate(axes) if letters and _base(letters[0]) == base), None)
    if at is None:
        return torch.full(shape, operand * _STEP, dtype=torch.float64)
    view = [shape[at] if axis == at else 1 for axis in range(len(shape))]
    line = torch.arange(shape[at], dtype=torch.float64) + operand * _STEP
    return line.view(view).expand(shape).contiguous()


def _read(first: Tensor, second: Tensor, axes: Axes, base: str) -> Move:
    """The map along one axis: at each position, an entry that some operand (not padding) gave."""
    at = next((a for a, letters in enumerate(axes) if letters and _base(letters[0]) == base), None)
    n = 1 if at is None else first.shape[at]
    if not first.numel():
        nothing = torch.full((n,), -1)
        return Move(nothing, nothing, 0.0)
    rows = first.movedim(at, 0).reshape(n, -1) if at is not None else first.reshape(1, -1)
    again = second.movedim(at, 0).reshape(n, -1) if at is not None else second.reshape(1, -1)
    real = rows != again
    pick = real.to(torch.int8).argmax(1, keepdim=True)
    code = rows.gather(1, pick).squeeze(1)
    padded = ~real.any(1)
    source = torch.div(code, _STEP, rounding_mode="floor").long()
    position = (code - source * _STEP).long()
    value = float(rows[padded][0, 0]) if bool(padded.any()) else 0.0
    return Move(source.masked_fill(padded, -1), position.masked_fill(padded, 0), value)
