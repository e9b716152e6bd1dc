"""Tasks on the workers of a `dask.distributed` client.

A task is a pure function of the call of `stream`, the segment, the rows and the values without
rows: it may run on any worker, twice, or again after its worker died.
"""

from __future__ import annotations

import functools
import gc
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from demask.errors import BadInput
from demask.files import atomic_write
from demask.machine.allocator import release_free_memory
from demask.ops.regions import Interval
from demask.traverse.execution.journal import TaskRecord
from demask.traverse.execution.run import new_memory
from demask.traverse.execution.segment_executor import SourcesAndSinks
from demask.traverse.execution.stream_job import Streaming, digest_of
from demask.traverse.execution.tasks import compute_record
from demask.traverse.storage.sources_and_sinks import spill

Prepare = Callable[..., Streaming]
CALL = "call.pickle"
DEATHS = 100  # workers that may die while they compute the same task


@dataclass(frozen=True, slots=True)
class Cluster:
    """A client, and the call of `stream`, pickled. prepare: a function of a module that makes the
    job of such a call again.

    Workers read it, and the values without rows, from files next to the unfinished result: what a
    scheduler keeps on workers is lost with them.
    """

    client: Any
    job: Streaming
    prepare: Prepare
    call: bytes

    @classmethod
    def of(cls, client: Any, job: Streaming, prepare: Prepare, *call: Any) -> Cluster:
        """The cluster of a client. Raises BadInput where the call cannot be sent to workers."""
        import cloudpickle  # with dask.distributed

        try:
            return cls(client, job, prepare, cloudpickle.dumps(call))
        except Exception as error:  # of any type: users' classes have their own
            raise BadInput(
                f"client: the network or the source cannot be sent to workers ({error}); give paths of files instead"
            ) from error

    def run_tasks(
        self, image: int, segment: int, stripes: Sequence[Interval], values: Mapping[Any, Any]
    ) -> Iterator[tuple[Interval, TaskRecord]]:
        """Run tasks of one image, and yield each as it is finished."""
        from distributed import KilledWorker, as_completed

        assert self.job.target is not None
        folder = self.job.target.folder
        _write_file(folder / CALL, self.call)
        tensors = {
            node.name: value.contiguous()
            for node, value in values.items()
            if isinstance(value, torch.Tensor) and node.op == "call_function"
        }
        _write_file(folder / _values_name(image, segment), safetensors.torch.save(tensors))
        digest = digest_of(*self.job.identity.values())

        def submit(rows: Interval) -> Any:
            return self.client.submit(
                run_remote_task, self.prepare, str(folder), digest, image, segment, rows, pure=False, retries=2
            )

        futures = {submit(rows): rows for rows in stripes}
        deaths, completed = 0, as_completed(list(futures))
        for future in completed:
            rows = futures.pop(future)
            try:
                yield rows, TaskRecord.from_dict(future.result())
            except KilledWorker:
                deaths += 1
                if deaths > DEATHS:
                    raise
                again = submit(rows)
                futures[again] = rows
                completed.add(again)


def _values_name(image: int, segment: int) -> str:
    return f"values-{image}-{segment}.safetensors"


def _write_file(path: Path, data: bytes) -> None:
    with atomic_write.write(path) as file:
        file.write(data)


@dataclass(slots=True)
class _WorkerJob:
    """The job that this worker has prepared last, and the memory of its segments.

    One task at a time: the budget is that of a worker, however many threads it has.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    key: tuple[Any, ...] | None = None
    job: Streaming | None = None
    arena: Any = None

    def take(self, prepare: Prepare, folder: str, digest: str) -> tuple[Streaming, Any]:
        """The job of a call, prepared again in this process, and memory for its segments.

        The memory of the capture and of an earlier job is returned before that of the plan is
        taken: they are not alive at the same time.
        """
        key = (prepare, folder, digest)
        if self.key != key or self.job is None:
            self.key = self.job = self.arena = None
            job = prepare(*pickle.loads(Path(folder, CALL).read_bytes()))
            if digest_of(*job.identity.values()) != digest:
                raise BadInput(
                    "this worker reads another input or makes another plan than the client: do "
                    "both have the same files, and the same versions of demask and torch?"
                )
            gc.collect()
            release_free_memory()
            self.key, self.job, self.arena = key, job, new_memory(job.layout.size)
        return self.job, self.arena


@functools.cache
def _job_of_this_process() -> _WorkerJob:
    return _WorkerJob()


def run_remote_task(
    prepare: Prepare, folder: str, digest: str, image: int, segment: int, rows: Interval
) -> dict[str, Any]:
    """Compute one task in a worker. Returns its record as JSON types."""
    worker = _job_of_this_process()
    with worker.lock:
        job, arena = worker.take(prepare, folder, digest)
        return _run_task(job, arena, folder, image, segment, rows)


def _run_task(job: Streaming, arena: Any, folder: str, image: int, segment: int, rows: Interval) -> dict[str, Any]:
    values = safetensors.torch.load_file(Path(folder, _values_name(image, segment)))
    placed = job.layout.segments[segment]
    uncut = dict(job.flow.constants)
    nodes = {node.name: node for node in job.flow.program.graph.nodes}
    uncut.update({nodes[name]: value for name, value in values.items()})
    sink, store = job.open_part(image)
    ends = SourcesAndSinks({}, {job.flow.inputs[0]: job.source.image(image)}, {job.output: sink}, uncut)
    assert job.target is not None
    stored = {name for p in job.layout.segments for name in p.segment.spills}
    for value in {*placed.stage.enters, *placed.stage.targets}:
        if value.name in stored:
            fake, name = value.meta["val"], job.spill_name(image, value)
            file = spill(fake.shape, fake.dtype, job.flow.axes[value], job.target.folder, name)
            (ends.sinks if value in placed.stage.targets else ends.sources)[value] = file
    if job.output not in placed.stage.targets:
        ends.sinks.pop(job.output)
    work = arena[job.layout.work[segment] : job.layout.work[segment] + placed.bytes]
    with torch.no_grad():
        record = compute_record(placed, ends, work, (rows[0], rows[1]), store, job.mask)
    store.close()
    return record.to_dict()
