"""Alternating timings of several calls in one process: medians and quantiles."""

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
        """The timing of samples in seconds; a single sample is its own median and quantiles."""
        if not seconds:
            raise BadInput("a timing needs at least one sample, got none; ask for one pair or more")
        if len(seconds) == 1:
            return cls(seconds[0], seconds[0], seconds[0], 1)
        tenths = quantiles(seconds, n=10, method="inclusive")
        return cls(tenths[4], tenths[0], tenths[8], len(seconds))


def time_alternately(
    contenders: Mapping[str, Callable[[], Any]],
    pairs: int = 30,
    warmup: int = 3,
    *,
    seconds: float = inf,
    clock: Callable[[], float] = perf_counter,
) -> dict[str, Timing]:
    """The timing of each call, by name, from rounds in which each is called once.

    Every second round runs in reverse order, so that slow drifts of the machine and the cache
    contents of other calls affect all calls alike. Python's garbage collector is off meanwhile. The
    caller sets the number of threads and the allocator (`demask.machine.allocator`).

    Args:
        contenders: calls by name.
        pairs: the number of rounds.
        warmup: untimed calls of each before the first round.
        seconds: no further round starts once the rounds took that long; at least one round is
            timed, and the `count` of each timing is the number of rounds.
        clock: returns seconds; tests pass one that needs no real time.

    Raises:
        BadInput: pairs < 1 or warmup < 0.

    >>> sorted(time_alternately({"a": lambda: 1, "b": lambda: 2}, pairs=2))
    ['a', 'b']
    """
    samples = sample_seconds(contenders, pairs, warmup, seconds=seconds, clock=clock)
    return {name: Timing.of(seconds_per_round) for name, seconds_per_round in samples.items()}


def sample_seconds(
    contenders: Mapping[str, Callable[[], Any]],
    pairs: int = 30,
    warmup: int = 3,
    *,
    seconds: float = inf,
    clock: Callable[[], float] = perf_counter,
) -> dict[str, list[float]]:
    """The seconds of each call in each round, by name; arguments and errors as in
    `time_alternately`.

    >>> {name: len(taken) for name, taken in sample_seconds({"a": lambda: 1}, pairs=2).items()}
    {'a': 2}
    """
    if pairs < 1 or warmup < 0:
        raise BadInput(f"expected pairs >= 1 and warmup >= 0, got pairs={pairs}, warmup={warmup}")
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    with _no_collection():
        for call in contenders.values():
            for _ in range(warmup):
                call()
        total = 0.0
        for round_number in range(pairs):
            if round_number and total >= seconds:
                break
            for name in list(contenders)[:: -1 if round_number % 2 else 1]:
                start = clock()
                contenders[name]()
                samples[name].append(clock() - start)
                total += samples[name][-1]
    return samples


@contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage is not collected in the block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
