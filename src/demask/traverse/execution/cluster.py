"""Tasks on the workers of a `dask.distributed` client.

A task is a pure function of the call of `stream`, the segment, the rows and the values without
rows: it may run on any worker, twice, or again after its worker died.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from demask.errors import BadInput
from demask.ops import TABLE
from demask.ops.regions import Interval
from demask.traverse.execution.journal import TaskRecord
from demask.traverse.execution.run import new_memory
from demask.traverse.execution.segment_executor import SourcesAndSinks
from demask.traverse.execution.stream_job import Streaming, prepare_stream
from demask.traverse.execution.tasks import compute_record
from demask.traverse.storage.sources_and_sinks import spill

DEATHS = 100  # workers that may die while they compute the same task


@dataclass(frozen=True, slots=True)
class Cluster:
    """A client, and the call of `stream` as bytes that workers unpack."""

    client: Any
    job: Streaming
    call: Any  # a future of bytes on the workers

    @classmethod
    def of(cls, client: Any, job: Streaming, *call: Any) -> Cluster:
        """The cluster of a client. Raises BadInput where the call cannot be sent to workers."""
        if not hasattr(client, "submit") or not hasattr(client, "scatter"):
            raise BadInput(
                f"client: expected a dask.distributed.Client, got {type(client).__name__}"
            )
        try:
            import cloudpickle

            data = cloudpickle.dumps(call)
        except Exception as error:  # of any type: users' classes have their own
            raise BadInput(f"client: the network or the source cannot be sent to workers "
                           f"({error}); give paths of files instead") from error  # fmt: skip
        return cls(client, job, client.scatter(data, broadcast=True, hash=False))

    def tasks_of(self, image: int) -> Callable[..., Iterator[tuple[Interval, TaskRecord]]]:
        """A function that runs tasks of one image, and yields each as it is finished."""
        return functools.partial(self._run, image)

    def _run(
        self, image: int, segment: int, stripes: Sequence[Interval], values: Mapping[Any, Any]
    ) -> Iterator[tuple[Interval, TaskRecord]]:
        from distributed import KilledWorker, as_completed

        names = {node.name: value for node, value in values.items()
                 if isinstance(value, torch.Tensor) and node.op == "call_function"}  # fmt: skip
        shared = self.client.scatter(names, broadcast=True, hash=False)
        digest = self.job.identity["plan"]

        def submit(rows: Interval) -> Any:
            return self.client.submit(run_remote_task, self.call, digest, image, segment, rows,
                                      shared, pure=False, retries=2)  # fmt: skip

        futures = {submit(rows): rows for rows in stripes}
        deaths = 0
        completed = as_completed(list(futures))
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


@functools.lru_cache(maxsize=2)
def _unpack(data: bytes, digest: str) -> tuple[Streaming, Any]:
    """The job of a call, prepared again in this process, and memory for its segments."""
    model, source, destination, options = pickle.loads(data)
    job = prepare_stream(model, source, destination, options, table=TABLE)
    if job.identity["plan"] != digest:
        raise BadInput("this worker makes another plan than the client: is another version of "
                       "demask or torch installed here?")  # fmt: skip
    return job, new_memory(job.layout.size)


def run_remote_task(
    data: bytes, digest: str, image: int, segment: int, rows: Interval, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Compute one task in a worker. Returns its record as JSON types."""
    job, arena = _unpack(data, digest)
    place = job.layout.places[segment]
    whole = dict(job.flow.constants)
    nodes = {node.name: node for node in job.flow.program.graph.nodes}
    whole.update({nodes[name]: value for name, value in values.items()})
    sink, store = job.open_part()
    ends = SourcesAndSinks({}, {job.flow.inputs[0]: job.source.image(image)},
                           {job.output: sink.image(image)}, whole)  # fmt: skip
    assert job.target is not None
    stored = {name for p in job.layout.places for name in p.segment.spills}
    for value in {*place.stage.enters, *place.stage.targets}:
        if value.name in stored:
            fake = value.meta["val"]
            file = spill(tuple(fake.shape), fake.dtype, job.flow.axes[value],
                         str(job.target.folder), job.spill_name(image, value))  # fmt: skip
            (ends.sinks if value in place.stage.targets else ends.sources)[value] = file
    if job.output not in place.stage.targets:
        ends.sinks.pop(job.output)
    work = arena[job.layout.work[segment] : job.layout.work[segment] + place.bytes]
    with torch.no_grad():
        record = compute_record(place, ends, work, tuple(rows), store, job.mask)
    return record.to_dict()
