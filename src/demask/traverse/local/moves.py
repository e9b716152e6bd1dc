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
from demask.ops.positions import IndexMap
from demask.ops.regions import Interval
from demask.traverse.axes import Window
from demask.traverse.local.call import LocalCall, LocalKind, Scratch, stepped

_MANY = 16  # more runs of one axis than that are selected by index, not copied one by one


@dataclass(frozen=True, slots=True)
class PositionRun:
    """Consecutive positions [first, first + count) of an output's axis.

    They are read from positions start, start + step, ... of operand `source`; -1: padding. index:
    the positions, where they are no progression.
    """

    first: int
    count: int
    source: int
    start: int
    step: int
    index: Tensor | None = None


def runs(sources: Sequence[int], positions: Sequence[int]) -> list[PositionRun]:
    """The runs of an axis, each as long as possible (greedy)."""
    merged: list[PositionRun] = []
    k = 0
    while k < len(sources):
        end = k + 1
        step = positions[end] - positions[k] if end < len(sources) else 1
        while (
            end < len(sources)
            and sources[end] == sources[k]
            and (sources[k] < 0 or positions[end] - positions[end - 1] == step)
        ):
            end += 1
        merged.append(PositionRun(k, end - k, sources[k], positions[k], step if end - k > 1 else 1))
        k = end
    return merged


@dataclass(frozen=True, slots=True)
class MovedAxis:
    """One moved axis of the output, as runs. firsts: of each. value: of padding."""

    axis: int
    runs: tuple[PositionRun, ...]
    firsts: tuple[int, ...]
    value: float

    @staticmethod
    def of(axis: int, move: IndexMap) -> MovedAxis:
        axis_runs = tuple(runs(move.source.tolist(), move.position.tolist()))
        return MovedAxis(axis, axis_runs, tuple(run.first for run in axis_runs), move.value)

    def within(self, interval: Interval, lows: Sequence[int]) -> list[PositionRun]:
        """The runs of an interval, relative to its start.

        lows: per operand, the position along this axis at which its part begins.
        """
        start, end = interval
        first_run = max(bisect_right(self.firsts, start) - 1, 0)
        clipped = []
        for run in itertools.islice(self.runs, first_run, None):
            if run.first >= end:
                break
            low, high = max(run.first, start), min(run.first + run.count, end)
            if low >= high:
                continue
            position = run.start + (low - run.first) * run.step
            position -= lows[run.source] if run.source >= 0 else 0
            clipped.append(PositionRun(low - start, high - low, run.source, position, run.step))
        return clipped if len(clipped) <= _MANY else _selected(clipped)


def _selected(clipped: list[PositionRun]) -> list[PositionRun]:
    """Adjacent runs of one operand merged into one with an index."""
    merged = []
    for source, group in itertools.groupby(clipped, key=lambda run: run.source):
        members = list(group)
        index = [run.start + k * run.step for run in members for k in range(run.count)]
        merged.append(PositionRun(members[0].first, len(index), source, index[0], 0, torch.tensor(index)))
    return merged


@dataclass(frozen=True, slots=True, eq=False)
class LocalMove(LocalKind):
    """A call that moves positions: it copies runs of them."""

    call: LocalCall
    axes: tuple[MovedAxis, ...]

    @staticmethod
    def of(call: LocalCall) -> LocalMove | Declined:
        relation, axes = call.relation, []
        for axis, letters in enumerate(relation.outs[0]):
            if letters and letters[0] in relation.moved:
                move = relation.moves[0].get(letters[0].partition(">")[0])
                if move is None:
                    return Declined(f"{op_name(call.node.target)}: its positions are not known")
                axes.append(MovedAxis.of(axis, move))
        return LocalMove(call, tuple(axes))

    def run(self, values: list[Any], window: Window, into: Tensor, scratch: Scratch) -> None:
        for taken in itertools.product(*self._within(window)):
            target, source = into, max(run.source for run in taken)
            for moved, run in zip(self.axes, taken, strict=True):
                target = target.narrow(moved.axis, run.first, run.count)
            if any(run.source < 0 for run in taken):
                value = next(a.value for a, run in zip(self.axes, taken, strict=True) if run.source < 0)
                target.fill_(value)
            else:
                self._copy(values[source], target, taken)

    def _within(self, window: Window) -> list[list[PositionRun]]:
        return [
            moved.within(self.call.window(moved.axis, window), self._lows(moved.axis, window)) for moved in self.axes
        ]

    def _lows(self, axis: int, window: Window) -> list[int]:
        """Per operand, the position at which its part begins along an axis."""
        if axis not in self.call.axes:
            return [0] * len(self.call.cuts)
        dim = self.call.axes.index(axis)
        rules = [cut.rules[dim] for cut in self.call.cuts]
        return [0 if rule is None else rule(*window[dim])[0] for rule in rules]

    def _copy(self, x: Tensor, into: Tensor, taken: Sequence[PositionRun]) -> None:
        selected: list[tuple[int, Tensor]] = []
        for moved, run in zip(self.axes, taken, strict=True):
            if run.index is not None:
                selected.append((moved.axis, run.index))
            elif run.step < 0:
                positions = run.start + run.step * torch.arange(run.count)
                selected.append((moved.axis, positions))
            elif run.step == 0:
                x = x.narrow(moved.axis, run.start, 1)
            else:
                x = stepped(x, moved.axis, run.start, run.count, run.step)
        for axis, index in selected[:-1]:
            x = x.index_select(axis, index)
        if selected:
            shape = [into.shape[k] if k == selected[-1][0] else n for k, n in enumerate(x.shape)]
            if tuple(shape) == tuple(into.shape):
                torch.index_select(x, *selected[-1], out=into)
                return
            x = x.index_select(*selected[-1])
        into.copy_(x)

    def allocated_bytes(self, window: Window) -> int:
        """The first of two selections, where indices select along two axes."""
        has_index = [any(r.index is not None or r.step < 0 for r in axis_runs) for axis_runs in self._within(window)]
        return self.call.bytes(window) if sum(has_index) > 1 else 0


__all__ = ["LocalMove", "MovedAxis", "PositionRun", "runs"]
