"""A chain linear, ReLU, linear, … ready to run on one vector: one call into machine code.

Each layer has a mode. "dense": all columns. "columns": those whose input is not zero. "certified":
8-bit weights prove rows zero, the others are computed over the columns whose input is not zero.
"two": the same, 4 bits first. All four give the same bits (`kernels.gemv`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demask.kernels.cpu import gemv
from demask.kernels.cpu import zero_proof as certify
from demask.kernels.cpu.thread_team import Job
from demask.kernels.llvm.isa import Isa, host
from demask.pilot.chains import packing
from demask.sparse.plan.tape import HEADER, KernelCall, NoPlan, Tape, TapeArena

MODES = ("dense", "columns", "certified", "two")
SPARE = 4  # sets of memory that are kept: calls that run at the same time
INPUT, OUTPUT = 1, 2  # slots
COLUMNS_MOST = 16  # vectors of a tile of float32


@dataclass(frozen=True, slots=True)
class ChainLayer:
    """weight float32 [rows, columns], contiguous; bias [rows] or None; whether ReLU follows."""

    weight: Tensor
    bias: Tensor | None
    relu: bool


@dataclass(frozen=True, slots=True)
class LayerCounts:
    """What one layer's last call did: columns whose input was not zero, rows that were not proved
    zero by the first and by the last level; all rows where nothing was to be proved."""

    columns: int
    first: int
    rows: int


@dataclass(slots=True)
class Slots:
    """The table of addresses that calls bring: what is in which place."""

    size: int = HEADER
    offsets: dict[int, int] = field(default_factory=dict)
    fixed: dict[int, int] = field(default_factory=dict)
    last: int = OUTPUT

    def new(self, size: int) -> int:
        """A slot for memory of the call."""
        self.last += 1
        self.offsets[self.last] = self.size
        self.size += -(-size // 128) * 128 + 128  # apart: threads write their own
        return self.last

    def address(self, address: int) -> int:
        """A slot for what never moves."""
        self.last += 1
        self.fixed[self.last] = address
        return self.last

    def several(self, count: int, size: int) -> int:
        """Slots in a row, one for each thread; the first of them."""
        first = self.last + 1
        for _ in range(count):
            self.new(size)
        return first


@dataclass(frozen=True, slots=True)
class ChainMemory:
    """What a call needs for itself."""

    job: Job
    arena: TapeArena


@dataclass(slots=True)
class ChainPlanBuilder:
    """Writes the phases of a plan."""

    threads: int
    isa: Isa
    slots: Slots = field(default_factory=Slots)
    seen: list[tuple[list[int], list[int], list[int]]] = field(default_factory=list)
    tape: Tape = field(init=False)

    def __post_init__(self) -> None:
        self.tape = Tape(self.threads)

    def held(self, array: np.ndarray) -> int:
        """The address of an array that lives as long as the plan."""
        self.tape.arrays.append(array)
        return array.ctypes.data

    def call(self, thread: int, kernel: Any, kind: np.dtype, /, **fields: int) -> None:
        self.tape.add(thread, KernelCall(kernel, kind, {}, fields))

    def layer(self, layer: ChainLayer, mode: str, x: int, out: int) -> None:
        """One layer, from slot to slot."""
        columns = layer.weight.shape[1]
        self.tape.phase()
        lists = [self.listed(t, mode, x, columns) for t in range(self.threads)]
        self.seen.append(([count for *_, count in lists[:1]], [], []))
        if mode in ("dense", "columns"):
            self._columns(layer, lists, out, gemv.AHEAD if mode == "columns" else 0)
        elif columns > certify.MOST_COLUMNS:
            raise NoPlan(f"{columns} columns: more than {certify.MOST_COLUMNS} overflow")
        else:
            self._certified(layer, mode, x, lists, out)

    def listed(self, thread: int, mode: str, x: int, columns: int) -> tuple[int, int, int]:
        """Slots of the columns to go through: (numbers, values, count)."""
        if mode == "dense":
            every = np.minimum(np.arange(columns + gemv.SLACK), columns - 1).astype(np.int32)
            count = np.array([columns], np.int64)
            return self.slots.address(self.held(every)), x, self.slots.address(self.held(count))
        size = 4 * (columns + gemv.SLACK)
        cols, values, count = self.slots.new(size), self.slots.new(size), self.slots.new(8)
        self.call(thread, gemv.Compact(), gemv.COMPACT, x=x, n=columns, cols=cols, values=values,
                  count=count)  # fmt: skip
        return cols, values, count

    def _columns(self, layer: ChainLayer, lists: Sequence[tuple[int, int, int]], out: int,
                 ahead: int) -> None:  # fmt: skip
        """ahead: columns that are asked for early; processors see by themselves that all come."""
        rows, columns = layer.weight.shape
        vectors = gemv.vectors_of(rows, self.isa, min(COLUMNS_MOST, self.isa.registers // 2))
        weights = packing.tiled(layer.weight.numpy(), vectors, self.isa)
        size = vectors * self.isa.lanes
        bias = None if layer.bias is None else layer.bias.numpy()
        held = packing.biases(bias, len(weights) * size)
        for t, (cols, values, count) in enumerate(lists):
            self.call(t, gemv.ColumnKernel(vectors, layer.relu, ahead), gemv.COLUMNS,
                      weights=self.held(weights), bias=self.held(held), begin=t,
                      end=len(weights), step=self.threads, pitch=4 * size * columns,
                      cols=cols, values=values, count=count, out=out)  # fmt: skip

    def _certified(self, layer: ChainLayer, mode: str, x: int, lists: Sequence[tuple[int, int, int]],
                   out: int) -> None:  # fmt: skip
        rows, columns = layer.weight.shape
        bits, slots, isa = 4 if mode == "two" else 8, self.slots, self.isa
        how, vectors = certify.dots(isa), gemv.vectors_of(rows, isa, certify.tile_vectors(isa))
        weight = layer.weight.numpy()
        bias = None if layer.bias is None else layer.bias.numpy()
        kept: packing.Whole | None = None
        if bits == 8:
            first = packing.eight(weight, bias, vectors, isa)
        else:
            first, kept = packing.four_and_four(weight, bias, vectors, isa)
        width, count = 32 // bits, packing.tiles(rows, vectors, isa)
        room = 4 * (rows + vectors * isa.lanes + gemv.SLACK)
        open_, left = slots.several(self.threads, room), slots.several(self.threads, 8)
        sums = [slots.several(self.threads, room) for _ in range(2)] if kept else [0, 0]
        inputs = []
        for t in range(self.threads):
            inputs.append(self.quantised(t, x, columns, width, np.abs(weight).max(initial=0)))
            u0, u1, groups, listed, numbers, _ = inputs[t]
            self.call(t, certify.Pilot(bits, vectors, how, kept is not None), certify.PILOT,
                      weights=self.held(first.weights), constants=self.held(first.constants),
                      begin=t, end=count, step=self.threads, rows=rows,
                      pitch=first.weights[0].nbytes, u0=u0, u1=u1, groups=groups, count=listed,
                      numbers=numbers, out=out, list=open_ + t, left=left + t,
                      first=sums[0] + t, second=sums[1] + t)  # fmt: skip
        self.tape.phase()
        self.seen[-1][1].extend(range(left, left + self.threads))
        if kept is not None:
            lists_, counts = open_, left
            open_, left = slots.several(self.threads, room), slots.several(self.threads, 8)
            for t, (u0, u1, _, _, numbers, whole) in enumerate(inputs):
                self.call(t, certify.Second(how), certify.SECOND, lists=lists_, counts=counts,
                          first=sums[0], second=sums[1], threads=self.threads, thread=t,
                          weights=self.held(kept.weights), constants=self.held(kept.constants),
                          pitch=kept.weights.shape[1], blocks=kept.weights.shape[1] // 64, u0=u0,
                          u1=u1, numbers=numbers, sums=whole, list=open_ + t,
                          left=left + t)  # fmt: skip
            self.tape.phase()
        self.seen[-1][2].extend(range(left, left + self.threads))
        self.tape.arrays.append(layer.weight)
        held = self.held(packing.biases(bias, rows))
        for t, (cols, values, listed) in enumerate(lists):
            self.call(t, gemv.RowKernel(layer.relu), gemv.ROWS, lists=open_, counts=left,
                      threads=self.threads, thread=t, weights=layer.weight.data_ptr(), bias=held,
                      pitch=4 * columns, cols=cols, values=values, count=listed,
                      out=out)  # fmt: skip

    def quantised(self, thread: int, x: int, columns: int, width: int,
                   largest: float) -> tuple[int, ...]:  # fmt: skip
        """Slots of an input as whole numbers: (u0, u1, groups, their count, numbers, sums)."""
        slots, room = self.slots, -(-columns // 128) * 128 + 256
        u0, u1 = slots.new(room), slots.new(room)
        groups = slots.new(4 * (-(-columns // width) + gemv.SLACK))
        count, numbers, sums = slots.new(8), slots.new(64), slots.new(8)
        limit = struct.unpack("<I", struct.pack("<f", certify.CEILING / max(1.0, largest)))[0]
        self.call(thread, certify.Quantise(width), certify.QUANTISE, x=x, n=columns, u0=u0, u1=u1,
                  groups=groups, count=count, group_count=-(-columns // width), numbers=numbers,
                  limit=limit, sums=sums)  # fmt: skip
        return u0, u1, groups, count, numbers, sums


def padded(layer: ChainLayer, mode: str, isa: Isa) -> int:
    """Numbers that a layer writes: its rows and what fills its last tile."""
    rows = layer.weight.shape[0]
    most = (min(COLUMNS_MOST, isa.registers // 2) if mode in ("dense", "columns")
            else certify.tile_vectors(isa))  # fmt: skip
    vectors = gemv.vectors_of(rows, isa, most)
    return packing.tiles(rows, vectors, isa) * vectors * isa.lanes


class Runs:
    """What a builder wrote, ready to run; several threads may run it at once."""

    def __init__(self, builder: ChainPlanBuilder):
        self.threads, self.slots, self.seen = builder.threads, builder.slots, builder.seen
        self.ready = builder.tape.done(builder.isa)
        self.spare: list[ChainMemory] = []

    def taken(self) -> ChainMemory:
        """Memory for one call, which `given_back` takes."""
        try:
            return self.spare.pop()
        except IndexError:
            arena = TapeArena(self.slots.size)
            for slot, offset in self.slots.offsets.items():
                arena.slots[slot] = arena.address + offset
            for slot, address in self.slots.fixed.items():
                arena.slots[slot] = address
            ready, places = self.ready, np.array([arena.address], np.int64)
            return ChainMemory(Job(ready.entries, ready.ends, ready.threads, places), arena)

    def given_back(self, memory: ChainMemory) -> None:
        """Keep it for another call."""
        if len(self.spare) < SPARE:
            self.spare.append(memory)


class ChainPlan(Runs):
    """plan(x float32 [n, columns], contiguous) -> float32 [n, rows]: the chain, row by row of x.
    Several threads may call it at once.

    NoPlan where the kernels cannot do it: infinite or NaN weights, certified rows without ReLU.
    """

    def __init__(self, layers: Sequence[ChainLayer], modes: Sequence[str], threads: int,
                 isa: Isa | None = None):  # fmt: skip
        isa = isa or host()
        builder = ChainPlanBuilder(threads, isa)
        self.modes, self.layers = tuple(modes), tuple(layers)
        x = INPUT
        for k, (layer, mode) in enumerate(zip(layers, modes, strict=True)):
            if mode not in MODES or (mode in ("certified", "two") and not layer.relu):
                raise NoPlan(f"expected one of {MODES}, certified ones in front of ReLU: {mode}")
            if not all(bool(t.isfinite().all()) for t in (layer.weight, layer.bias)
                       if t is not None):  # fmt: skip
                raise NoPlan("weights with NaN or infinities: 0 times one of them is not 0")
            last = k == len(layers) - 1
            room = 4 * (padded(layer, mode, isa) + gemv.SLACK)
            out = OUTPUT if last else builder.slots.new(room)
            builder.layer(layer, mode, x, out)
            x = out
        self.width = padded(layers[-1], modes[-1], isa)
        super().__init__(builder)
        self.rows = layers[-1].weight.shape[0]

    def __call__(self, x: Tensor, seen: list[list[LayerCounts]] | None = None) -> Tensor:
        """The outputs. seen: gets what each row's call did, layer by layer."""
        count = x.shape[0]
        out = torch.empty((count, self.width))
        memory = self.taken()
        places = memory.arena.slots
        address, to = x.data_ptr(), out.data_ptr()
        for row in range(count):
            places[INPUT] = address + 4 * row * x.shape[1]
            places[OUTPUT] = to + 4 * row * self.width
            memory.job.run(self.threads)
            if seen is not None:
                seen.append(self._looked(memory))
        self.given_back(memory)
        if self.width == self.rows:
            return out
        return out[:, : self.rows] if count == 1 else out[:, : self.rows].contiguous()

    def _looked(self, memory: ChainMemory) -> list[LayerCounts]:
        """What the last call of this memory did."""
        base = memory.arena.memory

        def number(slot: int) -> int:
            if slot in self.slots.offsets:
                place = self.slots.offsets[slot]
                return struct.unpack("<q", base[place : place + 8])[0]
            return -1

        found = []
        for layer, (columns, first, last) in zip(self.layers, self.seen, strict=True):
            rows, all_ = layer.weight.shape
            live = number(columns[0])
            found.append(LayerCounts(all_ if live < 0 else live,
                              sum(map(number, first)) if first else rows,
                              sum(map(number, last)) if last else rows))  # fmt: skip
        return found
