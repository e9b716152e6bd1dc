"""Memory offsets of the rows of a stage: blocks that share an arena by lifetime, and tails.

In every step the block of a value contains the rows of earlier steps that are read again, then the
new rows. A block is alive from the unit that computes it to the last that reads it, so that a deep
stage needs memory for its widest part, not for all layers. Rows that the next step reads again are
copied to a tail, which shares no memory, and back into the block in the next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import fx

from demask.machine.arena import ArenaPlan, Block, align_size, peak_bytes, plan_arena
from demask.ops.schema import fake
from demask.traverse.analysis.streamed_attention import scratch_bytes
from demask.traverse.axes import cut_shape
from demask.traverse.planning.schedule import LiveRows, Step
from demask.traverse.planning.stage import Stage, Unit

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
                self._local(k, unit, step)
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

    def _local(self, k: int, unit: Unit, step: Step) -> None:
        rows = step[unit.value]
        if rows.computed[0] >= rows.computed[1]:
            return
        window = rows.computed, rows.columns
        local = self.stage.flow.local[unit.node]
        if self.stage.streamed(unit, self.maps):
            value = fake(unit.value)
            queries = cut_shape(value.shape, self.stage.flow.axes[unit.value], window)
            self._add_allocated(k, scratch_bytes(unit.node, queries, value.dtype))
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

    maps: values that are whole in the plan's arena. estimate: sum live bytes without placing
    blocks: faster, and a lower bound.
    """
    peaks = _PeakSizes(stage, maps)
    for step in steps:
        peaks.add(step)
    owner = _owners(stage, peaks)
    lives = _lifetimes(stage, peaks, owner)
    scratch = {k: n for k, n in peaks.scratch.items() if n}
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
    large = frozenset(k for k, n in peaks.allocated.items() if n >= LARGE)
    allocated = max(peaks.allocated.values(), default=0)
    return StageMemory(block_offsets, tails, scratch_blocks, owner, size, allocated, packed, kernels, large)


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
    owner = {v: v for v in peaks.values}
    for unit in reversed(stage.units):
        if unit.value not in owner:
            continue
        for edge in unit.edges:
            base = edge.source
            if (unit.addend is base or _pointwise(stage, unit)) and _is_only_reader(stage, peaks, unit, base):
                owner[base] = owner[unit.value]
                break
    return owner


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


def _pointwise(stage: Stage, unit: Unit) -> bool:
    return stage.flow.local[unit.node].pointwise if unit.node in stage.flow.local else False
