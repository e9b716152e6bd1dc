"""The plan of a chain linear, ReLU, linear, …: machine code that runs one vector per call.

Each layer has a mode:

- "dense": all columns of the weight are read.
- "columns": the columns whose input is not zero are read.
- "certified": 8-bit weights prove rows zero; the other rows are computed from the columns whose
  input is not zero.
- "two": as "certified", with 4-bit weights before the 8-bit ones.

All four return the same bits (`kernels.cpu.gemv`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demask.exec.tape.tape import HEADER, KernelCall, NoPlan, Tape, TapeArena
from demask.kernels.cpu import gemv
from demask.kernels.cpu import zero_proof as certify
from demask.kernels.llvm.isa import Isa, host
from demask.kernels.thread_team import Job
from demask.pilot.chains import packing

MODES = ("dense", "columns", "certified", "two")
SPARE = 4  # sets of memory that are reused: calls that run at the same time
INPUT, OUTPUT = 1, 2  # slots
COLUMNS_MOST = 16  # vectors of a tile of float32


@dataclass(frozen=True, slots=True)
class ChainLayer:
    """A linear layer: weight float32 [rows, columns], contiguous; bias float32 [rows] or None;
    relu:
    whether ReLU follows."""

    weight: Tensor
    bias: Tensor | None
    relu: bool


@dataclass(frozen=True, slots=True)
class LayerCounts:
    """What one layer read in its last call.

    columns: columns whose input was not zero. first, rows: rows that the first and the last level
    did not prove zero; all rows where nothing is proved.
    """

    columns: int
    first: int
    rows: int


@dataclass(slots=True)
class Slots:
    """The table of addresses of a call: which slot is which memory."""

    size: int = HEADER
    offsets: dict[int, int] = field(default_factory=dict)
    fixed: dict[int, int] = field(default_factory=dict)
    last: int = OUTPUT

    def new(self, size: int) -> int:
        """The number of a new slot for memory of the call, of `size` bytes."""
        self.last += 1
        self.offsets[self.last] = self.size
        self.size += -(-size // 128) * 128 + 128  # no shared cache line: each thread writes its own
        return self.last

    def address(self, address: int) -> int:
        """The number of a new slot for memory that never moves."""
        self.last += 1
        self.fixed[self.last] = address
        return self.last

    def several(self, count: int, size: int) -> int:
        """The first of `count` consecutive new slots of `size` bytes, one for each thread."""
        first = self.last + 1
        for _ in range(count):
            self.new(size)
        return first

    def lists(self, threads: int, size: int) -> tuple[int, int]:
        """The first slots of a list of `size` bytes and its length, one of each per thread."""
        return self.several(threads, size), self.several(threads, 8)


@dataclass(frozen=True, slots=True)
class ChainMemory:
    """Memory of one call."""

    job: Job
    arena: TapeArena


@dataclass(slots=True)
class ChainPlanBuilder:
    """Writes the phases of a plan.

    seen: of each layer the slots of three counts: live columns, open rows of the first and of the
    last level.
    """

    threads: int
    isa: Isa
    slots: Slots = field(default_factory=Slots)
    seen: list[tuple[list[int], list[int], list[int]]] = field(default_factory=list)
    tape: Tape = field(init=False)

    def __post_init__(self) -> None:
        self.tape = Tape(self.threads)

    def keep_alive(self, array: np.ndarray) -> int:
        """The address of an array, which lives as long as the plan."""
        self.tape.arrays.append(array)
        return array.ctypes.data

    def call(self, thread: int, kernel: Any, kind: np.dtype, /, **fields: int) -> None:
        """Append a call of a kernel to a thread of the current phase."""
        self.tape.add(thread, KernelCall(kernel, kind, {}, fields))

    def layer(self, layer: ChainLayer, mode: str, x: int, out: int) -> None:
        """Write the phases of one layer, which reads slot `x` and writes slot `out`."""
        columns = layer.weight.shape[1]
        self.tape.phase()
        lists = [self.listed(t, mode, x, columns) for t in range(self.threads)]
        self.seen.append(([count for *_, count in lists[:1]], [], []))
        if mode in ("dense", "columns"):
            self._write_columns(layer, lists, out, gemv.AHEAD if mode == "columns" else 0)
        elif columns > certify.MOST_COLUMNS:
            raise NoPlan(f"{columns} columns: more than {certify.MOST_COLUMNS} overflow")
        else:
            self._write_certified(layer, mode, x, lists, out)

    def listed(self, thread: int, mode: str, x: int, columns: int) -> tuple[int, int, int]:
        """Slots of the columns that are read: (column numbers, values, count)."""
        if mode == "dense":
            every = np.minimum(np.arange(columns + gemv.SLACK), columns - 1).astype(np.int32)
            count = np.array([columns], np.int64)
            columns_slot = self.slots.address(self.keep_alive(every))
            return columns_slot, x, self.slots.address(self.keep_alive(count))
        size = 4 * (columns + gemv.SLACK)
        cols, values, count = self.slots.new(size), self.slots.new(size), self.slots.new(8)
        self.call(thread, gemv.CompactKernel(), gemv.COMPACT, x=x, n=columns, cols=cols, values=values, count=count)
        return cols, values, count

    def _write_columns(self, layer: ChainLayer, lists: Sequence[tuple[int, int, int]], out: int, ahead: int) -> None:
        """Write a layer that reads listed columns. ahead: how many columns are prefetched; 0 for
        dense layers, whose order the processor predicts."""
        rows, columns = layer.weight.shape
        vectors = gemv.vectors_of(rows, self.isa, min(COLUMNS_MOST, self.isa.registers // 2))
        weights = packing.tile_columns(layer.weight.numpy(), vectors, self.isa)
        size = vectors * self.isa.lanes
        bias = None if layer.bias is None else layer.bias.numpy()
        biases = packing.pad_bias(bias, len(weights) * size)
        for t, (cols, values, count) in enumerate(lists):
            self.call(
                t,
                gemv.ColumnKernel(vectors, layer.relu, ahead),
                gemv.COLUMNS,
                weights=self.keep_alive(weights),
                bias=self.keep_alive(biases),
                begin=t,
                end=len(weights),
                step=self.threads,
                pitch=4 * size * columns,
                cols=cols,
                values=values,
                count=count,
                out=out,
            )

    def _write_certified(
        self, layer: ChainLayer, mode: str, x: int, column_lists: Sequence[tuple[int, int, int]], out: int
    ) -> None:
        """Write a layer whose first level, and second where there is one, proves rows zero."""
        rows, columns = layer.weight.shape
        bits, slots, isa = 4 if mode == "two" else 8, self.slots, self.isa
        dot, vectors = (certify.dot_instruction(isa), gemv.vectors_of(rows, isa, certify.tile_vectors(isa)))
        weight, bias = layer.weight.numpy(), None if layer.bias is None else layer.bias.numpy()
        first, second = packing.pack_levels(weight, bias, bits, vectors, isa)
        width, count = 32 // bits, packing.count_tiles(rows, vectors, isa)
        list_bytes = 4 * (rows + vectors * isa.lanes + gemv.SLACK)
        open_lists, open_counts = slots.lists(self.threads, list_bytes)
        sums = [slots.several(self.threads, list_bytes) for _ in range(2)] if second else [0, 0]
        inputs = []
        for t in range(self.threads):
            inputs.append(self.quantised(t, x, columns, width, np.abs(weight).max(initial=0)))
            u0, u1, groups, listed, numbers, _ = inputs[t]
            kernel = certify.ZeroProofKernel(bits, vectors, dot, second is not None)
            self.call(t, kernel, certify.ZERO_PROOF, weights=self.keep_alive(first.weights),
                      constants=self.keep_alive(first.constants),
                      begin=t, end=count, step=self.threads, rows=rows,
                      pitch=first.weights[0].nbytes, u0=u0, u1=u1, groups=groups, count=listed,
                      numbers=numbers, out=out, list=open_lists + t, left=open_counts + t,
                      first=sums[0] + t, second=sums[1] + t)  # fmt: skip
        self.tape.phase()
        self.seen[-1][1].extend(range(open_counts, open_counts + self.threads))
        if second is not None:
            first_lists, first_counts = open_lists, open_counts
            open_lists, open_counts = slots.lists(self.threads, list_bytes)
            for t, (u0, u1, _, _, numbers, input_sums) in enumerate(inputs):
                self.call(t, certify.SecondProofKernel(dot), certify.SECOND_PROOF,
                          lists=first_lists, counts=first_counts, first=sums[0], second=sums[1],
                          threads=self.threads, thread=t, weights=self.keep_alive(second.weights),
                          constants=self.keep_alive(second.constants),
                          pitch=second.weights.shape[1], blocks=second.weights.shape[1] // 64,
                          u0=u0, u1=u1, numbers=numbers, sums=input_sums, list=open_lists + t,
                          left=open_counts + t)  # fmt: skip
            self.tape.phase()
        self.seen[-1][2].extend(range(open_counts, open_counts + self.threads))
        self._write_open_rows(layer, column_lists, (open_lists, open_counts), out)

    def _write_open_rows(
        self, layer: ChainLayer, column_lists: Sequence[tuple[int, int, int]], open_rows: tuple[int, int], out: int
    ) -> None:
        """Write the exact rows that are not proved zero. open_rows: slots (lists, counts)."""
        rows, columns = layer.weight.shape
        bias = None if layer.bias is None else layer.bias.numpy()
        (open_lists, open_counts), weight = open_rows, layer.weight
        self.tape.arrays.append(weight)
        biases = self.keep_alive(packing.pad_bias(bias, rows))
        for t, (cols, values, listed) in enumerate(column_lists):
            self.call(
                t,
                gemv.RowKernel(layer.relu),
                gemv.ROWS,
                lists=open_lists,
                counts=open_counts,
                threads=self.threads,
                thread=t,
                weights=weight.data_ptr(),
                bias=biases,
                pitch=4 * columns,
                cols=cols,
                values=values,
                count=listed,
                out=out,
            )

    def quantised(self, thread: int, x: int, columns: int, width: int, largest: float) -> tuple[int, ...]:
        """Slots of an input as integers: (u0, u1, groups, group count, constants, sums)."""
        slots, room = self.slots, -(-columns // 128) * 128 + 256
        u0, u1 = slots.new(room), slots.new(room)
        groups = slots.new(4 * (-(-columns // width) + gemv.SLACK))
        count, numbers, sums = slots.new(8), slots.new(64), slots.new(8)
        limit = struct.unpack("<I", struct.pack("<f", certify.CEILING / max(1.0, largest)))[0]
        self.call(
            thread,
            certify.Quantize(width),
            certify.QUANTIZE,
            x=x,
            n=columns,
            u0=u0,
            u1=u1,
            groups=groups,
            count=count,
            group_count=-(-columns // width),
            numbers=numbers,
            limit=limit,
            sums=sums,
        )
        return u0, u1, groups, count, numbers, sums


def padded(layer: ChainLayer, mode: str, isa: Isa) -> int:
    """How many numbers a layer writes: its rows, and what fills its last tile."""
    rows = layer.weight.shape[0]
    most = min(COLUMNS_MOST, isa.registers // 2) if mode in ("dense", "columns") else certify.tile_vectors(isa)
    vectors = gemv.vectors_of(rows, isa, most)
    return packing.count_tiles(rows, vectors, isa) * vectors * isa.lanes


class ChainPlan:
    """plan(x float32 [n, columns], contiguous) -> float32 [n, rows]: the chain, row by row of x.

    Several threads may call it at once. Raises NoPlan where the kernels cannot run the chain:
    weights with NaN or infinities, certified rows without ReLU.
    """

    def __init__(self, layers: Sequence[ChainLayer], modes: Sequence[str], threads: int, isa: Isa | None = None):
        isa = isa or host()
        builder = ChainPlanBuilder(threads, isa)
        self.modes, self.layers = tuple(modes), tuple(layers)
        x = INPUT
        for k, (layer, mode) in enumerate(zip(layers, modes, strict=True)):
            if mode not in MODES or (mode in ("certified", "two") and not layer.relu):
                raise NoPlan(f"expected one of {MODES}, certified ones before a ReLU, got {mode}")
            if not all(bool(t.isfinite().all()) for t in (layer.weight, layer.bias) if t is not None):
                raise NoPlan("the weights have NaN or infinities: 0 times one of them is not 0")
            last = k == len(layers) - 1
            bytes_written = 4 * (padded(layer, mode, isa) + gemv.SLACK)
            out = OUTPUT if last else builder.slots.new(bytes_written)
            builder.layer(layer, mode, x, out)
            x = out
        self.width = padded(layers[-1], modes[-1], isa)
        self.rows = layers[-1].weight.shape[0]
        self.threads, self.slots, self.seen = builder.threads, builder.slots, builder.seen
        self.ready = builder.tape.done(builder.isa)
        self.spare: list[ChainMemory] = []

    def __call__(self, x: Tensor, seen: list[list[LayerCounts]] | None = None) -> Tensor:
        """The outputs float32 [n, rows]. seen: a list that gets, for each row of x, the counts of
        all layers."""
        count = x.shape[0]
        out = torch.empty((count, self.width))
        memory = self._take_memory()
        slots = memory.arena.slots
        address, out_address = x.data_ptr(), out.data_ptr()
        for row in range(count):
            slots[INPUT] = address + 4 * row * x.shape[1]
            slots[OUTPUT] = out_address + 4 * row * self.width
            memory.job.run(self.threads)
            if seen is not None:
                seen.append(self._read_counts(memory))
        self._return_memory(memory)
        if self.width == self.rows:
            return out
        return out[:, : self.rows] if count == 1 else out[:, : self.rows].contiguous()

    def _take_memory(self) -> ChainMemory:
        """Memory for one call, to be returned with `_return_memory`."""
        try:
            return self.spare.pop()
        except IndexError:
            arena = TapeArena(self.slots.size)
            for slot, offset in self.slots.offsets.items():
                arena.slots[slot] = arena.address + offset
            for slot, address in self.slots.fixed.items():
                arena.slots[slot] = address
            ready, tables = self.ready, np.array([arena.address], np.int64)
            return ChainMemory(Job(ready.entries, ready.ends, ready.threads, tables), arena)

    def _return_memory(self, memory: ChainMemory) -> None:
        if len(self.spare) < SPARE:
            self.spare.append(memory)

    def _read_counts(self, memory: ChainMemory) -> list[LayerCounts]:
        """The counts of the last call that used this memory."""
        base = memory.arena.memory

        def number(slot: int) -> int:
            if slot in self.slots.offsets:
                offset = self.slots.offsets[slot]
                return struct.unpack("<q", base[offset : offset + 8])[0]
            return -1

        counts = []
        for layer, (columns, first, last) in zip(self.layers, self.seen, strict=True):
            rows, width = layer.weight.shape
            live = number(columns[0])
            open_first = sum(map(number, first)) if first else rows
            open_last = sum(map(number, last)) if last else rows
            counts.append(LayerCounts(width if live < 0 else live, open_first, open_last))
        return counts
