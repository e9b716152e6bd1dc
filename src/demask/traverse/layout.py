"""The memory of a whole plan: stages, the maps between them, one arena.

Maps live from the segment that keeps them to the last that reads them; a segment's own memory
while it runs. A map may be written over one that is read for the last time, where every row is
written after it was read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor, fx

from demask.errors import BadInput
from demask.machine.arena import ALIGNMENT, Block, planned
from demask.ops.regions import Interval
from demask.traverse.flow import Flow
from demask.traverse.memory import Memory, memory
from demask.traverse.plan import BANDS, FRUSTUMS, Segment
from demask.traverse.schedule import Step, Strip, at_once, ends_of, strips, tile, walked
from demask.traverse.stage import Stage, Unit, staged

WORKERS = 64  # at most, side by side
STEPS = 2**21  # at most, of a segment: a plan from a file must not run for ever
# What the process takes beside live values, measured: libraries, and a kernel that oneDNN keeps.
LIBRARIES, KERNEL = 8 * 2**20, 120 * 2**10
KERNELS = 1024  # that oneDNN keeps


@dataclass(frozen=True, slots=True)
class Place:
    """One segment ready to run: its stage, which of its values are maps, the memory of each of its
    workers, and the strips that they walk down, if they are several."""

    segment: Segment
    stage: Stage
    maps: frozenset[fx.Node]
    memory: Memory
    strips: tuple[Strip, ...] = ()

    @property
    def bytes(self) -> int:
        """Of all workers, with the borders between them."""
        each = _aligned(self.memory.size)
        return each * max(len(self.strips), 1) + sum(map(sum, self.borders()))

    @property
    def packed(self) -> int:
        """Bytes of the weights that its workers share."""
        return self.memory.packed

    def borders(self) -> list[list[int]]:
        """Between each two strips, the bytes of each value that goes from one to the other."""
        return [[_aligned(self.border_bytes(v, n)) for v, n in strip.borders.items()]
                for strip in self.strips[:-1]]  # fmt: skip

    def border_bytes(self, node: fx.Node, rows: int) -> int:
        if node in self.maps:
            return 0
        return value_bytes(node) // self.stage.flow.rows(node) * rows


@dataclass(frozen=True, slots=True)
class Layout:
    """places: per segment. maps: offsets of maps in the arena; work: of each segment's memory.
    size: of the arena. wholes: bytes of values without rows, which stay until the end."""

    places: tuple[Place, ...]
    maps: Mapping[fx.Node, int]
    work: tuple[int, ...]
    size: int
    wholes: int

    @property
    def live(self) -> int:
        """Bytes of values and weights laid out that are alive at once at most."""
        return self.size + self.wholes + max((place.packed for place in self.places), default=0)

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
        if len(over_of(stage, segment)) != len(segment.over):
            raise BadInput(f"the plan writes maps of {segment.nodes[:1]} over what is still read")
        here = set(made)
        for unit in stage.units:
            missing = [n.name for node in unit.nodes for n in node.all_input_nodes
                       if n not in here and n not in unit.nodes]  # fmt: skip
            if missing:
                raise BadInput(f"the plan makes {unit.node.name} before {missing[0]}")
            here |= set(unit.nodes)
        made |= set(stage.targets) | {u.node for u in stage.units if u.node not in flow.axes}
    wanted = [n for n in flow.outputs if isinstance(n, fx.Node) and n not in made]
    if wanted:
        raise BadInput(f"the plan does not make {wanted[0].name}, which the network returns")


def laid(flow: Flow, segments: Sequence[Segment], outside: frozenset[fx.Node]) -> Layout:
    """Where everything lies. outside: values that lie whole in memory that is not ours (the
    caller's input, the result), in the layout of parts."""
    check(flow, segments)
    stages = [stage_of(flow, s) for s in segments]
    spilled = {name for s in segments for name in s.spills}
    kept = {v for stage in stages for v in stage.targets
            if v.name not in spilled and v not in outside}  # fmt: skip
    outputs = {n for n in flow.outputs if isinstance(n, fx.Node)}
    read = {v for stage in stages for v in stage.enters} | {
        e.source for stage in stages for u in stage.units for e in u.edges if e.whole
    }
    kept = {v for v in kept if v in read or v not in outputs}
    places = []
    for segment, stage in zip(segments, stages, strict=True):
        mine = frozenset(v for v in [*stage.enters, *stage.targets] if v in kept or v in outside)
        where = memory(stage, steps_of(stage, segment), mine)
        several = segment.workers > 1 and segment.mode == BANDS and bool(ends_of(stage))
        side = tuple(strips(stage, segment.workers)) if several else ()
        places.append(Place(segment, stage, mine, where, side if len(side) > 1 else ()))
    wholes = sum(value_bytes(n) for n in flow.calls if n not in flow.axes)
    return _packed(tuple(places), kept, wholes)


def _packed(places: tuple[Place, ...], kept: set[fx.Node], wholes: int) -> Layout:
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
    blocks = [Block(_aligned(value_bytes(v)), *life) for v, life in lives.items()]
    blocks += [Block(_aligned(p.bytes), k, k) for k, p in enumerate(places)]
    found = planned(blocks)
    at = dict(zip(lives, found.offsets, strict=False))
    maps = {v: at[owner[v]] for v in kept if owner[v] in at}
    return Layout(places, maps, found.offsets[len(lives) :], found.size, wholes)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def written_over(
    stage: Stage, steps: Sequence[Step], maps: frozenset[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Maps that can be written over maps read: each row after it was read for the last time."""
    makers = {u.value: (k, u) for k, u in enumerate(stage.units)}
    free = [v for v in stage.enters if v in maps]
    found: dict[fx.Node, fx.Node] = {}
    for target in (v for v in stage.targets if v in maps):
        base = next((b for b in free if _follows(stage, steps, makers[target], b)), None)
        if base is not None:
            found[target] = base
            free.remove(base)
    return found


def _follows(stage: Stage, steps: Sequence[Step], maker: tuple[int, Unit], base: fx.Node) -> bool:
    """Are a map's rows written behind those of `base` that are still to be read?"""
    k, unit = maker
    mine, theirs = unit.value.meta["val"], base.meta["val"]
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return False
    readers = stage.readers[base]
    if any(edge.whole or j > k for j, edge in readers):
        return False
    if any(j == k and unit.addend is not base for j, _ in readers):
        return False
    return all(step[unit.value].end <= step[base].keep for step in steps)


def over_of(stage: Stage, segment: Segment) -> dict[fx.Node, fx.Node]:
    """The maps that a segment says are written over others, where every step allows it."""
    said = {stage_value.name: stage_value for stage_value in [*stage.enters, *stage.targets]}
    pairs = {said[a]: said[b] for a, b in segment.over.items() if a in said and b in said}
    maps = frozenset([*pairs, *pairs.values()])
    alone = segment.workers <= 1  # the worker below may still read what this one writes over
    found = written_over(stage, list(steps_of(stage, segment)), maps) if pairs and alone else {}
    return {a: b for a, b in found.items() if pairs.get(a) is b}
