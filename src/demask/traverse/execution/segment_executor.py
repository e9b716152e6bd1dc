"""Execute a stage: its steps, unit after unit, in the memory planned for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from demask.exec.analysis.partial_reductions import Reduction, attend, keys_of
from demask.exec.axes import Axes, RowSource, Window, cut_shape, empty, full_window, part, strides
from demask.exec.planning.plan_memory import StageMemory
from demask.exec.planning.schedule import LiveRows, Stage, Step, Unit
from demask.machine.allocator import release_free_memory
from demask.machine.arena import align_size
from demask.ops import schema
from demask.ops.regions import Interval
from demask.ops.schema import fake
from demask.traverse.storage.sources_and_sinks import Sink, tensor_source


@dataclass(slots=True)
class SourcesAndSinks:
    """The values that a stage reads and writes.

    maps: values that are complete in memory, in the layout of parts. sources: of other values. sinks:
    of targets, including those that are maps. uncut_values: values without rows. packed: weights in
    the layout of the calls that read them.
    """

    maps: MutableMapping[fx.Node, Tensor] = field(default_factory=dict)
    sources: MutableMapping[fx.Node, RowSource] = field(default_factory=dict)
    sinks: MutableMapping[fx.Node, Sink] = field(default_factory=dict)
    uncut_values: MutableMapping[fx.Node, Any] = field(default_factory=dict)
    packed: MutableMapping[fx.Node, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class Counter:
    """Multiply-adds, and steps (bands, tiles and full segments) that were executed."""

    macs: int = 0
    steps: int = 0


class BandBorder:
    """Rows that one worker computes in its first steps and the worker above needs in its last.

    rows: of each value, memory for the rows of its span; None for maps, which both workers read.
    spans: the interval of rows of each value.
    """

    def __init__(self, rows: Mapping[fx.Node, Tensor | None], spans: Mapping[fx.Node, Interval]):
        self.rows, self.spans = rows, spans
        self.missing = {v: high - low for v, (low, high) in spans.items()}
        self.ready, self.failed = threading.Event(), False

    def put(self, node: fx.Node, axis: int, rows: Interval, computed: Tensor) -> None:
        """Copy those of some computed rows that belong to the border."""
        first, last = self.spans[node]
        low, high = max(rows[0], first), min(rows[1], last)
        if low >= high:
            return
        border = self.rows[node]
        if border is not None:
            border.narrow(axis, low - first, high - low).copy_(computed.narrow(axis, low - rows[0], high - low))
        self.missing[node] -= high - low
        if not any(self.missing.values()):
            self.ready.set()

    def fail(self) -> None:
        """Stop the worker that waits for the rows, as the worker that computes them failed."""
        self.failed = True
        self.ready.set()

    def take(self, node: fx.Node, axis: int, rows: Interval) -> Tensor | None:
        """Some rows, once all rows of the border are computed; None for a map.

        Raises:
            RuntimeError: if the worker that computes them failed.
        """
        self.ready.wait()
        if self.failed:
            raise RuntimeError("the worker of the next strip stopped")
        border = self.rows[node]
        first = self.spans[node][0]
        return None if border is None else border.narrow(axis, rows[0] - first, rows[1] - rows[0])


class SegmentExecutor:
    """One stage with its memory, sources and sinks.

    arena: uint8 [memory.size or more]. above, below: the borders to the neighboring workers; None
    where there is none. finishes: whether statistics are complete after the last row.
    """

    def __init__(
        self,
        stage: Stage,
        memory: StageMemory,
        ends: SourcesAndSinks,
        arena: Tensor,
        counter: Counter,
        above: BandBorder | None = None,
        below: BandBorder | None = None,
        *,
        finishes: bool = True,
    ):
        self.finishes = finishes and above is None and below is None
        self.stage, self.flow, self.memory, self.ends = stage, stage.flow, memory, ends
        self.arena, self.counter, self.above, self.below = arena, counter, above, below
        self.views: dict[tuple[Any, ...], Tensor] = {}
        self.states: dict[fx.Node, tuple[Reduction, Any]] = {}
        self.first, self.last = _first_and_last_uses(stage)
        cut = ((u.node, self.flow.local.get(u.node)) for u in stage.units)
        self.streamed = {e for u in stage.units for e in stage.streamed(u, ends.maps)}
        self.packable = frozenset(n for n, local in cut if local is not None and local.kind.packed_bytes)

    def run(self, steps: Iterable[Step], on_step: Callable[[Step], None] | None = None) -> None:
        """Run all steps. on_step: called after each.

        A single worker finishes statistics after the last row; those of several are merged first.
        """
        for node in (u.node for u in self.stage.sinks):
            reduction = self.flow.gathers[node]
            self.states[node] = reduction, reduction.begin()
        try:
            for step in steps:
                self._step(step)
                self.counter.steps += 1
                if on_step is not None:
                    on_step(step)
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
                self._update_reduction(unit, step)
            elif unit.value not in self.flow.axes or unit.node not in self.flow.local:
                self._run_uncut(unit, step)
            elif step[unit.value].computed[0] < step[unit.value].computed[1]:
                self._compute(k, unit, step)
            if k in self.memory.large:
                release_free_memory()
            for node in self.last.get(k, ()):
                if node in active:
                    self._save_tail(node, step)

    def _active(self, step: Step) -> set[fx.Node]:
        """Values in blocks that are computed, read, or received from the next worker in a step."""
        active = set()
        for unit in self.stage.units:
            live = step.get(unit.value)
            if (live is None and unit.node not in self.states) or (live is not None and live.done < live.end):
                active.add(unit.value)
                active |= {edge.source for edge in unit.edges}
        active |= {v for v, live in step.items() if live.done < live.end}
        owner = self.memory.owner
        return {v for v in active if v in owner or (v in step and step[v].received[0] < step[v].received[1])}

    def _load(self, node: fx.Node, step: Step) -> None:
        """Fill a block with the rows of its tail, new rows of its source, and received rows."""
        live = step[node]
        if live.first < live.done and node in self.memory.tail:
            tail = self._view_tail(node, live, live.done - live.first)
            self._view_rows(node, step, live.first, live.done).copy_(tail)
        if node in self.ends.sources and live.done < live.end:
            window = (live.done, live.end), live.columns
            self.ends.sources[node].read(window, self._view_rows(node, step, live.done, live.end))
        low, high = live.received
        if low < high and self.below is not None:
            received = self.below.take(node, self.flow.axes[node][0] or 0, (low, high))
            if received is not None:
                self._view_rows(node, step, low, high).copy_(received)

    def _save_tail(self, node: fx.Node, step: Step) -> None:
        live = step[node]
        if live.tail and node in self.memory.tail:
            rows = self._view_rows(node, step, live.keep, live.end)
            self._view_tail(node, live, live.tail).copy_(rows)

    def _update_reduction(self, unit: Unit, step: Step) -> None:
        source = unit.edges[0].source
        live = step.get(unit.node, step[source])
        reduction, state = self.states[unit.node]
        if live.done < live.end:
            window = (live.done, live.end), live.columns
            rows = self._view_rows(source, step, live.done, live.end, live.columns)
            reduction.update(state, rows, window)
        rows, columns = self.flow.rows(source), self.flow.columns(source)
        is_last = live.end >= rows and live.columns[1] >= columns
        if is_last and self.finishes:
            self.ends.uncut_values[unit.node] = reduction.finish(state)

    def _compute(self, k: int, unit: Unit, step: Step) -> None:
        live, local = step[unit.value], self.flow.local[unit.node]
        window = live.computed, live.columns
        into = self._view_rows(unit.value, step, *live.computed)
        if any(edge in self.streamed for edge in unit.edges):
            into.copy_(self._attend_in_blocks(unit, step, window))
            self._deliver(unit, live, into)
            return
        operands = self._operands(unit, step, window)
        fused: dict[str, Any] = {}
        if unit.addend is not None:
            addend = self._view_rows(unit.addend, step, *live.computed, live.columns)
            if addend.data_ptr() != into.data_ptr():
                into.copy_(addend)
            fused["add"] = True
        if unit.after is not None:
            fused["after"] = unit.after
        local.run(operands, window, into, scratch=self._scratch(k), **fused)
        self._deliver(unit, live, into)

    def _attend_in_blocks(self, unit: Unit, step: Step, window: Window) -> Tensor:
        """Attention whose keys or values are read in blocks."""
        axes, sources = self.flow.axes, dict(self.ends.sources)
        for node in keys_of(unit.node):
            if node not in sources:
                sources[node] = tensor_source(self.ends.maps[node], axes[node])
        q, *others = unit.edges
        queries = self._view_rows(q.source, step, *q.rules[0](*window[0]), q.rules[1](*window[1]))
        columns = next(e.rules[1](*window[1]) for e in others if e.source is keys_of(unit.node)[1])
        return attend(unit.node, queries, sources, axes, columns)

    def _deliver(self, unit: Unit, live: LiveRows, into: Tensor) -> None:
        """Count multiply-adds, and write the rows to the sink and to the border above."""
        window = live.computed, live.columns
        self.counter.macs += self.flow.local[unit.node].macs(window)
        if unit.value in self.ends.sinks:
            self.ends.sinks[unit.value].write(window, into)
        if self.above is not None and unit.value in self.above.spans:
            self.above.put(unit.value, self.flow.axes[unit.value][0] or 0, live.computed, into)

    def _operands(self, unit: Unit, step: Step, window: Window) -> list[Any]:
        """The operands of a cut call, in the order of its relation: the parts that it needs."""
        local = self.flow.local[unit.node]
        cut = {read.operand: edge for read, edge in zip(local.reads, unit.edges, strict=False)}
        operands: list[Any] = []
        for k, operand in enumerate(local.relation.operands):
            edge = cut.get(k)
            if edge is None and operand.name == "weight" and unit.node in self.packable:
                operands.append(self._packed_weight(unit.node, operand.value, window))
            elif edge is None:
                operands.append(self._value(operand.value))
            else:
                rows, columns = edge.rules[0](*window[0]), edge.rules[1](*window[1])
                operands.append(self._view_rows(edge.source, step, *rows, columns))
        return operands

    def _packed_weight(self, node: fx.Node, weight: Any, window: Window) -> Tensor:
        """A weight in the layout of its call, packed by the worker that needs it first."""
        if node not in self.ends.packed:
            kind: Any = self.flow.local[node].kind
            self.ends.packed[node] = kind.pack_weight(self._value(weight), window)
        return self.ends.packed[node]

    def _value(self, value: Any) -> Any:
        return self.ends.uncut_values[value] if isinstance(value, fx.Node) else value

    def _run_uncut(self, unit: Unit, step: Step) -> None:
        """Run a call on full values."""

        def value(source: fx.Node) -> Any:
            if source in self.ends.uncut_values:
                return self.ends.uncut_values[source]
            return self._view_rows(source, step, 0, self.flow.rows(source))

        node = unit.node
        result = schema.call_on(node, value)
        self.counter.macs += self.flow.macs(node)
        if node not in self.flow.axes:
            self.ends.uncut_values[node] = result
            return
        into = self._view_rows(node, step, 0, self.flow.rows(node))
        into.copy_(result)
        if node in self.ends.sinks:
            self.ends.sinks[node].write(full_window(node, self.flow.axes[node]), into)

    def _view_rows(self, node: fx.Node, step: Step, low: int, high: int, columns: Interval | None = None) -> Tensor:
        """A view of some rows and columns of a value, in a map or a block."""
        live, axes = step[node], self.flow.axes[node]
        columns_read = live.columns if columns is None or axes[1] is None else columns
        if low >= high or columns_read[0] >= columns_read[1]:  # windows that read only padding
            value = fake(node)
            shape = cut_shape(value.shape, axes, ((low, high), columns_read))
            return empty(shape, axes, value.dtype)
        if node in self.ends.maps:
            return part(self.ends.maps[node], axes, ((low, high), columns_read))
        owner = self.memory.owner[node]
        origin = min(step[owner].first, live.first)
        left, right = live.columns
        rows = max(step[owner].end, live.end) - origin
        key = (node, rows, low - origin, high - origin, columns_read[0] - left, columns_read[1] - left, right - left)
        view = self.views.get(key)
        if view is None:
            block = self._view_block(node, self.memory.block[owner], rows, live.columns)
            view = part(block, axes, ((low, high), columns_read), (origin, left))
            self.views[key] = view
        return view

    def _view_tail(self, node: fx.Node, live: LiveRows, rows: int) -> Tensor:
        key = (node, rows, live.columns)
        tail = self.views.get(key)
        if tail is None:
            tail = self._view_block(node, self.memory.tail[node], rows, live.columns)
            self.views[key] = tail
        return tail

    def _view_block(self, node: fx.Node, offset: int, rows: int, columns: Interval) -> Tensor:
        value, axes = fake(node), self.flow.axes[node]
        shape = cut_shape(value.shape, axes, ((0, rows), columns))
        return view_part(self.arena, offset, shape, axes, value.dtype)

    def _scratch(self, k: int) -> Callable[..., Tensor]:
        """A function that returns pieces of the scratch memory of a unit."""
        offset, size = self.memory.scratch.get(k, (0, 0))
        end = offset + size

        def take(shape: Any, axes: Axes, dtype: torch.dtype) -> Tensor:
            nonlocal offset
            piece = view_part(self.arena, offset, shape, axes, dtype)
            offset += align_size(piece.numel() * dtype.itemsize)
            if offset > end:
                raise RuntimeError(f"{self.stage.units[k].node} needs more memory than planned")
            return piece

        return take


def view_part(arena: Tensor, offset: int, shape: Any, axes: Axes, dtype: torch.dtype) -> Tensor:
    """A view of bytes of an arena from `offset` on, as a part of this shape."""
    count = dtype.itemsize
    for size in shape:
        count *= size
    memory = arena[offset : offset + count].view(dtype)
    return memory.as_strided(tuple(shape), strides(shape, axes))


def _first_and_last_uses(stage: Stage) -> tuple[dict[int, list[fx.Node]], dict[int, list[fx.Node]]]:
    """Per unit, the values that it is the first to use, and those that it is the last to use."""
    first: dict[fx.Node, int] = {}
    last: dict[fx.Node, int] = {}
    for k, unit in enumerate(stage.units):
        for node in (unit.value, *(edge.source for edge in unit.edges)):
            if node in stage.flow.axes:
                first.setdefault(node, k)
                last[node] = k
    result: tuple[dict[int, list[fx.Node]], dict[int, list[fx.Node]]] = {}, {}
    for uses, by_unit in zip((first, last), result, strict=True):
        for node, k in uses.items():
            by_unit.setdefault(k, []).append(node)
    return result
