"""Seconds that a call takes on this machine: measured once, kept in a file, else worked out.

A number is worth something only with its machine, so the file groups them by it:
{"version": 1, "machines": {machine: {name: seconds}}}. Numbers whose samples differ much, as on a
busy machine, count in the process that measured them and are not written: the next one measures.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from math import inf, log, nan
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Literal

import torch

from demask.machine.roofline import Roofline
from demask.machine.threads import checked_threads
from demask.machine.timing import Timing

VERSION, MAX_BYTES, MAX_MACHINES, MAX_ANSWERS = 1, 16 * 2**20, 8, 20_000  # of the file
WARMUP, LEAST, MOST, ENOUGH = 2, 3, 15, 4e-3  # calls; ENOUGH: seconds, once LEAST are timed
SPREAD = 0.5  # of the median, between the 10 % and 90 % quantiles: answers above it are not written


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked: one call on given shapes.

    name: canonical, equal for equal questions only: op, shapes, dtypes, layouts, arguments, device.
    flops, bytes: what the call computes and moves, for the analytic answer.
    make: builds the operands and returns the call to time; called only if the answer is not known.
    """

    name: str
    flops: float
    bytes: float
    make: Callable[[], Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Error:
    """How far analytic answers are from measured ones, as |log(analytic / measured)|: the median
    and the 90 % quantile over `count` questions; both are NaN where there was none."""

    count: int
    median: float
    high: float


# What calibrates a machine: its smallest call, its flops and its bytes; kept like other answers.
SMALLEST = Question("smallest call", 8, 64, lambda: partial(torch.relu, torch.ones(8)))
MATMUL = Question("best mm", 2**28, 3 << 20, lambda: partial(torch.mm, *torch.ones(2, 512, 512)))
COPY = Question("best copy", 0, 2**24, lambda: torch.ones(2**21).clone)


@dataclass(slots=True, eq=False)
class Costs:
    """The seconds of calls on this machine; `open` makes one, `save` keeps what it learnt.

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
    _known: dict[str, float] = field(repr=False)  # inf: does not exist here; the oldest first
    _asked: dict[str, float] = field(default_factory=dict, repr=False)  # the analytic answers
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
        """The costs with what a file holds of this machine; a file that is none of ours is empty.

        path: None for demask/costs.json in the user's cache folder, False for no file.
        threads: of torch while measuring; None for as many as it has now.
        measure: False for cached and analytic answers only. clock: returns seconds.
        """
        threads = checked_threads(threads)
        path = _usual_path() if path is None else path
        # realpath: a later change of folder must not move the file, nor a save replace a link.
        final = None if path is False else Path(os.path.realpath(path))
        machine = _machine(threads)
        known = _read(final).get(machine, {}) if final else {}
        return cls(final, machine, threads, measure, clock, known)

    def seconds(self, question: Question) -> float:
        """Seconds of one call: from the file, else measured, else (measure=False) worked out.

        inf where `make` or its call raised: that form does not exist here. Remembered, not written.
        """
        analytic = self._asked[question.name] = self.analytic(question)
        taken = self._answer(question)
        return taken if question.name in self._known else analytic

    def forget(self, names: Iterable[str]) -> None:
        """Ask these questions anew: their answers are not believed."""
        for name in names:
            self._known.pop(name, None)
            self._noisy.discard(name)

    def measured(self, name: str) -> bool:
        """Whether the answer to the question of this name was measured, now or earlier."""
        return self._known.get(name, inf) < inf

    def analytic(self, question: Question) -> float:
        """overhead + the longer of computing and moving, in this machine's numbers if known."""
        call, matmul, copy = map(self._answer, (SMALLEST, MATMUL, COPY))
        machine = Roofline.typical(self.threads)
        if inf not in (call, matmul, copy):
            machine = Roofline(MATMUL.flops / 2 / matmul, COPY.bytes / copy, call)
        return machine.seconds(question.flops / 2, question.bytes)

    def error(self) -> Error:
        """The error of analytic answers, over the questions asked so far that were measured."""
        pairs = [(self._asked[n], self._known[n]) for n in filter(self.measured, self._asked)]
        errors = [abs(log(made / taken)) for made, taken in pairs if 0 < made < inf]
        spread = Timing.of(errors or [nan])
        return Error(len(errors), spread.median, spread.high)

    def save(self) -> None:
        """Write the file, whole or not at all, merged with what others wrote meanwhile; nothing is
        written, and nothing raised, where that cannot be: the file only saves time."""
        if self.path is None or (os.path.exists(self.path) and not os.path.isfile(self.path)):
            return  # no file, or a device, which must not be replaced
        machines = _read(self.path)
        ours = {name: taken for name, taken in self._known.items()
                if taken < inf and name not in self._noisy}  # fmt: skip
        # Ours twice: first in age, since the file may have dropped our oldest; last in value.
        merged = ours | machines.pop(self.machine, {}) | ours
        data = _encoded(machines | {self.machine: merged})  # the newest at the end
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(prefix=".costs-", dir=self.path.parent) as beside:
                Path(beside, "whole").write_bytes(data)
                os.replace(Path(beside, "whole"), self.path)

    def _answer(self, question: Question) -> float:
        """The answer, measured if it is not known; inf where it may not or cannot be."""
        name = question.name
        if name not in self._known and self.measure:
            timing = self._timed(question.make)
            # a clock may stand still, and answers have ratios
            self._known[name] = max(timing.median, 1e-9)
            if timing.high - timing.low > SPREAD * timing.median:
                self._noisy.add(name)
        return self._known.get(name, inf)

    def _timed(self, make: Callable[[], Callable[[], object]]) -> Timing:
        """The seconds of the call that `make` builds; inf where either raises."""
        samples: list[float] = []
        try:
            with _quiet(self.threads):
                call = make()
                for _ in range(WARMUP):
                    call()
                for turn in range(MOST):
                    # By the shortest: calls that the system held up must not end the sampling.
                    if turn >= LEAST and turn * min(samples) >= ENOUGH:
                        break
                    start = self._now()
                    call()
                    samples.append(self._now() - start)
        except Exception:  # of any kind: out of memory, no such kernel, shapes that do not fit
            return Timing(inf, inf, inf, 0)
        return Timing.of(samples)

    def _now(self) -> float:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return self.clock()


@contextmanager
def _quiet(threads: int) -> Iterator[None]:
    """No gradients, no garbage collection, `threads` threads; all is put back after."""
    before, collects = torch.get_num_threads(), gc.isenabled()
    try:
        gc.disable()  # but no gc.collect(), which takes longer than most measurements
        torch.set_num_threads(threads)
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(before)
        if collects:
            gc.enable()


def _usual_path() -> Path | Literal[False]:
    """The file in the user's cache folder, False for a user without one; reads the environment."""
    home, system = Path(os.path.expanduser("~")), sys.platform
    usual = home / {"darwin": "Library/Caches", "win32": "AppData/Local"}.get(system, ".cache")
    variable = {"darwin": "", "win32": "LOCALAPPDATA"}.get(system, "XDG_CACHE_HOME")
    named = Path(os.environ.get(variable, ""))
    folder = named if named.is_absolute() else usual  # the XDG standard: ignore relative ones
    return folder / "demask" / "costs.json" if folder.is_absolute() else False


def _machine(threads: int) -> str:
    """What the numbers hold for, in words: processor, threads, vector instructions, versions."""
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    # "model name" on x86 and its number, for virtual machines hide the name; "CPU part" on ARM.
    found = [line.partition(":")[2].strip() for line in lines if line[:5] in ("model", "CPU p")]
    cpu = ", ".join(dict.fromkeys(found)) or platform.processor() or platform.machine()
    version = "unknown"
    with suppress(metadata.PackageNotFoundError):
        version = metadata.version("demask")
    vectors = torch.backends.cpu.get_cpu_capability()
    return f"{cpu}; {threads} threads; {vectors}; torch {torch.__version__}; demask {version}"


def _read(path: Path) -> dict[str, dict[str, float]]:
    """What a file holds, by machine and name; nothing of what is not as `save` writes it."""
    found: Any = None
    if not os.path.isfile(path):  # a pipe would wait for its writer
        return {}
    with suppress(OSError, ValueError, RecursionError), open(path, "rb") as file:
        data = file.read(MAX_BYTES + 1)
        found = json.loads(data) if len(data) <= MAX_BYTES else None
    if not isinstance(found, dict) or found.get("version") != VERSION:
        return {}
    machines = found.get("machines")
    entries = machines.items() if isinstance(machines, dict) else ()
    return {
        machine: {n: s for n, s in answers.items() if isinstance(s, float) and 0 < s < inf}
        for machine, answers in entries
        if isinstance(answers, dict)
    }


def _encoded(machines: dict[str, dict[str, float]]) -> bytes:
    """The file's text, without the oldest machines and answers where there are too many."""
    most, data = MAX_ANSWERS, b""
    held = [(one, list(answers.items())) for one, answers in machines.items() if answers]
    while most and (not data or len(data) > MAX_BYTES):
        entries = {one: dict(answers[-most:]) for one, answers in held[-MAX_MACHINES:]}
        data = json.dumps({"version": VERSION, "machines": entries}).encode()
        most //= 2
    return data
