"""How one axis of the image runs through a network, call by call, as on an endless image.

Near a border a call reads less than it does inside. A halo is about the inside: each call's rule
(`ops.regions`) is read where the border does not cut it and continued for ever, which a rule
allows that repeats: `period` positions further along the output is `step` positions further along
the operand.
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
from demask.ops.regions import needed
from demask.ops.relation import Relation

PERIODS = 64  # the longest period looked for
WINDOW = 16  # positions asked for at once: more than a transposed convolution leaves out in a row


@dataclass(frozen=True, slots=True)
class AxisStep:
    """What a call reads on an endless image.

    Positions from `o` on read from `start(o)` on; positions before `o` read to before `end(o)`:

        start(o + period) == start(o) + step,    end(o + period) == end(o) + step

    exact: False where the rule does not repeat (resizing with align_corners), and what is told is
    a bound: no less than is read, and at most two positions and the drift along the axis more.
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

    def start(self, place: int) -> int:
        if not self.exact:
            return place * self.step // self.period + self.starts[0]
        turns, rest = divmod(place, self.period)
        return turns * self.step + self.starts[rest]

    def end(self, place: int) -> int:
        if not self.exact:
            return -(-place * self.step // self.period) + self.ends[0]
        turns, rest = divmod(place, self.period)
        return turns * self.step + self.ends[rest]


SAME = AxisStep(1, 1, (0,), (0,))


class TooSmall(Exception):
    """The image is so small that no position of a call is free of its border."""


# --- what a call reads along it -----------------------------------------------------------------


class Rules:
    """The step of each call, made once for calls that are alike."""

    def __init__(self) -> None:
        self._found: dict[Any, AxisStep | str | None] = {}

    def step(
        self, relation: Relation, operand: int, places: tuple[Part, Part], out: int, last: bool
    ) -> AxisStep | str | None:
        """The step from an output to an operand; in words, why every position reads all of it;
        None where the middle of the output reads nothing of it.

        places: of the operand and of the output. last: the image cannot be made larger. Raises
        TooSmall where it must be.
        """
        before, after = places
        where = follow(relation, operand, before, out=out)
        if where is None or where.axis != after.axis:
            return f"reads all of {relation.operands[operand].name!r} at every position"
        letters = relation.outs[out][after.axis]
        if letters[0] not in relation.window | relation.moved:
            return _step_carried(relation, operand, (before, where, after), out)
        key = (_key(relation), operand, places, out)
        if key not in self._found:
            found = _fitted(_Rule(relation, operand, before, after, out), last)
            self._found[key] = found
        return self._found[key]


def _key(relation: Relation) -> tuple[Any, ...]:
    names = {operand.name for operand in relation.operands}
    plain = [repr(v) for k, v in schema.arguments(relation.node).items() if k not in names]
    shapes = [tuple(schema.sizes(_value(operand.value))) for operand in relation.operands]
    return relation.node.target, tuple(plain), tuple(shapes)


def _value(value: Any) -> Any:
    return value.meta["val"] if hasattr(value, "meta") else value


def _step_carried(
    relation: Relation, operand: int, places: tuple[Part, Part, Part], out: int
) -> AxisStep | str:
    """A carried axis is read position by position, unless the call needs all of it at once.

    places: of the operand, that place in the output, and the output's own, which may be finer.
    """
    before, where, after = places
    letters = set(relation.ins[operand][before.axis]) & set(relation.outs[out][after.axis])
    if letters & relation.complete and relation.entry.fill != "same":
        return "normalises over all positions"
    if letters & relation.looped:
        return "carries a state from position to position"
    if where.inner * where.size != after.inner * after.size or where.inner % after.inner:
        return "moves positions across the image"
    many, step = where.inner // after.inner, before.size // where.size
    ends = (0, *[step] * (many - 1))  # part of a position is read as all of it
    return AxisStep(many, step, (0,) * many, ends)


@dataclass(frozen=True, slots=True)
class _Rule:
    """The region rule of a call between two places, in their positions."""

    relation: Relation
    operand: int
    before: Part
    after: Part
    out: int

    @property
    def moves(self) -> bool:
        """Is it given by a map of positions? What such a map does is its own at every position."""
        return self.relation.outs[self.out][self.after.axis][0] in self.relation.moved

    def low(self, place: int) -> int:
        """The first position read by those from `place` on."""
        end = place + (1 if self.moves else WINDOW)
        return self._needed(place, min(end, self.after.size))[0] // self.before.inner

    def high(self, place: int) -> int:
        """One past the last position read by those before `place`."""
        start = place - (1 if self.moves else WINDOW)
        return -(-self._needed(max(start, 0), place)[1] // self.before.inner)

    def one(self) -> tuple[int, int]:
        """What the position in the middle reads."""
        middle = self.after.size // 2
        low, high = self._needed(middle, middle + 1)
        return low // self.before.inner, -(-high // self.before.inner)

    def _needed(self, start: int, end: int) -> tuple[int, int]:
        inner = self.after.inner
        return needed(
            self.relation, self.operand, self.after.axis, start * inner, end * inner, out=self.out
        )


def _fitted(rule: _Rule, last: bool) -> AxisStep | str | None:
    given, made = rule.before.size, rule.after.size
    low, high = rule.one()
    if rule.moves and low == high:
        return None
    if not last and (low <= 0 or high >= given):
        raise TooSmall(f"{rule.relation.node}")
    if (low, high) == (0, given) and given > 1:
        return f"reads all {given} positions at every position"
    found = _periodic(rule)
    if found is not None:
        return found
    scale, inside = Fraction(given, made), _inside(rule)[0]
    if not last and inside[1] - inside[0] <= 2 * scale.denominator <= made:
        raise TooSmall(f"{rule.relation.node}")
    lows = [rule.low(o) - math.floor(o * scale) for o in range(made)]
    highs = [rule.high(o) - math.ceil(o * scale) for o in range(1, made + 1)]
    if max(-min(lows), max(highs)) > given // 2:
        return "moves positions across the image"
    # One more on both sides: floors of other multiples of the scale than those seen here.
    bound = (min(lows) - 1,), (max(highs) + 1,)
    return AxisStep(scale.denominator, scale.numerator, *bound, exact=False)


def _periodic(rule: _Rule) -> AxisStep | None:
    """The shortest period with which the rule repeats wherever the border does not cut it."""
    lows, highs = _inside(rule)
    longest = min(PERIODS, *((last - first + 1) // 2 for first, last in (lows, highs)))
    for period in range(1, longest + 1):
        step = rule.low(lows[0] + period) - rule.low(lows[0])
        if step > 0 and _repeats(rule.low, lows, period, step) and _repeats(
            rule.high, highs, period, step
        ):  # fmt: skip
            starts = _table(rule.low, lows, period, step)
            return AxisStep(period, step, starts, _table(rule.high, highs, period, step))
    return None


def _inside(rule: _Rule) -> tuple[tuple[int, int], tuple[int, int]]:
    """The first and last output position whose `low`, and whose `high`, no border cuts."""
    given, made = rule.before.size, rule.after.size
    if rule.moves:  # pads, crops and what is rolled around are at the ends
        return (made // 4, 3 * made // 4), (made // 4, 3 * made // 4)
    first = bisect.bisect_right(range(made), 0, key=rule.low)
    final = bisect.bisect_left(range(1, made + 1), given, key=rule.high)
    return (first, final - 1), (first + 1, final)


def _repeats(value: Callable[[int], int], inside: tuple[int, int], period: int, step: int) -> bool:
    """Is value(o + period) == value(o) + step at both ends of what is inside and in the middle?"""
    first, last = inside
    span = last - period - first
    anchors = {first, first + max(span - period, 0) // 2, max(first, last - 2 * period + 1)}
    return all(
        value(place + period) - value(place) == step
        for anchor in anchors for place in range(anchor, min(anchor + period, last - period + 1))
    )  # fmt: skip


def _table(
    value: Callable[[int], int], inside: tuple[int, int], period: int, step: int
) -> tuple[int, ...]:
    """By the rest of a position divided by the period, read in the middle of what is inside."""
    middle = (sum(inside) - period + 1) // 2
    found = {}
    for place in range(middle, middle + period):
        found[place % period] = value(place) - place // period * step
    return tuple(found[rest] for rest in range(period))
