"""Measured seconds of networks, as `demask.optimize` runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import mean
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import nn

from demask.graph.provenance import GIVEN
from demask.machine.clock import checked_threads, race, set_threads
from demask.prune.allocation.layer_seconds import SEGMENT, TORCH
from demask.registry import RUNNERS
from demask.shrink.demask import demask

# Of the timing of a network: short ones take as long as others, since a shared machine may be slow
# for tenths of seconds.
CALLS, BLOCK, SHORT, SECONDS = 20_000, 7, 0.02, 3.0


@dataclass(frozen=True, slots=True)
class NetworkTime:
    """Seconds of one call of a network.

    Attributes:
        seconds: of the network as `demask.optimize` returns it.
        runners: by what runs its layers, "segment" or "torch", the seconds of the fastest such
            network.

    Example:
        >>> from demask.prune import NetworkTime
        >>> NetworkTime(2e-3, {"torch": 2e-3}).seconds
        0.002
    """

    seconds: float
    runners: Mapping[str, float]


@dataclass(slots=True)
class NetworkTimer:
    """Times networks at the speed that the machine had at the first of them.

    Shared machines become slower and faster within minutes, by up to two times. So every later
    network is timed in turns with the first one, and its seconds are those of the first one times
    the ratio of both.

    Args:
        threads: number of CPU threads; None: `torch.get_num_threads()`.
        cache: of `demask.optimize`.
        clock: returns seconds; None: the time of the process on one thread, else of the wall.

    Attributes:
        first: the first network, ready to call; None before it.
        seconds: of one call of it.
        ratios: for each later network, the seconds of the first one in turns with it, over
            `seconds`: how much slower the machine was.

    Example:
        >>> import torch
        >>> from demask.prune import NetworkTimer
        >>> timer = NetworkTimer(threads=1)
        >>> x = torch.zeros(8, 64)
        >>> first = timer.seconds_of(torch.nn.Linear(64, 64), (x,), {})
        >>> timer.seconds_of(torch.nn.Linear(64, 9), (x,), {}) > 0, first == timer.seconds
        (True, True)
    """

    threads: int | None = None
    cache: Any = None
    clock: Callable[[], float] | None = None
    first: Callable[[], object] | None = None
    seconds: float = 0.0
    ratios: list[float] = field(default_factory=list)

    def __call__(self, network: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NetworkTime:
        """Seconds of a network, demasked and optimized. Those of the slower ways to run it are in
        proportion to what `optimize` measured."""
        slim = demask(network, args, kwargs, check=False, result="graph")
        optimize = RUNNERS.get("optimize")
        fast = optimize(slim, args, kwargs, threads=self.threads, cache=self.cache)
        decision = fast.demasked.decisions[0]
        seconds = self.seconds_of(fast, args, kwargs)
        chosen = runner_of(decision.chosen)
        runners = {chosen: seconds}
        for name, taken in decision.seconds.items():
            runner = runner_of(name)
            if runner != chosen and name != GIVEN:
                slower = seconds * max(taken / decision.seconds[decision.chosen], 1.0)
                runners[runner] = min(slower, runners.get(runner, slower))
        return NetworkTime(seconds, runners)

    def seconds_of(self, network: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
        """Seconds of a call of a network as it is."""
        call = partial(network, *args, **kwargs)
        if self.first is None:
            (self.seconds,) = self._in_turns(call)
            self.first = call
            return self.seconds
        first, own = self._in_turns(self.first, call)
        self.ratios.append(first / self.seconds)
        return self.seconds * own / first

    def _in_turns(self, *calls: Callable[[], object]) -> list[float]:
        """Mean seconds of each call in the fastest quarter of the rounds within `SECONDS`, in each
        of which every call runs `BLOCK` times, long ones once. Other processes only add to it, and
        not to all rounds."""
        threads = checked_threads(self.threads)
        clock = self.clock or clock_of(threads)
        names = {str(number): call for number, call in enumerate(calls)}
        with torch.no_grad(), set_threads(threads):
            once = race(names, 1, 1, clock=clock)
            size = BLOCK if max(seconds[0] for seconds in once.values()) < SHORT else 1
            blocks = {name: partial(_repeat, call, size) for name, call in names.items()}
            samples = race(blocks, CALLS, 0, seconds=SECONDS, clock=clock)
        rounds = sorted(zip(*samples.values(), strict=True), key=sum)
        fastest = rounds[: max(len(rounds) // 4, 1)]
        return [mean(seconds) / size for seconds in zip(*fastest, strict=True)]


def _repeat(call: Callable[[], object], times: int) -> None:
    """Call it so many times."""
    for _ in range(times):
        call()


def runner_of(candidate: str) -> str:
    """What runs the layers of a candidate of `optimize`."""
    return SEGMENT if candidate.startswith("segments") else TORCH


def clock_of(threads: int) -> Callable[[], float]:
    """What times calls on so many threads: on one, the time of the processor for this thread, which
    is that of the call without the pauses in which other processes ran."""
    return thread_time if threads == 1 else perf_counter
