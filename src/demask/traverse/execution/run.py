"""A plan, executed: segment after segment in one arena, from sources to sinks."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from demask.machine.allocator import give_back
from demask.machine.arena import ALIGNMENT
from demask.traverse.analysis.flow import Flow
from demask.traverse.axes import Window
from demask.traverse.execution.segment_executor import Counter, Ends, Sweep, seen
from demask.traverse.execution.workers import side_by_side
from demask.traverse.planning.plan_memory import MemoryLayout, PlacedSegment, steps_of
from demask.traverse.planning.schedule import Step
from demask.traverse.planning.stage_memory import LARGE
from demask.traverse.storage.sources_and_sinks import Spill, in_place, spill, tensor_source

Told = Callable[[PlacedSegment, Step], None]
Walk = Callable[[PlacedSegment, Ends, Tensor, Counter, Callable[[Step], None] | None], None]


@dataclass(frozen=True, slots=True)
class ImageRun:
    """One image: where its rows come from and go to.

    sources, sinks: of values with rows; wholes: inputs without, and constants.
    """

    sources: Mapping[fx.Node, Any]
    sinks: Mapping[fx.Node, Any]
    wholes: Mapping[fx.Node, Any]


def execute(
    flow: Flow,
    layout: MemoryLayout,
    call: ImageRun,
    *,
    folder: str = tempfile.gettempdir(),
    told: Told | None = None,
) -> tuple[dict[fx.Node, Any], Counter]:
    """Run all segments. Returns the results without rows, and what was done.

    folder: for maps on disk, which are gone when they were read. told: called
    after each step of each segment, by whichever thread made it.
    """
    return _executed(flow, layout, call, _walk, folder, told)


def rehearse(flow: Flow, layout: MemoryLayout, constants: Mapping[fx.Node, Any]) -> None:
    """Run each segment on zeros until each of its calls ran once: code that the process loads and
    kernels that it makes for them stay with it, and take nothing of the budget of a call."""
    sources, wholes = {}, dict(constants)
    for node in flow.inputs:
        value: Any = node.meta.get("val")
        if node in flow.axes:
            sources[node] = tensor_source(_zeros(value), flow.axes[node])
        else:
            wholes[node] = _zeros(value) if isinstance(value, Tensor) else value
    sinks = {v: Nowhere() for v in flow.outputs if isinstance(v, fx.Node) and v in flow.axes}
    call = ImageRun(sources, sinks, wholes)
    with torch.no_grad(), suppress(Exception):  # what fails on zeros may do with other values
        _executed(flow, layout, call, _begin, tempfile.gettempdir(), None)


def _zeros(value: Tensor) -> Tensor:
    """Zeros of the shape of a fake value, which take no memory."""
    return torch.zeros((), dtype=value.dtype).expand(value.shape)


def _executed(
    flow: Flow, layout: MemoryLayout, call: ImageRun, walk: Walk, folder: str, told: Told | None
) -> tuple[dict[fx.Node, Any], Counter]:
    counter, arena = Counter(), fresh(layout.size)
    wholes, spills = dict(call.wholes), dict[fx.Node, Spill]()
    for k, place in enumerate(layout.places):
        maps = _maps(flow, layout, place, arena)
        ends = Ends(maps, dict(call.sources), dict(call.sinks), wholes)
        for v in place.stage.targets:
            if v.name in place.segment.spills:
                value = v.meta["val"]
                spills[v] = spill(tuple(value.shape), value.dtype, flow.axes[v], folder)
                ends.sinks[v] = spills[v] if v not in call.sinks else Tee(spills[v], call.sinks[v])
        ends.sources.update({v: spills[v] for v in place.stage.enters if v in spills})
        work = arena[layout.work[k] : layout.work[k] + place.bytes]
        _direct(place, call, ends)
        walk(place, ends, work, counter, _telling(told, place))
        ends.packed.clear()
        if place.allocated >= LARGE:
            give_back()
        _forget(layout, k, spills)
        for v in layout.last_used[k]:
            wholes.pop(v, None)
    return wholes, counter


def _walk(
    place: PlacedSegment,
    ends: Ends,
    work: Tensor,
    counter: Counter,
    told: Callable[[Step], None] | None,
) -> None:
    """Run one segment."""
    if place.strips:
        side_by_side(place, ends, work, counter, told)
    else:
        sweep = Sweep(place.stage, place.memory, ends, work, counter)
        sweep.run(steps_of(place.stage, place.segment), told)


def _begin(
    place: PlacedSegment,
    ends: Ends,
    work: Tensor,
    counter: Counter,
    told: Callable[[Step], None] | None,
) -> None:
    """Run one segment, by one worker, until each of its calls made something."""

    def steps() -> Iterator[Step]:
        left = {unit.value for unit in place.stage.units if unit.value in place.stage.flow.axes}
        for step in steps_of(place.stage, place.segment):
            yield step
            left -= {v for v in left if v not in step or step[v].computed[0] < step[v].computed[1]}
            if not left:
                return

    sweep = Sweep(place.stage, place.memory, ends, work, counter)
    sweep.run(steps(), told)
    for node, (statistic, state) in sweep.states.items():
        if node not in ends.wholes:  # of the rows so far
            ends.wholes[node] = statistic.finish(state)


class Nowhere:
    """A sink that drops what is written."""

    def write(self, window: Window, part: Tensor) -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True)
class Tee:
    """A value that goes to two places."""

    first: Any
    second: Any

    def write(self, window: Window, part: Tensor) -> None:
        self.first.write(window, part)
        self.second.write(window, part)


def _telling(told: Told | None, place: PlacedSegment) -> Callable[[Step], None] | None:
    return None if told is None else lambda step: told(place, step)


def _maps(
    flow: Flow, layout: MemoryLayout, place: PlacedSegment, arena: Tensor
) -> dict[fx.Node, Tensor]:
    values = {v: v.meta["val"] for v in place.maps}
    return {v: seen(arena, layout.maps[v], tuple(value.shape), flow.axes[v], value.dtype)
            for v, value in values.items()}  # fmt: skip


def _direct(place: PlacedSegment, call: ImageRun, ends: Ends) -> None:
    """Read and write without a copy what lies in memory as parts do: the plan counts a block for
    it, which is then left untouched."""
    for v in place.stage.enters:
        held = in_place(call.sources.get(v))
        if held is not None:
            ends.maps[v] = held
            ends.sources.pop(v)
    for v in place.stage.targets:
        held = in_place(call.sinks.get(v))
        if held is not None and ends.sinks.get(v) is call.sinks[v] and v not in ends.maps:
            ends.maps[v] = held
            ends.sinks.pop(v)


def _forget(layout: MemoryLayout, k: int, spills: dict[fx.Node, Spill]) -> None:
    """Free the disk of maps that no later segment reads."""
    later = {v for place in layout.places[k + 1 :] for v in place.stage.enters}
    for v in [v for v in spills if v not in later]:
        del spills[v]


def fresh(size: int) -> Tensor:
    """Memory of our own: given back as a whole when the last view goes."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, size + ALIGNMENT), dtype=torch.uint8)
