"""The job of `stream`: a network, its plan, a source and a result, ready to run.

The segments of a plan are cut into tasks: stripes of rows that are computed by themselves. A task
reads the rows around its stripe again, so that it depends on the source, on statistics and on
stored maps alone, and can run on any machine, at any time, twice.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from demask.errors import BadInput
from demask.exec.analysis.flow import Flow, flow_of
from demask.exec.analysis.partial_reductions import can_stream_keys
from demask.exec.axes import NONE, Axes, Window
from demask.exec.planning.plan import BANDS, FRUSTUMS, Segment, TilePlan
from demask.exec.planning.plan_memory import MemoryLayout, PlacedSegment, lay_out, step_macs, stripes_of, tile_at
from demask.exec.planning.planner import plan_flow
from demask.exec.planning.schedule import Stage, target_rows
from demask.machine.arena import strided_bytes
from demask.machine.byte_sizes import BUDGET, format_bytes, parse_memory
from demask.ops import Table
from demask.ops.regions import Interval
from demask.ops.schema import fake
from demask.pages import Lines, Page, PageSource
from demask.traverse.captured_size import captured, network_of
from demask.traverse.execution.journal import Journal, TaskKey, TaskRecord
from demask.traverse.execution.run import ImageRun, execute
from demask.traverse.execution.tasks import TaskMask, TaskRunner, is_intact
from demask.traverse.normalization import IMAGE, Statistics, with_normalized_input, with_statistics
from demask.traverse.storage.boxes import slices
from demask.traverse.storage.dtype_conversion import check_conversion, name_of
from demask.traverse.storage.open_ends import (
    FileTarget,
    Region,
    identity_of,
    open_sink,
    open_source,
    scaled_metadata,
    target_of,
)
from demask.traverse.storage.sources_and_sinks import ArgmaxSink, FilledSink, Sink, StoredSink, StoredSource
from demask.traverse.storage.store import SliceStore, backing_file

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
    for placed in layout.segments:
        size = _rows_per_task(flow, placed.stage, placed.segment, rows, stripe)
        segments.append(replace(placed.segment, stripe=size, workers=1, over={}))
    return lay_out(flow, segments)


def check_shared(flow: Flow, layout: MemoryLayout) -> None:
    """Raise BadInput unless all maps are in files, for tasks on several machines."""
    for placed in layout.segments:
        for value in placed.stage.targets:
            reader = None if value.name in placed.segment.spills else _reader_of_all(flow, value)
            if reader is not None:
                raise BadInput(
                    f"{reader.name} reads all rows of {value.name} at once: this network cannot be "
                    "streamed on several machines; leave client= out"
                )


def _rows_per_task(flow: Flow, stage: Stage, segment: Segment, rows: int, wanted: int | None) -> int:
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
    once = step_macs(stage, tile_at(stage, (0, height), _all_columns(stage)))
    while size < height:
        cut = replace(segment, stripe=size)
        again = sum(step_macs(stage, tile_at(stage, r, _all_columns(stage))) for r in stripes_of(stage, cut))
        if again <= AGAIN * once:
            return size
        size *= 2
    return 0


def _all_columns(stage: Stage) -> Interval:
    return 0, max(stage.flow.columns(v) for v in target_rows(stage))


def _reader_of_all(flow: Flow, value: fx.Node) -> fx.Node | None:
    """A call that reads all rows of a value, and cannot read them in blocks."""
    readers = [u for u in value.users if u.op == "call_function" and not can_stream_keys(u)]
    edges = ((u, edge) for u in readers for edge in flow.edges(u))
    return next((u for u, edge in edges if edge.all_rows and edge.source is value), None)


CLASSES = 256  # at most, to store their numbers as uint8


def capture_flow(
    model: Any, source: StoredSource, normalize: Any, statistics: Statistics, table: Table
) -> tuple[Flow, fx.Node]:
    """A network captured for one image of a source, and its input."""
    shape = source.shape
    if not 3 <= len(shape) <= 5 or 0 in shape:
        raise BadInput(
            f"expected images (N, C, H, W), volumes (N, C, D, H, W) or sequences "
            f"(N, C, L) of at least one position, got {shape}"
        )
    program = captured(network_of(model), (1, *shape[1:]), source.dtype)
    program = with_statistics(with_normalized_input(program, normalize), statistics)
    flow = flow_of(program, table)
    nodes = [n for n in flow.inputs if n in flow.axes]
    computed = [n for n in flow.outputs if isinstance(n, fx.Node) and n.op == "call_function"]
    if len(flow.inputs) != 1 or len(nodes) != 1:
        raise BadInput(f"stream() takes networks of one input, got {len(flow.inputs)}")
    if len(flow.outputs) != 1 or len(computed) != 1:
        raise BadInput(f"stream() takes networks of one output that they compute, got {len(flow.outputs)}")
    return flow, nodes[0]


def result_of(shape: tuple[int, ...], values: torch.dtype, output: str | None) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a result: of the network's output, or of its classes."""
    if output != "argmax":
        return shape, values if output is None else getattr(torch, output)
    if len(shape) < 3 or not values.is_floating_point:
        raise BadInput(f"output='argmax': expected scores (N, classes, ...), got {shape}")
    stored = torch.uint8 if shape[1] <= CLASSES else torch.uint16
    return (shape[0], 1, *shape[2:]), stored


def batched(shape: tuple[int, ...], images: int) -> tuple[int, ...]:
    """The shape of the results of all images."""
    if images > 1 and (not shape or shape[0] != 1):
        raise BadInput(
            f"the result of one image has the shape {shape}: it has no axis for {images} images; stream them one by one"
        )
    return (images, *shape[1:]) if shape else shape


def check_separate(source: Any, destination: Any, reader: StoredSource, sink: StoredSink) -> None:
    """Raise BadInput where source and destination share memory or a mapped file. A path as
    destination is a new file, even where it replaces the source."""
    mapped_file, name = getattr(destination, "filename", None), getattr(source, "filename", source)
    if (
        isinstance(mapped_file, str | os.PathLike)
        and isinstance(name, str | os.PathLike)
        and os.path.samefile(mapped_file, name)
    ):
        raise BadInput(f"source and destination are both in {mapped_file}; write to another file")
    if source is destination:
        raise BadInput("source and destination are the same; give a separate destination")
    if reader.tensor is not None and sink.tensor is not None:
        (first, last), (start, end) = _address_range(reader.tensor), _address_range(sink.tensor)
        if first < end and start < last:
            raise BadInput("source and destination share memory; give a separate destination")


def _address_range(tensor: Tensor) -> tuple[int, int]:
    first = tensor.data_ptr()
    return first, first + strided_bytes(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def folder_of(destination: Any) -> Path | str:
    """The folder for intermediate maps: that of the result, whose disk is likely to have room."""
    if isinstance(destination, str | os.PathLike):
        return Path(destination).resolve().parent
    mapped = isinstance(destination, np.ndarray) and backing_file(destination) is not None
    name = getattr(destination, "filename", None) if mapped else None
    return Path(name).resolve().parent if name else tempfile.gettempdir()


def mask_of(mask: Any, shape: tuple[int, ...], axes: Axes) -> TaskMask | None:
    """A mask of any size, at the size of the result: each position has the nearest one's value."""
    if mask is None:
        return None
    values = np.asarray(mask)
    if values.ndim != 2 or 0 in values.shape or values.dtype != bool:
        raise BadInput(f"mask: expected bools (rows, columns), got {values.dtype} {values.shape}")
    if len(shape) != 4 or None in axes:
        raise BadInput(f"mask: the result has the shape {shape}, expected images (N, C, H, W)")
    rows, columns = ((np.arange(n) * m // n) for n, m in zip(shape[-2:], values.shape, strict=True))
    return TaskMask(torch.from_numpy(np.ascontiguousarray(values[rows][:, columns])))


def network_digest(flow: Flow) -> str:
    """A text that differs for networks with other calls or other weights."""
    digest = hashlib.blake2b(str(flow.program.graph).encode(), digest_size=16)
    for name, constant in sorted(flow.program.constants.items()):
        tensor = constant.tensor.detach()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        data = tensor.contiguous().reshape(-1)
        digest.update(data.view(torch.uint8).numpy().tobytes() if data.numel() else b"")
    return digest.hexdigest()


def digest_of(*texts: str) -> str:
    """A short text that differs for other texts."""
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=16).hexdigest()


SETTLED = 2.0  # seconds after which the speed so far says how much time is left
OUTPUTS = ("uint8", "uint16", "float16", "float32", "float64", "argmax")


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """The keywords of `stream` that decide what is computed and how it is stored.

    Any process makes the same plan from them. shared: whether tasks run in several processes.
    """

    memory: str | int = BUDGET
    output: str | None = None
    layout: str | None = None
    region: Region | None = None
    mask: Any = None
    normalize: Any = None
    statistics: Statistics = IMAGE
    chunk: int | None = None
    stripe: int | None = None
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Streamed(PageSource):
    """The result of `stream`: shape and dtype of the output, and the time and memory of the run.

    Attributes:
        shape: shape of the written array, N first.
        dtype: name of the written dtype, such as "float32" or "uint8".
        images: number of images, N.
        rows: number of rows of all images written.
        seconds: time of execution, without capture and planning of the network.
        peak: predicted maximum of memory in bytes, in addition to the process before the call.
        macs: multiply-adds executed, for all images.
        resumed: rows that an earlier, unfinished run had written; default 0.

    Example:
        >>> import torch
        >>> from demask.traverse import stream
        >>> net = torch.nn.Conv2d(3, 1, 3)
        >>> x, y = torch.rand(2, 3, 64, 48), torch.empty(2, 1, 62, 46)
        >>> streamed = stream(net, x, y, memory="16MiB")
        >>> streamed.shape, streamed.images, streamed.rows, streamed.peak < 16 * 2**20
        ((2, 1, 62, 46), 2, 124, True)
    """

    shape: tuple[int, ...]
    dtype: str
    images: int
    rows: int
    seconds: float
    peak: int
    macs: int
    resumed: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The attributes as a dictionary of JSON types; `shape` as a list of integers."""
        return {name: getattr(self, name) for name in self.__slots__} | {"shape": list(self.shape)}

    def page(self) -> Page:
        """What `print`, `to_html` and notebooks show, as sections."""
        many = f"{self.images:,} images, " if self.images > 1 else ""
        before = f" ({self.resumed:,} of them before)" if self.resumed else ""
        line = (
            f"{many}{self.rows:,} rows{before} in {self.seconds:.1f} s, predicted peak "
            f"{format_bytes(self.peak)}: {self.dtype} {self.shape}"
        )
        return Page("demask stream", (Lines([line]),))


class Counted:
    """A sink that counts written positions, to check that none is missing."""

    def __init__(self, sink: Any, window: Window, tell: RowProgress):
        self.sink, self.tell, self.done = sink, tell, 0
        self.height, self.width = _extents(window)

    def write(self, window: Window, part: Tensor) -> None:
        self.sink.write(window, part)
        self.count(window)

    def count(self, window: Window) -> None:
        """Count positions that are written, or were before."""
        rows, columns = _extents(window)
        self.done += rows * columns
        self.tell.rows += rows * columns / self.width

    def check(self) -> None:
        """Raise RuntimeError where positions were missed or written twice."""
        if self.done != self.height * self.width:
            raise RuntimeError(
                f"the plan wrote {self.done} positions of an image of {self.height} x {self.width}; please report this"
            )


class RowProgress:
    """Reports the number of rows written so far, and the time left.

    work: multiply-adds of the job. Time left is of those to come, at the speed so far;
    what an earlier run did counts as done, and not as time.
    """

    def __init__(self, total: int, progress: Callable[..., object] | None, work: int = 0):
        self.total, self.work, self.progress = total, work, progress
        self.rows = self.resumed = 0.0
        self.begun, self.computed, self.skipped = time.perf_counter(), 0.0, 0.0

    def step(self, placed: PlacedSegment, *_: object) -> None:
        """Report one step of a segment."""
        self.computed += placed.segment.macs / placed.segment.steps
        self._report(1)

    def task(self, placed: PlacedSegment, rows: Interval, *, resumed: bool) -> None:
        """Report a task: one that an earlier run did, or another process."""
        height = max(target_rows(placed.stage).values())
        share = (rows[1] - rows[0]) / height
        if resumed:
            self.skipped += share * placed.segment.macs
        else:
            self.computed += share * placed.segment.macs
        self._report(max(1, round(share * placed.segment.steps)))

    def image(self, placed_segments: Sequence[PlacedSegment], rows: int) -> None:
        """Report an image that an earlier run did."""
        self.rows, self.resumed = self.rows + rows, self.resumed + rows
        self.skipped += sum(placed.segment.macs for placed in placed_segments)
        self._report(sum(placed.segment.steps for placed in placed_segments))

    def _report(self, done: int) -> None:
        if self.progress is not None:
            self.progress(f"{int(self.rows):,} of {self.total:,} rows{self._time_left()}", done=done)

    def _time_left(self) -> str:
        seconds, left = time.perf_counter() - self.begun, self.work - self.computed - self.skipped
        if seconds < SETTLED or self.computed <= 0 or self.rows >= self.total:
            return ""
        minutes, rest = divmod(round(seconds * max(left, 0) / self.computed), 60)
        hours, minutes = divmod(minutes, 60)
        clock = f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
        return f", {clock} left"


@dataclass(frozen=True, slots=True)
class Streaming:
    """A network with its plan, ready to run.

    source, sink: of all images. target: the file to write, if the sink is one. identity: what must be
    equal to go on with an unfinished file.
    """

    flow: Flow
    plan: TilePlan
    layout: MemoryLayout
    source: StoredSource
    target: FileTarget | None
    sink: StoredSink
    options: StreamOptions
    mask: TaskMask | None
    folder: str
    identity: Mapping[str, str]

    @property
    def images(self) -> int:
        """The number of images."""
        return self.source.shape[0]

    @property
    def output(self) -> fx.Node:
        """The value of the network that is written."""
        return self.flow.outputs[0]

    @property
    def rows(self) -> int:
        """The number of rows to write, of all images."""
        return self.images * _extents(self.sink.window)[0]

    @property
    def steps(self) -> int:
        """The number of times that `run` calls `progress`, if nothing was done before."""
        return self.images * sum(segment.steps for segment in self.plan.segments)

    def run(
        self, progress: Callable[..., object] | None = None, *, resume: bool = True, cluster: Any = None
    ) -> Streamed:
        """Execute the plan, image after image.

        resume: whether to go on with an unfinished file. cluster: runs the tasks elsewhere.
        """
        begun, macs = time.perf_counter(), 0
        tell = RowProgress(self.rows, progress, self.images * self.plan.macs)
        with self._opened(resume) as (sink, journal), torch.no_grad():
            for k in range(self.images):
                if self._is_image_done(k, journal, sink.store):
                    tell.image(self.layout.segments, _extents(self.sink.window)[0])
                    continue
                counted = Counted(self._with_adjustments(sink, k), self.sink.window, tell)
                macs += self._run_image(k, counted, journal, sink.store, tell, cluster)
                counted.check()
                self._add_image(k, journal, sink.store)
        seconds = time.perf_counter() - begun
        dtype, peak, resumed = name_of(self.sink.dtype), self.plan.peak, int(tell.resumed)
        return Streamed(self.sink.shape, dtype, self.images, self.rows, seconds, peak, macs, resumed)

    def _run_image(
        self, k: int, sink: Counted, journal: Journal | None, store: SliceStore, tell: RowProgress, cluster: Any
    ) -> int:
        """Run one image. Returns its multiply-adds."""
        flow, has_rows = self.flow, self.output in self.flow.axes

        def count(placed: PlacedSegment, rows: Interval, *, resumed: bool) -> None:
            if self.output in target_rows(placed.stage):
                window = self.written_window(placed, rows)
                sink.count(window)
                tell.resumed += resumed * (window[0][1] - window[0][0])
            tell.task(placed, rows, resumed=resumed)

        remote = None if cluster is None else partial(cluster.run_tasks, k)
        runner = TaskRunner(self.layout, k, journal, store, count, self.mask, remote)
        call = ImageRun({flow.inputs[0]: self.source.image(k)}, {self.output: sink} if has_rows else {}, flow.constants)
        names = None if journal is None else (lambda node: self.spill_name(k, node))
        values, counter = execute(
            flow,
            self.layout,
            call,
            folder=self.folder if journal is None else str(journal.folder),
            on_step=tell.step,
            run_tasks=runner.run,
            spill_name=names,
        )
        if not has_rows:
            sink.write(self.sink.window, values[self.output])
        return counter.macs

    def _image_key(self, image: int) -> TaskKey | None:
        """The key in the journal of an image whose output is written without tasks; None where
        tasks have keys of their own."""
        writers = [k for k, placed in enumerate(self.layout.segments) if self.output in placed.stage.targets]
        if not writers or self.layout.segments[writers[0]].segment.stripe:
            return None
        return (image, writers[0], 0, _extents(self.sink.window)[0])

    def _is_image_done(self, image: int, journal: Journal | None, store: SliceStore) -> bool:
        """Whether an earlier run wrote an image, and the file still has it."""
        key = self._image_key(image)
        return journal is not None and key in journal.done and is_intact(store, journal.done[key])

    def _add_image(self, image: int, journal: Journal | None, store: SliceStore) -> None:
        key = self._image_key(image)
        if journal is not None and key is not None:
            journal.add(key, TaskRecord(0, store.take_written(), {}))

    def written_window(self, placed: PlacedSegment, rows: tuple[int, int]) -> Window:
        """The positions of the output that a task writes."""
        heights = target_rows(placed.stage)
        factor = max(heights.values()) // heights[self.output]
        return (rows[0] // factor, rows[1] // factor), self.sink.window[1]

    def spill_name(self, image: int, node: fx.Node) -> str:
        """The name of the file of a map."""
        return f"map-{image}-{node.name}.bin"

    @contextmanager
    def _opened(self, resume: bool) -> Iterator[tuple[StoredSink, Journal | None]]:
        """The sink, and for a file its journal. The file gets its name at the end."""
        if self.target is None:
            yield self.sink.over(self.sink.store), None
            return
        journal = Journal.open(self.target.folder, self.identity, resume=resume)
        try:
            if not self.target.part.exists():
                try:
                    self.target.create()
                except Exception:
                    if not journal.done:
                        journal.delete()
                    raise
            sink = self.target.open(self.sink)
            try:
                yield sink, journal
            finally:
                sink.store.close()
            self.target.finish()
            journal.delete()
        finally:
            journal.close()

    def open_part(self, image: int) -> tuple[Sink, SliceStore]:
        """The unfinished file, in another process: the sink of an image, and the store."""
        assert self.target is not None
        sink = self.target.open(self.sink)
        return self._with_adjustments(sink, image), sink.store

    def _with_adjustments(self, sink: StoredSink, image: int) -> Sink:
        """The sink of an image, after what changes values on the way to it."""
        adjusted: Sink = sink.image(image)
        is_argmax, source = self.options.output == "argmax", self.source.image(image)
        if is_argmax:
            adjusted = ArgmaxSink(adjusted)
        value = sink.store.metadata.get("nodata")
        is_raster = len(sink.shape) == 4 and None not in self.sink.axes and source.shape[-2:] == sink.shape[-2:]
        if value is not None and source.missing is not None and is_raster and not is_argmax:
            adjusted = FilledSink(adjusted, self.sink.axes, source.lacks, float(value))
        if self.mask is not None:
            wanted = self.mask.wanted
            adjusted = FilledSink(adjusted, self.sink.axes, lambda window: ~wanted[slices(window)], self.mask.fill)
        return adjusted


def prepare_stream(
    model: Any,
    source: Any,
    destination: Any,
    options: StreamOptions,
    *,
    spill: str | os.PathLike[str] | None = None,
    table: Table,
) -> Streaming:
    """The job with its plan, before anything runs or is written."""
    if options.output is not None and options.output not in OUTPUTS:
        raise BadInput(f"expected output=None or one of {OUTPUTS}, got {options.output!r}")
    budget = parse_memory(options.memory)
    reader = open_source(source, options.layout, options.region)
    flow, node = capture_flow(model, reader, options.normalize, options.statistics, table)
    images = reader.placed(flow.axes[node])
    target, sink = _result_end(flow, reader, source, destination, options)
    folder = str(spill or folder_of(destination))
    if not os.path.isdir(folder):
        raise BadInput(f"spill: expected a folder that exists, got {folder}")
    if options.shared and target is None:
        raise BadInput("client: the destination must be a file, which all workers can open")
    flow, plan, layout = _plan_image(flow, budget, images.image(0), sink.image(0), target, options.stripe)
    if options.shared:
        check_shared(flow, layout)
    mask = mask_of(options.mask, sink.shape, sink.axes)
    identity = (
        {}
        if target is None
        else {
            "network": network_digest(flow),
            "input": identity_of(source, reader),
            "plan": digest_of(
                str(replace(plan, budget=0).to_dict()), str(replace(options, shared=False)), str(target.info)
            ),
        }
    )
    return Streaming(flow, plan, layout, images, target, sink, options, mask, folder, identity)


def _result_end(
    flow: Flow, reader: StoredSource, source: Any, destination: Any, options: StreamOptions
) -> tuple[FileTarget | None, StoredSink]:
    """The sink of the result, and the file to write if it is one."""
    output = flow.outputs[0]
    value, axes, wanted = fake(output), flow.axes.get(output, NONE), options.output
    values = torch.int64 if wanted == "argmax" else value.dtype
    shape, stored = result_of(batched(tuple(value.shape), reader.shape[0]), value.dtype, wanted)
    if isinstance(destination, str | os.PathLike):
        if wanted != "argmax":
            check_conversion(value.dtype, stored)
        metadata = scaled_metadata(reader, shape, stored, labels=wanted == "argmax")
        target, images = target_of(destination, shape, stored, metadata, options.chunk)
        return target, StoredSink(target.planned_store(), images, axes, values)
    if options.chunk is not None:
        raise BadInput("chunk: an array has chunks of its own; leave `chunk` out")
    sink = open_sink(destination, shape, values, options.layout).placed(axes)
    if wanted not in (None, "argmax") and sink.dtype != stored:
        raise BadInput(
            f"the destination holds {name_of(sink.dtype)}, and output={wanted!r} was requested: leave `output` out"
        )
    check_separate(source, destination, reader, sink)
    return None, sink


def _plan_image(
    flow: Flow, budget: int, source: StoredSource, sink: StoredSink, target: FileTarget | None, stripe: int | None
) -> tuple[Flow, TilePlan, MemoryLayout]:
    """The flow with its kernels, which are compiled, and the plan of one image; for a file, cut
    into tasks."""

    def cut(flow: Flow) -> Callable[[MemoryLayout], MemoryLayout]:
        return partial(cut_into_tasks, flow, rows=sink.chunk_rows, stripe=stripe)

    parts = replace(sink, values=fake(flow.outputs[0]).dtype)  # of the network: before classes are chosen
    flow, plan, layout = plan_flow(
        flow, budget, reserved=_buffer_bytes(source, parts), compiles=True, cut=None if target is None else cut
    )
    layout.compile_kernels()
    return flow, plan, layout


def _buffer_bytes(source: StoredSource, sink: StoredSink) -> int:
    """Bytes of the budget for buffers: those of chunks live at the same time, others one after
    another; they are largest for a full value."""
    sizes = [end.workspace(end.window) for end in (source, sink)]
    return max(sizes) if source.store.chunks is None and sink.store.chunks is None else sum(sizes)


def _extents(window: Window) -> tuple[int, int]:
    (top, bottom), (left, right) = window
    return bottom - top, right - left
