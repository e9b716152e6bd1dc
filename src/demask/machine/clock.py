"""Alternating timings of calls in one process, their medians and quantiles, and when one is faster.

torch's number of threads: checked, and set in a `with` block.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch

from demask.errors import BadInput

PER_CORE, LEAST = 4, 64  # the most threads: per core; on a machine with few cores


def checked_threads(count: int | None) -> int:
    """`count`, if this machine can start that many threads; for None, torch's number of threads.

    Raises:
        BadInput: less than 1, or so many more than the cores that torch would end the process.

    >>> checked_threads(2)
    2
    """
    if count is None:
        return torch.get_num_threads()
    most = max(LEAST, PER_CORE * (os.cpu_count() or 1))
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= most:
        raise BadInput(f"expected threads from 1 to {most} on this machine, got {count!r}")
    return count


@contextmanager
def set_threads(count: int) -> Iterator[None]:
    """Set torch's number of threads in the block; the number before it is restored after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(checked_threads(count))
    try:
        yield
    finally:
        torch.set_num_threads(before)


PAIRS = 30  # the least number of rounds of a comparison
ALLOWED = 0.97  # a network counts as no slower if the lower bound of the ratio is at least this
QUICK, MOST = 4e-3, 32  # seconds of the untimed calls before a quicker one, and their number at most
CLEAR, FEW = 1.25, 10  # times as fast as the baseline for which so few rounds are enough
DRAWS, CONFIDENCE = 2000, 0.95

Samples = dict[str, list[float]]  # seconds of each round, by name


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per call: the median, the 10 % and 90 % quantiles, and the number of calls."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """The timing of samples in seconds; a single sample is its own median and quantiles."""
        if not seconds:
            raise BadInput("a timing needs at least one sample, got none; ask for one pair or more")
        if len(seconds) == 1:
            return cls(seconds[0], seconds[0], seconds[0], 1)
        tenths = quantiles(seconds, n=10, method="inclusive")
        return cls(tenths[4], tenths[0], tenths[8], len(seconds))

    @classmethod
    def of_each(cls, samples: Mapping[str, Sequence[float]]) -> dict[str, Timing]:
        """The timing of each call, by name."""
        return {name: cls.of(seconds) for name, seconds in samples.items()}


def race(
    calls: Mapping[str, Callable[[], Any]],
    rounds: int = PAIRS,
    warmup: int = 3,
    *,
    seconds: float = inf,
    threads: int | None = None,
    device: torch.device | None = None,
    clock: Callable[[], float] = perf_counter,
    is_enough: Callable[[Samples], bool] = lambda samples: False,
) -> Samples:
    """The seconds of each call in each round, by name.

    Every second round runs in reverse order, so that slow drifts of the machine affect all calls
    alike. A quick call is timed right after untimed ones, as in a loop: caches have what it reads,
    not what others read. Python's garbage collector is off meanwhile. The caller sets the allocator
    (`demask.machine.allocator`) and whether gradients are recorded.

    Args:
        calls: by name.
        rounds: their number, at most.
        warmup: untimed calls of each before the first round.
        seconds: no further round starts once the rounds took that long; at least one is timed.
        threads: of torch meanwhile. Default: as they are.
        device: a call ends when the kernels that it launched there are done. Default: the CPU.
        clock: returns seconds; tests pass one that needs no real time.
        is_enough: whether no further round is necessary, by those so far.

    Raises:
        BadInput: rounds < 1 or warmup < 0.

    >>> {name: len(taken) for name, taken in race({"a": lambda: 1}, 2).items()}
    {'a': 2}
    """
    if rounds < 1 or warmup < 0:
        raise BadInput(f"expected rounds >= 1 and warmup >= 0, got rounds={rounds}, warmup={warmup}")
    samples: Samples = {name: [] for name in calls}

    def now() -> float:
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock()

    with without_collection(), nullcontext() if threads is None else set_threads(threads):
        for call in calls.values():
            for _ in range(warmup):
                call()
        total = 0.0
        for number in range(rounds):
            if number and (total >= seconds or is_enough(samples)):
                break
            for name in list(calls)[:: -1 if number % 2 else 1]:
                if samples[name] and len(calls) > 1:
                    for _ in range(int(QUICK / max(samples[name][-1], QUICK / MOST))):
                        calls[name]()
                start = now()
                calls[name]()
                samples[name].append(now() - start)
                total += samples[name][-1]
    return samples


def median_seconds(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median seconds of each call, by name."""
    return {name: median(seconds) for name, seconds in samples.items()}


def is_faster(least: float, times: float = ALLOWED) -> bool:
    """Whether a call is `times` as fast as another beyond noise. least: the lower 95 % bound of the
    ratio of both. By default, whether it is not slower."""
    return least >= times


def is_clear(baseline: str, candidate: str) -> Callable[[Samples], bool]:
    """For `race`: whether FEW rounds are enough, since the candidate is clearly faster."""

    def is_enough(samples: Samples) -> bool:
        few = len(samples[baseline]) == FEW
        return few and is_faster(lower_bound(samples[baseline], samples[candidate]), CLEAR)

    return is_enough


def lower_bound(baseline: Sequence[float], candidate: Sequence[float], seed: int = 0) -> float:
    """One-sided lower 95 % bound of median(baseline) / median(candidate), by bootstrap over rounds.

    Rounds are resampled as pairs with replacement (Efron 1979), since other load slows both calls
    of a round.

    Args:
        baseline, candidate: seconds of the same rounds, in order; 2 rounds or more.
        seed: of the resampling.

    Raises:
        BadInput: the two have different numbers of rounds, or fewer than 2.

    >>> lower_bound([2.0, 2.1, 2.2] * 10, [1.0, 1.1, 1.0] * 10) > 1.8
    True
    """
    if len(baseline) != len(candidate) or len(baseline) < 2:
        raise BadInput(f"expected rounds of both, 2 or more, got {len(baseline)} and {len(candidate)}")
    draw, rounds = random.Random(seed), list(zip(baseline, candidate, strict=True))
    ratios = []
    for _ in range(DRAWS):
        drawn = draw.choices(rounds, k=len(rounds))
        ratios.append(median(a for a, _ in drawn) / median(b for _, b in drawn))
    return sorted(ratios)[int((1 - CONFIDENCE) * DRAWS)]


def waiting_seconds() -> float:
    """Seconds that threads of this process have waited for a processor, by Linux's count; 0 elsewhere. Those of
    threads that have ended are forgotten."""
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):
            total += int(path.read_text().split()[1])
    return total * 1e-9


@contextmanager
def without_collection() -> Iterator[None]:
    """Garbage is not collected in the block; not before it either, which takes longer than most calls."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
