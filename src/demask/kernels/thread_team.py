"""Threads that together run a tape of kernel calls, with one call into machine code per inference.

If torch uses the OpenMP of GCC, torch's own threads are used: a second pool in addition would
compete for cores, since threads of either spin for a while after their work. Otherwise Python
threads are started, as in a forked process, where OpenMP would wait forever for threads that do not
exist.

A tape has phases. In each, every thread of the plan has a list of calls, and no thread begins a
phase before all lists of the previous one are done. Each list is claimed before it is run, first by
its own thread: a thread that has waited for long, because another one has no core, claims the list
of that one. If fewer threads arrive than the plan has, each does the work of several.
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

#: a call of a tape: addresses of machine code and of its argument
ENTRY = np.dtype([("code", "<i8"), ("call", "<i8")])
#: argument of `TeamWork`
JOB = np.dtype([(key, "<i8") for key in (
    "entries", "ends", "phases", "threads", "number_of", "count_of", "give_way", "sleep", "done",
    "claims", "runs", "arenas", "slots", "slot_count")])  # fmt: skip
SPINS = 2000  # reads of the counter before a thread yields
YIELDS = 200  # yields before a thread sleeps between reads: others may be without a core for long
NAP = 1000  # longest sleep in microseconds; the first takes 1, each later one 1 more
PAD = 64  # bytes of a cache line
PROCESS = os.getpid()  # at import: in a process forked later, OpenMP has no threads


@dataclass(frozen=True, slots=True)
class TeamWork:
    """work(job, number, count): the share of thread `number` of `count`.

    asks: the function is work(job) and gets both numbers from OpenMP. The `done` field of a job
    counts the lists that are done so far, over all phases; `claims` has for each list of a phase
    the number of phases in which it was claimed.

    runs = 0: all threads run the tape together, in the first arena. Otherwise each thread runs
    whole tapes (planned for one thread) alone, in an arena of its own, into whose slots it writes
    those of the run.
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
        is_alone = e.b.icmp_signed(">", field["runs"], I64(0))
        with e.b.if_else(is_alone) as (then, otherwise):
            with then, e.loop(number, field["runs"], count) as run:
                arena = e.load(I64, e.pointer(field["arenas"]), number)
                run_slots = e.at(e.pointer(field["slots"]), e.b.mul(run, field["slot_count"]), I64)
                with e.loop(I64(0), field["slot_count"]) as slot:
                    slot_address = e.at(e.pointer(arena), e.b.add(slot, I64(1)), I64)
                    e.b.store(e.load(I64, run_slots, slot), slot_address)
                every = I64(0), field["threads"]
                with e.loop(I64(0), field["phases"]) as phase, e.loop(*every) as thread:
                    _run_list(e, field, phase, thread, arena)
            with otherwise, e.loop(I64(0), field["phases"]) as phase:
                arena = e.load(I64, e.pointer(field["arenas"]))
                with e.loop(number, field["threads"], count) as thread:
                    _claim_list(e, field, phase, thread, arena)
                _wait(e, field, phase, arena)


def _called(e: Emitter, address: Value, result: Any, *args: Value) -> Value:
    """The result of calling the function at an address."""
    kind = ir.FunctionType(result, [a.type for a in args])
    return e.b.call(e.b.inttoptr(address, kind.as_pointer()), args)


def _run_list(e: Emitter, field: dict[str, Value], phase: Value, thread: Value,
              arena: Value) -> None:  # fmt: skip
    """Make the calls of a thread in a phase."""
    entries, ends = e.pointer(field["entries"]), e.pointer(field["ends"])
    list_number = e.b.add(e.b.mul(phase, field["threads"]), thread)
    begin, end = e.load(I64, ends, list_number), e.load(I64, ends, e.b.add(list_number, I64(1)))
    with e.loop(begin, end) as k:
        entry = e.at(entries, e.b.mul(k, I64(ENTRY.itemsize)))
        _called(e, e.load(I64, entry, 0), VOID, e.load(I64, entry, 1), arena)


def _claim_list(e: Emitter, field: dict[str, Value], phase: Value, thread: Value,
                arena: Value) -> None:  # fmt: skip
    """Make the calls of a thread in a phase, unless another thread has claimed them."""
    claim = e.at(e.pointer(field["claims"]), e.b.mul(thread, I64(PAD // 8)), I64)
    following = e.b.add(phase, I64(1))
    swapped = e.b.cmpxchg(claim, phase, following, "acq_rel", "monotonic")
    with e.b.if_then(e.b.extract_value(swapped, 1)):
        _run_list(e, field, phase, thread, arena)
        e.b.atomic_rmw("add", e.pointer(field["done"]), I64(1), "acq_rel")


def _wait(e: Emitter, field: dict[str, Value], phase: Value, arena: Value) -> None:
    """Wait until all lists of a phase are done; run those of threads that are late."""
    counter, b = e.pointer(field["done"]), e.b
    expected = b.mul(b.add(phase, I64(1)), field["threads"])
    spins = e.variable(I64, I64(0))
    check, wait, after = (e.function.append_basic_block(n) for n in ("look", "wait", "after"))
    b.branch(check)
    b.position_at_end(check)
    done = b.load_atomic(counter, "acquire", 8, typ=I64)
    b.cbranch(b.icmp_signed(">=", done, expected), after, wait)
    b.position_at_end(wait)
    spins.set(b.add(spins.get(), I64(1)))
    if e.isa.triple.startswith("x86"):
        b.call(e.intrinsic("llvm.x86.sse2.pause", VOID), [])
    with b.if_then(b.icmp_signed(">", spins.get(), I64(SPINS))):
        with e.loop(I64(0), field["threads"]) as thread:
            _claim_list(e, field, phase, thread, arena)
        nap = b.sub(spins.get(), I64(SPINS + YIELDS))
        sleeps = b.icmp_signed(">", nap, I64(0))
        with b.if_else(sleeps) as (then, otherwise):
            with then:
                nap = b.select(b.icmp_signed("<", nap, I64(NAP)), nap, I64(NAP))
                _called(e, field["sleep"], I32, b.trunc(nap, I32))
            with otherwise:
                _called(e, field["give_way"], I32)
    b.branch(check)
    b.position_at_end(after)


@dataclass(frozen=True, slots=True)
class OpenMP:
    """Functions of the libgomp that torch has loaded. process: the process that has its threads."""

    parallel: Any
    number_of: int
    count_of: int
    process: int


@functools.cache
def openmp() -> OpenMP | None:
    """The OpenMP library that torch uses; None if it is not libgomp or /proc is unavailable."""
    import torch  # noqa: F401  loads it

    try:
        text = Path("/proc/self/maps").read_text(errors="replace")
    except OSError:
        return None
    paths = dict.fromkeys(re.findall(r"(/.*libgomp[^/\n]*)$", text, re.MULTILINE))
    torch_paths = [path for path in paths if "torch" in path] or list(paths)
    if not torch_paths:
        return None
    try:
        library = ctypes.CDLL(torch_paths[0])
    except OSError:  # the file was replaced since
        return None
    parallel = library.GOMP_parallel
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    functions = (getattr(library, name) for name in ("omp_get_thread_num", "omp_get_num_threads"))
    return OpenMP(parallel, *(_address(function) for function in functions), process=PROCESS)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache
def _waiting() -> tuple[int, int]:
    """Addresses of sched_yield and usleep."""
    library = ctypes.CDLL(None)
    return _address(library.sched_yield), _address(library.usleep)


@functools.cache
def _entered() -> tuple[int, Any]:
    """`TeamWork` as an address for OpenMP, and as a function for threads with known numbers."""
    for_openmp, numbered = TeamWork(True), TeamWork(False)
    codes = CODE.addresses([for_openmp, numbered])
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    return codes[for_openmp], kind(codes[numbered])


class Job:
    """The memory of one call of a tape, in addition to the tape; not for two calls at once."""

    def __init__(self, entries: np.ndarray, ends: np.ndarray, threads: int, arenas: np.ndarray,
                 slots: np.ndarray | None = None):  # fmt: skip
        """slots [runs, inputs and outputs]: for threads that run tapes alone; filled before."""
        self.entries, self.ends, self.arenas, self.slots = entries, ends, arenas, slots
        runs, count, slots_address = (
            (0, 0, 0) if slots is None else (*slots.shape, slots.ctypes.data)
        )
        self.memory = np.zeros((4 + threads) * PAD // 8, np.int64)
        self.fields = np.zeros(1, JOB)
        omp = openmp()
        done, claims = (self.memory[k * PAD // 8 :].ctypes.data for k in (1, 3))
        self.fields[0] = (
            entries.ctypes.data, ends.ctypes.data, (len(ends) - 1) // threads, threads,
            0 if omp is None else omp.number_of, 0 if omp is None else omp.count_of, *_waiting(),
            done, claims, runs, arenas.ctypes.data, slots_address, count,
        )  # fmt: skip
        self.address = self.fields.ctypes.data
        self.omp = omp
        self.for_openmp, self.numbered = _entered()

    def run(self, threads: int) -> None:
        """Run the tape with at most `threads` threads."""
        self.memory[:] = 0
        if threads == 1:
            self.numbered(self.address, 0, 1)
        elif self.omp is not None and self.omp.process == os.getpid():
            self.omp.parallel(self.for_openmp, self.address, threads, 0)
        else:
            self._by_python(threads)

    def _by_python(self, threads: int) -> None:
        """Start Python threads, which begin once their number is known: some may be refused."""
        begin, count, others = threading.Event(), 0, []

        def enter(number: int) -> None:
            begin.wait()
            if count:
                self.numbered(self.address, number, count)

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
        self.numbered(self.address, 0, count)
        for other in others:
            other.join()
