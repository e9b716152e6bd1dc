"""The memory of a plan: stages, the maps between them, one arena.

Maps live from the segment that computes them to the last that reads them; a segment's own memory
lives while it runs. A map may overwrite a map that is read for the last time, if every row is
written after it was read.

In every step of a stage the block of a value contains the rows of earlier steps that are read
again, then the new rows. A block is alive from the unit that computes it to the last that reads it,
so that a deep stage needs memory for its widest part, not for all layers. Rows that the next step
reads again are copied to a tail, which shares no memory, and back into the block in the next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

from torch import Tensor, fx

from demask.errors import BadInput
from demask.exec.analysis.flow import Flow
from demask.exec.analysis.partial_reductions import attention_scratch_bytes, can_stream_keys
from demask.exec.axes import cut_shape
from demask.exec.planning.plan import BANDS, FRUSTUMS, PARTS, Segment
from demask.exec.planning.schedule import (
    LiveRows,
    Stage,
    Step,
    Strip,
    Unit,
    build_stage,
    cut_strips,
    full_step,
    target_rows,
    tile_bands,
    tile_step,
    walk_bands,
)
from demask.machine.arena import ArenaPlan, Block, align_size, owners, peak_bytes, plan_arena
from demask.ops.regions import Interval
from demask.ops.schema import fake

WORKERS = 64  # at most, in parallel
STEPS = 2**21  # at most, of a segment: a plan from a file must not run for ever
# Bytes of the process in addition to live values, measured: libraries, and each oneDNN kernel.
LIBRARIES, KERNEL = 8 * 2**20, 120 * 2**10
KERNELS = 1024  # in oneDNN's cache
LARGE = 2**20  # bytes allocated by torch that are returned to the system after a unit


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Offsets in bytes from the beginning of the stage's memory, and its size.

    block: of values computed in blocks, or read into them. tail: of values whose rows are read
    again. scratch: (offset, size) of units that need memory while they run. owner: values that are
    written over one another use the block of the last of them.

    Allocated by torch: `allocated`, bytes of results and copies of one call at most; packed, bytes
    of packed weights; kernels, keys of oneDNN's kernels. large: units after which torch's memory is
    returned to the system.
    """

    block: Mapping[fx.Node, int]
    tail: Mapping[fx.Node, int]
    scratch: Mapping[int, tuple[int, int]]
    owner: Mapping[fx.Node, fx.Node]
    size: int
    allocated: int
    packed: int
    kernels: frozenset[Any]
    large: frozenset[int] = frozenset()


class _PeakSizes:
    """The largest sizes of blocks, tails and scratch over the steps."""

    def __init__(self, stage: Stage, maps: frozenset[fx.Node]):
        self.stage, self.maps = stage, maps
        self.values = [v for v in stage.enters if v not in maps]
        self.values += [u.value for u in stage.units if u.value in stage.flow.axes and u.value not in maps]
        self.block = dict.fromkeys(self.values, 0)
        self.tail = dict.fromkeys(self.values, 0)
        self.scratch = dict.fromkeys(range(len(stage.units)), 0)
        self.allocated = dict.fromkeys(range(len(stage.units)), 0)
        self.kernels = set[Any]()
        # Operands of which a unit reads exactly the rows that it computes, in every step.
        self.exact_reads = {(u.value, e.source) for u in stage.units for e in u.edges}

    def add(self, step: Step) -> None:
        for v in self.values:
            rows = step[v]
            self.block[v] = max(self.block[v], part_bytes(self.stage, v, rows, rows.rows))
            self.tail[v] = max(self.tail[v], part_bytes(self.stage, v, rows, rows.tail))
        for k, unit in enumerate(self.stage.units):
            if unit.node in self.stage.flow.local:
                self._add_local(k, unit, step)
            elif unit.value in self.stage.flow.axes:  # torch's result, before it is copied
                rows = step[unit.value]
                self._add_allocated(k, part_bytes(self.stage, unit.value, rows, rows.end))
            elif unit.node in self.stage.flow.gathers:
                rows = step.get(unit.node, step[unit.edges[0].source])
                window = (rows.done, max(rows.done, rows.end)), rows.columns
                self._add_allocated(k, self.stage.flow.gathers[unit.node].scratch_bytes(window))
        for value, base in list(self.exact_reads):
            written, read = step.get(value), step[base]
            if written is None or written.computed != read.computed or written.columns != read.columns:
                self.exact_reads.discard((value, base))

    def _add_allocated(self, k: int, size: int) -> None:
        self.allocated[k] = max(self.allocated[k], size)

    def _add_local(self, k: int, unit: Unit, step: Step) -> None:
        rows = step[unit.value]
        if rows.computed[0] >= rows.computed[1]:
            return
        window = rows.computed, rows.columns
        local = self.stage.flow.local[unit.node]
        if self.stage.streamed(unit, self.maps):
            value = fake(unit.value)
            queries = cut_shape(value.shape, self.stage.flow.axes[unit.value], window)
            self._add_allocated(k, attention_scratch_bytes(unit.node, queries, value.dtype))
            return
        self.scratch[k] = max(self.scratch[k], local.scratch_bytes(window))
        self._add_allocated(k, local.allocated_bytes(window))
        self.kernels.add(local.kind.onednn_key(window))


def part_bytes(stage: Stage, node: fx.Node, live: LiveRows, rows: int) -> int:
    """Bytes of `rows` rows of a value."""
    value = fake(node)
    shape = cut_shape(value.shape, stage.flow.axes[node], ((0, rows), live.columns))
    return prod(shape) * value.dtype.itemsize


def plan_stage_memory(
    stage: Stage, steps: Iterable[Step], maps: frozenset[fx.Node], *, estimate: bool = False
) -> StageMemory:
    """The memory of a stage for all of its steps.

    maps: values that are complete in the plan's arena. estimate: sum live bytes without placing
    blocks: faster, and a lower bound.
    """
    peaks = _PeakSizes(stage, maps)
    for step in steps:
        peaks.add(step)
    owner = _owners(stage, peaks)
    lives = _lifetimes(stage, peaks, owner)
    device = stage.flow.device
    scratch = {} if device is not None else {k: n for k, n in peaks.scratch.items() if n}
    blocks = [Block(align_size(peaks.block[v]), *life) for v, life in lives.items()]
    blocks += [Block(align_size(n), k, k) for k, n in scratch.items()]
    arena = ArenaPlan((0,) * len(blocks), peak_bytes(blocks)) if estimate else plan_arena(blocks)
    size, tails = arena.size, {}
    for v, n in peaks.tail.items():
        if n:
            tails[v], size = size, size + align_size(n)
    scratch_blocks = {k: (arena.offsets[len(lives) + i], n) for i, (k, n) in enumerate(scratch.items())}
    cut = [stage.flow.local[u.node] for u in stage.units if u.node in stage.flow.local]
    packed_sizes = [local.kind.packed_bytes for local in cut]
    packed = sum(packed_sizes) + max(packed_sizes, default=0)  # packing one weight needs a copy
    kernels = frozenset(peaks.kernels - {None})
    block_offsets = dict(zip(lives, arena.offsets, strict=False))
    if device is not None:  # nothing is torch's, and weights are not packed
        weights = device.weight_bytes(_weights_of(stage))
        return StageMemory(block_offsets, tails, scratch_blocks, owner, size, 0, weights, frozenset())
    large = frozenset(k for k, n in peaks.allocated.items() if n >= LARGE)
    allocated = max(peaks.allocated.values(), default=0)
    return StageMemory(block_offsets, tails, scratch_blocks, owner, size, allocated, packed, kernels, large)


def _weights_of(stage: Stage) -> list[Tensor]:
    """The captured tensors that the calls of a stage read, each once."""
    constants = stage.flow.constants
    nodes = {n for unit in stage.units for node in unit.nodes for n in node.all_input_nodes if n in constants}
    return [constants[node] for node in nodes]


def _lifetimes(stage: Stage, peaks: _PeakSizes, owner: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, tuple[int, int]]:
    """The first and the last unit that use each block, over all values in it."""
    unit_of = {u.value: k for k, u in enumerate(stage.units)}
    lives: dict[fx.Node, tuple[int, int]] = {}
    for v in peaks.values:
        if not peaks.block[v]:
            continue
        reads = [k for k, _ in stage.readers.get(v, ())]
        first = unit_of.get(v, min(reads, default=0))
        life, other = (first, max([first, *reads])), lives.get(owner[v])
        lives[owner[v]] = life if other is None else (min(other[0], life[0]), max(other[1], life[1]))
    return lives


def _owners(stage: Stage, peaks: _PeakSizes) -> dict[fx.Node, fx.Node]:
    """The last of the values that share a block: pointwise calls write over an operand that no
    other unit reads, sums over their addends."""
    units = [None] * len(stage.enters) + list(stage.units)
    calls = [(v, ()) for v in stage.enters]
    calls += [(unit.value, tuple(e.source for e in unit.edges)) for unit in stage.units]

    def may_overwrite(k: int, base: fx.Node) -> bool:
        unit = units[k]
        assert unit is not None
        local = stage.flow.local.get(unit.node)
        writes_over = unit.addend is base or (local is not None and local.pointwise)
        return unit.value in peaks.block and writes_over and _is_only_reader(stage, peaks, unit, base)

    shared = owners(calls, may_overwrite, last=True)
    return {value: shared[value] for value in peaks.values}


def _is_only_reader(stage: Stage, peaks: _PeakSizes, unit: Unit, base: fx.Node) -> bool:
    """Whether a unit is the only reader of a value, at exactly the rows that it computes."""
    if (unit.value, base) not in peaks.exact_reads:
        return False
    if base not in peaks.block or base in stage.targets or peaks.tail[base]:
        return False
    value, base_value = fake(unit.value), fake(base)
    is_alike = value.shape == base_value.shape and value.dtype == base_value.dtype
    axes = stage.flow.axes
    return is_alike and len(stage.readers[base]) == 1 and axes[base] == axes[unit.value]


class PartsMemory(Protocol):
    """The memory of the parts of a stage, which are networks of their own."""

    @property
    def bytes(self) -> int:
        """Bytes of the values of one part."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights of all of its networks."""
        ...


@dataclass(frozen=True, slots=True)
class PlacedSegment:
    """A segment with exact sizes, its stage, and its memory.

    maps: those of its values that are complete in the arena. memory: of each worker. strips: of each
    worker; none for one worker. parts: networks that compute it.
    """

    segment: Segment
    stage: Stage
    maps: frozenset[fx.Node]
    memory: StageMemory
    strips: tuple[Strip, ...] = ()
    parts: PartsMemory | None = None

    @property
    def bytes(self) -> int:
        """Bytes of all workers, with the borders between them."""
        each = align_size(self.memory.size)
        return each * max(len(self.strips), 1) + sum(map(sum, self.borders()))

    @property
    def allocated(self) -> int:
        """Bytes allocated by torch: packed weights, which workers share, and results of each."""
        return self.memory.packed + self.memory.allocated * max(len(self.strips), 1)

    def borders(self) -> list[list[int]]:
        """For each two adjacent strips, the bytes of each value that is exchanged."""
        return [[align_size(self.border_bytes(v, n)) for v, n in strip.borders.items()] for strip in self.strips[:-1]]

    def border_bytes(self, node: fx.Node, rows: int) -> int:
        """Bytes of exchanged rows of a value; 0 for maps, which workers share."""
        if node in self.maps:
            return 0
        return value_bytes(node) // self.stage.flow.rows(node) * rows


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """The memory of a plan.

    segments: in order. maps: offsets of maps in the arena; work: of each segment's memory. size:
    of the arena. uncut_bytes: of the values without rows that live while each segment runs;
    last_used: those that it reads last. stored: bytes of all values that live between segments, of
    those alive while each segment runs.
    """

    segments: tuple[PlacedSegment, ...]
    maps: Mapping[fx.Node, int]
    work: tuple[int, ...]
    size: int
    uncut_bytes: tuple[int, ...]
    last_used: tuple[frozenset[fx.Node], ...]
    stored: tuple[int, ...]

    @property
    def live(self) -> int:
        """Peak bytes of values and packed weights, including all of the arena."""
        pairs = zip(self.segments, self.uncut_bytes, strict=True)
        return self.size + max((placed.allocated + uncut for placed, uncut in pairs), default=0)

    def compile_kernels(self) -> None:
        """Compile the plan's kernels."""
        for placed in self.segments:
            for unit in placed.stage.units:
                local = placed.stage.flow.local.get(unit.node)
                if local is not None and placed.parts is None:
                    local.kind.compile(unit.after, unit.addend is not None)

    @property
    def overhead(self) -> int:
        """Bytes of libraries and oneDNN's kernels; 0 of a device."""
        if any(placed.stage.flow.device is not None for placed in self.segments):
            return 0
        kernels = frozenset[Any]().union(*(placed.memory.kernels for placed in self.segments))
        return LIBRARIES + KERNEL * min(len(kernels), KERNELS)

    @property
    def peak(self) -> int:
        """Predicted maximum bytes of the process."""
        return self.live + self.overhead


def value_bytes(node: fx.Node) -> int:
    """Bytes of a full value."""
    value = fake(node)
    return prod(value.shape) * value.dtype.itemsize if isinstance(value, Tensor) else 0


def steps_of(stage: Stage, segment: Segment) -> Iterator[Step]:
    """The steps in which a segment runs."""
    if not target_rows(stage):
        yield full_step(stage)
    elif segment.stripe:
        for rows in stripes_of(stage, segment):
            yield from steps_of_stripe(stage, segment, rows)
    elif segment.mode == BANDS and segment.workers > 1:
        for strip in cut_strips(stage, segment.workers):
            yield from walk_bands(stage, segment.rows, strip, None, segment.row_steps)
    elif segment.mode == BANDS:
        yield from walk_bands(stage, segment.rows, row_steps=segment.row_steps)
    elif segment.mode == FRUSTUMS:
        yield from tiles(stage, segment.rows, segment.columns)
    elif segment.mode == PARTS:
        yield from tiles(stage, segment.rows, max(stage.flow.columns(v) for v in target_rows(stage)))
    else:
        yield full_step(stage)


def stripes_of(stage: Stage, segment: Segment) -> list[Interval]:
    """The rows of each task of a segment, of its tallest target."""
    height = max(target_rows(stage).values())
    size = segment.stripe or height
    return [(top, min(top + size, height)) for top in range(0, height, size)]


def steps_of_stripe(stage: Stage, segment: Segment, rows: Interval, columns: Interval | None = None) -> Iterator[Step]:
    """The steps that compute some rows of the tallest target, and nothing else of the targets.

    columns: of the widest target; None for all. The rows around them are computed again.
    """
    width = max(stage.flow.columns(v) for v in target_rows(stage))
    left, right = columns or (0, width)
    if segment.mode == BANDS:
        yield from tile_bands(stage, tile_at(stage, rows, (left, right)), segment.rows, segment.row_steps)
        return
    for top in range(*rows, segment.rows):
        for first in range(left, right, segment.columns):
            tile = (top, min(top + segment.rows, rows[1]))
            yield tile_at(stage, tile, (first, min(first + segment.columns, right)))


def tiles(stage: Stage, rows: int, columns: int) -> Iterator[Step]:
    """One step for each tile of the tallest target; other targets are cut in proportion."""
    ends = target_rows(stage)
    height, width = max(ends.values()), max(stage.flow.columns(v) for v in ends)
    for top in range(0, height, rows):
        for left in range(0, width, columns):
            yield tile_at(stage, (top, top + rows), (left, left + columns))


def tile_at(stage: Stage, rows: Interval, columns: Interval) -> Step:
    """The step of a tile: these rows and columns of the tallest target."""
    ends, window = target_rows(stage), {}
    height, width = max(ends.values()), max(stage.flow.columns(v) for v in ends)
    for v, n in ends.items():
        m = stage.flow.columns(v)
        window[v] = (
            (rows[0] * n // height, min(rows[1], height) * n // height),
            (columns[0] * m // width, min(columns[1], width) * m // width),
        )
    return tile_step(stage, window)


def count_steps(stage: Stage, segment: Segment) -> int:
    """The approximate number of steps of a segment."""
    ends = target_rows(stage)
    if segment.mode not in (BANDS, FRUSTUMS, PARTS) or not ends:
        return 1
    down = -(-max(ends.values()) * segment.row_steps // segment.rows)
    width = max(stage.flow.columns(v) for v in ends)
    return down * -(-width // segment.columns) if segment.mode == FRUSTUMS else down


def stage_of(flow: Flow, segment: Segment) -> Stage:
    """The stage of a segment. Raises BadInput where it names calls that the network lacks."""
    names = {node.name: node for node in flow.program.graph.nodes}
    try:
        nodes = [names[n] for n in segment.nodes]
        return build_stage(flow, nodes, {names[n] for n in segment.keeps})
    except KeyError as error:
        raise BadInput(f"the plan names {error}, which the network does not have") from None


def check(flow: Flow, segments: Sequence[Segment]) -> None:
    """Raise BadInput unless the segments compute all outputs, each from values computed before."""
    computed = {n for n in flow.program.graph.nodes if n.op in ("placeholder", "get_attr")}
    for segment in segments:
        stage = stage_of(flow, segment)
        if segment.mode in (BANDS, FRUSTUMS, PARTS) and (not stage.is_streamable or segment.rows < 1):
            raise BadInput(f"the plan runs {segment.nodes[:1]} in {segment.mode}, which is not possible")
        if segment.mode == PARTS and segment.stripe:
            raise BadInput(f"the plan cuts the parts of {segment.nodes[:1]} into tasks, which is not possible")
        if segment.row_steps < 1:
            raise BadInput(f"the plan computes a row of {segment.nodes[:1]} in no step")
        if not 1 <= segment.workers <= WORKERS:
            raise BadInput(f"the plan has {segment.workers} workers, expected 1 to {WORKERS}")
        if segment.mode == FRUSTUMS and segment.columns < 1:
            raise BadInput(f"the plan cuts {segment.nodes[:1]} into tiles without columns")
        if count_steps(stage, segment) > STEPS:
            raise BadInput(f"the plan runs {segment.nodes[:1]} in more than {STEPS} steps")
        available = set(computed)
        spilled = {name for s in segments for name in s.spills}
        for unit in stage.units:
            for edge in unit.edges:
                if edge.all_rows and edge.source.name in spilled and not can_stream_keys(unit.node):
                    raise BadInput(
                        f"the plan stores {edge.source.name} on disk, but "
                        f"{unit.node.name} reads all of its rows at once"
                    )
            missing = [
                n.name
                for node in unit.nodes
                for n in node.all_input_nodes
                if n not in available and n not in unit.nodes
            ]
            if missing:
                raise BadInput(f"the plan runs {unit.node.name} before its operand {missing[0]}")
            available |= set(unit.nodes)
        computed |= set(stage.targets) | {u.node for u in stage.units if u.node not in flow.axes}
    missing_outputs = [n for n in flow.outputs if isinstance(n, fx.Node) and n not in computed]
    if missing_outputs:
        raise BadInput(f"the plan does not compute {missing_outputs[0].name}, which the network returns")


def lay_out_checked(flow: Flow, segments: Sequence[Segment]) -> MemoryLayout:
    """The memory layout of a plan from a file. Raises BadInput where the plan cannot run."""
    check(flow, segments)
    layout = lay_out(flow, segments)
    for segment, placed in zip(segments, layout.segments, strict=True):
        if placed.segment.over != segment.over:
            raise BadInput(f"the plan lets maps of {segment.nodes[:1]} overwrite values that are still read")
    return layout


def lay_out(flow: Flow, segments: Sequence[Segment]) -> MemoryLayout:
    """The memory layout of segments. Maps overwrite others only where no step forbids it."""
    stages = [stage_of(flow, s) for s in segments]
    spilled = {name for s in segments for name in s.spills}
    maps = {v for stage in stages for v in stage.targets if v.name not in spilled}
    outputs = {n for n in flow.outputs if isinstance(n, fx.Node)}
    values_read = {v for stage in stages for v in stage.enters} | {
        e.source for stage in stages for u in stage.units for e in u.edges if e.all_rows
    }
    maps = {v for v in maps if v in values_read or v not in outputs}
    placed_segments = []
    for segment, stage in zip(segments, stages, strict=True):
        segment_maps = frozenset(v for v in [*stage.enters, *stage.targets] if v in maps)
        placed_segments.append(_place_segment(segment, stage, segment_maps))
    return _allocate(flow, tuple(placed_segments), maps)


def _place_segment(segment: Segment, stage: Stage, maps: frozenset[fx.Node]) -> PlacedSegment:
    """A segment with its memory and exact sizes, from one pass over its steps."""
    over, macs, count = _requested_overwrites(stage, segment), 0, 0

    def counted_steps() -> Iterator[Step]:
        nonlocal over, macs, count
        for step in steps_of(stage, segment):
            over = {a: b for a, b in over.items() if _writes_no_live_rows(step, a, b)}
            macs, count = macs + step_macs(stage, step), count + 1
            yield step

    parts = None
    if segment.mode == PARTS and stage.flow.parts is not None:
        parts = stage.flow.parts(stage, segment)
    if parts is None:
        memory = plan_stage_memory(stage, counted_steps(), maps)
    else:
        over = {}
        for _ in counted_steps():
            pass
        memory = StageMemory({}, {}, {}, {}, 0, parts.bytes, parts.weight_bytes, frozenset())
    is_parallel = segment.workers > 1 and segment.mode == BANDS and bool(target_rows(stage))
    each = tuple(cut_strips(stage, segment.workers)) if is_parallel else ()
    names = {a.name: b.name for a, b in over.items()}
    exact = replace(segment, over=names, macs=macs, steps=max(count, 1))
    placed = PlacedSegment(exact, stage, maps, memory, each if len(each) > 1 else (), parts)
    return replace(placed, segment=replace(exact, bytes=placed.bytes))


def step_macs(stage: Stage, step: Step) -> int:
    """Multiply-adds of one step."""
    total = 0
    for unit in stage.units:
        rows = step.get(unit.value)
        if unit.node not in stage.flow.local:
            total += 0 if unit.node in stage.flow.gathers else stage.flow.macs(unit.node)
        elif rows is not None and rows.computed[0] < rows.computed[1]:
            total += stage.flow.local[unit.node].macs((rows.computed, rows.columns))
    return total


def _uncut_lifetimes(flow: Flow, placed_segments: Sequence[PlacedSegment]) -> dict[fx.Node, tuple[int, int]]:
    """The first and the last segment in which each value without rows is alive."""
    lifetimes: dict[fx.Node, tuple[int, int]] = {}
    for k, placed in enumerate(placed_segments):
        for node in (node for unit in placed.stage.units for node in unit.nodes):
            for value in (node, *node.all_input_nodes):
                if value.op == "call_function" and value not in flow.axes:
                    lifetimes[value] = lifetimes.get(value, (k, k))[0], k
    for value in flow.outputs:
        if value in lifetimes:
            lifetimes[value] = lifetimes[value][0], len(placed_segments)
    return lifetimes


def _allocate(flow: Flow, placed_segments: tuple[PlacedSegment, ...], map_values: set[fx.Node]) -> MemoryLayout:
    """Maps and segments in one arena, placed by lifetime."""
    owner = {v: v for v in map_values}
    names = {v.name: v for v in map_values}
    for placed in placed_segments:
        for target, base in placed.segment.over.items():
            if target in names and base in names:
                owner[names[target]] = owner[names[base]]
    lives: dict[fx.Node, tuple[int, int]] = {}
    for k, placed in enumerate(placed_segments):
        for v in placed.maps & map_values:
            first, last = lives.get(owner[v], (k, k))
            lives[owner[v]] = min(first, k), max(last, k)
    blocks = [Block(align_size(value_bytes(v)), *life) for v, life in lives.items()]
    blocks += [Block(align_size(p.bytes), k, k) for k, p in enumerate(placed_segments)]
    arena = plan_arena(blocks)
    offset_of = dict(zip(lives, arena.offsets, strict=False))
    maps = {v: offset_of[owner[v]] for v in map_values if owner[v] in offset_of}
    uncut_lifetimes = _uncut_lifetimes(flow, placed_segments)
    uncut_bytes, last_used = [], []
    for k in range(len(placed_segments)):
        live_values = (v for v, (first, last) in uncut_lifetimes.items() if first <= k <= last)
        uncut_bytes.append(sum(map(value_bytes, live_values)))
        last_used.append(frozenset(v for v, (_, last) in uncut_lifetimes.items() if last == k))
    work = arena.offsets[len(lives) :]
    stored = tuple(
        uncut + sum(block.size for block in blocks[: len(lives)] if block.start <= k <= block.end)
        for k, uncut in enumerate(uncut_bytes)
    )
    return MemoryLayout(placed_segments, maps, work, arena.size, tuple(uncut_bytes), tuple(last_used), stored)


def find_overwrites(stage: Stage, steps: Sequence[Step], maps: frozenset[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Maps that can overwrite maps that are read: each row after it was read for the last time."""
    unit_of = {u.value: (k, u) for k, u in enumerate(stage.units)}
    overwritable = [v for v in stage.enters if v in maps]
    overwrites: dict[fx.Node, fx.Node] = {}
    for target in (v for v in stage.targets if v in maps):
        candidates = (b for b in overwritable if _can_overwrite(stage, unit_of[target], b))
        fits = (b for b in candidates if all(_writes_no_live_rows(s, target, b) for s in steps))
        base = next(fits, None)
        if base is not None:
            overwrites[target] = base
            overwritable.remove(base)
    return overwrites


def _writes_no_live_rows(step: Step, target: fx.Node, base: fx.Node) -> bool:
    """Whether a step writes only rows of a target that are no longer read of `base`."""
    return step[target].end <= step[base].keep


def _can_overwrite(stage: Stage, maker: tuple[int, Unit], base: fx.Node) -> bool:
    """Whether a map may overwrite `base`, for steps that read none of the written rows again."""
    k, unit = maker
    value, base_value = fake(unit.value), fake(base)
    if value.shape != base_value.shape or value.dtype != base_value.dtype:
        return False
    readers = stage.readers[base]
    if any(edge.all_rows or j > k for j, edge in readers):
        return False
    return not any(j == k and unit.addend is not base for j, _ in readers)


def _requested_overwrites(stage: Stage, segment: Segment) -> dict[fx.Node, fx.Node]:
    """The overwrites of a segment's plan that are possible."""
    # The worker below, or the task of the next stripe, may still read the overwritten rows.
    if segment.workers > 1 or segment.stripe or segment.mode == PARTS:
        return {}
    unit_of = {u.value: (k, u) for k, u in enumerate(stage.units)}
    entering = {v.name: v for v in stage.enters}
    overwrites: dict[fx.Node, fx.Node] = {}
    for target in stage.targets:
        base = entering.get(segment.over.get(target.name, ""))
        if base is not None and _can_overwrite(stage, unit_of[target], base):
            overwrites[target] = base
            del entering[base.name]
    return overwrites
