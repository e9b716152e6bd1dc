"""Timing that two contenders share: alternated runs in one process, medians and quantiles."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from statistics import quantiles
from time import perf_counter
from typing import Any

from demask.errors import BadInput


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per call: the median, the 10 % and 90 % quantiles, and the number of calls."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        """The timing of these samples; one sample is its own median and quantiles."""
        if not seconds:
            raise BadInput("a timing needs at least one sample, got none; ask for one pair or more")
        if len(seconds) == 1:
            return cls(seconds[0], seconds[0], seconds[0], 1)
        tenths = quantiles(seconds, n=10, method="inclusive")
        return cls(tenths[4], tenths[0], tenths[8], len(seconds))


def alternate(
    contenders: Mapping[str, Callable[[], Any]],
    pairs: int = 30,
    warmup: int = 3,
    *,
    seconds: float = inf,
    clock: Callable[[], float] = perf_counter,
) -> dict[str, Timing]:
    """A timing per contender, from `pairs` rounds in which each contender is called once.

    Rounds alternate their order (forward, backward, forward, ...), so that slow drifts of the
    machine and the cache left by a neighbour fall on all contenders alike. Each is first called
    `warmup` times, untimed. Python's garbage collector is off meanwhile and put back after. Threads
    and allocator are the caller's: see `demask.machine.allocator`.

    seconds: no further round starts once the rounds took that long (a busy machine); at least one
    is made, and each timing's `count` says how many were.
    clock: returns seconds; an argument so that tests need no real time.

    >>> sorted(alternate({"a": lambda: 1, "b": lambda: 2}, pairs=2))
    ['a', 'b']
    """
    found = sampled(contenders, pairs, warmup, seconds=seconds, clock=clock)
    return {name: Timing.of(taken) for name, taken in found.items()}


def sampled(
    contenders: Mapping[str, Callable[[], Any]],
    pairs: int = 30,
    warmup: int = 3,
    *,
    seconds: float = inf,
    clock: Callable[[], float] = perf_counter,
) -> dict[str, list[float]]:
    """The seconds of every call that `alternate` sums up, round by round.

    >>> {name: len(taken) for name, taken in sampled({"a": lambda: 1}, pairs=2).items()}
    {'a': 2}
    """
    if pairs < 1 or warmup < 0:
        raise BadInput(f"expected pairs >= 1 and warmup >= 0, got pairs={pairs}, warmup={warmup}")
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    with _no_collection():
        for call in contenders.values():
            for _ in range(warmup):
                call()
        for turn in range(pairs):
            if turn and sum(map(sum, samples.values())) >= seconds:
                break
            for name in list(contenders)[:: -1 if turn % 2 else 1]:
                start = clock()
                contenders[name]()
                samples[name].append(clock() - start)
    return samples


@contextmanager
def _no_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
