"""Calls on parts, where positions move along the cut axes: slices, joins, pads, flips, rolls."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from demask.ops.entry import Declined, op_name
from demask.ops.positions import Move
from demask.ops.regions import Interval
from demask.traverse.axes import Window
from demask.traverse.local.call import LocalCall, LocalKind, Scratch, stepped

_MANY = 16  # runs of one axis that are copied one by one; more are selected by index


@dataclass(frozen=True, slots=True)
class PositionRun:
    """Positions [first, first + count) of an output's axis, from `start` and every `step` on of
    operand `source`'s; -1: padding. index: the positions, where they keep no step."""

    first: int
    count: int
    source: int
    start: int
    step: int
    index: Tensor | None = None


def runs(sources: Sequence[int], positions: Sequence[int]) -> list[PositionRun]:
    """An axis as the fewest runs that a greedy walk finds."""
    found: list[PositionRun] = []
    k = 0
    while k < len(sources):
        last = k + 1
        step = positions[last] - positions[k] if last < len(sources) else 1
        while (
            last < len(sources)
            and sources[last] == sources[k]
            and (sources[k] < 0 or positions[last] - positions[last - 1] == step)
        ):
            last += 1
        found.append(
            PositionRun(k, last - k, sources[k], positions[k], step if last - k > 1 else 1)
        )
        k = last
    return found


@dataclass(frozen=True, slots=True)
class MovedAxis:
    """One moved axis of the output, as runs."""

    axis: int
    runs: tuple[PositionRun, ...]
    firsts: tuple[int, ...]
    value: float

    @staticmethod
    def of(axis: int, move: Move) -> MovedAxis:
        found = tuple(runs(move.source.tolist(), move.position.tolist()))
        return MovedAxis(axis, found, tuple(run.first for run in found), move.value)

    def within(self, interval: Interval, lows: Sequence[int]) -> list[PositionRun]:
        """The runs of an interval, counted from its start; lows: of each operand, the position
        along this axis at which its part begins."""
        start, end = interval
        at = max(bisect_right(self.firsts, start) - 1, 0)
        found = []
        for run in itertools.islice(self.runs, at, None):
            if run.first >= end:
                break
            low, high = max(run.first, start), min(run.first + run.count, end)
            if low >= high:
                continue
            place = run.start + (low - run.first) * run.step
            place -= lows[run.source] if run.source >= 0 else 0
            found.append(PositionRun(low - start, high - low, run.source, place, run.step))
        return found if len(found) <= _MANY else _selected(found)


def _selected(found: list[PositionRun]) -> list[PositionRun]:
    """Neighbouring runs of one operand as one, by index."""
    made = []
    for source, group in itertools.groupby(found, key=lambda run: run.source):
        members = list(group)
        index = [run.start + k * run.step for run in members for k in range(run.count)]
        made.append(
            PositionRun(members[0].first, len(index), source, index[0], 0, torch.tensor(index))
        )
    return made


@dataclass(frozen=True, slots=True, eq=False)
class LocalMove(LocalKind):
    """A call that moves positions: copies of what runs of them hold."""

    call: LocalCall
    lines: tuple[MovedAxis, ...]

    @staticmethod
    def of(call: LocalCall) -> LocalMove | Declined:
        relation, lines = call.relation, []
        for axis, letters in enumerate(relation.outs[0]):
            if letters and letters[0] in relation.moved:
                move = relation.moves[0].get(letters[0].partition(">")[0])
                if move is None:
                    return Declined(f"{op_name(call.node.target)}: positions that are not known")
                lines.append(MovedAxis.of(axis, move))
        return LocalMove(call, tuple(lines))

    def run(self, values: list[Any], window: Window, into: Tensor, scratch: Scratch) -> None:
        for taken in itertools.product(*self._within(window)):
            made, source = into, max(run.source for run in taken)
            for line, run in zip(self.lines, taken, strict=True):
                made = made.narrow(line.axis, run.first, run.count)
            if any(run.source < 0 for run in taken):
                value = next(
                    a.value for a, run in zip(self.lines, taken, strict=True) if run.source < 0
                )
                made.fill_(value)
            else:
                self._copy(values[source], made, taken)

    def _within(self, window: Window) -> list[list[PositionRun]]:
        return [
            line.within(self.call.window(line.axis, window), self._lows(line.axis, window))
            for line in self.lines
        ]

    def _lows(self, axis: int, window: Window) -> list[int]:
        """Per operand, where its part begins along an axis."""
        if axis not in self.call.axes:
            return [0] * len(self.call.cuts)
        dim = self.call.axes.index(axis)
        rules = [cut.rules[dim] for cut in self.call.cuts]
        return [0 if rule is None else rule(*window[dim])[0] for rule in rules]

    def _copy(self, x: Tensor, into: Tensor, taken: Sequence[PositionRun]) -> None:
        selected: list[tuple[int, Tensor]] = []
        for line, run in zip(self.lines, taken, strict=True):
            if run.index is not None:
                selected.append((line.axis, run.index))
            elif run.step < 0:
                where = run.start + run.step * torch.arange(run.count)
                selected.append((line.axis, where))
            elif run.step == 0:
                x = x.narrow(line.axis, run.start, 1)
            else:
                x = stepped(x, line.axis, run.start, run.count, run.step)
        for axis, index in selected[:-1]:
            x = x.index_select(axis, index)
        if selected:
            shape = [into.shape[k] if k == selected[-1][0] else n for k, n in enumerate(x.shape)]
            if tuple(shape) == tuple(into.shape):
                torch.index_select(x, *selected[-1], out=into)
                return
            x = x.index_select(*selected[-1])
        into.copy_(x)

    def beside(self, window: Window) -> int:
        """Selections along two axes at once: the first is made beside."""
        found = [
            any(r.index is not None or r.step < 0 for r in line) for line in self._within(window)
        ]
        return self.call.bytes(window) if sum(found) > 1 else 0


__all__ = ["LocalMove", "MovedAxis", "PositionRun", "runs"]
