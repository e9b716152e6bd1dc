"""Where the rows of a stage lie: blocks that share an arena by lifetime, and tails of their own.

In every step the block of a value holds the rows kept from the step before, then the new ones.
Blocks are alive from the unit that makes them to the last that reads them, so that a deep stage
needs memory for its widest place, not for all its layers. What the next step reads again is put
aside at the end (a tail, never shared) and back in front of the new rows when its block is due.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import fx

from demask.machine.arena import ArenaPlan, Block, aligned, peak, planned
from demask.traverse.analysis.streamed_attention import scratch_bytes
from demask.traverse.axes import cut_shape
from demask.traverse.planning.schedule import LiveRows, Step
from demask.traverse.planning.stage import Stage, Unit

LARGE = 2**20  # bytes of torch's memory that are given back when a unit is done


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Offsets in bytes from the beginning of the stage's memory, and its size.

    block: of values made in blocks, or read into them. tail: of those that keep rows. scratch: of
    units that need memory while they run, with its size. owner: values that are written over one
    another share the block of the last of them. Beside that memory, in torch's: `beside`, bytes of
    results and copies of one call at most; packed, the bytes of weights laid out for the stage;
    and kernels, those that oneDNN makes for it. large: units behind which torch's memory is given
    back to the kernel, since it held much.
    """

    block: Mapping[fx.Node, int]
    tail: Mapping[fx.Node, int]
    scratch: Mapping[int, tuple[int, int]]
    owner: Mapping[fx.Node, fx.Node]
    size: int
    beside: int
    packed: int
    kernels: frozenset[Any]
    large: frozenset[int] = frozenset()


class _Most:
    """The largest sizes seen over the steps."""

    def __init__(self, stage: Stage, maps: frozenset[fx.Node]):
        self.stage, self.maps = stage, maps
        self.values = [v for v in stage.enters if v not in maps]
        self.values += [
            u.value for u in stage.units if u.value in stage.flow.axes and u.value not in maps
        ]
        self.block = dict.fromkeys(self.values, 0)
        self.tail = dict.fromkeys(self.values, 0)
        self.scratch = dict.fromkeys(range(len(stage.units)), 0)
        self.beside = dict.fromkeys(range(len(stage.units)), 0)
        self.kernels = set[Any]()
        # Operands of which a unit reads just the rows that it makes, in every step.
        self.same = {(u.value, e.source) for u in stage.units for e in u.edges}

    def add(self, step: Step) -> None:
        for v in self.values:
            held = step[v]
            self.block[v] = max(self.block[v], part_bytes(self.stage, v, held, held.rows))
            self.tail[v] = max(self.tail[v], part_bytes(self.stage, v, held, held.tail))
        for k, unit in enumerate(self.stage.units):
            if unit.node in self.stage.flow.local:
                self._local(k, unit, step)
            elif unit.value in self.stage.flow.axes:  # torch's own result, before it is copied
                held = step[unit.value]
                self._beside(k, part_bytes(self.stage, unit.value, held, held.end))
            elif unit.node in self.stage.flow.gathers:
                held = step.get(unit.node, step[unit.edges[0].source])
                window = (held.done, max(held.done, held.end)), held.columns
                self._beside(k, self.stage.flow.gathers[unit.node].scratch_bytes(window))
        for value, base in list(self.same):
            mine, theirs = step.get(value), step[base]
            if mine is None or mine.made != theirs.made or mine.columns != theirs.columns:
                self.same.discard((value, base))

    def _beside(self, k: int, size: int) -> None:
        self.beside[k] = max(self.beside[k], size)

    def _local(self, k: int, unit: Unit, step: Step) -> None:
        held = step[unit.value]
        if held.made[0] >= held.made[1]:
            return
        window = held.made, held.columns
        here = self.stage.flow.local[unit.node]
        if self.stage.streamed(unit, self.maps):
            value = unit.value.meta["val"]
            queries = cut_shape(value.shape, self.stage.flow.axes[unit.value], window)
            self._beside(k, scratch_bytes(unit.node, queries, value.dtype))
            return
        self.scratch[k] = max(self.scratch[k], here.scratch_bytes(window))
        self._beside(k, here.allocated_bytes(window))
        self.kernels.add(here.kind.onednn_key(window))


def part_bytes(stage: Stage, node: fx.Node, held: LiveRows, rows: int) -> int:
    """Bytes of some rows of a value."""
    value = node.meta["val"]
    shape = cut_shape(value.shape, stage.flow.axes[node], ((0, rows), held.columns))
    return prod(shape) * value.dtype.itemsize


def memory(
    stage: Stage,
    steps: Iterable[Step],
    maps: frozenset[fx.Node],
    *,
    estimate: bool = False,
) -> StageMemory:
    """Where everything lies in all of the steps. maps: values that lie whole somewhere else.
    estimate: only sum up what lives at once, which is quicker and no more than is needed."""
    most = _Most(stage, maps)
    for step in steps:
        most.add(step)
    owner = _owners(stage, most)
    lives = _lives(stage, most, owner)
    scratch = {k: n for k, n in most.scratch.items() if n}
    blocks = [Block(aligned(most.block[v]), *life) for v, life in lives.items()]
    blocks += [Block(aligned(n), k, k) for k, n in scratch.items()]
    where = ArenaPlan((0,) * len(blocks), peak(blocks)) if estimate else planned(blocks)
    size, tails = where.size, {}
    for v, n in most.tail.items():
        if n:
            tails[v], size = size, size + aligned(n)
    at = {k: (where.offsets[len(lives) + i], n) for i, (k, n) in enumerate(scratch.items())}
    cut = [stage.flow.local[u.node] for u in stage.units if u.node in stage.flow.local]
    packs = [here.kind.packed_bytes for here in cut]
    packed = sum(packs) + max(packs, default=0)  # one is laid out by way of a copy
    kernels = frozenset(most.kernels - {None})
    found = dict(zip(lives, where.offsets, strict=False))
    large = frozenset(k for k, n in most.beside.items() if n >= LARGE)
    beside = max(most.beside.values(), default=0)
    return StageMemory(found, tails, at, owner, size, beside, packed, kernels, large)


def _lives(
    stage: Stage, most: _Most, owner: Mapping[fx.Node, fx.Node]
) -> dict[fx.Node, tuple[int, int]]:
    """From which unit to which a block is in use, by all that lie in it."""
    made = {u.value: k for k, u in enumerate(stage.units)}
    found: dict[fx.Node, tuple[int, int]] = {}
    for v in most.values:
        if not most.block[v]:
            continue
        reads = [k for k, _ in stage.readers.get(v, ())]
        first = made.get(v, min(reads, default=0))
        mine, before = (first, max([first, *reads])), found.get(owner[v])
        found[owner[v]] = (
            mine if before is None else (min(before[0], mine[0]), max(before[1], mine[1]))
        )
    return found


def _owners(stage: Stage, most: _Most) -> dict[fx.Node, fx.Node]:
    """The last of the values that lie at one place: pointwise calls write over what nobody else
    reads, sums over their addends."""
    found = {v: v for v in most.values}
    for unit in reversed(stage.units):
        if unit.value not in found:
            continue
        for edge in unit.edges:
            base = edge.source
            if (unit.addend is base or _pointwise(stage, unit)) and _dies(stage, most, unit, base):
                found[base] = found[unit.value]
                break
    return found


def _dies(stage: Stage, most: _Most, unit: Unit, base: fx.Node) -> bool:
    """Does nobody but a unit read a value, and the unit only once, at the rows it makes?"""
    if (unit.value, base) not in most.same:
        return False
    if base not in most.block or base in stage.targets or most.tail[base]:
        return False
    mine, theirs = unit.value.meta["val"], base.meta["val"]
    alike = mine.shape == theirs.shape and mine.dtype == theirs.dtype
    axes = stage.flow.axes
    return alike and len(stage.readers[base]) == 1 and axes[base] == axes[unit.value]


def _pointwise(stage: Stage, unit: Unit) -> bool:
    return stage.flow.local[unit.node].pointwise if unit.node in stage.flow.local else False
