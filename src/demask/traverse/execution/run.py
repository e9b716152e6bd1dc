"""Execute a plan: segment after segment in one arena, from sources to sinks.

Several workers in parallel each run a strip of bands in a thread, with memory of their own and a
share of torch's threads; they share sources, sinks and the borders between their strips. Their
counters and statistics are merged at the end.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from demask.exec.analysis.flow import Flow
from demask.exec.axes import Window, cut_shape
from demask.exec.planning.plan_memory import LARGE, MemoryLayout, PlacedSegment, steps_of
from demask.exec.planning.schedule import Step, Strip, walk_bands
from demask.failures import is_strict
from demask.machine.allocator import release_free_memory
from demask.machine.arena import ALIGNMENT, align_size
from demask.machine.clock import set_threads
from demask.ops.schema import fake
from demask.traverse.execution.segment_executor import BandBorder, Counter, SegmentExecutor, SourcesAndSinks, view_part
from demask.traverse.storage.sources_and_sinks import Spill, in_place, spill, tensor_source


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
    placed: PlacedSegment, ends: SourcesAndSinks, work: Tensor, counter: Counter, on_step: Callable[[Step], None] | None
) -> None:
    """Run the strips of a segment in parallel. work: uint8 [placed.bytes]."""
    arena = _WorkerArena(work)
    memories = [arena.take(placed.memory.size) for _ in placed.strips]
    borders = [_border_memory(placed, strip, arena) for strip in placed.strips[:-1]]
    neighbors = [None, *borders, None]
    work_and_borders = zip(memories, neighbors, neighbors[1:], strict=False)
    executors = [
        SegmentExecutor(placed.stage, placed.memory, ends, memory, Counter(), above, below)
        for memory, above, below in work_and_borders
    ]
    count = torch.get_num_threads()
    threads = max(1, count // len(executors))

    def run_strip(executor: SegmentExecutor, strip: Strip) -> None:
        torch.set_num_threads(threads)
        with torch.no_grad():
            steps = walk_bands(placed.stage, placed.segment.rows, strip, row_steps=placed.segment.row_steps)
            executor.run(steps, on_step)

    # A worker's thread count is also that of threads that start later: restore it at the end.
    with set_threads(count), ThreadPoolExecutor(len(executors)) as pool:
        jobs = [pool.submit(run_strip, *pair) for pair in zip(executors, placed.strips, strict=True)]
    failures = [error for job in jobs if (error := job.exception()) is not None]
    if failures:
        raise failures[-1]  # the workers above only waited for it
    for executor in executors:
        counter.macs += executor.counter.macs
        counter.steps += executor.counter.steps
    for node, (reduction, state) in executors[0].states.items():
        for other in executors[1:]:
            reduction.merge(state, other.states[node][1])
        ends.uncut_values[node] = reduction.finish(state)


def _border_memory(placed: PlacedSegment, upper: Strip, arena: _WorkerArena) -> BandBorder:
    """Memory for the rows that a strip receives from the one below it."""
    rows: dict[fx.Node, Tensor | None] = {}
    spans = {v: (upper.own[v], upper.own[v] + n) for v, n in upper.borders.items()}
    for v, (low, high) in spans.items():
        rows[v] = None
        if v not in placed.maps:
            value, axes = fake(v), placed.stage.flow.axes[v]
            columns = 0, placed.stage.flow.columns(v)
            shape = cut_shape(value.shape, axes, ((low, high), columns))
            memory = arena.take(placed.border_bytes(v, high - low))
            rows[v] = view_part(memory, 0, shape, axes, value.dtype)
    return BandBorder(rows, spans)


OnStep = Callable[[PlacedSegment, Step], None]
SpillName = Callable[[fx.Node], str]
RunSegment = Callable[[PlacedSegment, SourcesAndSinks, Tensor, Counter, Callable[[Step], None] | None], None]


@dataclass(frozen=True, slots=True)
class ImageRun:
    """The sources and sinks of one image.

    sources, sinks: of values with rows. uncut_values: inputs without rows, and constants.
    """

    sources: Mapping[fx.Node, Any]
    sinks: Mapping[fx.Node, Any]
    uncut_values: Mapping[fx.Node, Any]


def _run_segment(
    placed: PlacedSegment, ends: SourcesAndSinks, work: Tensor, counter: Counter, on_step: Callable[[Step], None] | None
) -> None:
    if placed.parts is not None:
        parts: Any = placed.parts
        parts.run(ends, counter, on_step)
    elif placed.strips:
        run_strips(placed, ends, work, counter, on_step)
    else:
        executor = SegmentExecutor(placed.stage, placed.memory, ends, work, counter)
        executor.run(steps_of(placed.stage, placed.segment), on_step)


def execute(
    flow: Flow,
    layout: MemoryLayout,
    call: ImageRun,
    *,
    folder: str = tempfile.gettempdir(),
    on_step: OnStep | None = None,
    run_segment: RunSegment = _run_segment,
    run_tasks: RunSegment | None = None,
    spill_name: SpillName | None = None,
) -> tuple[dict[fx.Node, Any], Counter]:
    """Run all segments. Returns the values without rows, and multiply-adds and steps.

    folder: for maps on disk, which are deleted after the last read. on_step: called after each step
    of each segment, by the thread that ran it. run_tasks: runs segments that are cut into tasks.
    spill_name: the file name of a value's map on disk; None for files without names.
    """
    counter, arena = Counter(), new_memory(layout.size)
    uncut_values, spills = dict(call.uncut_values), dict[fx.Node, Spill]()
    for k, placed in enumerate(layout.segments):
        maps = {
            v: view_part(arena, layout.maps[v], tuple(fake(v).shape), flow.axes[v], fake(v).dtype) for v in placed.maps
        }
        ends = SourcesAndSinks(maps, dict(call.sources), dict(call.sinks), uncut_values)
        for v in placed.stage.targets:
            if v.name in placed.segment.spills:
                value = fake(v)
                name = spill_name(v) if spill_name else ""
                spills[v] = spill(tuple(value.shape), value.dtype, flow.axes[v], folder, name)
                ends.sinks[v] = spills[v] if v not in call.sinks else Tee(spills[v], call.sinks[v])
        ends.sources.update({v: spills[v] for v in placed.stage.enters if v in spills})
        work = arena[layout.work[k] : layout.work[k] + placed.bytes]
        _use_in_place(placed, call, ends)
        run = run_tasks if run_tasks is not None and placed.segment.stripe else run_segment
        run(placed, ends, work, counter, None if on_step is None else partial(on_step, placed))
        ends.packed.clear()
        if placed.allocated >= LARGE:
            release_free_memory()
        _delete_spills(layout, k, spills)
        for v in layout.last_used[k]:
            uncut_values.pop(v, None)
    for file in spills.values():
        file.delete()
    return uncut_values, counter


def rehearse(flow: Flow, layout: MemoryLayout, constants: Mapping[fx.Node, Any]) -> None:
    """Run each segment on zeros until each of its calls ran once, so that code and kernels that the
    process loads are not allocated during a call."""
    sources, uncut_values = {}, dict(constants)
    for node in flow.inputs:
        value: Any = node.meta.get("val")
        if node in flow.axes:
            sources[node] = tensor_source(_expanded_zeros(value), flow.axes[node])
        else:
            uncut_values[node] = _expanded_zeros(value) if isinstance(value, Tensor) else value
    sinks = {v: Nowhere() for v in flow.outputs if isinstance(v, fx.Node) and v in flow.axes}
    call = ImageRun(sources, sinks, uncut_values)
    try:
        with torch.no_grad():
            execute(flow, layout, call, run_segment=_run_until_all_computed)
    except Exception:  # a call that fails on zeros may succeed on others
        if is_strict():
            raise


def _expanded_zeros(value: Tensor) -> Tensor:
    return torch.zeros((), dtype=value.dtype).expand(value.shape)


def _run_until_all_computed(
    placed: PlacedSegment, ends: SourcesAndSinks, work: Tensor, counter: Counter, on_step: Callable[[Step], None] | None
) -> None:
    """Run one segment with one worker until each of its calls has computed rows. Parts ran when they were compiled."""
    if placed.parts is not None:
        return

    def steps() -> Iterator[Step]:
        pending = {unit.value for unit in placed.stage.units if unit.value in placed.stage.flow.axes}
        for step in steps_of(placed.stage, placed.segment):
            yield step
            pending -= {v for v in pending if v not in step or step[v].computed[0] < step[v].computed[1]}
            if not pending:
                return

    executor = SegmentExecutor(placed.stage, placed.memory, ends, work, counter)
    executor.run(steps(), on_step)
    for node, (statistic, state) in executor.states.items():
        if node not in ends.uncut_values:  # statistics of the rows so far
            ends.uncut_values[node] = statistic.finish(state)


class Nowhere:
    """A sink that ignores what is written."""

    def write(self, window: Window, part: Tensor) -> None:
        """Ignore a part."""


@dataclass(frozen=True, slots=True)
class Tee:
    """A sink that writes to two others."""

    first: Any
    second: Any

    def write(self, window: Window, part: Tensor) -> None:
        self.first.write(window, part)
        self.second.write(window, part)


def _use_in_place(placed: PlacedSegment, call: ImageRun, ends: SourcesAndSinks) -> None:
    """Use tensors in the layout of parts directly, without a copy; their planned blocks stay
    untouched."""
    for v in placed.stage.enters:
        part = in_place(call.sources.get(v))
        if part is not None:
            ends.maps[v] = part
            ends.sources.pop(v)
    for v in placed.stage.targets:
        part = in_place(call.sinks.get(v))
        if part is not None and ends.sinks.get(v) is call.sinks[v] and v not in ends.maps:
            ends.maps[v] = part
            ends.sinks.pop(v)


def _delete_spills(layout: MemoryLayout, k: int, spills: dict[fx.Node, Spill]) -> None:
    """Delete maps on disk that no later segment reads. Named ones stay until the image is done: a
    resumed stream skips the tasks that wrote them, and may read them again."""
    later = {v for placed in layout.segments[k + 1 :] for v in placed.stage.enters}
    for v in [v for v in spills if v not in later and not spills[v].is_named]:
        spills.pop(v).delete()


def new_memory(size: int) -> Tensor:
    """New memory, uint8 [size or more], returned to the system when the last view is deleted."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, size + ALIGNMENT), dtype=torch.uint8)
