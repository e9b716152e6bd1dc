"""Alternating timings of networks, and a lower confidence bound on the ratio of two."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch

from demask.errors import BadInput
from demask.machine.timing import time_alternately

PAIRS = 30  # the least number of rounds of a comparison
ALLOWED = 0.97  # a network counts as no slower if the lower bound of the ratio is above this
DRAWS, CONFIDENCE = 2000, 0.95


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


def wait_for_device(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The call, followed on a GPU by waiting for the kernels that it launched."""

    def waiting() -> None:
        call()
        torch.cuda.synchronize(device)

    return waiting if device.type == "cuda" else call


def measure_medians(
    calls: Mapping[str, Callable[[], object]], device: torch.device, pairs: int, seconds: float
) -> dict[str, float]:
    """Median seconds of each call, from at most `pairs` rounds that began within `seconds`."""
    waiting = {name: wait_for_device(call, device) for name, call in calls.items()}
    timings = time_alternately(waiting, pairs, 1, seconds=seconds)
    return {name: timing.median for name, timing in timings.items()}
