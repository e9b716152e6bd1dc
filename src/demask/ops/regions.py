"""Input regions: the interval of an operand's axis that an output interval requires.

    tile(op(x), start, end) == tile(op(y), start, end)     for every y that equals x on
                                                           [input_start(start), input_end(end))

There is one formula per class of windows. Intervals are half-open, clamped to the operand, and may
be empty (start >= end): a transposed convolution whose kernel is shorter than its stride has output
rows that depend on no input. `axis` is an axis of the output, `axis_of` returns the operand's axis;
all positions of the operand's other axes are required. The geometry (kernel, stride, padding,
dilation, scale, align_corners) is read from the call's arguments by name; dynamic sizes are those
of the example. Source: the arithmetic of ATen's UpSample.h, Pool.h and AdaptivePooling.h.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import torch

from demask.ops import schema
from demask.ops.flow import axis_of, base
from demask.ops.positions import IndexMap
from demask.ops.relation import Relation
from demask.ops.schema import fake

Interval = tuple[int, int]
Rule = Callable[[int, int], Interval]  # start, end of an output -> interval of an operand


def input_start(relation: Relation, operand: int, axis: int, start: int, *, out: int = 0) -> int:
    """The first position of the operand that output positions from `start` on require.

    >>> import torch
    >>> from demask.ops import TABLE, bind
    >>> from demask.ops.laws import call_node
    >>> node = call_node(torch.ops.aten.max_pool1d.default, torch.zeros(1, 2, 9), [3], [2])
    >>> input_start(bind(node, TABLE), 0, 2, 1), input_end(bind(node, TABLE), 0, 2, 2)
    (2, 5)
    """
    return needed_interval(relation, operand, axis, start, _length(relation, axis, out), out=out)[0]


def input_end(relation: Relation, operand: int, axis: int, end: int, *, out: int = 0) -> int:
    """One past the last position of the operand that output positions before `end` require."""
    return needed_interval(relation, operand, axis, 0, end, out=out)[1]


def needed_interval(relation: Relation, operand: int, axis: int, start: int, end: int, *, out: int = 0) -> Interval:
    """The positions of the operand that output positions [start, end) require, along `axis_of`.

    Raises ValueError if the operand has no such axis: all of it is required.
    """
    return region_rule(relation, operand, axis, out=out)(start, end)


def region_rule(relation: Relation, operand: int, axis: int, *, out: int = 0) -> Rule:
    """`needed_interval` as a function of start and end, for many intervals: reads geometry once.

    Raises ValueError if the operand has no such axis: all of it is required.
    """
    operand_axis = axis_of(relation, operand, axis, out=out)
    if operand_axis is None:
        name = relation.operands[operand].name
        raise ValueError(f"{relation.node}: operand {name!r} has no axis along axis {axis} of the output")
    axis %= len(relation.outs[out])
    length = schema.example_size(fake(relation.operands[operand].value).shape[operand_axis])
    output_length = _length(relation, axis, out)
    unclamped = _unclamped(relation, (operand, operand_axis), (out, axis))

    def answer(start: int, end: int) -> Interval:
        start, end = max(start, 0), min(end, output_length)
        if start >= end:
            return 0, 0
        low, high = (0, length) if unclamped is None else unclamped(start, end)
        return min(max(low, 0), length), min(max(high, 0), length)

    return answer


def is_whole(relation: Relation, operand: int, axis: int, *, out: int = 0) -> bool:
    """Whether every position of an output's axis requires all of the operand along `axis_of`."""
    operand_axis = axis_of(relation, operand, axis, out=out)
    axis %= len(relation.outs[out])
    return operand_axis is None or _unclamped(relation, (operand, operand_axis), (out, axis)) is None


def _unclamped(relation: Relation, source: Interval, target: Interval) -> Rule | None:
    """The rule without clamping; None if the full axis is required. source: an operand and its
    axis; target: an output and its axis."""
    operand_letters, letters = (relation.ins[source[0]][source[1]], relation.outs[target[0]][target[1]])
    if set(letters) & relation.looped:
        return None
    if letters[0] in relation.window:
        windowed = _RULES.get(relation.entry.region)
        return None if windowed is None else partial(windowed, Geometry(relation, *source, *target))
    if letters[0] in relation.moved:
        move = relation.moves[target[0]].get(base(letters[0]))
        return None if move is None else _moved(move, source[0])
    common, step, tile = _steps(relation, operand_letters, letters)
    if not common or step is None or tile is None:
        return None
    return lambda start, end: (start // tile * step, -(-end // tile) * step)


def carried_steps(relation: Relation, operand: int, axis: int, *, out: int = 0) -> tuple[int, int, int]:
    """Of a carried axis: the number of major letters that the operand's axis and the output's axis
    share, and the number of positions per position of these, in the operand and in the output.

    >>> from demask.ops import TABLE, bind
    >>> from demask.ops.laws import call_node
    >>> node = call_node(torch.ops.aten.pixel_shuffle.default, torch.zeros(1, 8, 3, 5), 2)
    >>> carried_steps(bind(node, TABLE), 0, 2)
    (1, 1, 2)
    """
    operand_axis = axis_of(relation, operand, axis, out=out)
    if operand_axis is None:
        raise ValueError(f"{relation.node}: operand {operand} has no axis along axis {axis}")
    common, step, tile = _steps(relation, relation.ins[operand][operand_axis], relation.outs[out][axis])
    return common, step or 1, tile or 1


def _steps(relation: Relation, operand_letters, letters) -> tuple[int, int | None, int | None]:
    """The number of shared major letters, and the products of the sizes after them in the operand
    and the output; None for dynamic ones."""
    common = 0
    for letter, other in zip(operand_letters, letters, strict=False):
        if letter != other or letter in relation.complete:
            break
        common += 1
    return (common, _size_product(relation, operand_letters[common:]), _size_product(relation, letters[common:]))


def _size_product(relation: Relation, letters: tuple[str, ...]) -> int | None:
    """The product of the sizes of letters; None if one is dynamic."""
    sizes = [relation.size[letter] for letter in letters]
    return None if None in sizes else math.prod(size or 1 for size in sizes)


def _moved(move: IndexMap, operand: int) -> Rule:
    """The rule of an index map. Positions are split into monotonic runs: within a run, the first
    and last positions of an interval are its extremes."""
    runs = _runs([int(k) for k in (move.source == operand).nonzero()], move.position.tolist())
    last_positions = [last for last, _, _ in runs]

    def unclamped(start: int, end: int) -> Interval:
        low, high = 0, 0
        for last, first, positions in islice(runs, bisect_left(last_positions, start), None):
            if first >= end:
                break
            a, b = sorted((positions[max(start - first, 0)], positions[min(end - 1, last) - first]))
            low, high = (a, b + 1) if low == high else (min(low, a), max(high, b + 1))
        return low, high

    return unclamped


def _runs(indices: list[int], position: list[int]) -> list[tuple[int, int, list[int]]]:
    """Monotonic runs of source positions over consecutive output positions `ours`: the last and
    the first output position, and the source positions."""
    runs: list[tuple[int, int, list[int]]] = []
    direction = 0
    for index in indices:
        source = position[index]
        if runs and runs[-1][0] == index - 1:
            change = (source > position[index - 1]) - (source < position[index - 1])
            if direction * change >= 0:
                direction = direction or change
                runs[-1][2].append(source)
                runs[-1] = (index, *runs[-1][1:])
                continue
        direction = 0
        runs.append((index, index, [source]))
    return runs


class Geometry:
    """The geometry of one windowed axis of a call, read by name from its arguments."""

    def __init__(self, relation: Relation, operand: int, operand_axis: int, out: int, axis: int):
        self.arguments = schema.arguments(relation.node)
        windowed = [k for k, a in enumerate(relation.outs[out]) if set(a) & relation.window]
        self.rank, self.index = len(windowed), windowed.index(axis)
        operands = relation.operands
        self.input = schema.example_size(fake(operands[operand].value).shape[operand_axis])
        self.output = _length(relation, axis, out)
        weight = self.arguments.get("weight")
        self.kernel = (
            self.number("kernel_size", None)
            if weight is None
            else schema.example_size(fake(weight).shape[self.index - self.rank])
        )
        self.step = self.number("stride", None) or self.kernel
        # The distance from the first input position of a window to the last.
        self.reach = self.number("dilation", 1) * ((self.kernel or 1) - 1)
        self.padding = self._padding()
        self._floors: dict[tuple[float, bool], tuple[list[int], list[int]]] = {}

    def number(self, name: str, default: Any) -> Any:
        """An argument's value along this axis; a single value applies to every axis."""
        value = self.arguments.get(name)
        if value is None or (isinstance(value, (list, tuple)) and not value):
            return default
        value = value if isinstance(value, (list, tuple)) else [value]
        return schema.concrete(value[self.index if len(value) == self.rank else 0])

    def _padding(self) -> int:
        """The padding before the first position. "same" is half the window, rounded down; "valid"
        is none."""
        value = self.arguments.get("padding")
        if isinstance(value, str):
            return self.reach // 2 if value == "same" else 0
        return self.number("padding", 0)

    def scales(self, align: bool) -> tuple[float, ...]:
        """Input positions per output position, in double and in single precision, as in ATen."""
        factor = self.number("scale_factors", None)
        if align:
            scale = (self.input - 1) / (self.output - 1) if self.output > 1 else 0.0
        else:
            scale = self.input / self.output if factor is None else 1.0 / factor
        return scale, float(torch.tensor(scale, dtype=torch.float32))

    def shortcuts(self, position: int) -> tuple[int, ...]:
        """The input position that nearest kernels for images read, regardless of the scale: they
        copy if sizes are equal, and read each position twice if the output is twice as long."""
        step = self.output / max(self.input, 1)
        return () if self.rank == 1 or step not in (1, 2) else (int(position // step),)

    def floors(self, shift: float, align: bool) -> tuple[list[int], list[int]]:
        """The least and largest floor((position + shift) * scale - shift) of every position: at
        exact multiples, single and double precision round differently."""
        if (shift, align) not in self._floors:
            positions, rounded = torch.arange(self.output, dtype=torch.float64) + shift, []
            for scale in self.scales(align):
                rounded += [(v * scale - shift).floor().long() for v in (positions, positions.float())]
            candidates = torch.stack(rounded)
            self._floors[shift, align] = (candidates.amin(0).tolist(), candidates.amax(0).tolist())
        return self._floors[shift, align]


def geometry(relation: Relation, operand: int, axis: int, *, out: int = 0) -> Geometry:
    """Kernel, step, reach and padding of the window along an axis.

    Raises ValueError if the operand has no such axis.
    """
    operand_axis = axis_of(relation, operand, axis, out=out)
    if operand_axis is None:
        raise ValueError(f"{relation.node}: operand {operand} has no axis along axis {axis}")
    return Geometry(relation, operand, operand_axis, out, axis % len(relation.outs[out]))


def _conv(axis: Geometry, start: int, end: int) -> Interval:
    """Window o reads o * stride - padding + dilation * k."""
    first = start * axis.step - axis.padding
    return first, (end - 1) * axis.step - axis.padding + axis.reach + 1


def _transposed(axis: Geometry, start: int, end: int) -> Interval:
    """Input i writes i * stride - padding + dilation * k."""
    first = -(-(start + axis.padding - axis.reach) // axis.step)
    return first, (end - 1 + axis.padding) // axis.step + 1


def _adaptive(axis: Geometry, start: int, end: int) -> Interval:
    """Window o reads from floor(o * in / out) to ceil((o + 1) * in / out)."""
    return start * axis.input // axis.output, -(-end * axis.input // axis.output)


def _nearest(axis: Geometry, start: int, end: int) -> Interval:
    """floor(o * scale)."""
    low, high = axis.floors(0.0, False)
    first = min([low[start], *axis.shortcuts(start)])
    return min(first, axis.input - 1), max([high[end - 1], *axis.shortcuts(end - 1)]) + 1


def _exact(axis: Geometry, start: int, end: int) -> Interval:
    """floor((o + 0.5) * scale) of a product rounded to single precision."""
    scales = axis.scales(False)
    low = [_floor_single((start + 0.5) * scale) for scale in scales]
    high = [_floor_single((end - 0.5) * scale) for scale in scales]
    low, high = [*low, *axis.shortcuts(start)], [*high, *axis.shortcuts(end - 1)]
    return min(*low, axis.input - 1), max(high) + 1


def _floor_single(value: float) -> int:
    """The floor of a value rounded to single precision."""
    return math.floor(struct.unpack("f", struct.pack("f", value))[0])


def _taps(before: int, after: int) -> Callable[[Geometry, int, int], Interval]:
    """Interpolation that reads from `before` positions before the floor of the source position to
    `after` positions after it; outside of the border it reads the border."""

    def windowed(axis: Geometry, start: int, end: int) -> Interval:
        align = bool(axis.arguments["align_corners"])
        low, high = axis.floors(0.0 if align else 0.5, align)
        last = max(high[end - 1], -before) + after
        return min(low[start] - before, axis.input - 1), last + 1

    return windowed


_RULES: dict[str, Callable[[Geometry, int, int], Interval]] = {
    "conv": _conv,
    "transposed": _transposed,
    "adaptive": _adaptive,
    "nearest": _nearest,
    "exact": _exact,
    "linear": _taps(0, 1),
    "cubic": _taps(1, 2),
}


def _length(relation: Relation, axis: int, out: int) -> int:
    return schema.example_size(schema.outputs(relation.node)[out].shape[axis])


__all__ = [
    "Geometry",
    "carried_steps",
    "geometry",
    "input_end",
    "input_start",
    "is_whole",
    "needed_interval",
    "region_rule",
]
