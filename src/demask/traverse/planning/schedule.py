"""Which rows and columns of each value a stage holds, step by step.

Bands walk down the image. What a step needs is found backward from the rows of the targets that it
completes (pull): `end[v] = max over readers of needs(end[reader])`, so that strides, dilation,
delays of residual branches and concatenations follow from the table's rules alone. Deep stages
start before their first output: a layer that is n rows ahead of the outputs is so from the first
step on, else the first step would make all n at once.

Several workers walk side by side, each down a strip of its own (row 003-e). Strips are cut
slantwise: a worker's layers begin at the rows that its first outputs need, so that it needs nothing
from the worker above; that one ends where the other began, and takes the few rows beyond from what
the other made in its first steps. Nothing is computed twice, and only borders are exchanged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from demask.ops.regions import Interval
from demask.traverse.analysis.flow import FlowEdge
from demask.traverse.axes import Window, whole
from demask.traverse.planning.stage import Stage, Unit

EMPTY: Interval = (0, 0)


@dataclass(frozen=True, slots=True)
class LiveRows:
    """Rows of a value in one step: those before `first` are gone, `done` were made by earlier
    steps, `end` are there when the step is over; the next step starts with those from `keep` on.
    columns: the same in every step of a walk. own: rows from there on come from the next worker."""

    first: int
    done: int
    end: int
    keep: int
    columns: Interval
    own: int = 2**62

    @property
    def made(self) -> Interval:
        """The rows that the step computes."""
        return self.done, min(self.end, max(self.own, self.done))

    @property
    def lent(self) -> Interval:
        """The rows that the step takes over from the next worker."""
        return max(self.done, min(self.own, self.end)), self.end

    @property
    def rows(self) -> int:
        """How many rows lie in memory during the step."""
        return max(self.end - self.first, 0)

    @property
    def tail(self) -> int:
        """Rows kept for the next step."""
        return max(self.end - self.keep, 0)


Step = Mapping[fx.Node, LiveRows]


def ends_of(stage: Stage) -> dict[fx.Node, int]:
    """The values that a stage walks along in full, and their rows: targets, and what sinks read."""
    flow = stage.flow
    found = {node: flow.rows(node) for node in stage.targets}
    return found | {e.source: flow.rows(e.source) for u in stage.sinks for e in u.edges}


@dataclass(frozen=True, slots=True)
class Strip:
    """The rows of each value that are one worker's: from `first` to `last`. It makes those up to
    `own` and sees those up to `seen`; what a stage enters with each worker reads for itself. due:
    rows that the worker above waits for, whether or not this one needs them."""

    first: Mapping[fx.Node, int]
    last: Mapping[fx.Node, int]
    own: Mapping[fx.Node, int]
    seen: Mapping[fx.Node, int]
    due: Mapping[fx.Node, int]

    @property
    def borders(self) -> dict[fx.Node, int]:
        """How many rows of each value come from the next worker."""
        return {v: self.seen[v] - n for v, n in self.own.items() if self.seen[v] > n}


def strips(stage: Stage, workers: int) -> list[Strip]:
    """Strips for so many workers, or for as many as the stage has rows for: a border must lie
    within the next strip."""
    for count in range(workers, 1, -1):
        found = _strips(stage, count)
        pairs = itertools.pairwise(found)
        if all(a.last[v] >= a.first[v] and a.seen[v] <= b.own[v] for a, b in pairs for v in a.own):
            return found
    return [_undivided(stage)]


def _undivided(stage: Stage) -> Strip:
    """The strip that is all rows."""
    rows = {v: stage.flow.rows(v) for v in _values(stage)}
    return Strip(dict.fromkeys(rows, 0), rows, rows, rows, {})


def _strips(stage: Stage, count: int) -> list[Strip]:
    rows = {v: stage.flow.rows(v) for v in _values(stage)}
    tops = [_top(stage, rows, k / count) for k in range(count)]
    found: list[Strip] = []
    for k, first in enumerate(tops):
        last = tops[k + 1] if k + 1 < count else rows
        own = {v: rows[v] if v in stage.enters else last[v] for v in rows}
        seen = dict(own)
        for unit in stage.units:
            if unit.value not in own or unit.node in stage.flow.gathers:
                continue
            if first[unit.value] < own[unit.value]:
                for edge in _cut(unit):
                    high = edge.rules[0](first[unit.value], own[unit.value])[1]
                    seen[edge.source] = max(seen[edge.source], high)
        due = {v: found[-1].seen[v] for v in found[-1].borders} if found else {}
        found.append(Strip(first, last, own, seen, due))
    return found


def _top(stage: Stage, rows: Mapping[fx.Node, int], share: float) -> dict[fx.Node, int]:
    """The first row of each value in the strip whose targets begin at a share of their rows."""
    if not share:
        return dict.fromkeys(rows, 0)
    found = dict(rows)
    for v, n in ends_of(stage).items():
        found[v] = min(found[v], math.floor(n * share))
    for unit in reversed(stage.units):
        mine = unit.value
        if unit.node in stage.flow.gathers or found[mine] >= rows[mine]:
            continue
        for edge in _cut(unit):
            low, high = edge.rules[0](found[mine], rows[mine])
            if low < high:
                found[edge.source] = min(found[edge.source], low)
    return found


def walked(
    stage: Stage,
    band: int,
    strip: Strip | None = None,
    columns: Mapping[fx.Node, Interval] | None = None,
) -> Iterator[Step]:
    """The steps of bands of `band` rows of the tallest target, down a strip or the whole image.
    columns: of each value, where not the full width."""
    strip = strip or _undivided(stage)
    ends = ends_of(stage)
    height = max(ends.values())
    top = min(strip.first[v] * height // n for v, n in ends.items())
    bottom = max(math.ceil(strip.last[v] * height / n) for v, n in ends.items())
    ahead = _ahead(stage, ends, height, band)
    most = max((n * height / stage.flow.rows(v) for v, n in ahead.items()), default=0.0)
    start = math.ceil(most / band) * band if band < bottom - top else 0
    columns = columns or {v: (0, stage.flow.columns(v)) for v in _values(stage)}
    done, kept = dict(strip.first), dict(strip.first)
    for row in range(top + band - start, bottom + band, band):
        last = row >= bottom
        wanted = {v: strip.last[v] if last else min(strip.last[v], math.floor(row * n / height))
                  for v, n in ends.items()}  # fmt: skip
        for v, n in strip.due.items() if last else ():
            wanted[v] = max(n, wanted.get(v, 0))
        end = _pulled(stage, strip, wanted, done, row, height, ahead)
        keep = _kept(stage, strip, end)
        step = {
            v: LiveRows(kept[v], done[v], end[v], keep[v], columns[v], strip.own[v])
            for v in columns
        }
        for unit in stage.sinks:  # each row is counted by one worker
            v = unit.edges[0].source
            low, high = (min(n, strip.last[v]) for n in (done[v], end[v]))
            step[unit.node] = LiveRows(low, low, high, high, columns[v])
        yield step
        done, kept = end, keep


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


def banded(stage: Stage, frustum: Step, band: int) -> Iterator[Step]:
    """The rows and columns of each value that `tile` found, made in bands, none of them twice."""
    values = _values(stage)
    first = {v: frustum[v].first for v in values}
    last = {v: frustum[v].end for v in values}
    columns = {v: frustum[v].columns for v in values}
    return walked(stage, band, Strip(first, last, last, last, {}), columns)


def _alone(window: Window) -> LiveRows:
    (low, high), columns = window
    return LiveRows(low, low, high, high, columns)


def _is_empty(window: Window) -> bool:
    return any(start >= end for start, end in window)


def middle(stage: Stage, band: int) -> list[Step]:
    """Two steps from the middle of walked(): what most of them hold."""
    ends, strip = ends_of(stage), _undivided(stage)
    height = max(ends.values())
    row = height // 2 // band * band
    values = _values(stage)
    done = dict.fromkeys(values, 0)
    found: list[Step] = []
    kept: dict[fx.Node, int] = {}
    for k in range(3):
        wanted = {v: min(n, (row + k * band) * n // height) for v, n in ends.items()}
        end = _pulled(stage, strip, wanted, done, row, height, {})
        keep = _kept(stage, strip, end)
        if k:
            columns = {v: (0, stage.flow.columns(v)) for v in values}
            found.append(
                {v: LiveRows(kept[v], done[v], end[v], keep[v], columns[v]) for v in values}
            )
        done, kept = end, keep
    return found


def at_once(stage: Stage) -> Step:
    """The one step that makes all of every value."""
    found = {}
    for node in _values(stage):
        (_, rows), columns = whole(node, stage.flow.axes[node])
        found[node] = LiveRows(0, 0, rows, rows, columns)
    return found


def _cut(unit: Unit) -> list[FlowEdge]:
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
    strip = _undivided(stage)
    wanted = {v: math.floor(min(band, height) * n / height) for v, n in ends.items()}
    end = _pulled(stage, strip, wanted, nothing, 0, height, {})
    rows = stage.flow.rows
    return {v: max(0.0, n - rows(v) * min(band, height) / height) for v, n in end.items()}


def _pulled(
    stage: Stage, strip: Strip, wanted: Mapping[fx.Node, int], done: Mapping[fx.Node, int],
    row: int, height: int, ahead: Mapping[fx.Node, float],
) -> dict[fx.Node, int]:  # fmt: skip
    """Rows of each value there when the step is over that brings the tallest target to `row`."""
    flow, end = stage.flow, dict(done)
    for v, n in wanted.items():
        end[v] = max(end[v], n)
    if row <= height:
        for v, lead in ahead.items():
            due = math.floor(row * flow.rows(v) / height + lead)
            end[v] = max(end[v], min(strip.own[v], due))
    for unit in reversed(stage.units):
        mine = unit.value
        if unit.node in flow.gathers:
            continue
        last = min(end[mine], strip.own[mine])
        for edge in _cut(unit) if done[mine] < last else ():
            need = edge.rules[0](done[mine], last)[1]
            end[edge.source] = max(end[edge.source], min(need, strip.seen[edge.source]))
    return end


def _kept(stage: Stage, strip: Strip, end: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """The first row of each value that a later step reads; `end` where none is read again."""
    keep = dict(end)
    for unit in stage.units:
        if unit.node in stage.flow.gathers or end[unit.value] >= strip.own[unit.value]:
            continue
        for edge in _cut(unit):
            low, high = edge.rules[0](end[unit.value], strip.own[unit.value])
            if low < high:
                keep[edge.source] = min(keep[edge.source], low)
    return keep
