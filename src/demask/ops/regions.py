"""Which interval of an operand's axis an interval of the output needs: one formula per class.

    tile(op(x), start, end) == tile(op(y), start, end)     for every y that equals x on
                                                           [input_start(start), input_end(end))

Intervals are half-open, clamped to the operand, and may be empty (start >= end): a transposed
convolution whose kernel is shorter than its stride has rows that no input reaches. `axis` is an
axis of the output; `axis_of` tells the operand's axis, and along all its other axes the operand is
needed whole. Geometry (kernel, stride, padding, dilation, scale, align_corners) is found by name
in the op's schema; dynamic sizes are those of the example. Source: the arithmetic of ATen's
UpSample.h, Pool.h and AdaptivePooling.h.
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
from demask.ops.positions import Move
from demask.ops.relation import Relation

Interval = tuple[int, int]
Rule = Callable[[int, int], Interval]  # start, end of an output -> interval of an operand


def input_start(relation: Relation, operand: int, axis: int, start: int, *, out: int = 0) -> int:
    """The first position of the operand that positions `start` and later of the output need.

    >>> import torch
    >>> from demask.ops import TABLE, bind
    >>> from demask.ops.laws import call_node
    >>> node = call_node(torch.ops.aten.max_pool1d.default, torch.zeros(1, 2, 9), [3], [2])
    >>> input_start(bind(node, TABLE), 0, 2, 1), input_end(bind(node, TABLE), 0, 2, 2)
    (2, 5)
    """
    return needed(relation, operand, axis, start, _length(relation, axis, out), out=out)[0]


def input_end(relation: Relation, operand: int, axis: int, end: int, *, out: int = 0) -> int:
    """One past the last position of the operand that positions before `end` of the output need."""
    return needed(relation, operand, axis, 0, end, out=out)[1]


def needed(
    relation: Relation, operand: int, axis: int, start: int, end: int, *, out: int = 0
) -> Interval:
    """The positions of the operand that positions [start, end) of the output need, along `axis_of`.

    Raises ValueError where the operand has no such axis: it is needed whole.
    """
    return rule(relation, operand, axis, out=out)(start, end)


def rule(relation: Relation, operand: int, axis: int, *, out: int = 0) -> Rule:
    """`needed` for many intervals: the geometry is bound once, an answer is plain arithmetic.

    Raises ValueError where the operand has no such axis: it is needed whole.
    """
    at = axis_of(relation, operand, axis, out=out)
    if at is None:
        name = relation.operands[operand].name
        raise ValueError(
            f"{relation.node}: operand {name!r} has no axis along axis {axis} of the output"
        )
    axis %= len(relation.outs[out])
    length = schema.hint(relation.operands[operand].value.meta["val"].shape[at])
    made = _length(relation, axis, out)
    unclamped = _unclamped(relation, (operand, at), (out, axis))

    def answer(start: int, end: int) -> Interval:
        start, end = max(start, 0), min(end, made)
        if start >= end:
            return 0, 0
        low, high = (0, length) if unclamped is None else unclamped(start, end)
        return min(max(low, 0), length), min(max(high, 0), length)

    return answer


def is_whole(relation: Relation, operand: int, axis: int, *, out: int = 0) -> bool:
    """Does every position along an axis of the output need all of the operand along `axis_of`?"""
    at = axis_of(relation, operand, axis, out=out)
    axis %= len(relation.outs[out])
    return at is None or _unclamped(relation, (operand, at), (out, axis)) is None


def _unclamped(relation: Relation, source: Interval, made: Interval) -> Rule | None:
    """source: an operand and its axis; made: an output and its axis. None: needed whole."""
    theirs, letters = relation.ins[source[0]][source[1]], relation.outs[made[0]][made[1]]
    if set(letters) & relation.looped:
        return None
    if letters[0] in relation.window:
        windowed = _RULES.get(relation.entry.region)
        return None if windowed is None else partial(windowed, Geometry(relation, *source, *made))
    if letters[0] in relation.moved:
        move = relation.moves[made[0]].get(base(letters[0]))
        return None if move is None else _moved(move, source[0])
    common, step, tile = _steps(relation, theirs, letters)
    if not common or step is None or tile is None:
        return None
    return lambda start, end: (start // tile * step, -(-end // tile) * step)


def steps(relation: Relation, operand: int, axis: int, *, out: int = 0) -> tuple[int, int, int]:
    """Of a carried axis: how many letters in front the operand's axis and the output's share, and
    how many positions follow one of their positions, in the operand and in the output.

    >>> from demask.ops import TABLE, bind
    >>> from demask.ops.laws import call_node
    >>> node = call_node(torch.ops.aten.pixel_shuffle.default, torch.zeros(1, 8, 3, 5), 2)
    >>> steps(bind(node, TABLE), 0, 2)
    (1, 1, 2)
    """
    at = axis_of(relation, operand, axis, out=out)
    if at is None:
        raise ValueError(f"{relation.node}: operand {operand} has no axis along axis {axis}")
    common, step, tile = _steps(relation, relation.ins[operand][at], relation.outs[out][axis])
    return common, step or 1, tile or 1


def _steps(relation: Relation, theirs, letters) -> tuple[int, int | None, int | None]:
    """The same letters in front, and the sizes of what follows them; None where dynamic."""
    common = 0
    for mine, other in zip(theirs, letters, strict=False):
        if mine != other or mine in relation.complete:
            break
        common += 1
    return common, _product(relation, theirs[common:]), _product(relation, letters[common:])


def _product(relation: Relation, letters: tuple[str, ...]) -> int | None:
    sizes = [relation.size[letter] for letter in letters]
    return None if None in sizes else math.prod(size or 1 for size in sizes)


def _moved(move: Move, operand: int) -> Rule:
    """The positions taken from an operand, as runs in which they only rise or only fall: the ends
    of what an interval takes of a run are its extremes."""
    runs = _runs([int(k) for k in (move.source == operand).nonzero()], move.position.tolist())
    ends = [last for last, _, _ in runs]

    def unclamped(start: int, end: int) -> Interval:
        low, high = 0, 0
        for last, first, taken in islice(runs, bisect_left(ends, start), None):
            if first >= end:
                break
            a, b = sorted((taken[max(start - first, 0)], taken[min(end - 1, last) - first]))
            low, high = (a, b + 1) if low == high else (min(low, a), max(high, b + 1))
        return low, high

    return unclamped


def _runs(ours: list[int], position: list[int]) -> list[tuple[int, int, list[int]]]:
    """Of places that follow each other and rise or fall together: last, first, positions."""
    runs: list[tuple[int, int, list[int]]] = []
    slope = 0
    for place in ours:
        here = position[place]
        if runs and runs[-1][0] == place - 1:
            turn = (here > position[place - 1]) - (here < position[place - 1])
            if slope * turn >= 0:
                slope = slope or turn
                runs[-1][2].append(here)
                runs[-1] = (place, *runs[-1][1:])
                continue
        slope = 0
        runs.append((place, place, [here]))
    return runs


class Geometry:
    """One windowed axis of a call, read by name from its arguments, once."""

    def __init__(self, relation: Relation, operand: int, at: int, out: int, axis: int):
        self.found = schema.arguments(relation.node)
        windowed = [k for k, a in enumerate(relation.outs[out]) if set(a) & relation.window]
        self.rank, self.index = len(windowed), windowed.index(axis)
        operands = relation.operands
        self.input = schema.hint(operands[operand].value.meta["val"].shape[at])
        self.output = _length(relation, axis, out)
        weight = self.found.get("weight")
        self.kernel = (
            self.number("kernel_size", None)
            if weight is None
            else schema.hint(weight.meta["val"].shape[self.index - self.rank])
        )
        self.step = self.number("stride", None) or self.kernel
        # From the first input position of a window to its last.
        self.reach = self.number("dilation", 1) * ((self.kernel or 1) - 1)
        self.padding = self._padding()
        self._floors: dict[tuple[float, bool], tuple[list[int], list[int]]] = {}

    def number(self, name: str, default: Any) -> Any:
        """An argument's value along this axis; one value stands for every axis."""
        value = self.found.get(name)
        if value is None or (isinstance(value, (list, tuple)) and not value):
            return default
        value = value if isinstance(value, (list, tuple)) else [value]
        return schema.concrete(value[self.index if len(value) == self.rank else 0])

    def _padding(self) -> int:
        """Positions before the first; a string pads by half the window, rounded down, or not."""
        value = self.found.get("padding")
        if isinstance(value, str):
            return self.reach // 2 if value == "same" else 0
        return self.number("padding", 0)

    def scales(self, align: bool) -> tuple[float, ...]:
        """Input steps per output step, in double and in single precision, as ATen computes it."""
        factor = self.number("scale_factors", None)
        if align:
            scale = (self.input - 1) / (self.output - 1) if self.output > 1 else 0.0
        else:
            scale = self.input / self.output if factor is None else 1.0 / factor
        return scale, float(torch.tensor(scale, dtype=torch.float32))

    def shortcuts(self, place: int) -> tuple[int, ...]:
        """Where nearest kernels of images read instead, whatever scale is given: they copy where
        sizes are equal, and read each position twice where one is twice the other."""
        step = self.output / max(self.input, 1)
        return () if self.rank == 1 or step not in (1, 2) else (int(place // step),)

    def floors(self, shift: float, align: bool) -> tuple[list[int], list[int]]:
        """floor((place + shift) * scale - shift) of every place, at its lowest and highest: at
        exact multiples single and double precision round to different sides."""
        if (shift, align) not in self._floors:
            places, found = torch.arange(self.output, dtype=torch.float64) + shift, []
            for scale in self.scales(align):
                found += [(v * scale - shift).floor().long() for v in (places, places.float())]
            table = torch.stack(found)
            self._floors[shift, align] = (table.amin(0).tolist(), table.amax(0).tolist())
        return self._floors[shift, align]


def geometry(relation: Relation, operand: int, axis: int, *, out: int = 0) -> Geometry:
    """Kernel, step, reach and padding of the window that slides along a windowed axis.

    Raises ValueError where the operand has no such axis.
    """
    at = axis_of(relation, operand, axis, out=out)
    if at is None:
        raise ValueError(f"{relation.node}: operand {operand} has no axis along axis {axis}")
    return Geometry(relation, operand, at, out, axis % len(relation.outs[out]))


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
    low, high = axis.floors(0.0, False)
    first = min([low[start], *axis.shortcuts(start)])
    return min(first, axis.input - 1), max([high[end - 1], *axis.shortcuts(end - 1)]) + 1


def _exact(axis: Geometry, start: int, end: int) -> Interval:
    """floor((o + 0.5) * scale), rounded to single precision before."""
    scales = axis.scales(False)
    low = [_floor_single((start + 0.5) * scale) for scale in scales]
    high = [_floor_single((end - 0.5) * scale) for scale in scales]
    low, high = [*low, *axis.shortcuts(start)], [*high, *axis.shortcuts(end - 1)]
    return min(*low, axis.input - 1), max(high) + 1


def _floor_single(value: float) -> int:
    return math.floor(struct.unpack("f", struct.pack("f", value))[0])


def _taps(before: int, after: int) -> Callable[[Geometry, int, int], Interval]:
    """Interpolation that reads from `before` positions before the source's floor to `after` after;
    beyond the border it reads the border."""

    def windowed(axis: Geometry, start: int, end: int) -> Interval:
        align = bool(axis.found["align_corners"])
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
    return schema.hint(schema.outputs(relation.node)[out].shape[axis])


__all__ = [
    "Geometry",
    "geometry",
    "input_end",
    "input_start",
    "is_whole",
    "needed",
    "rule",
    "steps",
]
