"""The positions that each call reads along one image axis, as if the image had no borders.

Near a border a call reads less than inside. For a halo only the inside matters: each call's rule
(`ops.regions`) is evaluated where no border clips it, and extrapolated. Rules repeat: `period`
positions further along the output is `step` positions further along the operand.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from demask.ops import schema
from demask.ops.flow import Part, follow
from demask.ops.regions import needed_interval
from demask.ops.relation import Relation
from demask.ops.schema import fake

PERIODS = 64  # the longest period that is searched for
WINDOW = 16  # positions per query: more than a transposed convolution leaves out in a row


@dataclass(frozen=True, slots=True)
class AxisStep:
    """The positions that a call reads on an image without borders.

    Positions from `o` on read from `start(o)` on; positions before `o` read to before `end(o)`:

        start(o + period) == start(o) + step,    end(o + period) == end(o) + step

    exact: False where the rule does not repeat (resizing with align_corners). Then start and end
    are bounds, off by at most two positions plus the drift along the axis.
    """

    period: int
    step: int
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    exact: bool = True

    @property
    def scale(self) -> Fraction:
        """Positions of the operand per position of the output."""
        return Fraction(self.step, self.period)

    def start(self, position: int) -> int:
        if not self.exact:
            return position * self.step // self.period + self.starts[0]
        periods, rest = divmod(position, self.period)
        return periods * self.step + self.starts[rest]

    def end(self, position: int) -> int:
        if not self.exact:
            return -(-position * self.step // self.period) + self.ends[0]
        periods, rest = divmod(position, self.period)
        return periods * self.step + self.ends[rest]


SAME = AxisStep(1, 1, (0,), (0,))


class TooSmall(Exception):
    """The image is so small that every position of a call reads its border."""


# --- the positions that a call reads ------------------------------------------------------------


class Rules:
    """The step of each call, computed once for equal calls."""

    def __init__(self) -> None:
        self._cache: dict[Any, AxisStep | str | None] = {}

    def step(
        self, relation: Relation, operand: int, parts: tuple[Part, Part], out: int, last: bool
    ) -> AxisStep | str | None:
        """The step from an output to an operand; a reason (str) where every position reads all of
        it; None where the middle of the output reads nothing of it.

        parts: the axis of the operand and of the output. last: the image cannot be enlarged.

        Raises:
            TooSmall: if the image must be enlarged, unless `last`.
        """
        before, after = parts
        carried_part = follow(relation, operand, before, out=out)
        if carried_part is None or carried_part.axis != after.axis:
            return f"reads all of {relation.operands[operand].name!r} at every position"
        letters = relation.outs[out][after.axis]
        if letters[0] not in relation.window | relation.moved:
            return _step_carried(relation, operand, (before, carried_part, after), out)
        key = (_key(relation), operand, parts, out)
        if key not in self._cache:
            step = _fit(_AxisRule(relation, operand, before, after, out), last)
            self._cache[key] = step
        return self._cache[key]


def _key(relation: Relation) -> tuple[Any, ...]:
    names = {operand.name for operand in relation.operands}
    plain = [repr(v) for k, v in schema.arguments(relation.node).items() if k not in names]
    shapes = [tuple(schema.sizes(_value(operand.value))) for operand in relation.operands]
    return relation.node.target, tuple(plain), tuple(shapes)


def _value(value: Any) -> Any:
    return fake(value) if hasattr(value, "meta") else value


def _step_carried(relation: Relation, operand: int, parts: tuple[Part, Part, Part], out: int) -> AxisStep | str:
    """The step of a carried axis: position by position, unless the call needs all of it at once.

    parts: of the operand, the operand's in the output, and the output's own, which may be finer.
    """
    before, carried_part, after = parts
    letters = set(relation.ins[operand][before.axis]) & set(relation.outs[out][after.axis])
    if letters & relation.complete and relation.entry.fill != "same":
        return "normalizes over all positions"
    if letters & relation.looped:
        return "carries a state from position to position"
    if carried_part.inner * carried_part.size != after.inner * after.size or carried_part.inner % after.inner:
        return "moves positions across the image"
    count, step = carried_part.inner // after.inner, before.size // carried_part.size
    ends = (0, *[step] * (count - 1))  # part of a position is read as all of it
    return AxisStep(count, step, (0,) * count, ends)


@dataclass(frozen=True, slots=True)
class _AxisRule:
    """The region rule of a call between a part of an operand's axis and one of an output's."""

    relation: Relation
    operand: int
    before: Part
    after: Part
    out: int

    @property
    def moves(self) -> bool:
        """Whether the axis is moved: its positions follow a map that may differ everywhere."""
        return self.relation.outs[self.out][self.after.axis][0] in self.relation.moved

    def low(self, position: int) -> int:
        """The first position read by positions from `position` on."""
        end = position + (1 if self.moves else WINDOW)
        return self._needed(position, min(end, self.after.size))[0] // self.before.inner

    def high(self, position: int) -> int:
        """One past the last position read by positions before `position`."""
        start = position - (1 if self.moves else WINDOW)
        return -(-self._needed(max(start, 0), position)[1] // self.before.inner)

    def one(self) -> tuple[int, int]:
        """The interval that the position in the middle reads."""
        middle = self.after.size // 2
        low, high = self._needed(middle, middle + 1)
        return low // self.before.inner, -(-high // self.before.inner)

    def _needed(self, start: int, end: int) -> tuple[int, int]:
        inner = self.after.inner
        return needed_interval(self.relation, self.operand, self.after.axis, start * inner, end * inner, out=self.out)


def _fit(rule: _AxisRule, last: bool) -> AxisStep | str | None:
    operand_size, output_size = rule.before.size, rule.after.size
    low, high = rule.one()
    if rule.moves and low == high:
        return None
    if not last and (low <= 0 or high >= operand_size):
        raise TooSmall(f"{rule.relation.node}")
    if (low, high) == (0, operand_size) and operand_size > 1:
        return f"reads all {operand_size} positions at every position"
    step = _periodic(rule)
    if step is not None:
        return step
    scale, inside = Fraction(operand_size, output_size), _inside(rule)[0]
    if not last and inside[1] - inside[0] <= 2 * scale.denominator <= output_size:
        raise TooSmall(f"{rule.relation.node}")
    lows = [rule.low(o) - math.floor(o * scale) for o in range(output_size)]
    highs = [rule.high(o) - math.ceil(o * scale) for o in range(1, output_size + 1)]
    if max(-min(lows), max(highs)) > operand_size // 2:
        return "moves positions across the image"
    # One more on both sides: positions not tested here may round differently.
    bound = (min(lows) - 1,), (max(highs) + 1,)
    return AxisStep(scale.denominator, scale.numerator, *bound, exact=False)


def _periodic(rule: _AxisRule) -> AxisStep | None:
    """The step of the shortest period with which the rule repeats inside the borders."""
    lows, highs = _inside(rule)
    longest = min(PERIODS, *((last - first + 1) // 2 for first, last in (lows, highs)))
    for period in range(1, longest + 1):
        step = rule.low(lows[0] + period) - rule.low(lows[0])
        if step > 0 and _repeats(rule.low, lows, period, step) and _repeats(rule.high, highs, period, step):
            starts = _table(rule.low, lows, period, step)
            return AxisStep(period, step, starts, _table(rule.high, highs, period, step))
    return None


def _inside(rule: _AxisRule) -> tuple[tuple[int, int], tuple[int, int]]:
    """The first and last output position whose `low`, and whose `high`, no border clips."""
    operand_size, output_size = rule.before.size, rule.after.size
    if rule.moves:  # pads, crops and rolled positions are at the ends
        return (output_size // 4, 3 * output_size // 4), (output_size // 4, 3 * output_size // 4)
    first = bisect.bisect_right(range(output_size), 0, key=rule.low)
    final = bisect.bisect_left(range(1, output_size + 1), operand_size, key=rule.high)
    return (first, final - 1), (first + 1, final)


def _repeats(value: Callable[[int], int], inside: tuple[int, int], period: int, step: int) -> bool:
    """Whether value(o + period) == value(o) + step at both ends and in the middle of the inside."""
    first, last = inside
    span = last - period - first
    anchors = {first, first + max(span - period, 0) // 2, max(first, last - 2 * period + 1)}
    return all(
        value(position + period) - value(position) == step
        for anchor in anchors
        for position in range(anchor, min(anchor + period, last - period + 1))
    )


def _table(value: Callable[[int], int], inside: tuple[int, int], period: int, step: int) -> tuple[int, ...]:
    """The values of one period in the middle of the inside, by position modulo the period."""
    middle = (sum(inside) - period + 1) // 2
    values = {}
    for position in range(middle, middle + period):
        values[position % period] = value(position) - position // period * step
    return tuple(values[rest] for rest in range(period))
