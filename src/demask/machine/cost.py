"""Seconds of calls on this machine: measured once and cached in a file, or predicted.

The file groups seconds by machine: {"version": 1, "machines": {machine: {name: seconds}}}.
Measurements of a busy machine, in which times spread widely or threads wait for a processor, are used
in the process that measured them and not written, so that the next process measures again.

Seconds predicted from multiply-adds and bytes (`Roofline`) rank plans; actual times differ.
`traverse` and `pilot` use `TWO_CORES`, so that plans are the same on every machine; `Costs` uses
`typical` if it may not measure.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf, log, nan
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, time
from typing import Any, Literal

import torch

from demask.failures import is_strict
from demask.installation import VERSION
from demask.machine.clock import (
    Samples,
    Timing,
    checked_threads,
    race,
    set_threads,
    waiting_seconds,
    without_collection,
)
from demask.machine.private_files import cache_folder


@dataclass(frozen=True, slots=True)
class Roofline:
    """Rates of a machine.

    Attributes:
        macs: float32 multiply-adds per second.
        far, near: bytes per second from and to memory; from and to caches.
        call: overhead of a call in seconds.
        new, disk: bytes per second of pages at their first use; of files.
        cache: the most bytes of one step for which the rate `near` applies.
    """

    macs: float
    far: float
    call: float
    near: float = inf
    new: float = inf
    disk: float = inf
    cache: float = 0

    @classmethod
    def typical(cls, threads: int) -> Roofline:
        """Rates of a typical server of the last ten years, with this number of threads."""
        return cls(macs=2.5e10 * threads, far=1e10, call=3e-6)

    def seconds(self, macs: float, nbytes: float) -> float:
        """Predicted seconds of one call: computation and memory traffic overlap (the roofline model
        of Williams, Waterman and Patterson, 2009)."""
        return self.call + max(macs / self.macs, nbytes / self.far)


#: Two cores of a server, in round numbers. `call` is the overhead of one step of a plan: Python
#: code and synchronization of threads.
TWO_CORES = Roofline(macs=90e9, near=80e9, far=40e9, new=3e9, disk=0.5e9, cache=20 * 2**20, call=120e-6)


FORMAT, MAX_BYTES, MAX_MACHINES, MAX_ANSWERS = 1, 16 * 2**20, 8, 20_000  # of the file
WARMUP, LEAST, MOST, ENOUGH = 2, 3, 15, 4e-3  # calls; ENOUGH: seconds, once LEAST are timed
SPREAD = 0.5  # of the median, between the 10 % and 90 % quantiles: answers above it are not written
WAITED = 0.1  # of the time that calls are timed: answers above it are not written


@dataclass(frozen=True, slots=True)
class Question:
    """A call on operands of certain shapes, whose seconds are wanted.

    Attributes:
        name: canonical, equal for equal calls only: op, shapes, dtypes, layouts, arguments, device.
        flops, bytes: what the call computes and moves, for the analytic answer.
        make: builds the operands and returns the call to time; not called if the seconds are known.
    """

    name: str
    flops: float
    bytes: float
    make: Callable[[], Callable[[], object]]


@dataclass(frozen=True, slots=True)
class CostError:
    """Error of the analytic answers, |log(analytic / measured)|: the median and the 90 % quantile
    (`high`) over `count` questions; both are NaN if there are none."""

    count: int
    median: float
    high: float


# Calls that calibrate a machine: overhead, flops and bytes per second; cached like other answers.
SMALLEST = Question("smallest call", 8, 64, lambda: partial(torch.relu, torch.ones(8)))
MATMUL = Question("best mm", 2**28, 3 << 20, lambda: partial(torch.mm, *torch.ones(2, 512, 512)))
COPY = Question("best copy", 0, 2**24, lambda: torch.ones(2**21).clone)


@dataclass(slots=True, eq=False)
class Costs:
    """The seconds of calls on this machine; `open` reads the file, `save` writes it.

    >>> from itertools import count
    >>> costs = Costs.open(False, threads=1, clock=count().__next__)  # each call takes 1 second
    >>> relu = Question("relu(f32[8])", 8, 64, lambda: partial(torch.relu, torch.ones(8)))
    >>> costs.seconds(relu), costs.measured("relu(f32[8])")
    (1.0, True)
    """

    path: Path | None
    machine: str
    threads: int
    measure: bool
    clock: Callable[[], float]
    _known: dict[str, float] = field(repr=False)  # inf: the call raises here; the oldest first
    _predicted: dict[str, float] = field(default_factory=dict, repr=False)  # analytic answers
    _noisy: set[str] = field(default_factory=set, repr=False)  # measured, not to be written

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | Literal[False] | None = None,
        *,
        threads: int | None = None,
        measure: bool = True,
        clock: Callable[[], float] = perf_counter,
    ) -> Costs:
        """The costs that a file has for this machine; a file of another format counts as empty.

        Args:
            path: None for demask/costs.json in the user's cache folder, False for no file.
            threads: torch's number of threads while measuring; None for the current number.
            measure: False for cached and analytic answers only.
            clock: returns seconds.

        Raises:
            BadInput: a number of threads that this machine cannot start.
        """
        threads = checked_threads(threads)
        if path is None:
            folder = cache_folder()
            path = False if folder is None else folder / "costs.json"
        # realpath: a later change of folder must not move the file, nor a save replace a link.
        final = None if path is False else Path(os.path.realpath(path))
        machine = _machine_key(threads)
        known = _read_machines(final).get(machine, {}) if final else {}
        return cls(final, machine, threads, measure, clock, known)

    def seconds(self, question: Question) -> float:
        """Seconds of one call: from the file, else measured, else (measure=False) predicted.

        inf if `make` or its call raises: this machine cannot run the call. Not written to the file.
        """
        analytic = self._predicted[question.name] = self.analytic(question)
        taken = self._measured_or_inf(question)
        return taken if question.name in self._known else analytic

    def known(self, name: str) -> float | None:
        """The seconds with this name; None if they were not measured."""
        return self._known.get(name)

    def time_calls(
        self,
        calls: Mapping[str, Callable[[], object]],
        rounds: int,
        warmup: int = 1,
        *,
        seconds: float = inf,
        is_enough: Callable[[Samples], bool] = lambda samples: False,
    ) -> None:
        """Time calls in turns, and add their seconds by name. For rounds, warmup, seconds and is_enough see
        `demask.machine.clock.race`."""
        device = torch.device("cuda") if torch.cuda.is_initialized() else None
        waited = waiting_seconds()
        with torch.no_grad(), without_collection(), set_threads(self.threads):
            samples = race(calls, rounds, warmup, seconds=seconds, device=device, clock=self.clock, is_enough=is_enough)
        is_busy = waiting_seconds() - waited > WAITED * sum(map(sum, samples.values()))
        for name, timing in Timing.of_each(samples).items():
            self._known[name] = max(timing.median, 1e-9)  # a clock may return equal times, and answers are divided
            if is_busy or timing.high - timing.low > SPREAD * timing.median:
                self._noisy.add(name)

    def forget(self, names: Iterable[str]) -> None:
        """Drop the answers with these names, so that they are measured again."""
        for name in names:
            self._known.pop(name, None)
            self._noisy.discard(name)

    def measured(self, name: str) -> bool:
        """Whether the question with this name was measured, by this process or an earlier one."""
        return self._known.get(name, inf) < inf

    def analytic(self, question: Question) -> float:
        """Predicted seconds: overhead + max(compute, memory), by this machine's rates if known."""
        return self.roofline(question.flops, question.bytes)

    def roofline(self, flops: float, size: float) -> float:
        """Predicted seconds of a call that computes `flops` and moves `size` bytes."""
        call, matmul, copy = map(self._measured_or_inf, (SMALLEST, MATMUL, COPY))
        machine = Roofline.typical(self.threads)
        if inf not in (call, matmul, copy):
            machine = Roofline(MATMUL.flops / 2 / matmul, COPY.bytes / copy, call)
        return machine.seconds(flops / 2, size)

    def error(self) -> CostError:
        """The error of the analytic answers, over the measured questions so far."""
        pairs = [(self._predicted[n], self._known[n]) for n in filter(self.measured, self._predicted)]
        errors = [abs(log(analytic / measured)) for analytic, measured in pairs if 0 < analytic < inf]
        timing = Timing.of(errors or [nan])
        return CostError(len(errors), timing.median, timing.high)

    def save(self) -> None:
        """Write the file atomically, merged with what other processes wrote meanwhile. Ignores
        errors of the file system: the file only saves time."""
        if self.path is None or (os.path.exists(self.path) and not os.path.isfile(self.path)):
            return  # no file, or a device, which must not be replaced
        machines = _read_machines(self.path)
        ours = {name: taken for name, taken in self._known.items() if taken < inf and name not in self._noisy}
        # Ours twice: first for the order by age, as the file may lack our oldest; last for values.
        merged = ours | machines.pop(self.machine, {}) | ours
        data = _encode_machines(machines | {self.machine: merged})  # the newest at the end
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            for old in self.path.parent.glob(".costs-*"):  # of a killed process
                if time() - old.stat().st_mtime > 3600:
                    shutil.rmtree(old)
            with TemporaryDirectory(prefix=".costs-", dir=self.path.parent) as folder:
                Path(folder, "complete").write_bytes(data)
                os.replace(Path(folder, "complete"), self.path)

    def _measured_or_inf(self, question: Question) -> float:
        """Seconds of a call, measured if they are not known; inf if it may not or cannot run."""
        name = question.name
        if name not in self._known and self.measure:
            self._time_call(question)
        return self._known.get(name, inf)

    def _time_call(self, question: Question) -> None:
        def is_enough(samples: Samples) -> bool:
            # By the shortest: calls that the system delayed must not end the sampling.
            (seconds,) = samples.values()
            return len(seconds) >= LEAST and len(seconds) * min(seconds) >= ENOUGH

        try:
            with torch.no_grad(), without_collection(), set_threads(self.threads):
                self.time_calls({question.name: question.make()}, MOST, WARMUP, is_enough=is_enough)
        except Exception:  # of any kind: out of memory, no such kernel, shapes that do not fit
            if is_strict():
                raise
            self._known[question.name] = inf


@functools.cache
def costs_of_machine(threads: int) -> Costs:
    """The measurements of this machine, read once. threads: of torch."""
    return Costs.open(threads=threads)


def _machine_key(threads: int) -> str:
    """The key of the machine in the file: processor, threads, vector instructions, versions."""
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    # "model name" on x86 and its number, for virtual machines hide the name; "CPU part" on ARM.
    models = [line.partition(":")[2].strip() for line in lines if line[:5] in ("model", "CPU p")]
    cpu = ", ".join(dict.fromkeys(models)) or platform.processor() or platform.machine()
    vectors = torch.backends.cpu.get_cpu_capability()
    return f"{cpu}; {threads} threads; {vectors}; torch {torch.__version__}; demask {VERSION}"


def _read_machines(path: Path) -> dict[str, dict[str, float]]:
    """The seconds in a file, by machine and name, without values that `save` would not write."""
    content: Any = None
    if not os.path.isfile(path):  # a pipe would wait for its writer
        return {}
    with suppress(OSError, ValueError, RecursionError), open(path, "rb") as file:
        data = file.read(MAX_BYTES + 1)
        content = json.loads(data) if len(data) <= MAX_BYTES else None
    if not isinstance(content, dict) or content.get("version") != FORMAT:
        return {}
    machines = content.get("machines")
    entries = machines.items() if isinstance(machines, dict) else ()
    return {
        machine: {n: s for n, s in answers.items() if isinstance(s, float) and 0 < s < inf}
        for machine, answers in entries
        if isinstance(answers, dict)
    }


def _encode_machines(machines: dict[str, dict[str, float]]) -> bytes:
    """The file's bytes; the oldest machines and answers are left out if there are too many."""
    answers_each, data = MAX_ANSWERS, b""
    nonempty = [(machine, list(answers.items())) for machine, answers in machines.items() if answers]
    while answers_each and (not data or len(data) > MAX_BYTES):
        entries = {machine: dict(answers[-answers_each:]) for machine, answers in nonempty[-MAX_MACHINES:]}
        data = json.dumps({"version": FORMAT, "machines": entries}).encode()
        answers_each //= 2
    return data
