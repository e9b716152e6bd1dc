"""A stage, executed: its steps, one unit after the other, in the memory planned for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from demask.machine.allocator import give_back
from demask.machine.arena import aligned
from demask.ops.regions import Interval
from demask.traverse.analysis.partial_reductions import Reduction
from demask.traverse.analysis.streamed_attention import attend, keys_of
from demask.traverse.axes import Axes, Window, cut_shape, empty, part, strides, whole
from demask.traverse.planning.schedule import LiveRows, Step
from demask.traverse.planning.stage import Stage, Unit
from demask.traverse.planning.stage_memory import StageMemory
from demask.traverse.storage.sources_and_sinks import RowSource, Sink, tensor_source


@dataclass(slots=True)
class Ends:
    """What a stage reads from and writes to.

    maps: values that lie whole in memory, in the layout of parts. sources: of values that do not.
    sinks: of targets, also of those that are maps. wholes: values without rows. packed: weights
    laid out for the calls that read them.
    """

    maps: MutableMapping[fx.Node, Tensor] = field(default_factory=dict)
    sources: MutableMapping[fx.Node, RowSource] = field(default_factory=dict)
    sinks: MutableMapping[fx.Node, Sink] = field(default_factory=dict)
    wholes: MutableMapping[fx.Node, Any] = field(default_factory=dict)
    packed: MutableMapping[fx.Node, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class Counter:
    """What the executor did. macs: multiply-adds; steps: bands, tiles and whole segments."""

    macs: int = 0
    steps: int = 0


class BandBorder:
    """Rows that one worker makes in its first steps and the worker above it needs in its last.

    held: of each value, the rows from `first` on; None for values that lie in maps, which both see.
    """

    def __init__(self, held: Mapping[fx.Node, Tensor | None], spans: Mapping[fx.Node, Interval]):
        self.held, self.spans = held, spans
        self.missing = {v: high - low for v, (low, high) in spans.items()}
        self.ready, self.failed = threading.Event(), False

    def put(self, node: fx.Node, axis: int, rows: Interval, made: Tensor) -> None:
        """Take over those of some rows that belong to the border."""
        first, last = self.spans[node]
        low, high = max(rows[0], first), min(rows[1], last)
        if low >= high:
            return
        held = self.held[node]
        if held is not None:
            held.narrow(axis, low - first, high - low).copy_(
                made.narrow(axis, low - rows[0], high - low)
            )
        self.missing[node] -= high - low
        if not any(self.missing.values()):
            self.ready.set()

    def fail(self) -> None:
        """The worker that makes the rows stopped: who waits for them is to stop too."""
        self.failed = True
        self.ready.set()

    def take(self, node: fx.Node, axis: int, rows: Interval) -> Tensor | None:
        """Some rows, as soon as all of the border are made; None where they lie in a map."""
        self.ready.wait()
        if self.failed:
            raise RuntimeError("the worker of the next strip stopped")
        held = self.held[node]
        first = self.spans[node][0]
        return None if held is None else held.narrow(axis, rows[0] - first, rows[1] - rows[0])


class Sweep:
    """One stage with its memory and ends, ready to run. arena: at least memory.size bytes. above,
    below: the borders to the workers beside this one; a worker alone has none."""

    def __init__(
        self, stage: Stage, memory: StageMemory, ends: Ends, arena: Tensor, counter: Counter,
        above: BandBorder | None = None, below: BandBorder | None = None,
    ):  # fmt: skip
        self.stage, self.flow, self.memory, self.ends = stage, stage.flow, memory, ends
        self.arena, self.counter, self.above, self.below = arena, counter, above, below
        self.views: dict[tuple[Any, ...], Tensor] = {}
        self.states: dict[fx.Node, tuple[Reduction, Any]] = {}
        self.first, self.last = _uses(stage)
        cut = ((u.node, self.flow.local.get(u.node)) for u in stage.units)
        self.streamed = {e for u in stage.units for e in stage.streamed(u, ends.maps)}
        self.packs = frozenset(n for n, here in cut if here is not None and here.kind.packed_bytes)

    def run(self, steps: Iterable[Step], told: Callable[[Step], None] | None = None) -> None:
        """Run all steps. told: called after each. Statistics are finished when all rows were seen,
        by the worker alone, or by who merges the states of several."""
        for node in (u.node for u in self.stage.sinks):
            made = self.flow.gathers[node]
            self.states[node] = made, made.begin()
        try:
            for step in steps:
                self._step(step)
                self.counter.steps += 1
                if told is not None:
                    told(step)
        except BaseException:
            if self.above is not None:
                self.above.fail()
            raise

    def _step(self, step: Step) -> None:
        active = self._active(step)
        for k, unit in enumerate(self.stage.units):
            for node in self.first.get(k, ()):
                if node in active:
                    self._load(node, step)
            if unit.node in self.states:
                self._gather(unit, step)
            elif unit.value not in self.flow.axes or unit.node not in self.flow.local:
                self._whole(unit, step)
            elif step[unit.value].computed[0] < step[unit.value].computed[1]:
                self._make(k, unit, step)
            if k in self.memory.large:
                give_back()
            for node in self.last.get(k, ()):
                if node in active:
                    self._put_aside(node, step)

    def _active(self, step: Step) -> set[fx.Node]:
        """Values in blocks that are made or read in a step, and those lent by the next worker."""
        found = set()
        for unit in self.stage.units:
            held = step.get(unit.value)
            if (held is None and unit.node not in self.states) or (
                held is not None and held.done < held.end
            ):
                found.add(unit.value)
                found |= {edge.source for edge in unit.edges}
        found |= {v for v, held in step.items() if held.done < held.end}
        owner = self.memory.owner
        return {
            v
            for v in found
            if v in owner or (v in step and step[v].received[0] < step[v].received[1])
        }

    def _load(self, node: fx.Node, step: Step) -> None:
        """Put the rows kept in front of the block, and, of what is read from elsewhere, the new."""
        held = step[node]
        if held.first < held.done and node in self.memory.tail:
            tail = self._tail(node, held, held.done - held.first)
            self._rows(node, step, held.first, held.done).copy_(tail)
        if node in self.ends.sources and held.done < held.end:
            window = (held.done, held.end), held.columns
            self.ends.sources[node].read(window, self._rows(node, step, held.done, held.end))
        low, high = held.received
        if low < high and self.below is not None:
            lent = self.below.take(node, self.flow.axes[node][0] or 0, (low, high))
            if lent is not None:
                self._rows(node, step, low, high).copy_(lent)

    def _put_aside(self, node: fx.Node, step: Step) -> None:
        held = step[node]
        if held.tail and node in self.memory.tail:
            rows = self._rows(node, step, held.keep, held.end)
            self._tail(node, held, held.tail).copy_(rows)

    def _gather(self, unit: Unit, step: Step) -> None:
        source = unit.edges[0].source
        held = step.get(unit.node, step[source])
        made, state = self.states[unit.node]
        if held.done < held.end:
            window = (held.done, held.end), held.columns
            rows = self._rows(source, step, held.done, held.end, held.columns)
            made.update(state, rows, window)
        seen = held.end >= self.flow.rows(source) and held.columns[1] >= self.flow.columns(source)
        if seen and self.above is None and self.below is None:
            self.ends.wholes[unit.node] = made.finish(state)

    def _make(self, k: int, unit: Unit, step: Step) -> None:
        held, here = step[unit.value], self.flow.local[unit.node]
        window = held.computed, held.columns
        into = self._rows(unit.value, step, *held.computed)
        if any(edge in self.streamed for edge in unit.edges):
            into.copy_(self._attended(unit, step, window))
            self._made(unit, held, into)
            return
        operands = self._operands(unit, step, window)
        fused: dict[str, Any] = {}
        if unit.addend is not None:
            addend = self._rows(unit.addend, step, *held.computed, held.columns)
            if addend.data_ptr() != into.data_ptr():
                into.copy_(addend)
            fused["add"] = True
        if unit.after is not None:
            fused["after"] = unit.after
        here.run(operands, window, into, scratch=self._scratch(k), **fused)
        self._made(unit, held, into)

    def _attended(self, unit: Unit, step: Step, window: Window) -> Tensor:
        """Attention to keys and values of which some are read block by block."""
        axes, sources = self.flow.axes, dict(self.ends.sources)
        for node in keys_of(unit.node):
            if node not in sources:
                sources[node] = tensor_source(self.ends.maps[node], axes[node])
        q, *others = unit.edges
        queries = self._rows(q.source, step, *q.rules[0](*window[0]), q.rules[1](*window[1]))
        columns = next(e.rules[1](*window[1]) for e in others if e.source is keys_of(unit.node)[1])
        return attend(unit.node, queries, sources, axes, columns)

    def _made(self, unit: Unit, held: LiveRows, into: Tensor) -> None:
        """Count what was made, and hand it on to who waits for it."""
        window = held.computed, held.columns
        self.counter.macs += self.flow.local[unit.node].macs(window)
        if unit.value in self.ends.sinks:
            self.ends.sinks[unit.value].write(window, into)
        if self.above is not None and unit.value in self.above.spans:
            self.above.put(unit.value, self.flow.axes[unit.value][0] or 0, held.computed, into)

    def _operands(self, unit: Unit, step: Step, window: Window) -> list[Any]:
        """The operands of a cut call, in the order of its relation: the parts that it needs."""
        here = self.flow.local[unit.node]
        cut = {read.operand: edge for read, edge in zip(here.reads, unit.edges, strict=False)}
        found: list[Any] = []
        for k, operand in enumerate(here.relation.operands):
            edge = cut.get(k)
            if edge is None and operand.name == "weight" and unit.node in self.packs:
                found.append(self._packed(unit.node, operand.value, window))
            elif edge is None:
                found.append(self._value(operand.value))
            else:
                rows, columns = edge.rules[0](*window[0]), edge.rules[1](*window[1])
                found.append(self._rows(edge.source, step, *rows, columns))
        return found

    def _packed(self, node: fx.Node, weight: Any, window: Window) -> Tensor:
        """A weight laid out for the stage, by whichever worker needs it first."""
        if node not in self.ends.packed:
            kind: Any = self.flow.local[node].kind
            self.ends.packed[node] = kind.pack_weight(self._value(weight), window)
        return self.ends.packed[node]

    def _value(self, value: Any) -> Any:
        return self.ends.wholes[value] if isinstance(value, fx.Node) else value

    def _whole(self, unit: Unit, step: Step) -> None:
        """A call on whole values, as torch makes it."""

        def value(source: fx.Node) -> Any:
            if source in self.ends.wholes:
                return self.ends.wholes[source]
            return self._rows(source, step, 0, self.flow.rows(source))

        node = unit.node
        found: Any = map_arg((node.args, dict(node.kwargs)), value)
        args, kwargs = found
        made = node.target(*args, **kwargs)  # type: ignore[operator]
        self.counter.macs += self.flow.macs(node)
        if node not in self.flow.axes:
            self.ends.wholes[node] = made
            return
        into = self._rows(node, step, 0, self.flow.rows(node))
        into.copy_(made)
        if node in self.ends.sinks:
            self.ends.sinks[node].write(whole(node, self.flow.axes[node]), into)

    def _rows(
        self, node: fx.Node, step: Step, low: int, high: int, columns: Interval | None = None
    ) -> Tensor:
        """Rows of a value, and columns of them, wherever they lie."""
        held, axes = step[node], self.flow.axes[node]
        wanted = held.columns if columns is None or axes[1] is None else columns
        if low >= high or wanted[0] >= wanted[1]:  # windows that see nothing but padding
            value = node.meta["val"]
            return empty(cut_shape(value.shape, axes, ((low, high), wanted)), axes, value.dtype)
        if node in self.ends.maps:
            return part(self.ends.maps[node], axes, ((low, high), wanted))
        owner = self.memory.owner[node]
        origin = min(step[owner].first, held.first)
        left, right = held.columns
        rows = max(step[owner].end, held.end) - origin
        key = (
            node,
            rows,
            low - origin,
            high - origin,
            wanted[0] - left,
            wanted[1] - left,
            right - left,
        )
        found = self.views.get(key)
        if found is None:
            block = self._view(node, self.memory.block[owner], rows, held.columns)
            found = part(block, axes, ((low, high), wanted), (origin, left))
            self.views[key] = found
        return found

    def _tail(self, node: fx.Node, held: LiveRows, rows: int) -> Tensor:
        key = (node, rows, held.columns)
        found = self.views.get(key)
        if found is None:
            found = self._view(node, self.memory.tail[node], rows, held.columns)
            self.views[key] = found
        return found

    def _view(self, node: fx.Node, offset: int, rows: int, columns: Interval) -> Tensor:
        value, axes = node.meta["val"], self.flow.axes[node]
        shape = cut_shape(value.shape, axes, ((0, rows), columns))
        return seen(self.arena, offset, shape, axes, value.dtype)

    def _scratch(self, k: int) -> Callable[..., Tensor]:
        """Memory for what a unit needs while it runs: one piece behind the other."""
        place, size = self.memory.scratch.get(k, (0, 0))
        end = place + size

        def take(shape: Any, axes: Axes, dtype: torch.dtype) -> Tensor:
            nonlocal place
            made = seen(self.arena, place, shape, axes, dtype)
            place += aligned(made.numel() * dtype.itemsize)
            if place > end:
                raise RuntimeError(f"{self.stage.units[k].node} asks for more memory than planned")
            return made

        return take


def seen(arena: Tensor, offset: int, shape: Any, axes: Axes, dtype: torch.dtype) -> Tensor:
    """A part in an arena of bytes, beginning at an offset."""
    count = dtype.itemsize
    for size in shape:
        count *= size
    memory = arena[offset : offset + count].view(dtype)
    return memory.as_strided(tuple(shape), strides(shape, axes))


def _uses(stage: Stage) -> tuple[dict[int, list[fx.Node]], dict[int, list[fx.Node]]]:
    """Per unit, the values in blocks that are used by it first, and those used by it last."""
    first: dict[fx.Node, int] = {}
    last: dict[fx.Node, int] = {}
    for k, unit in enumerate(stage.units):
        for node in (unit.value, *(edge.source for edge in unit.edges)):
            if node in stage.flow.axes:
                first.setdefault(node, k)
                last[node] = k
    found: tuple[dict[int, list[fx.Node]], dict[int, list[fx.Node]]] = {}, {}
    for uses, made in zip((first, last), found, strict=True):
        for node, k in uses.items():
            made.setdefault(k, []).append(node)
    return found


__all__ = ["Counter", "Ends", "Sweep", "seen"]
