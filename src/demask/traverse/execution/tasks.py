"""Run the tasks of a segment, skip those that a journal has, and merge their reductions.

Reductions are merged as a binary tree over the tasks in order, so that the result does not depend
on which process computed which task, or when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from demask.exec.axes import Window, cut_shape
from demask.exec.planning.plan_memory import MemoryLayout, PlacedSegment, steps_of_stripe, stripes_of
from demask.exec.planning.schedule import Step, target_rows
from demask.ops.regions import Interval
from demask.ops.schema import fake
from demask.traverse.execution.journal import Journal, TaskKey, TaskRecord
from demask.traverse.execution.segment_executor import Counter, SegmentExecutor, SourcesAndSinks
from demask.traverse.storage.store import SliceStore, checksum

States = dict[str, tuple[Tensor, ...]]  # of reductions, by the name of the call
OnStep = Callable[[Step], None] | None
PIECE = 512  # columns of a piece of fill


def is_intact(store: SliceStore, record: TaskRecord) -> bool:
    """Whether a store still has what a task wrote."""
    return all(checksum(store.read(box)) == check for box, check in record.written)


def keeps_nothing_in_memory(placed: PlacedSegment, sinks: Mapping[fx.Node, Any]) -> bool:
    """Whether everything that a segment computes is in files or in states of reductions."""
    stored = set(placed.segment.spills)
    return all(v.name in stored or v in sinks for v in placed.stage.targets) and not (
        placed.maps & set(placed.stage.targets)
    )


@dataclass(frozen=True, slots=True)
class TaskMask:
    """Which positions of the output are wanted. rows: bool [height, width] of the output.

    fill: of other positions.
    """

    wanted: Tensor
    fill: float = 0.0

    def columns(self, rows: Interval, chunk: int) -> list[Interval]:
        """The columns that some rows need, in full chunks."""
        width = self.wanted.shape[1]
        any_row = self.wanted[rows[0] : rows[1]].any(0)
        starts = range(0, width, chunk)
        needed = [bool(any_row[k : k + chunk].any()) for k in starts]
        result: list[Interval] = []
        for k, is_needed in zip(starts, needed, strict=True):
            end = min(k + chunk, width)
            if is_needed and result and result[-1][1] == k:
                result[-1] = result[-1][0], end
            elif is_needed:
                result.append((k, end))
        return result


def run_task(
    placed: PlacedSegment,
    ends: SourcesAndSinks,
    work: Tensor,
    rows: Interval,
    on_step: OnStep = None,
    columns: Sequence[Interval] | None = None,
) -> tuple[int, States]:
    """Compute one stripe. Returns its multiply-adds and the states of its reductions.

    columns: of the widest target, to compute; None for all.
    """
    counter, states = Counter(), {}
    for part in (None,) if columns is None else columns:
        executor = SegmentExecutor(placed.stage, placed.memory, ends, work, counter, finishes=False)
        executor.run(steps_of_stripe(placed.stage, placed.segment, rows, part), on_step)
        states = {node.name: state for node, (_, state) in executor.states.items()}
    return counter.macs, states


def merge_states(placed: PlacedSegment, parts: Sequence[States]) -> dict[fx.Node, Any]:
    """The results of reductions from the states of all tasks, merged as a binary tree."""
    results = {}
    for unit in placed.stage.sinks:
        reduction = placed.stage.flow.gathers[unit.node]
        level = [tuple(t.clone() for t in part[unit.node.name]) for part in parts]
        while len(level) > 1:
            for k in range(0, len(level) - 1, 2):
                reduction.merge(level[k], level[k + 1])
            level = level[::2]
        results[unit.node] = reduction.finish(level[0])
    return results


@dataclass(slots=True)
class TaskRunner:
    """Runs the segments of one image in this process, task by task.

    count: called for each task, (segment, rows, resumed=whether an earlier run did it).
    remote: computes tasks elsewhere: (segment, rows of the tasks, values without rows) to records,
    as they are finished. mask: of the output.
    """

    layout: MemoryLayout
    image: int
    journal: Journal | None
    store: SliceStore
    count: Callable[..., None]
    mask: TaskMask | None = None
    remote: Callable[..., Iterator[tuple[Interval, TaskRecord]]] | None = None

    def run(
        self, placed: PlacedSegment, ends: SourcesAndSinks, work: Tensor, counter: Counter, on_step: OnStep
    ) -> None:
        """Run the tasks of a segment that are not done."""
        number = self.layout.segments.index(placed)
        records: dict[Interval, TaskRecord] = {}
        sinks = {v: s for v, s in ends.sinks.items() if v.name not in placed.segment.spills}
        is_durable = self.journal is not None and keeps_nothing_in_memory(placed, sinks)
        missing = []
        for rows in stripes_of(placed.stage, placed.segment):
            done = self.journal.done.get(self._task_key(number, rows)) if self.journal else None
            if done is not None and is_durable and is_intact(self.store, done):
                records[rows] = done
                self.count(placed, rows, resumed=True)
            else:
                missing.append(rows)
        for rows, record in self._compute_missing(placed, ends, work, missing, on_step):
            records[rows] = record
            if self.journal is not None and is_durable:
                self.journal.add(self._task_key(number, rows), record)
        counter.macs += sum(record.macs for record in records.values())
        counter.steps += len(records)
        states = [dict(records[rows].states) for rows in stripes_of(placed.stage, placed.segment)]
        ends.uncut_values.update(merge_states(placed, states))

    def _compute_missing(
        self, placed: PlacedSegment, ends: SourcesAndSinks, work: Tensor, missing: Sequence[Interval], on_step: OnStep
    ) -> Iterator[tuple[Interval, TaskRecord]]:
        if self.remote is not None and missing:
            number = self.layout.segments.index(placed)
            for rows, record in self.remote(number, missing, ends.uncut_values):
                self.count(placed, rows, resumed=False)
                yield rows, record
            return
        for rows in missing:
            yield rows, compute_record(placed, ends, work, rows, self.store, self.mask, on_step)

    def _task_key(self, number: int, rows: Interval) -> TaskKey:
        return (self.image, number, *rows)


def compute_record(
    placed: PlacedSegment,
    ends: SourcesAndSinks,
    work: Tensor,
    rows: Interval,
    store: SliceStore,
    mask: TaskMask | None = None,
    on_step: OnStep = None,
) -> TaskRecord:
    """Compute one task. Returns its record."""
    output = next(
        (v for v, sink in ends.sinks.items() if v in target_rows(placed.stage) and v in placed.stage.flow.outputs), None
    )
    columns = None
    if mask is not None and output is not None:
        columns = _columns_to_compute(placed, output, rows, mask)
        _write_fill(placed, output, ends.sinks[output], rows, columns, mask)
    macs, states = run_task(placed, ends, work, rows, on_step, columns)
    return TaskRecord(macs, store.take_written(), states)


def _columns_to_compute(placed: PlacedSegment, output: fx.Node, rows: Interval, mask: TaskMask) -> list[Interval]:
    flow, heights = placed.stage.flow, target_rows(placed.stage)
    factor = max(heights.values()) // heights[output]
    wide = max(flow.columns(v) for v in heights) // flow.columns(output)
    parts = mask.columns((rows[0] // factor, -(-rows[1] // factor)), PIECE)
    return [(a * wide, b * wide) for a, b in parts]


def _write_fill(
    placed: PlacedSegment, output: fx.Node, sink: Any, rows: Interval, computed: list[Interval], mask: TaskMask
) -> None:
    """Write the fill value to the columns that are not computed."""
    flow, heights = placed.stage.flow, target_rows(placed.stage)
    factor = max(heights.values()) // heights[output]
    width = flow.columns(output)
    wide = max(flow.columns(v) for v in heights) // width
    value, axes = fake(output), flow.axes[output]
    own = rows[0] // factor, rows[1] // factor
    for left in range(0, width, PIECE):
        right = min(left + PIECE, width)
        if any(a < right * wide and left * wide < b for a, b in computed):
            continue
        window: Window = own, (left, right)
        shape = cut_shape(value.shape, axes, window)
        sink.write(window, torch.full(shape, mask.fill, dtype=value.dtype))
