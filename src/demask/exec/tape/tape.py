"""Kernel calls, phase by phase, and their buffers, before and after memory is assigned."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from demask.exec.tape.tile_layout import GridLayout
from demask.kernels.llvm.availability import NoPlan
from demask.kernels.llvm.isa import Isa
from demask.kernels.llvm.jit import CODE
from demask.kernels.thread_team import ENTRY
from demask.machine.arena import Block, plan_arena
from demask.ops.regions import Interval

HEADER = 4096  # bytes of slots before the buffers of an arena
# Address space for the buffers of one thread. Values that a thread wrote are in its own cache, so
# no other thread should use the same memory later.
THREAD_BYTES = 2**27 + 2**13
MAX_SLOTS = HEADER // 8
STATIC = MAX_SLOTS - 1  # slot with the address of static values
INEXACT = MAX_SLOTS - 2  # slot that kernels set to 1 where another plan has to compute the outputs
MOST = 2**31 - 1  # elements of a value: kernels use 32-bit element numbers


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory of one value in one layout, in use from phase `start` to phase `end`.

    offset: where it starts in the memory of static values; None for memory of the arena. base,
    shift: the value whose memory it is a part of, and the bytes of that before it.
    """

    layout: GridLayout
    fill: float = 0.0
    start: int = 2**31
    end: int = -1
    offset: int | None = None
    base: Buffer | None = None
    shift: int = 0

    def used(self, phase: int) -> None:
        """Extend the time in use to a phase."""
        owner = self.owner[0]
        owner.start, owner.end = min(owner.start, phase), max(owner.end, phase)

    def channels(self, first: int, count: int, line: int) -> Buffer:
        """Some channels as a buffer in the same memory. line: bytes of a line."""
        batch, _, height, width = self.layout.size
        layout = replace(self.layout, size=(batch, count, height, width))
        return Buffer(layout, self.fill, base=self, shift=first * self.layout.pitch * line)

    @property
    def owner(self) -> tuple[Buffer, int]:
        """The buffer that owns the memory, and the bytes of that before this one."""
        if self.base is None:
            return self, 0
        owner, shift = self.base.owner
        return owner, shift + self.shift


Location = tuple[Buffer | int, int]  # a buffer, or the slot of an input or output; byte offset


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A call of a kernel: buffers and other fields by name; arrays are passed by address."""

    kernel: Any
    kind: np.dtype
    buffers: Mapping[str, Location]
    fields: Mapping[str, Any]


@dataclass(slots=True)
class Tape:
    """Phases of calls, with one list per thread."""

    threads: int
    thread_bytes: int = THREAD_BYTES  # from the arena of a thread to the next
    phases: list[list[list[KernelCall]]] = field(default_factory=list)
    arrays: list[Any] = field(default_factory=list)  # arrays that machine code reads
    value: int = 0  # which the calls that are added compute, or read
    kernels: dict[int, dict[tuple[int, str], int]] = field(default_factory=dict)  # of values: phase, kernel -> calls

    @property
    def now(self) -> int:
        """The number of the last phase."""
        return len(self.phases) - 1

    def phase(self) -> None:
        """Start a phase: its calls may read results of earlier phases."""
        if not self.phases or any(self.phases[-1]):
            self.phases.append([[] for _ in range(self.threads)])

    def add(self, thread: int, call: KernelCall) -> None:
        """Append a call of a thread to the last phase."""
        self.phases[-1][thread].append(call)
        counts, key = self.kernels.setdefault(self.value, {}), (self.now, type(call.kernel).__name__)
        counts[key] = counts.get(key, 0) + 1
        for buffer, _ in call.buffers.values():
            if isinstance(buffer, Buffer):
                buffer.used(self.now)

    def done(self, isa: Isa) -> EncodedTape:
        """The tape with addresses of buffers and kernels."""
        buffers: dict[int, Buffer] = {}
        flat = [call for phase in self.phases for calls in phase for call in calls]
        for call in flat:
            for buffer, _ in call.buffers.values():
                if isinstance(buffer, Buffer) and (owner := buffer.owner[0]).offset is None:
                    buffers[id(owner)] = owner
        offsets, size, used = self._assign_offsets(buffers)
        code = CODE.addresses((call.kernel for call in flat), isa)
        entries = np.zeros(max(len(flat), 1), ENTRY)
        for k, call in enumerate(flat):
            fields = self._field_array(call, offsets)
            self.arrays.append(fields)
            entries[k] = (code[call.kernel], fields.ctypes.data)
        counts = [len(calls) for phase in self.phases for calls in phase]
        ends = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
        return EncodedTape(entries, ends, self.threads, size, self.arrays, used)

    def _assign_offsets(self, buffers: Mapping[int, Buffer]) -> tuple[dict[int, int], int, tuple[Interval, ...]]:
        """Offsets of buffers, bytes of the arena, and the ranges of them that are used.

        Buffers shared by all threads come first, then one arena per thread for its parts of others.
        """
        offsets: dict[int, int] = {}
        first, size, used = HEADER, HEADER, [(0, HEADER)]
        for buffer in buffers.values():
            if buffer.layout.bytes > 4 * MOST:
                raise NoPlan(f"a value has {buffer.layout.bytes} bytes, more than {4 * MOST}")
        for is_per_thread in (False, True):
            selected = {k: b for k, b in buffers.items() if (b.layout.grid.parts > 1) is is_per_thread}
            plan = plan_arena([Block(b.layout.bytes, b.start, b.end) for b in selected.values()])
            offsets |= {key: first + o for key, o in zip(selected, plan.offsets, strict=True)}
            if is_per_thread and plan.size > self.thread_bytes:
                raise NoPlan(f"a thread needs {plan.size} bytes at once")
            starts = [first + k * self.thread_bytes for k in range(self.threads if is_per_thread and selected else 1)]
            used += [(start, start + plan.size) for start in starts]
            size, first = used[-1][1], first + plan.size
        return offsets, size, tuple(used)

    def _field_array(self, call: KernelCall, offsets: Mapping[int, int]) -> np.ndarray:
        """The fields of a call as an array."""
        fields = np.zeros(1, call.kind)
        for key, value in call.fields.items():
            if isinstance(value, np.ndarray):
                self.arrays.append(value)
                value = value.ctypes.data
            fields[key] = value
        for key, (location, offset) in call.buffers.items():
            slot, first = (location, 0) if isinstance(location, int) else _buffer_address(location, offsets)
            fields[f"{key}_slot"], fields[key] = slot, first + offset
        return fields


def _buffer_address(buffer: Buffer, offsets: Mapping[int, int]) -> tuple[int, int]:
    owner, shift = buffer.owner
    if owner.offset is not None:
        return STATIC, owner.offset + shift
    return 0, offsets[id(owner)] + shift


@dataclass(frozen=True, slots=True)
class EncodedTape:
    """A tape for machine code. size: bytes of an arena; used: the ranges of them that are used. arrays: memory that the
    code reads."""

    entries: np.ndarray
    ends: np.ndarray
    threads: int
    size: int
    arrays: list[Any]
    used: tuple[Interval, ...]


class TapeArena:
    """Memory for one call of a tape. Slot 0 is its own address, the others are inputs and outputs.

    Raises NoPlan if no memory is available now; callers then compute the same without the plan.
    """

    def __init__(self, size: int):
        if not hasattr(mmap, "MAP_PRIVATE"):
            raise NoPlan("the kernels need Linux or macOS")
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # a forked process has its own memory
        try:
            self.memory = mmap.mmap(-1, size, flags=flags)
        except OSError as error:
            raise NoPlan(f"no memory for {size} bytes: {error}") from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # Linux without huge pages
                self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.slots = np.frombuffer(self.memory, np.int64, MAX_SLOTS)
        self.address = self.slots.ctypes.data
        self.slots[0] = self.address

    def set_slots(self, addresses: Sequence[int]) -> None:
        """Store the addresses of inputs and outputs."""
        struct.pack_into(f"={len(addresses)}q", self.slots.data, 8, *addresses)


def by_thread(count: int, threads: int) -> Sequence[tuple[int, int]]:
    """(begin, end) of each thread's share of `count` equal items."""
    cuts = [count * k // threads for k in range(threads + 1)]
    return list(pairwise(cuts))


def aligned(array: np.ndarray, dtype: type = np.float32) -> np.ndarray:
    """A copy with elements of 4 bytes that starts at a cache line."""
    raw = np.zeros(array.size * 4 + 64, np.uint8)
    skipped = -raw.ctypes.data % 64
    copy = raw[skipped : skipped + array.size * 4].view(dtype).reshape(array.shape)
    copy[:] = array
    return copy
