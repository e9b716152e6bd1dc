"""Calls of kernels, phase by phase, and the buffers between them, until they have addresses."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from demask.kernels.cpu.thread_team import ENTRY
from demask.kernels.llvm.availability import NoPlan
from demask.kernels.llvm.isa import Isa
from demask.kernels.llvm.jit import CODE
from demask.machine.arena import Block, planned
from demask.sparse.plan.tile_layout import GridLayout

HEADER = 4096  # bytes in front of an arena's buffers: its slots
# Address space for the buffers of one thread. What one thread wrote lies in its own cache: no other
# thread should get the same memory later.
APART = 2**27 + 2**13
MAX_SLOTS = HEADER // 8
MOST = 2**31 - 1  # elements of a value: tables of kernels count them in 32 bits


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory of one value in one layout, in use from phase `start` to phase `end`."""

    layout: GridLayout
    fill: float = 0.0
    start: int = 2**31
    end: int = -1

    def used(self, phase: int) -> None:
        self.start, self.end = min(self.start, phase), max(self.end, phase)


Place = tuple[Buffer | int, int]  # a buffer, or a slot (an input or output); bytes behind it


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A kernel's call: its fields by name; buffers among them; arrays are passed by address."""

    kernel: Any
    kind: np.dtype
    buffers: Mapping[str, Place]
    fields: Mapping[str, Any]


@dataclass(slots=True)
class Tape:
    """Phases of calls, a list for each thread."""

    threads: int
    apart: int = APART  # bytes between the arenas of threads
    phases: list[list[list[KernelCall]]] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)  # arrays that machine code reads

    @property
    def now(self) -> int:
        """The phase that is being written."""
        return len(self.phases) - 1

    def phase(self) -> None:
        """What follows reads what came before."""
        if not self.phases or any(self.phases[-1]):
            self.phases.append([[] for _ in range(self.threads)])

    def add(self, thread: int, call: KernelCall) -> None:
        """One more call of a thread in the present phase."""
        self.phases[-1][thread].append(call)
        for place, _ in call.buffers.values():
            if isinstance(place, Buffer):
                place.used(self.now)

    def done(self, isa: Isa) -> EncodedTape:
        """Buffers get their offsets, kernels their addresses."""
        buffers: dict[int, Buffer] = {}
        flat = [call for phase in self.phases for calls in phase for call in calls]
        for call in flat:
            for place, _ in call.buffers.values():
                if isinstance(place, Buffer):
                    buffers[id(place)] = place
        offsets, size = self._placed(buffers)
        code = CODE.addresses((call.kernel for call in flat), isa)
        entries = np.zeros(max(len(flat), 1), ENTRY)
        for k, call in enumerate(flat):
            fields = self._fields(call, offsets)
            self.held.append(fields)
            entries[k] = (code[call.kernel], fields.ctypes.data)
        counts = [len(calls) for phase in self.phases for calls in phase]
        ends = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
        return EncodedTape(entries, ends, self.threads, size, self.held)

    def _placed(self, buffers: Mapping[int, Buffer]) -> tuple[dict[int, int], int]:
        """Offsets of buffers, and bytes of the arena: first what all threads write, then an arena
        for each thread's part of the others."""
        offsets: dict[int, int] = {}
        first, size = HEADER, HEADER
        for buffer in buffers.values():
            if buffer.layout.bytes > 4 * MOST:
                raise NoPlan(f"a value takes {buffer.layout.bytes} bytes, {4 * MOST} at most fit")
        for own in (False, True):
            some = {k: b for k, b in buffers.items() if (b.layout.grid.parts > 1) is own}
            plan = planned([Block(b.layout.bytes, b.start, b.end) for b in some.values()])
            offsets |= {key: first + o for key, o in zip(some, plan.offsets, strict=True)}
            if own and plan.size > self.apart:
                raise NoPlan(f"a thread needs {plan.size} bytes at once")
            size = first + plan.size + (self.threads - 1) * self.apart * (own and bool(some))
            first += plan.size
        return offsets, size

    def _fields(self, call: KernelCall, offsets: Mapping[int, int]) -> np.ndarray:
        found = np.zeros(1, call.kind)
        for key, value in call.fields.items():
            if isinstance(value, np.ndarray):
                self.held.append(value)
                value = value.ctypes.data
            found[key] = value
        for key, (place, more) in call.buffers.items():
            if isinstance(place, Buffer):
                found[f"{key}_slot"], found[key] = 0, offsets[id(place)] + more
            else:
                found[f"{key}_slot"], found[key] = place, more
        return found


@dataclass(frozen=True, slots=True)
class EncodedTape:
    """A tape as machine code reads it; size: bytes of an arena."""

    entries: np.ndarray
    ends: np.ndarray
    threads: int
    size: int
    held: list[Any]


class TapeArena:
    """Memory for one call of a tape. Slot 0 is its own address, the others inputs and outputs.

    NoPlan where there is none now: what runs a plan then computes the same without it.
    """

    def __init__(self, size: int):
        if not hasattr(mmap, "MAP_PRIVATE"):
            raise NoPlan("the kernels need Linux or macOS")
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # a forked process gets memory of its own
        try:
            self.memory = mmap.mmap(-1, size, flags=flags)
        except OSError as error:
            raise NoPlan(f"no room for {size} bytes: {error}") from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.slots = np.frombuffer(self.memory, np.int64, MAX_SLOTS)
        self.address = self.slots.ctypes.data
        self.slots[0] = self.address


def by_thread(count: int, threads: int) -> Sequence[tuple[int, int]]:
    """(begin, end) of each thread's share of things that are alike."""
    cuts = [count * k // threads for k in range(threads + 1)]
    return list(pairwise(cuts))
