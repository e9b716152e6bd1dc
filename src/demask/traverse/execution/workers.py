"""Several workers side by side, each down its strip of bands in a thread of its own (row 003-e).

Each has memory of its own and one of torch's threads; they share the ends, and the borders between
their strips. What they counted and the statistics they gathered are merged when all are done.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from demask.machine.arena import aligned
from demask.machine.threads import set_threads
from demask.traverse.axes import cut_shape
from demask.traverse.execution.segment_executor import BandBorder, Counter, Ends, Sweep, seen
from demask.traverse.planning.plan_memory import PlacedSegment
from demask.traverse.planning.schedule import Step, Strip, walk_bands


@dataclass(slots=True)
class _WorkerArena:
    """Memory handed out piece by piece."""

    memory: Tensor
    taken: int = 0

    def take(self, size: int) -> Tensor:
        start = self.taken
        self.taken += aligned(size)
        return self.memory[start : start + size]


def side_by_side(
    place: PlacedSegment,
    ends: Ends,
    work: Tensor,
    counter: Counter,
    told: Callable[[Step], None] | None,
) -> None:
    """Run a place's strips at once. work: memory of place.bytes."""
    arena = _WorkerArena(work)
    memories = [arena.take(place.memory.size) for _ in place.strips]
    borders = [_border(place, strip, arena) for strip in place.strips[:-1]]
    beside = [None, *borders, None]
    sides = zip(memories, beside, beside[1:], strict=False)
    sweeps = [Sweep(place.stage, place.memory, ends, memory, Counter(), above, below)
              for memory, above, below in sides]  # fmt: skip
    count = torch.get_num_threads()
    threads = max(1, count // len(sweeps))
    # A worker's number of threads is also that of threads that start later: put it back at the end.
    with set_threads(count), ThreadPoolExecutor(len(sweeps)) as pool:
        jobs = [pool.submit(_walk, sweep, place, strip, threads, told)
                for sweep, strip in zip(sweeps, place.strips, strict=True)]  # fmt: skip
    failures = [error for job in jobs if (error := job.exception()) is not None]
    if failures:
        raise failures[-1]  # those above only waited for it
    for sweep in sweeps:
        counter.macs += sweep.counter.macs
        counter.steps += sweep.counter.steps
    _merged(sweeps, ends)


def _walk(
    sweep: Sweep,
    place: PlacedSegment,
    strip: Strip,
    threads: int,
    told: Callable[[Step], None] | None,
) -> None:
    torch.set_num_threads(threads)
    with torch.no_grad():
        sweep.run(walk_bands(place.stage, place.segment.rows, strip), told)


def _border(place: PlacedSegment, upper: Strip, arena: _WorkerArena) -> BandBorder:
    """The rows that go to a strip from the one below it."""
    held: dict[fx.Node, Tensor | None] = {}
    spans = {v: (upper.own[v], upper.own[v] + n) for v, n in upper.borders.items()}
    for v, (low, high) in spans.items():
        held[v] = None
        if v not in place.maps:
            value, axes = v.meta["val"], place.stage.flow.axes[v]
            columns = 0, place.stage.flow.columns(v)
            shape = cut_shape(value.shape, axes, ((low, high), columns))
            memory = arena.take(place.border_bytes(v, high - low))
            held[v] = seen(memory, 0, shape, axes, value.dtype)
    return BandBorder(held, spans)


def _merged(sweeps: list[Sweep], ends: Ends) -> None:
    """Finish the statistics of all strips."""
    for node, (made, state) in sweeps[0].states.items():
        for other in sweeps[1:]:
            made.merge(state, other.states[node][1])
        ends.wholes[node] = made.finish(state)
