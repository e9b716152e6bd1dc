"""Cutting the segments of a plan into tasks: stripes of rows that are computed by themselves.

A task reads the rows around its stripe again, so that it depends on the source, on statistics and
on stored maps alone, and can run on any machine, at any time, twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from demask.errors import BadInput
from demask.ops.regions import Interval
from demask.traverse.analysis.flow import Flow
from demask.traverse.analysis.streamed_attention import can_stream_keys
from demask.traverse.planning.plan import BANDS, FRUSTUMS, Segment
from demask.traverse.planning.plan_memory import MemoryLayout, lay_out, step_macs, stripes_of, tile_at
from demask.traverse.planning.schedule import target_rows
from demask.traverse.planning.stage import Stage

MOST = 64  # tasks of a segment
AGAIN = 1.05  # largest factor of multiply-adds, by rows that are computed again


def cut_into_tasks(flow: Flow, layout: MemoryLayout, rows: int, stripe: int | None = None) -> MemoryLayout:
    """The layout of a plan whose segments are cut into tasks.

    Args:
        rows: rows of the output that are written together, as a row of chunks.
        stripe: rows of the output of each task, rounded up to a multiple of `rows`; None: as few as
            cost 5 % more multiply-adds.
    """
    segments = []
    for place in layout.places:
        size = _stripe(flow, place.stage, place.segment, rows, stripe)
        segments.append(replace(place.segment, stripe=size, workers=1, over={}))
    return lay_out(flow, segments)


def check_shared(flow: Flow, layout: MemoryLayout) -> None:
    """Raise BadInput unless all maps are in files, for tasks on several machines."""
    for place in layout.places:
        for value in place.stage.targets:
            whole = None if value.name in place.segment.spills else _reader_of_all(flow, value)
            if whole is not None:
                raise BadInput(
                    f"{whole.name} reads all rows of {value.name} at once: this network cannot be "
                    "streamed on several machines; leave client= out"
                )


def _stripe(flow: Flow, stage: Stage, segment: Segment, rows: int, wanted: int | None) -> int:
    """Rows of the tallest target per task; 0 for one task."""
    heights = target_rows(stage)
    if segment.mode not in (BANDS, FRUSTUMS) or not heights:
        return 0
    height = max(heights.values())
    unit = segment.rows
    outputs = [v for v in heights if v in flow.outputs]
    if outputs:
        if any(height % heights[v] for v in outputs):
            return 0  # a task would end within a row of the output
        unit = rows * max(height // heights[v] for v in outputs)
    if wanted is not None:
        factor = unit // rows if outputs else 1
        size = -(-wanted * factor // unit) * unit
        return size if size < height else 0
    size = unit * max(1, -(-height // (MOST * unit)))
    whole = step_macs(stage, tile_at(stage, (0, height), _all_columns(stage)))
    while size < height:
        cut = replace(segment, stripe=size)
        again = sum(step_macs(stage, tile_at(stage, r, _all_columns(stage))) for r in stripes_of(stage, cut))
        if again <= AGAIN * whole:
            return size
        size *= 2
    return 0


def _all_columns(stage: Stage) -> Interval:
    return 0, max(stage.flow.columns(v) for v in target_rows(stage))


def _reader_of_all(flow: Flow, value: fx.Node) -> fx.Node | None:
    """A call that reads all rows of a value, and cannot read them in blocks."""
    readers = [u for u in value.users if u.op == "call_function" and not can_stream_keys(u)]
    edges = ((u, edge) for u in readers for edge in flow.edges(u))
    return next((u for u, edge in edges if edge.whole and edge.source is value), None)


def task_names(layout: MemoryLayout, images: int) -> Sequence[tuple[int, int, Interval]]:
    """(image, segment, rows) of all tasks, in order."""
    return [
        (image, k, rows)
        for image in range(images)
        for k, place in enumerate(layout.places)
        if place.segment.stripe
        for rows in stripes_of(place.stage, place.segment)
    ]
