"""The memory of a whole plan: stages, the maps between them, one arena.

Maps live from the segment that keeps them to the last that reads them; a segment's own memory
while it runs. A map may be written over one that is read for the last time, where every row is
written after it was read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import Tensor, fx

from demask.errors import BadInput
from demask.machine.arena import Block, aligned, planned
from demask.ops.regions import Interval
from demask.traverse.analysis.flow import Flow
from demask.traverse.analysis.streamed_attention import streams_keys
from demask.traverse.planning.plan import BANDS, FRUSTUMS, Segment
from demask.traverse.planning.schedule import Step, Strip, at_once, ends_of, strips, tile, walked
from demask.traverse.planning.stage import Stage, Unit, staged
from demask.traverse.planning.stage_memory import StageMemory, memory

WORKERS = 64  # at most, side by side
STEPS = 2**21  # at most, of a segment: a plan from a file must not run for ever
# What the process takes beside live values, measured: libraries, and a kernel that oneDNN keeps.
LIBRARIES, KERNEL = 8 * 2**20, 120 * 2**10
KERNELS = 1024  # that oneDNN keeps


@dataclass(frozen=True, slots=True)
class PlacedSegment:
    """One segment ready to run: with what it takes, its stage, which of its values are maps, the
    memory of each of its workers, and the strips that they walk down, if they are several."""

    segment: Segment
    stage: Stage
    maps: frozenset[fx.Node]
    memory: StageMemory
    strips: tuple[Strip, ...] = ()

    @property
    def bytes(self) -> int:
        """Of all workers, with the borders between them."""
        each = aligned(self.memory.size)
        return each * max(len(self.strips), 1) + sum(map(sum, self.borders()))

    @property
    def beside(self) -> int:
        """Bytes in torch's memory: the weights that its workers share, and results of theirs."""
        return self.memory.packed + self.memory.beside * max(len(self.strips), 1)

    def borders(self) -> list[list[int]]:
        """Between each two strips, the bytes of each value that goes from one to the other."""
        return [[aligned(self.border_bytes(v, n)) for v, n in strip.borders.items()]
                for strip in self.strips[:-1]]  # fmt: skip

    def border_bytes(self, node: fx.Node, rows: int) -> int:
        if node in self.maps:
            return 0
        return value_bytes(node) // self.stage.flow.rows(node) * rows


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """places: per segment. maps: offsets of maps in the arena; work: of each segment's memory.
    size: of the arena. wholes: bytes of the values without rows that live while each segment runs;
    dies: those that are read for the last time in it."""

    places: tuple[PlacedSegment, ...]
    maps: Mapping[fx.Node, int]
    work: tuple[int, ...]
    size: int
    wholes: tuple[int, ...]
    dies: tuple[frozenset[fx.Node], ...]

    @property
    def live(self) -> int:
        """Bytes of values and weights laid out that are alive at once at most, where the arena's
        stay from the first touch on."""
        pairs = zip(self.places, self.wholes, strict=True)
        return self.size + max((place.beside + held for place, held in pairs), default=0)

    def compiled(self) -> int:
        """Make the machine code that the plan takes; the bytes of its compiler."""
        local = (((u, place.stage.flow.local.get(u.node)) for u in place.stage.units)
                 for place in self.places)  # fmt: skip
        found = [here.kind.compile(unit.after, unit.addend is not None)
                 for pairs in local for unit, here in pairs if here is not None]  # fmt: skip
        return max(found, default=0)

    @property
    def overhead(self) -> int:
        """Bytes that the process takes beside."""
        kernels = frozenset[Any]().union(*(place.memory.kernels for place in self.places))
        return LIBRARIES + KERNEL * min(len(kernels), KERNELS)

    @property
    def peak(self) -> int:
        return self.live + self.overhead


def value_bytes(node: fx.Node) -> int:
    """Bytes of a whole value."""
    value = node.meta["val"]
    return prod(value.shape) * value.dtype.itemsize if isinstance(value, Tensor) else 0


def steps_of(stage: Stage, segment: Segment) -> Iterator[Step]:
    """The steps in which a segment runs."""
    if not ends_of(stage):
        yield at_once(stage)
    elif segment.mode == BANDS and segment.workers > 1:
        for strip in strips(stage, segment.workers):
            yield from walked(stage, segment.rows, strip)
    elif segment.mode == BANDS:
        yield from walked(stage, segment.rows)
    elif segment.mode == FRUSTUMS:
        yield from tiles(stage, segment.rows, segment.columns)
    else:
        yield at_once(stage)


def tiles(stage: Stage, rows: int, columns: int) -> Iterator[Step]:
    """One step for each tile of the tallest target; other targets are cut in proportion."""
    ends = ends_of(stage)
    height, width = max(ends.values()), max(stage.flow.columns(v) for v in ends)
    for top in range(0, height, rows):
        for left in range(0, width, columns):
            yield tile_at(stage, (top, top + rows), (left, left + columns))


def tile_at(stage: Stage, rows: Interval, columns: Interval) -> Step:
    """The tile that makes these rows and columns of the tallest target."""
    ends, window = ends_of(stage), {}
    height, width = max(ends.values()), max(stage.flow.columns(v) for v in ends)
    for v, n in ends.items():
        m = stage.flow.columns(v)
        window[v] = ((rows[0] * n // height, min(rows[1], height) * n // height),
                     (columns[0] * m // width, min(columns[1], width) * m // width))  # fmt: skip
    return tile(stage, window)


def count_steps(stage: Stage, segment: Segment) -> int:
    """In about how many steps a segment runs."""
    ends = ends_of(stage)
    if segment.mode not in (BANDS, FRUSTUMS) or not ends:
        return 1
    down = -(-max(ends.values()) // segment.rows)
    width = max(stage.flow.columns(v) for v in ends)
    return down if segment.mode == BANDS else down * -(-width // segment.columns)


def stage_of(flow: Flow, segment: Segment) -> Stage:
    """BadInput: the segment names calls that the network does not have, or not in this order."""
    names = {node.name: node for node in flow.program.graph.nodes}
    try:
        return staged(flow, [names[n] for n in segment.nodes], {names[n] for n in segment.keeps})
    except KeyError as error:
        raise BadInput(f"the plan names {error}, which the network has not") from None


def check(flow: Flow, segments: Sequence[Segment]) -> None:
    """BadInput unless the segments make all outputs, each from what was made before it."""
    made = {n for n in flow.program.graph.nodes if n.op in ("placeholder", "get_attr")}
    for segment in segments:
        stage = stage_of(flow, segment)
        if segment.mode in (BANDS, FRUSTUMS) and (not stage.streams or segment.rows < 1):
            raise BadInput(f"the plan runs {segment.nodes[:1]} in {segment.mode}, which it cannot")
        if not 1 <= segment.workers <= WORKERS:
            raise BadInput(f"the plan asks for {segment.workers} workers, expected 1 to {WORKERS}")
        if segment.mode == FRUSTUMS and segment.columns < 1:
            raise BadInput(f"the plan cuts {segment.nodes[:1]} in tiles of no columns")
        if count_steps(stage, segment) > STEPS:
            raise BadInput(f"the plan runs {segment.nodes[:1]} in more than {STEPS} steps")
        here = set(made)
        spilled = {name for s in segments for name in s.spills}
        for unit in stage.units:
            for edge in unit.edges:
                if edge.whole and edge.source.name in spilled and not streams_keys(unit.node):
                    raise BadInput(f"the plan puts {edge.source.name} on disk, of which "
                                   f"{unit.node.name} reads all rows at once")  # fmt: skip
            missing = [n.name for node in unit.nodes for n in node.all_input_nodes
                       if n not in here and n not in unit.nodes]  # fmt: skip
            if missing:
                raise BadInput(f"the plan makes {unit.node.name} before {missing[0]}")
            here |= set(unit.nodes)
        made |= set(stage.targets) | {u.node for u in stage.units if u.node not in flow.axes}
    wanted = [n for n in flow.outputs if isinstance(n, fx.Node) and n not in made]
    if wanted:
        raise BadInput(f"the plan does not make {wanted[0].name}, which the network returns")


def admitted(flow: Flow, segments: Sequence[Segment]) -> MemoryLayout:
    """Where everything lies by a plan from elsewhere; BadInput where it would not run."""
    check(flow, segments)
    found = laid(flow, segments)
    for segment, place in zip(segments, found.places, strict=True):
        if place.segment.over != segment.over:
            raise BadInput(f"the plan writes maps of {segment.nodes[:1]} over what is still read")
    return found


def laid(flow: Flow, segments: Sequence[Segment]) -> MemoryLayout:
    """Where everything lies. Maps are not written over others where some step forbids it."""
    stages = [stage_of(flow, s) for s in segments]
    spilled = {name for s in segments for name in s.spills}
    kept = {v for stage in stages for v in stage.targets if v.name not in spilled}
    outputs = {n for n in flow.outputs if isinstance(n, fx.Node)}
    read = {v for stage in stages for v in stage.enters} | {
        e.source for stage in stages for u in stage.units for e in u.edges if e.whole
    }
    kept = {v for v in kept if v in read or v not in outputs}
    places = []
    for segment, stage in zip(segments, stages, strict=True):
        mine = frozenset(v for v in [*stage.enters, *stage.targets] if v in kept)
        places.append(_place(segment, stage, mine))
    return _packed(flow, tuple(places), kept)


def _place(segment: Segment, stage: Stage, maps: frozenset[fx.Node]) -> PlacedSegment:
    """A segment on its own: all its steps, looked at once."""
    over, doing, count = _said_over(stage, segment), 0, 0

    def told() -> Iterator[Step]:
        nonlocal over, doing, count
        for step in steps_of(stage, segment):
            over = {a: b for a, b in over.items() if _behind(step, a, b)}
            doing, count = doing + step_macs(stage, step), count + 1
            yield step

    where = memory(stage, told(), maps)
    several = segment.workers > 1 and segment.mode == BANDS and bool(ends_of(stage))
    side = tuple(strips(stage, segment.workers)) if several else ()
    names = {a.name: b.name for a, b in over.items()}
    exact = replace(segment, over=names, macs=doing, steps=max(count, 1))
    place = PlacedSegment(exact, stage, maps, where, side if len(side) > 1 else ())
    return replace(place, segment=replace(exact, bytes=place.bytes))


def step_macs(stage: Stage, step: Step) -> int:
    """Multiply-adds of one step."""
    total = 0
    for unit in stage.units:
        held = step.get(unit.value)
        if unit.node not in stage.flow.local:
            total += 0 if unit.node in stage.flow.gathers else stage.flow.macs(unit.node)
        elif held is not None and held.made[0] < held.made[1]:
            total += stage.flow.local[unit.node].macs((held.made, held.columns))
    return total


def _wholes(flow: Flow, places: Sequence[PlacedSegment]) -> dict[fx.Node, tuple[int, int]]:
    """The first and the last segment that hold each value without rows."""
    found: dict[fx.Node, tuple[int, int]] = {}
    for k, place in enumerate(places):
        for node in (node for unit in place.stage.units for node in unit.nodes):
            for value in (node, *node.all_input_nodes):
                if value.op == "call_function" and value not in flow.axes:
                    found[value] = found.get(value, (k, k))[0], k
    for value in flow.outputs:
        if value in found:
            found[value] = found[value][0], len(places)
    return found


def _packed(flow: Flow, places: tuple[PlacedSegment, ...], kept: set[fx.Node]) -> MemoryLayout:
    """Maps and segments in one arena, by when they are alive."""
    owner = {v: v for v in kept}
    names = {v.name: v for v in kept}
    for place in places:
        for mine, base in place.segment.over.items():
            if mine in names and base in names:
                owner[names[mine]] = owner[names[base]]
    lives: dict[fx.Node, tuple[int, int]] = {}
    for k, place in enumerate(places):
        for v in place.maps & kept:
            first, last = lives.get(owner[v], (k, k))
            lives[owner[v]] = min(first, k), max(last, k)
    blocks = [Block(aligned(value_bytes(v)), *life) for v, life in lives.items()]
    blocks += [Block(aligned(p.bytes), k, k) for k, p in enumerate(places)]
    found = planned(blocks)
    at = dict(zip(lives, found.offsets, strict=False))
    maps = {v: at[owner[v]] for v in kept if owner[v] in at}
    held = _wholes(flow, places)
    wholes, dies = [], []
    for k in range(len(places)):
        alive = (v for v, (first, last) in held.items() if first <= k <= last)
        wholes.append(sum(map(value_bytes, alive)))
        dies.append(frozenset(v for v, (_, last) in held.items() if last == k))
    work = found.offsets[len(lives) :]
    return MemoryLayout(places, maps, work, found.size, tuple(wholes), tuple(dies))


def written_over(
    stage: Stage, steps: Sequence[Step], maps: frozenset[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Maps that can be written over maps read: each row after it was read for the last time."""
    makers = {u.value: (k, u) for k, u in enumerate(stage.units)}
    free = [v for v in stage.enters if v in maps]
    found: dict[fx.Node, fx.Node] = {}
    for target in (v for v in stage.targets if v in maps):
        may = (b for b in free if _follows(stage, makers[target], b))
        base = next((b for b in may if all(_behind(s, target, b) for s in steps)), None)
        if base is not None:
            found[target] = base
            free.remove(base)
    return found


def _behind(step: Step, target: fx.Node, base: fx.Node) -> bool:
    """Does a step write no rows of a target beyond those of `base` that are read again?"""
    return step[target].end <= step[base].keep


def _follows(stage: Stage, maker: tuple[int, Unit], base: fx.Node) -> bool:
    """Can a map be written over `base`, in steps that keep none of the rows it writes?"""
    k, unit = maker
    mine, theirs = unit.value.meta["val"], base.meta["val"]
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return False
    readers = stage.readers[base]
    if any(edge.whole or j > k for j, edge in readers):
        return False
    return not any(j == k and unit.addend is not base for j, _ in readers)


def _said_over(stage: Stage, segment: Segment) -> dict[fx.Node, fx.Node]:
    """The maps that a segment says are written over others, where they can be."""
    if segment.workers > 1:  # the worker below may still read what this one writes over
        return {}
    makers = {u.value: (k, u) for k, u in enumerate(stage.units)}
    read = {v.name: v for v in stage.enters}
    found: dict[fx.Node, fx.Node] = {}
    for target in stage.targets:
        base = read.get(segment.over.get(target.name, ""))
        if base is not None and _follows(stage, makers[target], base):
            found[target] = base
            del read[base.name]
    return found
