"""Threads that together run a tape of kernel calls, with one call into machine code per inference.

If torch uses the OpenMP of GCC, torch's own threads are used: a second pool in addition would
compete for cores, since threads of either spin for a while after their work. Otherwise Python
threads are started, as in a forked process, where OpenMP would wait forever for threads that do not
exist.

A tape has phases. In each, every thread of the plan has a list of calls, and no thread begins a
phase before all lists of the previous one are done. Each list is claimed before it is run, first by
its own thread: a thread that waits, because another one has no core, claims the list of that one.
If fewer threads arrive than the plan has, each does the work of several.

Where other processes use the cores, a thread can lose its core for a full time slice in the middle
of a list or of OpenMP's end of a region, and all others wait for it. `Company` notices calls that
take far longer than others of the same job, and lets the caller run alone for a while after them.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Generic, TypeVar

import numpy as np
from llvmlite import ir

from demask.kernels.llvm.emitter import I32, I64, VOID, Emitter, Value
from demask.kernels.llvm.isa import Isa
from demask.kernels.llvm.jit import CODE

Key = TypeVar("Key", bound=Hashable)
Task = TypeVar("Task")
SIZES = 64  # keys of a cache


#: a call of a tape: addresses of machine code and of its argument
ENTRY = np.dtype([("code", "<i8"), ("call", "<i8")])
#: argument of `TeamWork` and `TeamStart`
JOB = np.dtype([(key, "<i8") for key in (
    "entries", "ends", "phases", "threads", "number_of", "count_of", "give_way", "sleep", "done",
    "claims", "runs", "arenas", "slots", "slot_count", "parallel", "shared", "numbered",
    "words")])  # fmt: skip
LOOKS = 64  # reads of the counter, some microseconds, before a thread claims lists of others
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
    full tapes (planned for one thread) alone, in an arena of its own, into whose slots it writes
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
            number, count = (e.b.sext(_call_address(e, field[key], I32), I64) for key in ("number_of", "count_of"))
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
                _wait_for_phase(e, field, phase, arena)


@dataclass(frozen=True, slots=True)
class TeamStart:
    """start(job, threads): zeroes the `words` of a job's memory, then runs it by OpenMP, or in this
    thread if threads is 1."""

    arguments = 2

    def emit(self, e: Emitter) -> None:
        job = e.pointer(e.args[0])
        field = {key: e.load(I64, job, k) for k, key in enumerate(JOB.names or ())}
        with e.loop(I64(0), field["words"]) as k:
            e.b.store(I64(0), e.at(e.pointer(field["done"]), k, I64))
        is_alone = e.b.icmp_signed("==", e.args[1], I64(1))
        with e.b.if_else(is_alone) as (then, otherwise):
            with then:
                _call_address(e, field["numbered"], VOID, e.args[0], I64(0), I64(1))
            with otherwise:
                count = e.b.trunc(e.args[1], I32)
                _call_address(e, field["parallel"], VOID, field["shared"], e.args[0], count, I32(0))


def _call_address(e: Emitter, address: Value, result: Any, *args: Value) -> Value:
    """The result of calling the function at an address."""
    kind = ir.FunctionType(result, [a.type for a in args])
    return e.b.call(e.b.inttoptr(address, kind.as_pointer()), args)


def _run_list(e: Emitter, field: dict[str, Value], phase: Value, thread: Value, arena: Value) -> None:
    entries, ends = e.pointer(field["entries"]), e.pointer(field["ends"])
    list_number = e.b.add(e.b.mul(phase, field["threads"]), thread)
    begin, end = e.load(I64, ends, list_number), e.load(I64, ends, e.b.add(list_number, I64(1)))
    with e.loop(begin, end) as k:
        entry = e.at(entries, e.b.mul(k, I64(ENTRY.itemsize)))
        _call_address(e, e.load(I64, entry, 0), VOID, e.load(I64, entry, 1), arena)


def _claim_list(e: Emitter, field: dict[str, Value], phase: Value, thread: Value, arena: Value) -> None:
    """Make the calls of a thread in a phase, unless another thread has claimed them."""
    claim = e.at(e.pointer(field["claims"]), e.b.mul(thread, I64(PAD // 8)), I64)
    following = e.b.add(phase, I64(1))
    now = e.b.load_atomic(claim, "monotonic", 8, typ=I64)  # leaves its line with the owner
    with e.b.if_then(e.b.icmp_signed("==", now, phase)):
        swapped = e.b.cmpxchg(claim, phase, following, "acq_rel", "monotonic")
        with e.b.if_then(e.b.extract_value(swapped, 1)):
            _run_list(e, field, phase, thread, arena)
            e.b.atomic_rmw("add", e.pointer(field["done"]), I64(1), "acq_rel")


def _wait_for_phase(e: Emitter, field: dict[str, Value], phase: Value, arena: Value) -> None:
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
    looks = b.icmp_signed("==", b.and_(spins.get(), I64(LOOKS - 1)), I64(0))
    with b.if_then(looks), e.loop(I64(0), field["threads"]) as thread:
        _claim_list(e, field, phase, thread, arena)
    with b.if_then(b.icmp_signed(">", spins.get(), I64(SPINS))):
        nap = b.sub(spins.get(), I64(SPINS + YIELDS))
        sleeps = b.icmp_signed(">", nap, I64(0))
        with b.if_else(sleeps) as (then, otherwise):
            with then:
                nap = b.select(b.icmp_signed("<", nap, I64(NAP)), nap, I64(NAP))
                _call_address(e, field["sleep"], I32, b.trunc(nap, I32))
            with otherwise:
                _call_address(e, field["give_way"], I32)
    b.branch(check)
    b.position_at_end(after)


@dataclass(frozen=True, slots=True)
class OpenMP:
    """Functions of the libgomp that torch has loaded. process: the process that has its threads."""

    address: int  # of GOMP_parallel(function, argument, threads, flags)
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
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    return OpenMP(*(_address(getattr(library, name)) for name in names), process=PROCESS)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache
def _yield_and_sleep() -> tuple[int, int]:
    library = ctypes.CDLL(None)
    return _address(library.sched_yield), _address(library.usleep)


@functools.cache
def _entry_points() -> tuple[int, int, Any, Any]:
    """Addresses of `TeamWork` for OpenMP and for threads with known numbers; the latter and
    `TeamStart` as functions."""
    for_openmp, numbered, start = TeamWork(True), TeamWork(False), TeamStart()
    codes = CODE.addresses([for_openmp, numbered, start])
    one, two = (ctypes.CFUNCTYPE(None, ctypes.c_void_p, *[ctypes.c_int64] * n) for n in (1, 2))
    return codes[for_openmp], codes[numbered], two(codes[numbered]), one(codes[start])


class Company:
    """Whether a call may use more threads than its own: not while others use their cores.

    A call that takes `SLOWER` times as long as the fastest of its job, and at least `STALL` seconds
    longer, has waited for a thread without a core. For `factor` times as long as it waited, calls
    use the thread of the caller alone; the factor doubles with each stall that soon follows.
    """

    SLOWER, STALL = 3.0, 1e-3
    LEAST, MOST, LONGEST = 2.0, 256.0, 1.0  # factors, and seconds alone

    def __init__(self) -> None:
        self.until, self.factor, self.alone = 0.0, self.LEAST, 0.0

    def note(self, begin: float, end: float, best: float) -> None:
        """Take note of a call with several threads; best: seconds of the fastest one."""
        lost = end - begin - best
        if lost > self.STALL and end - begin > self.SLOWER * best:
            if begin - self.until > self.alone:  # together for as long as it was alone
                self.factor = self.LEAST
            self.alone = min(self.factor * lost, self.LONGEST)
            self.until, self.factor = end + self.alone, min(2 * self.factor, self.MOST)


class Job:
    """The memory of one call of a tape, in addition to the tape; not for two calls at once."""

    def __init__(
        self,
        entries: np.ndarray,
        ends: np.ndarray,
        threads: int,
        arenas: np.ndarray,
        slots: np.ndarray | None = None,
        *,
        steady: bool = False,
    ):
        """slots [runs, inputs and outputs]: for threads that run tapes alone; filled before.
        steady: whether all calls do as much work, so that a slow one has waited."""
        self.entries, self.ends, self.arenas, self.slots = entries, ends, arenas, slots
        runs, count, slots_address = (0, 0, 0) if slots is None else (*slots.shape, slots.ctypes.data)
        self.memory = np.zeros((4 + threads) * PAD // 8, np.int64)
        self.fields = np.zeros(1, JOB)
        omp, waiting = openmp(), _yield_and_sleep()
        shared, alone, self.numbered, self.start = _entry_points()
        parallel = (0, 0, 0) if omp is None else (omp.number_of, omp.count_of, omp.address)
        done, claims = (self.memory[k * PAD // 8 :].ctypes.data for k in (1, 3))
        self.fields[0] = (
            entries.ctypes.data,
            ends.ctypes.data,
            (len(ends) - 1) // threads,
            threads,
            *parallel[:2],
            *waiting,
            done,
            claims,
            runs,
            arenas.ctypes.data,
            slots_address,
            count,
            parallel[2],
            shared,
            alone,
            (2 + threads) * PAD // 8,
        )
        self.address = self.fields.ctypes.data
        self.omp, self.best = omp, float("inf")
        self.company = Company() if steady else None

    def run(self, threads: int) -> None:
        """Run the tape with at most `threads` threads."""
        if threads == 1:
            self.start(self.address, 1)
            return
        begin = perf_counter()
        if self.company is not None and begin < self.company.until:
            self.start(self.address, 1)
            return
        if self.omp is not None and self.omp.process == os.getpid():
            self.start(self.address, threads)
        else:
            self.memory[:] = 0
            self._run_by_python(threads)
        if self.company is not None:
            end = perf_counter()
            self.best = min(self.best, end - begin)
            self.company.note(begin, end, self.best)

    def _run_by_python(self, threads: int) -> None:
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


def job_of_calls(kernel: Any, calls: np.ndarray, isa: Isa) -> Job:
    """The job in which each thread makes one call of a kernel, with an element of `calls`."""
    entries, code = np.zeros(len(calls), ENTRY), CODE.addresses([kernel], isa)[kernel]
    for k in range(len(calls)):
        entries[k] = code, calls[k:].ctypes.data
    return Job(entries, np.arange(len(calls) + 1, dtype=np.int64), len(calls), np.zeros(1, np.int64))


class SpareTasks(Generic[Key, Task]):
    """Tasks that no thread runs now, by what they are for; several threads may use it at once."""

    def __init__(self) -> None:
        self.tasks: dict[Key, list[Task]] = {}

    def take(self, key: Key, build: Callable[[], Task]) -> Task:
        """A task that is this thread's until it is put back; a new one where none is spare."""
        try:
            return self.tasks[key].pop()
        except (KeyError, IndexError):
            return build()

    def put(self, key: Key, task: Task) -> None:
        """Keep a task for the next run."""
        if key not in self.tasks and len(self.tasks) >= SIZES:
            self.tasks.clear()
        self.tasks.setdefault(key, []).append(task)
