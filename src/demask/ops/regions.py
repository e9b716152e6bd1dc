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
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from demask.ops import schema
from demask.ops.bind import Relation
from demask.ops.positions import Move

Interval = tuple[int, int]


def axis_of(relation: Relation, operand: int, axis: int, *, out: int = 0) -> int | None:
    """The operand's axis that axis `axis` of output `out` runs along, None if it has none."""
    axis %= len(relation.outs[out])
    letters = relation.outs[out][axis]
    if not letters:
        return None
    base = _base(letters[0])
    for k, theirs in enumerate(relation.ins[operand]):
        if base in map(_base, theirs):
            return k
    return None


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
    at = axis_of(relation, operand, axis, out=out)
    if at is None:
        name = relation.operands[operand].name
        raise ValueError(
            f"{relation.node}: operand {name!r} has no axis along axis {axis} of the output"
        )
    axis %= len(relation.outs[out])
    length = schema.hint(relation.operands[operand].value.meta["val"].shape[at])
    start, end = max(start, 0), min(end, _length(relation, axis, out))
    if start >= end:
        return 0, 0
    low, high = _interval(relation, (operand, at), (out, axis), start, end)
    return min(max(low, 0), length), min(max(high, 0), length)


def _interval(
    relation: Relation, source: tuple[int, int], made: tuple[int, int], start: int, end: int
) -> Interval:
    """Unclamped. source: an operand and its axis; made: an output and its axis."""
    whole = (0, schema.hint(relation.operands[source[0]].value.meta["val"].shape[source[1]]))
    theirs, letters = relation.ins[source[0]][source[1]], relation.outs[made[0]][made[1]]
    if set(letters) & relation.looped:
        return whole
    if letters[0] in relation.window:
        rule = _RULES.get(relation.entry.region)
        return whole if rule is None else rule(_Axis(relation, *source, *made), start, end)
    if letters[0] in relation.moved:
        move = relation.moves[made[0]].get(_base(letters[0]))
        return whole if move is None else _moved(move, source[0], start, end)
    return _carried(relation, theirs, letters, start, end) or whole


def _carried(relation: Relation, theirs, letters, start: int, end: int) -> Interval | None:
    """The same letters in front: whole steps of what follows them; None where that is the axis."""
    common = 0
    for mine, other in zip(theirs, letters, strict=False):
        if mine != other or mine in relation.complete:
            break
        common += 1
    step, tile = (_product(relation, axis[common:]) for axis in (theirs, letters))
    if not common or step is None or tile is None:
        return None
    return start // tile * step, -(-end // tile) * step


def _product(relation: Relation, letters: tuple[str, ...]) -> int | None:
    sizes = [relation.size[letter] for letter in letters]
    return None if None in sizes else math.prod(size or 1 for size in sizes)


def _moved(move: Move, operand: int, start: int, end: int) -> Interval:
    ours = move.source[start:end] == operand
    if not bool(ours.any()):
        return 0, 0
    taken = move.position[start:end][ours]
    return int(taken.min()), int(taken.max()) + 1


class _Axis:
    """One windowed axis of a call, read by name from its arguments."""

    def __init__(self, relation: Relation, operand: int, at: int, out: int, axis: int):
        self.found = schema.arguments(relation.node)
        windowed = [k for k, a in enumerate(relation.outs[out]) if set(a) & relation.window]
        self.rank, self.index = len(windowed), windowed.index(axis)
        operands = relation.operands
        self.input = schema.hint(operands[operand].value.meta["val"].shape[at])
        self.output = _length(relation, axis, out)
        self.step = self.number("stride", None) or self.kernel

    def number(self, name: str, default: Any) -> Any:
        """An argument's value along this axis; one value stands for every axis."""
        value = self.found.get(name)
        if value is None or (isinstance(value, (list, tuple)) and not value):
            return default
        value = value if isinstance(value, (list, tuple)) else [value]
        return schema.concrete(value[self.index if len(value) == self.rank else 0])

    @property
    def kernel(self) -> int:
        size = self.number("kernel_size", None)
        weight = self.found.get("weight")
        return (
            size
            if weight is None
            else schema.hint(weight.meta["val"].shape[self.index - self.rank])
        )

    @property
    def reach(self) -> int:
        """From the first input position of a window to its last."""
        return self.number("dilation", 1) * (self.kernel - 1)

    @property
    def padding(self) -> int:
        """Positions before the first; a string pads by half the window, rounded down, or not."""
        value = self.found["padding"]
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


def _conv(axis: _Axis, start: int, end: int) -> Interval:
    """Window o reads o * stride - padding + dilation * k."""
    first = start * axis.step - axis.padding
    return first, (end - 1) * axis.step - axis.padding + axis.reach + 1


def _transposed(axis: _Axis, start: int, end: int) -> Interval:
    """Input i writes i * stride - padding + dilation * k."""
    first = -(-(start + axis.padding - axis.reach) // axis.step)
    return first, (end - 1 + axis.padding) // axis.step + 1


def _adaptive(axis: _Axis, start: int, end: int) -> Interval:
    """Window o reads from floor(o * in / out) to ceil((o + 1) * in / out)."""
    return start * axis.input // axis.output, -(-end * axis.input // axis.output)


def _floors(axis: _Axis, place: int, *, shift: float, align: bool = False) -> tuple[int, int]:
    """floor((place + shift) * scale - shift) at its lowest and highest: at exact multiples single
    and double precision round to different sides."""
    found = []
    for scale in axis.scales(align):
        exact = (place + shift) * scale - shift
        single = torch.tensor(place + shift, dtype=torch.float32) * scale - shift
        found += [math.floor(exact), math.floor(float(single))]
    return min(found), max(found)


def _nearest(axis: _Axis, start: int, end: int) -> Interval:
    low, high = _floors(axis, start, shift=0.0)[0], _floors(axis, end - 1, shift=0.0)[1]
    return min(low, axis.input - 1), high + 1


def _exact(axis: _Axis, start: int, end: int) -> Interval:
    """floor((o + 0.5) * scale)"""

    def places(place: int) -> Tensor:
        return torch.tensor([(place + 0.5) * scale for scale in axis.scales(False)]).floor().long()

    return min(int(places(start).min()), axis.input - 1), int(places(end - 1).max()) + 1


def _taps(before: int, after: int) -> Callable[[_Axis, int, int], Interval]:
    """Interpolation that reads from `before` positions before the source's floor to `after` after;
    beyond the border it reads the border."""

    def rule(axis: _Axis, start: int, end: int) -> Interval:
        align = bool(axis.found["align_corners"])
        shift = 0.0 if align else 0.5
        low = _floors(axis, start, shift=shift, align=align)[0] - before
        high = max(_floors(axis, end - 1, shift=shift, align=align)[1], -before) + after
        return min(low, axis.input - 1), high + 1

    return rule


_RULES: dict[str, Callable[[_Axis, int, int], Interval]] = {
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


def _base(letter: str) -> str:
    return letter.partition("<")[0].partition(">")[0]


__all__ = ["axis_of", "input_end", "input_start", "needed"]
