"""Parts of a stage as networks of their own, which the kernels of `demask.optimize` compute.

A part is a tile of the full width. It is a network of the rows that it needs, whose convolutions have a border only
where the image ends, so that all parts in the middle of an image are one network, compiled once. The rows around a
part are computed again: parts are faster than bands where the kernels of segments gain more than that costs.
`choose_parts` times both.
"""

from __future__ import annotations

import hashlib
import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from math import inf
from typing import Any

import torch
from torch import Tensor, fx

from demask.exec.analysis.flow import Flow
from demask.exec.axes import Window, cut_shape, empty, part
from demask.exec.parts import can_write, uncut_operands, write_tile
from demask.exec.planning.plan import BANDS, BARRIER, PARTS, Segment, TilePlan
from demask.exec.planning.plan_memory import (
    MemoryLayout,
    PlacedSegment,
    lay_out,
    plan_stage_memory,
    step_macs,
    steps_of,
)
from demask.exec.planning.planner import packed_plan
from demask.exec.planning.schedule import Stage, Step, middle_steps, target_rows
from demask.exec.tape.tape import TapeArena
from demask.failures import Log
from demask.graph.program import Program
from demask.kernels.llvm import availability as llvm
from demask.kernels.memory_probe import MemoryProbe
from demask.kernels.plan_cache import version
from demask.machine.arena import Block, peak_bytes
from demask.machine.clock import set_threads
from demask.machine.cost import costs_of_machine
from demask.ops import Table
from demask.ops.regions import Interval
from demask.ops.schema import fake
from demask.rewrites.driver import rewrite
from demask.sparse.segment.build_segments import segmented, segments_of
from demask.sparse.segment.candidates import SUMS
from demask.sparse.segment.segment_plans import PlanRecorder
from demask.traverse.execution.segment_executor import Counter, SegmentExecutor, SourcesAndSinks
from demask.traverse.storage.sources_and_sinks import Spill, StoredSink, tensor_source

HEIGHTS = (64, 128)  # of the parts that are tried, in rows of the tallest target
NETWORKS = 6  # at most, of the parts of a stage
LEAST = 10**9  # multiply-adds of a segment for which parts are tried: 10 to 20 ms
Geometry = tuple[tuple[int, int, bool, bool], ...]
ROUNDS, ENOUGH = 9, 1.0  # calls in turns, and seconds after which no more are timed
GAIN, HOPELESS = 0.9, 1.1  # of the time of bands: parts below are chosen, others are not tried after one above
MOST = 1.2  # of the multiply-adds of a segment, for parts to be tried


class PartNetwork:
    """The network of one part; it runs on contiguous windows of the values that enter the stage, in its order.

    plans: of its segments; last: that which computes the results, where one does.
    """

    def __init__(self, program: Program, table: Table):
        program = segmented(rewrite(program, SUMS, table), _every_layer, _every_layer)
        tensors = {name: constant.tensor.detach().clone() for name, constant in program.constants.items()}
        self.graph = program.graph
        self.run = fx.GraphModule(tensors, program.graph)
        recorder = PlanRecorder()
        with torch.no_grad(), recorder:
            self.run(*(torch.zeros(fake(n).shape, dtype=fake(n).dtype) for n in self.inputs))
        self.plans = recorder.plans
        items = next(iter(program.graph.find_nodes(op="output"))).args[0]
        segments = {node.args[0] for node in items if _is_item(node)}
        is_last = len(segments) == 1 and [node.args[1:] for node in items] == [(k,) for k in range(len(items))]
        self.last = self.plans[-1] if is_last and self.plans else None
        self.weight_bytes = sum(t.nbytes for t in tensors.values()) + sum(plan.weight_bytes for plan in self.plans)
        self.free()

    @property
    def inputs(self) -> list[fx.Node]:
        return list(self.graph.find_nodes(op="placeholder"))

    @property
    def is_compiled(self) -> bool:
        """Whether kernels compute its layers."""
        segments = segments_of(self.graph)
        return 0 < len(segments) == len(self.plans)

    @property
    def bytes(self) -> int:
        """Bytes of its values: of inputs, which are also copied; of results and values in between; within segments, but
        for an arena that parts share."""
        position = {node: k for k, node in enumerate(self.graph.nodes)}
        blocks = []
        for node, k in position.items():
            if node.op == "placeholder":
                blocks += [Block(_bytes(node), 0, len(position)), Block(_bytes(node), 0, 0)]
            elif node.op == "call_function" and "val" in node.meta and not _is_item(node):
                readers = [user for reader in node.users for user in (reader.users if _is_item(reader) else (reader,))]
                blocks.append(Block(_bytes(node), k, max(position[reader] for reader in readers)))
        spare = 0 if self.last is not None else max(block.size for block in blocks)  # that the allocator retains
        own = 0 if self.used else sum(plan.bytes for plan in self.plans)
        return peak_bytes(blocks) + spare + own

    @property
    def used(self) -> tuple[Interval, ...]:
        """The ranges of bytes of the arena of its only segment, which parts share; none where it has several."""
        return self.plans[0].used if len(self.plans) == 1 else ()

    def recycle(self, results: Sequence[Tensor]) -> None:
        """Let the next part have the memory of the results of this one."""
        if self.last is not None:
            self.last.outputs.put(list(results))

    def free(self) -> None:
        """Return the memory within its segments to the system."""
        for plan in self.plans:
            plan.free()


class StageParts:
    """The parts of a stage, of `segment.rows` rows.

    networks: those compiled so far, by the geometry of a part. weights: the constants that the stage reads; uncut: the
    other values without rows.
    """

    def __init__(self, stage: Stage, segment: Segment, table: Table):
        self.stage, self.table, self.uncut = stage, table, uncut_operands(stage)
        self.lock = threading.Lock()
        self.is_stored_on_disk = bool(segment.spills)
        steps = list(steps_of(stage, segment))
        self.steps = list(zip(_geometries(stage, steps), steps, strict=True))
        self.examples = dict(self.steps)  # the last part of each geometry
        read = [n for unit in stage.units for node in unit.nodes for n in node.all_input_nodes]
        constants = stage.flow.constants
        self.weights = [node for node in dict.fromkeys(read) if node in constants]
        self._build([constants[node] for node in self.weights])

    def _build(self, tensors: Sequence[Tensor]) -> None:
        """Forget all networks: new ones have these weights."""
        self.networks: dict[Geometry, PartNetwork] = {}
        self.threads = torch.get_num_threads()
        self._remember(tensors)

    def program(self, geometry: Geometry) -> Program:
        """The network of the parts of a geometry, before it is compiled."""
        program = self.stage.flow.program
        values = dict(program.constants)
        for node, tensor in zip(self.weights, self.built, strict=True):
            values[str(node.target)] = replace(values[str(node.target)], tensor=tensor)
        flow = replace(self.stage.flow, program=program.with_graph(program.graph, values))
        return write_tile(replace(self.stage, flow=flow), self.examples[geometry])

    def network(self, geometry: Geometry) -> PartNetwork:
        """The network of the parts of a geometry, compiled once."""
        if geometry not in self.networks:
            self.networks[geometry] = PartNetwork(self.program(geometry), self.table)
        return self.networks[geometry]

    def _all_networks(self) -> list[PartNetwork]:
        return list(map(self.network, self.examples))

    def _remember(self, tensors: Sequence[Tensor]) -> None:
        self.built, self.versions = list(tensors), _versions(tensors)
        self.probe = MemoryProbe(tensors)

    def _update(self, tensors: Sequence[Tensor]) -> None:
        """Build the networks again unless these weights, and the threads, are those that they were built with."""
        is_unchanged = self.threads == torch.get_num_threads() and self.probe.same()
        if is_unchanged and _versions(tensors) == self.versions:
            return
        is_unchanged = is_unchanged and self.versions == _versions(self.built)
        if is_unchanged and all(map(torch.equal, tensors, self.built)):
            self._remember(tensors)  # copies of them, as a module has
        else:
            self._build(tensors)

    @property
    def bytes(self) -> int:
        """Bytes of the values of one part, and of copies of results for a file."""
        networks = self._all_networks()
        copied = max(sum(map(_bytes, network.graph.output_node().all_input_nodes)) for network in networks)
        arena, end = 0, 0
        for first, last in sorted(used for network in networks for used in network.used):
            arena, end = arena + max(last - max(first, end), 0), max(end, last)
        return max(network.bytes for network in networks) + arena + copied * self.is_stored_on_disk

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights of all networks."""
        return sum(network.weight_bytes for network in self._all_networks())

    @property
    def is_compiled(self) -> bool:
        return all(network.is_compiled for network in self._all_networks())

    @property
    def middle(self) -> Geometry:
        """The geometry of the most parts."""
        geometries = [geometry for geometry, _ in self.steps]
        return max(self.examples, key=geometries.count)

    @property
    def macs(self) -> int:
        return sum(step_macs(self.stage, step) for _, step in self.steps)

    def run(self, ends: SourcesAndSinks, counter: Counter, on_step: Callable[[Step], None] | None = None) -> None:
        """Compute all parts, one after another; calls at the same time wait. on_step: called after each."""
        with self.lock:
            self._run(ends, counter, on_step)

    def _run(self, ends: SourcesAndSinks, counter: Counter, on_step: Callable[[Step], None] | None) -> None:
        self._update([ends.uncut_values[node] for node in self.weights])
        size = max((end for network in self._all_networks() for _, end in network.used), default=0)
        arena = TapeArena(size) if size else None  # pages are mapped once, not for each network
        for geometry, group in groupby(self.steps, lambda pair: pair[0]):
            network = self.network(geometry)
            if arena is not None and network.used:
                network.plans[0].share(arena)
            for _, step in group:
                self.run_part(network, step, ends)
                counter.macs += step_macs(self.stage, step)
                counter.steps += 1
                if on_step is not None:
                    on_step(step)
            network.free()

    def run_part(self, network: PartNetwork, step: Step, ends: SourcesAndSinks) -> None:
        """Compute one part."""
        uncut = (ends.uncut_values[node] for node in self.uncut)
        results = network.run(*(self._entering(value, step, ends) for value in self.stage.enters), *uncut)
        for value, result in zip(self.stage.targets, results, strict=True):
            axes, window = self.stage.flow.axes[value], _window(step, value)
            if value in ends.maps:
                part(ends.maps[value], axes, window).copy_(result)
            sink: Any = ends.sinks.get(value)
            if sink is not None:
                takes_any = isinstance(sink, StoredSink | _Scratch)  # a file of a value takes its layout
                sink.write(window, result if takes_any else empty(result.shape, axes, result.dtype).copy_(result))
        network.recycle(results)

    def _entering(self, value: fx.Node, step: Step, ends: SourcesAndSinks) -> Tensor:
        axes, window, source = self.stage.flow.axes[value], _window(step, value), ends.sources.get(value)
        shape, dtype = cut_shape(fake(value).shape, axes, window), fake(value).dtype
        if value in ends.maps:
            return torch.empty(shape, dtype=dtype).copy_(part(ends.maps[value], axes, window))
        into = empty(shape, axes, dtype) if isinstance(source, Spill) else torch.empty(shape, dtype=dtype)
        assert source is not None
        source.read(window, into)
        return into.contiguous()


class PartsOfStages:
    """The parts of stages, each planned and compiled once. Called with a stage and its segment, it returns the compiled
    parts; None where there are none. log: notes what failed."""

    def __init__(self, table: Table):
        self.table = table
        self.planned: dict[Any, StageParts | None] = {}
        self.log = Log()

    def __call__(self, stage: Stage, segment: Segment) -> StageParts | None:
        def compiled() -> StageParts | None:
            parts = self.plan(stage, segment)
            return parts if parts is not None and parts.is_compiled else None

        return self.log.attempt(f"{segment.nodes[0]} in parts", compiled, None)

    def plan(self, stage: Stage, segment: Segment) -> StageParts | None:
        """The parts, not yet compiled; None where the kernels do not support them."""
        key = segment.nodes, segment.keeps, segment.spills, segment.rows, torch.get_num_threads()
        if key not in self.planned:
            by_torch = replace(stage, flow=stage.flow.without_compiler)
            self.planned[key] = None
            if _is_supported(by_torch):
                parts = StageParts(by_torch, replace(segment, mode=PARTS), self.table)
                self.planned[key] = parts if len(parts.examples) <= NETWORKS else None
        return self.planned[key]


def _is_supported(stage: Stage) -> bool:
    values = [*stage.enters, *uncut_operands(stage), *(node for unit in stage.units for node in unit.nodes)]
    return llvm.is_installed() and can_write(stage) and all(fake(v).dtype is torch.float32 for v in values)


def _geometries(stage: Stage, steps: Sequence[Step]) -> list[Geometry]:
    """For each part, what its network depends on: the sizes of its windows, where they are relative to that of the
    tallest target, and whether they reach the ends of the image."""
    tallest, middle = max(stage.targets, key=stage.flow.rows), len(steps) // 2
    # Over a power of two of parts: rows of half the resolution move by full rows only every second part of odd height.
    span = 1 << max(middle - 1, 1).bit_length() - 1
    before, after = steps[max(middle - span, 0)], steps[middle]
    moved = {v: after[v].done - before[v].done for v in after}

    def geometry(step: Step) -> Geometry:
        origin = step[tallest].done
        return tuple(
            (
                live.end - live.done,
                live.done * moved[tallest] - origin * moved[v],
                live.done == 0,
                live.end == stage.flow.rows(v),
            )
            for v, live in step.items()
        )

    return list(map(geometry, steps))


def _window(step: Step, value: fx.Node) -> Window:
    return step[value].computed, step[value].columns


def _versions(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(t.data_ptr(), version(t)) for t in tensors]


def _every_layer(*_: Any) -> bool:
    return True


def _is_item(node: fx.Node) -> bool:
    """Whether a node is one of the outputs of a call."""
    return node.target is operator.getitem


def _bytes(node: fx.Node) -> int:
    values = node.meta["val"]
    return sum(v.numel() * v.dtype.itemsize for v in (values if isinstance(values, list | tuple) else [values]))


# ------------------------------------------------------------------------------------- choice


def choose_parts(flow: Flow, plan: TilePlan, layout: MemoryLayout) -> tuple[TilePlan, MemoryLayout]:
    """The plan with parts in place of those of its bands and tiles that take longer, within the plan's budget.

    Both are timed on zeros, in turns: a part, and two bands, in the middle of the image. The times are stored in the
    file of `machine.cost`. flow: with `parts`. A note says where parts failed.
    """
    assert isinstance(flow.parts, PartsOfStages)
    segments, log = [placed.segment for placed in layout.segments], flow.parts.log
    for k, placed in enumerate(layout.segments):
        for segment in log.attempt(f"{placed.segment.nodes[0]} in parts", partial(_faster_parts, placed), []):
            trial = lay_out(flow, [*segments[:k], segment, *segments[k + 1 :]])
            if trial.peak <= plan.budget and trial.segments[k].parts is not None:
                segments[k], layout = segment, trial
                break
    chosen = packed_plan(flow, layout, plan.budget, 0)
    return replace(chosen, notes=(*plan.notes, *log.notes)), layout


def _faster_parts(placed: PlacedSegment) -> list[Segment]:
    """The parts that take less time than a segment, the fastest first."""
    segment, stage = placed.segment, placed.stage
    if segment.mode == BARRIER or segment.macs < LEAST:
        return []
    assert isinstance(stage.flow.parts, PartsOfStages)
    height, ratios = max(target_rows(stage).values()), list[tuple[float, Segment]]()
    for rows in HEIGHTS:
        trial = replace(segment, mode=PARTS, rows=rows, columns=0, workers=1, row_steps=1, over={})
        parts = stage.flow.parts.plan(stage, trial) if rows < height else None
        if parts is None or parts.macs > MOST * segment.macs:
            continue
        ratios.append((_time_over_bands(placed, parts), trial))
        if ratios[-1][0] > HOPELESS:
            break
    return [trial for ratio, trial in sorted(ratios, key=lambda pair: pair[0]) if ratio < GAIN]


def _time_over_bands(placed: PlacedSegment, parts: StageParts) -> float:
    """The time of parts divided by that of a segment as it is planned; infinite without kernels for them.

    The first part of a call maps the memory of the kernels.
    """
    segment, stage = placed.segment, placed.stage
    kinds = [type(local.kind).__name__ for n in _nodes(stage) if (local := stage.flow.local.get(n))]
    how = segment.mode, segment.rows, segment.columns, segment.row_steps, segment.workers, kinds
    text = f"{how}\n{_text(_nodes(stage))}\n{_text(parts.program(parts.middle).graph.nodes)}"
    digest, costs = hashlib.sha256(text.encode()).hexdigest()[:20], costs_of_machine(torch.get_num_threads())
    names = [f"tiles; {digest}; {which}" for which in ("as planned", "in parts", "first part")]
    if any(costs.known(name) is None for name in names):
        network = parts.network(parts.middle)
        if not network.is_compiled:
            return inf
        costs.time_calls(
            dict(zip(names, (_call_of_bands(placed), *_calls_of_part(parts)), strict=True)), ROUNDS, seconds=ENOUGH
        )
        costs.save()
        network.free()
    bands, part, first = (costs.known(name) or inf for name in names)
    band_macs = sum(step_macs(stage, step) for step in _middle_steps(placed)) * segment.workers
    count = parts.macs / step_macs(parts.stage, parts.examples[parts.middle])
    return (part * (count - 1) + first) / (bands * segment.macs / band_macs)


def _calls_of_part(parts: StageParts) -> tuple[Callable[[], None], Callable[[], None]]:
    """The call of a part, and that of the first one."""
    network, ends = parts.network(parts.middle), _ends_for_timing(parts.stage)

    def call() -> None:
        parts.run_part(network, parts.examples[parts.middle], ends)

    def call_first() -> None:
        network.free()
        call()

    return call, call_first


def _call_of_bands(placed: PlacedSegment) -> Callable[[], None]:
    stage, steps, ends = placed.stage, _middle_steps(placed), _ends_for_timing(placed.stage)
    ends.uncut_values.update(stage.flow.constants)
    memory = plan_stage_memory(stage, steps, frozenset())
    executor = SegmentExecutor(stage, memory, ends, torch.zeros(memory.size, dtype=torch.uint8), Counter())
    if placed.segment.workers == 1:
        return lambda: executor.run(steps)

    def run() -> None:  # one of several strips, with its share of the threads
        with set_threads(max(1, torch.get_num_threads() // placed.segment.workers)):
            executor.run(steps)

    return run


def _middle_steps(placed: PlacedSegment) -> list[Step]:
    if placed.segment.mode == BANDS:
        return middle_steps(placed.stage, placed.segment.rows)
    return [next(iter(steps_of(placed.stage, placed.segment)))]


def _nodes(stage: Stage) -> list[fx.Node]:
    return [node for unit in stage.units for node in unit.nodes]


@dataclass(slots=True)
class _Scratch:
    """A sink that copies what is written, always to the same memory."""

    memory: Tensor = field(default_factory=lambda: torch.empty(0))

    def write(self, window: Window, written: Tensor) -> None:
        """Copy a part."""
        if self.memory.shape != written.shape:
            self.memory = torch.empty(written.shape, dtype=written.dtype)
        self.memory.copy_(written)


def _ends_for_timing(stage: Stage) -> SourcesAndSinks:
    axes, zero = stage.flow.axes, torch.zeros(())
    sinks: Any = {v: _Scratch() for v in stage.targets}
    sources: Any = {v: tensor_source(zero.expand(fake(v).shape), axes[v]) for v in stage.enters}
    uncut: Any = {v: torch.zeros(fake(v).shape, dtype=fake(v).dtype) for v in uncut_operands(stage)}
    return SourcesAndSinks({}, sources, sinks, uncut)


def _text(nodes: Iterable[fx.Node]) -> str:
    """Calls with the shapes of their values, as a text."""
    return "\n".join(f"{node.format_node()} {_shape(node)}" for node in nodes)


def _shape(node: fx.Node) -> Any:
    values = node.meta.get("val")
    return [tuple(v.shape) for v in (values if isinstance(values, list | tuple) else [values]) if isinstance(v, Tensor)]
