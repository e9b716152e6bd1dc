"""Several workers in parallel: each runs its strip of bands in its own thread.

Each has its own memory and its share of torch's threads; they share sources, sinks and the borders
between their strips. Their counters and statistics are merged at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from demask.machine.arena import align_size
from demask.machine.threads import set_threads
from demask.traverse.axes import cut_shape
from demask.traverse.execution.segment_executor import BandBorder, Counter, SegmentExecutor, SourcesAndSinks, view_part
from demask.traverse.planning.plan_memory import PlacedSegment
from demask.traverse.planning.schedule import Step, Strip, walk_bands


@dataclass(slots=True)
class _WorkerArena:
    """Memory from which consecutive pieces are taken."""

    memory: Tensor
    taken: int = 0

    def take(self, size: int) -> Tensor:
        start = self.taken
        self.taken += align_size(size)
        return self.memory[start : start + size]


def run_strips(
    place: PlacedSegment, ends: SourcesAndSinks, work: Tensor, counter: Counter, on_step: Callable[[Step], None] | None
) -> None:
    """Run the strips of a segment in parallel. work: uint8 [place.bytes]."""
    arena = _WorkerArena(work)
    memories = [arena.take(place.memory.size) for _ in place.strips]
    borders = [_border(place, strip, arena) for strip in place.strips[:-1]]
    neighbors = [None, *borders, None]
    work_and_borders = zip(memories, neighbors, neighbors[1:], strict=False)
    executors = [
        SegmentExecutor(place.stage, place.memory, ends, memory, Counter(), above, below)
        for memory, above, below in work_and_borders
    ]
    count = torch.get_num_threads()
    threads = max(1, count // len(executors))
    # A worker's thread count is also that of threads that start later: restore it at the end.
    with set_threads(count), ThreadPoolExecutor(len(executors)) as pool:
        jobs = [
            pool.submit(_run_strip, executor, place, strip, threads, on_step)
            for executor, strip in zip(executors, place.strips, strict=True)
        ]
    failures = [error for job in jobs if (error := job.exception()) is not None]
    if failures:
        raise failures[-1]  # the workers above only waited for it
    for executor in executors:
        counter.macs += executor.counter.macs
        counter.steps += executor.counter.steps
    _merge_statistics(executors, ends)


def _run_strip(
    executor: SegmentExecutor, place: PlacedSegment, strip: Strip, threads: int, on_step: Callable[[Step], None] | None
) -> None:
    torch.set_num_threads(threads)
    with torch.no_grad():
        executor.run(walk_bands(place.stage, place.segment.rows, strip), on_step)


def _border(place: PlacedSegment, upper: Strip, arena: _WorkerArena) -> BandBorder:
    """Memory for the rows that a strip receives from the one below it."""
    rows: dict[fx.Node, Tensor | None] = {}
    spans = {v: (upper.own[v], upper.own[v] + n) for v, n in upper.borders.items()}
    for v, (low, high) in spans.items():
        rows[v] = None
        if v not in place.maps:
            value, axes = v.meta["val"], place.stage.flow.axes[v]
            columns = 0, place.stage.flow.columns(v)
            shape = cut_shape(value.shape, axes, ((low, high), columns))
            memory = arena.take(place.border_bytes(v, high - low))
            rows[v] = view_part(memory, 0, shape, axes, value.dtype)
    return BandBorder(rows, spans)


def _merge_statistics(executors: list[SegmentExecutor], ends: SourcesAndSinks) -> None:
    """Finish the statistics of all strips."""
    for node, (reduction, state) in executors[0].states.items():
        for other in executors[1:]:
            reduction.merge(state, other.states[node][1])
        ends.whole_values[node] = reduction.finish(state)
