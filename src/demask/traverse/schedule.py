"""Which rows and columns of each value a stage holds, step by step.

Bands walk down the image. What a step needs is found backward from the rows of the targets that it
completes (pull): `end[v] = max over readers of needs(end[reader])`, so that strides, dilation,
delays of residual branches and concatenations follow from the table's rules alone. Deep stages
start before their first output: a layer that is n rows ahead of the outputs is so from the first
step on, else the first step would make all n at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from demask.ops.regions import Interval
from demask.traverse.axes import Window, whole
from demask.traverse.flow import Edge
from demask.traverse.stage import Stage, Unit

EMPTY: Interval = (0, 0)


@dataclass(frozen=True, slots=True)
class Held:
    """Rows of a value in one step: those before `first` are gone, `done` were made by earlier
    steps, `end` are there when the step is over; the next step starts with those from `keep` on.
    columns: the same in every step of a walk."""

    first: int
    done: int
    end: int
    keep: int
    columns: Interval

    @property
    def rows(self) -> int:
        """How many rows lie in memory during the step."""
        return max(self.end - self.first, 0)

    @property
    def tail(self) -> int:
        """Rows kept for the next step."""
        return max(self.end - self.keep, 0)


Step = Mapping[fx.Node, Held]


def ends_of(stage: Stage) -> dict[fx.Node, int]:
    """The values that a stage walks along in full, and their rows: targets, and what sinks read."""
    flow = stage.flow
    found = {node: flow.rows(node) for node in stage.targets}
    return found | {e.source: flow.rows(e.source) for u in stage.sinks for e in u.edges}


def walked(stage: Stage, band: int) -> Iterator[Step]:
    """The steps of bands of `band` rows of the tallest target, over the full width."""
    ends = ends_of(stage)
    height = max(ends.values())
    ahead = _ahead(stage, ends, height, band)
    most = max((n * height / stage.flow.rows(v) for v, n in ahead.items()), default=0.0)
    start = math.ceil(most / band) * band if band < height else 0
    columns = {v: (0, stage.flow.columns(v)) for v in _values(stage)}
    done = dict.fromkeys(columns, 0)
    kept = dict.fromkeys(columns, 0)
    for row in range(band - start, height + band, band):
        wanted = {v: min(n, math.floor(row * n / height)) for v, n in ends.items()}
        end = _pulled(stage, wanted, done, row, height, ahead)
        keep = _kept(stage, end, ends)
        yield {v: Held(kept[v], done[v], end[v], keep[v], columns[v]) for v in columns}
        done, kept = end, keep
        if all(done[v] >= n for v, n in ends.items()):
            return


def tile(stage: Stage, window: Mapping[fx.Node, Window]) -> Step:
    """The one step that makes a window of each target and shares nothing with others."""
    need = {v: w for v, w in window.items() if not _is_empty(w)}
    for unit in reversed(stage.units):
        if unit.node in stage.flow.gathers or unit.value not in need:
            continue
        rows, columns = need[unit.value]
        for edge in _cut(unit):
            found = edge.rules[0](*rows), edge.rules[1](*columns)
            if not _is_empty(found):
                before = need.get(edge.source, found)
                need[edge.source] = _union(before[0], found[0]), _union(before[1], found[1])
    steps = {v: _alone(need.get(v, (EMPTY, EMPTY))) for v in _values(stage)}
    for unit in stage.sinks:  # halos are no part of what a tile counts
        mine = window[unit.edges[0].source]
        steps[unit.node] = _alone((EMPTY, EMPTY) if _is_empty(mine) else mine)
    return steps


def _alone(window: Window) -> Held:
    (low, high), columns = window
    return Held(low, low, high, high, columns)


def _is_empty(window: Window) -> bool:
    return any(start >= end for start, end in window)


def middle(stage: Stage, band: int) -> list[Step]:
    """Two steps from the middle of walked(): what most of them hold."""
    ends = ends_of(stage)
    height = max(ends.values())
    row = height // 2 // band * band
    values = _values(stage)
    done = dict.fromkeys(values, 0)
    found: list[Step] = []
    kept: dict[fx.Node, int] = {}
    for k in range(3):
        wanted = {v: min(n, (row + k * band) * n // height) for v, n in ends.items()}
        end = _pulled(stage, wanted, done, row, height, {})
        keep = _kept(stage, end, ends)
        if k:
            columns = {v: (0, stage.flow.columns(v)) for v in values}
            found.append({v: Held(kept[v], done[v], end[v], keep[v], columns[v]) for v in values})
        done, kept = end, keep
    return found


def at_once(stage: Stage) -> Step:
    """The one step that makes all of every value."""
    found = {}
    for node in _values(stage):
        (_, rows), columns = whole(node, stage.flow.axes[node])
        found[node] = Held(0, 0, rows, rows, columns)
    return found


def _cut(unit: Unit) -> list[Edge]:
    """The operands that a unit reads in parts; what it reads whole lies in memory as a map."""
    return [edge for edge in unit.edges if not edge.whole]


def _values(stage: Stage) -> list[fx.Node]:
    cut = stage.flow.axes
    return [*stage.enters, *(u.value for u in stage.units if u.value in cut)]


def _union(a: Interval, b: Interval) -> Interval:
    return min(a[0], b[0]), max(a[1], b[1])


def _ahead(
    stage: Stage, ends: Mapping[fx.Node, int], height: int, band: int
) -> dict[fx.Node, float]:
    """Rows by which each value is ahead of its share, seen from a band near the top."""
    nothing = dict.fromkeys(_values(stage), 0)
    wanted = {v: math.floor(min(band, height) * n / height) for v, n in ends.items()}
    end = _pulled(stage, wanted, nothing, 0, height, {})
    rows = stage.flow.rows
    return {v: max(0.0, n - rows(v) * min(band, height) / height) for v, n in end.items()}


def _pulled(
    stage: Stage, wanted: Mapping[fx.Node, int], done: Mapping[fx.Node, int], row: int, height: int,
    ahead: Mapping[fx.Node, float],
) -> dict[fx.Node, int]:  # fmt: skip
    """Rows of each value made when the step is over that brings the unit to `row`."""
    flow, end = stage.flow, dict(done)
    for v, n in wanted.items():
        end[v] = max(end[v], n)
    if row <= height and ahead:
        for v, lead in ahead.items():
            due = math.floor(row * flow.rows(v) / height + lead)
            end[v] = max(end[v], min(flow.rows(v), due))
    for unit in reversed(stage.units):
        mine = unit.value
        if unit.node in flow.gathers or done[mine] >= end[mine]:
            continue
        for edge in _cut(unit):
            need = edge.rules[0](done[mine], end[mine])
            end[edge.source] = max(end[edge.source], need[1])
    return end


def _kept(
    stage: Stage, end: Mapping[fx.Node, int], ends: Mapping[fx.Node, int]
) -> dict[fx.Node, int]:
    """The first row of each value that a later step reads; `end` where none is read again."""
    flow, keep = stage.flow, dict(end)
    for unit in stage.units:
        if unit.node in flow.gathers:
            continue
        rows = flow.rows(unit.value)
        if end[unit.value] >= rows:
            continue
        for edge in _cut(unit):
            low, high = edge.rules[0](end[unit.value], rows)
            if low < high:
                keep[edge.source] = min(keep[edge.source], low)
    return keep
