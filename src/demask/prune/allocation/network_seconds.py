"""Measured seconds of networks, as `demask.optimize` runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import nn

from demask.graph.provenance import GIVEN
from demask.machine.threads import set_threads
from demask.machine.timing import sample_seconds
from demask.prune.allocation.layer_seconds import SEGMENT, TORCH
from demask.registry import RUNNERS
from demask.shrink.demask import demask

# Of the timing of a network: short ones take as long as others, since a shared machine may be slow
# for tenths of seconds.
CALLS, BLOCK, SECONDS = 20_000, 7, 1.5


@dataclass(frozen=True, slots=True)
class NetworkTime:
    """Seconds of a network. runners: by what runs its layers, the fastest one among them."""

    seconds: float
    runners: Mapping[str, float]


def measure_optimized(
    network: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, threads: int,
    cache: Any = None,
) -> NetworkTime:  # fmt: skip
    """Seconds of a network, demasked and optimized. Those of the slower ways to run it are in
    proportion to what `optimize` measured."""
    slim = demask(network, args, kwargs, check=False, result="graph")
    fast = RUNNERS.get("optimize")(slim, args, kwargs, threads=threads, cache=cache)
    decision = fast.demasked.decisions[0]
    seconds = time_network(fast, args, kwargs, threads)
    chosen = runner_of(decision.chosen)
    runners = {chosen: seconds}
    for name, taken in decision.seconds.items():
        runner = runner_of(name)
        if runner != chosen and name != GIVEN:
            slower = seconds * max(taken / decision.seconds[decision.chosen], 1.0)
            runners[runner] = min(slower, runners.get(runner, slower))
    return NetworkTime(seconds, runners)


def runner_of(candidate: str) -> str:
    """What runs the layers of a candidate of `optimize`."""
    return SEGMENT if candidate.startswith("segments") else TORCH


def time_network(
    network: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], threads: int
) -> float:
    """Seconds of a call: the least median of `BLOCK` consecutive calls within `SECONDS`. Other
    processes on the machine only add to it, and not to all blocks."""
    call = {"": partial(network, *args, **kwargs)}
    with torch.no_grad(), set_threads(threads):
        seconds = sample_seconds(call, CALLS, seconds=SECONDS, clock=clock_of(threads))[""]
    blocks = [seconds[k : k + BLOCK] for k in range(0, max(len(seconds) - BLOCK, 1), BLOCK)]
    return min(median(block) for block in blocks)


def clock_of(threads: int) -> Callable[[], float]:
    """What times calls on so many threads: on one, the time of the processor for this thread, which
    is that of the call without the pauses in which other processes ran."""
    return thread_time if threads == 1 else perf_counter
