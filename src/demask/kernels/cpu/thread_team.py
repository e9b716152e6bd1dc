"""Threads that run a tape of kernel calls together, one call into machine code per inference.

torch's own threads are used where its OpenMP is GNU's: a second pool beside it would fight for the
cores, since threads of either spin for a while after their work. Elsewhere Python threads enter, as
they do in a forked process, where OpenMP's threads are missing and it would wait for them forever.

A tape has phases; in each, every thread of the plan has a list of calls, and nobody begins a phase
before all have ended the one before. Where fewer threads come than the plan has, each does the work
of several.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir

from demask.kernels.llvm.emitter import I32, I64, VOID, Emitter, Value
from demask.kernels.llvm.jit import CODE

#: a call of a tape: machine code, its argument
ENTRY = np.dtype([("code", "<i8"), ("call", "<i8")])
#: what threads enter with
JOB = np.dtype([(key, "<i8") for key in (
    "entries", "ends", "phases", "threads", "number_of", "count_of", "give_way", "sleep", "present",
    "runs", "arenas", "slots", "slot_count")])  # fmt: skip
SPINS = 2000  # looks at the counter before the processor is offered to others
YIELDS = 200  # such offers before a thread sleeps between looks: others may lack a core for long
NAP = 1000  # microseconds of such a sleep, at most; the first takes 1, each other 1 more
PAD = 64  # bytes of a cache line
PROCESS = os.getpid()  # that imported this file: in one forked later, OpenMP has no threads


@dataclass(frozen=True, slots=True)
class TeamWork:
    """work(job, number, count): what thread `number` of `count` does; work(job) asks OpenMP which
    one it is. A job's `present` counts the threads that have come to barriers so far.

    runs = 0: all threads run the tape together, in the first arena. Else each thread runs whole
    tapes (made for one thread) alone, in an arena of its own, into whose slots it writes those of
    the run.
    """

    asks: bool

    @property
    def arguments(self) -> int:
        return 1 if self.asks else 3

    def emit(self, e: Emitter) -> None:
        job = e.pointer(e.args[0])
        field = {key: e.load(I64, job, k) for k, key in enumerate(JOB.names or ())}
        if self.asks:
            number, count = (
                e.b.sext(_called(e, field[key], I32), I64) for key in ("number_of", "count_of")
            )
        else:
            number, count = e.args[1], e.args[2]
        alone = e.b.icmp_signed(">", field["runs"], I64(0))
        with e.b.if_else(alone) as (then, otherwise):
            with then, e.loop(number, field["runs"], count) as run:
                arena = e.load(I64, e.pointer(field["arenas"]), number)
                own = e.at(e.pointer(field["slots"]), e.b.mul(run, field["slot_count"]), I64)
                with e.loop(I64(0), field["slot_count"]) as slot:
                    place = e.at(e.pointer(arena), e.b.add(slot, I64(1)), I64)
                    e.b.store(e.load(I64, own, slot), place)
                with e.loop(I64(0), field["phases"]) as phase:
                    _phase(e, field, phase, (I64(0), I64(1)), arena)
            with otherwise, e.loop(I64(0), field["phases"]) as phase:
                _phase(e, field, phase, (number, count), e.load(I64, e.pointer(field["arenas"])))
                _barrier(e, field, e.b.mul(e.b.add(phase, I64(1)), count))


def _called(e: Emitter, address: Value, result: Any, *args: Value) -> Value:
    """The result of the function at an address."""
    kind = ir.FunctionType(result, [a.type for a in args])
    return e.b.call(e.b.inttoptr(address, kind.as_pointer()), args)


def _phase(e: Emitter, field: dict[str, Value], phase: Value, team: tuple[Value, Value],
           arena: Value) -> None:  # fmt: skip
    """The calls of one phase that a thread makes: its own, and those of threads that are not
    there."""
    entries, ends = e.pointer(field["entries"]), e.pointer(field["ends"])
    with e.loop(team[0], field["threads"], team[1]) as thread:
        place = e.b.add(e.b.mul(phase, field["threads"]), thread)
        begin, end = e.load(I64, ends, place), e.load(I64, ends, e.b.add(place, I64(1)))
        with e.loop(begin, end) as k:
            entry = e.at(entries, e.b.mul(k, I64(ENTRY.itemsize)))
            _called(e, e.load(I64, entry, 0), VOID, e.load(I64, entry, 1), arena)


def _barrier(e: Emitter, field: dict[str, Value], expected: Value) -> None:
    """Wait until as many threads have come, in all phases so far, as are expected."""
    place, b = e.pointer(field["present"]), e.b
    b.atomic_rmw("add", place, I64(1), "acq_rel")
    spins = e.variable(I64, I64(0))
    look, wait, behind = (e.function.append_basic_block(n) for n in ("look", "wait", "behind"))
    b.branch(look)
    b.position_at_end(look)
    present = b.load_atomic(place, "acquire", 8, typ=I64)
    b.cbranch(b.icmp_signed(">=", present, expected), behind, wait)
    b.position_at_end(wait)
    spins.set(b.add(spins.get(), I64(1)))
    if e.isa.triple.startswith("x86"):
        b.call(e.intrinsic("llvm.x86.sse2.pause", VOID), [])
    with b.if_then(b.icmp_signed(">", spins.get(), I64(SPINS))):
        nap = b.sub(spins.get(), I64(SPINS + YIELDS))
        sleepy = b.icmp_signed(">", nap, I64(0))
        with b.if_else(sleepy) as (then, otherwise):
            with then:
                nap = b.select(b.icmp_signed("<", nap, I64(NAP)), nap, I64(NAP))
                _called(e, field["sleep"], I32, b.trunc(nap, I32))
            with otherwise:
                _called(e, field["give_way"], I32)
    b.branch(look)
    b.position_at_end(behind)


@dataclass(frozen=True, slots=True)
class OpenMP:
    """GNU's, as torch has loaded it: addresses of its functions. process: the one whose threads it
    has."""

    parallel: Any
    number_of: int
    count_of: int
    process: int


@functools.cache
def openmp() -> OpenMP | None:
    """The OpenMP that torch uses, if it is GNU's and the system says where it lies."""
    import torch  # noqa: F401  loads it

    try:
        text = Path("/proc/self/maps").read_text(errors="replace")
    except OSError:
        return None
    found = dict.fromkeys(re.findall(r"(/.*libgomp[^/\n]*)$", text, re.MULTILINE))
    ours = [path for path in found if "torch" in path] or list(found)
    if not ours:
        return None
    try:
        library = ctypes.CDLL(ours[0])
    except OSError:  # the file was replaced since
        return None
    parallel = library.GOMP_parallel
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    places = (getattr(library, name) for name in ("omp_get_thread_num", "omp_get_num_threads"))
    return OpenMP(parallel, *(_address(place) for place in places), process=PROCESS)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache
def _waiting() -> tuple[int, int]:
    """The functions that offer the processor to other threads, and that sleep for microseconds."""
    library = ctypes.CDLL(None)
    return _address(library.sched_yield), _address(library.usleep)


@functools.cache
def _entered() -> tuple[int, Any]:
    """`TeamWork` for OpenMP, as an address; and for threads that say who they are, as a function."""
    asking, told = TeamWork(True), TeamWork(False)
    codes = CODE.addresses([asking, told])
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    return codes[asking], kind(codes[told])


class Job:
    """What one call of a tape needs beside the tape: not to be used by two calls at once."""

    def __init__(self, entries: np.ndarray, ends: np.ndarray, threads: int, arenas: np.ndarray,
                 slots: np.ndarray | None = None):  # fmt: skip
        """slots [runs, inputs and outputs]: for threads that run tapes alone, filled before."""
        self.entries, self.ends, self.arenas, self.slots = entries, ends, arenas, slots
        runs, count, place = (0, 0, 0) if slots is None else (*slots.shape, slots.ctypes.data)
        self.memory = np.zeros(4 * PAD // 8, np.int64)
        self.fields = np.zeros(1, JOB)
        omp = openmp()
        self.fields[0] = (
            entries.ctypes.data, ends.ctypes.data, (len(ends) - 1) // threads, threads,
            0 if omp is None else omp.number_of, 0 if omp is None else omp.count_of, *_waiting(),
            self.memory[PAD // 8 :].ctypes.data, runs, arenas.ctypes.data, place, count,
        )  # fmt: skip
        self.place = self.fields.ctypes.data
        self.omp = omp
        self.asking, self.told = _entered()

    def run(self, threads: int) -> None:
        """Run the tape with at most so many threads."""
        self.memory[:] = 0
        if threads == 1:
            self.told(self.place, 0, 1)
        elif self.omp is not None and self.omp.process == os.getpid():
            self.omp.parallel(self.asking, self.place, threads, 0)
        else:
            self._by_python(threads)

    def _by_python(self, threads: int) -> None:
        """Threads begin together, once it is known how many there are: a system may refuse some."""
        begin, count, others = threading.Event(), 0, []

        def enter(number: int) -> None:
            begin.wait()
            if count:
                self.told(self.place, number, count)

        try:
            for number in range(1, threads):
                other = threading.Thread(target=enter, args=(number,))
                try:
                    other.start()
                except RuntimeError:  # no more threads
                    break
                others.append(other)
            count = 1 + len(others)
        finally:
            begin.set()
        self.told(self.place, 0, count)
        for other in others:
            other.join()
