"""Networks called in turns: their seconds, and a lower confidence bound on the ratio of two."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch

from demask.errors import BadInput
from demask.machine.timing import alternate

PAIRS = 30  # rounds that an answer takes at least
ALLOWED = 0.97  # what counts as no slower: the lower bound of the ratio of medians
DRAWS, CONFIDENCE = 2000, 0.95


def lower_bound(given: Sequence[float], result: Sequence[float], seed: int = 0) -> float:
    """The lower 95 % bound of median(given) / median(result), by bootstrap over rounds.

    Rounds are drawn whole, with replacement (Efron 1979): what slowed a round slowed both.
    One-sided: 95 % of the draws have a ratio above it. Seconds; both of the same rounds, in order.

    >>> lower_bound([2.0, 2.1, 2.2] * 10, [1.0, 1.1, 1.0] * 10) > 1.8
    True
    """
    if len(given) != len(result) or len(given) < 2:
        raise BadInput(f"expected rounds of both, 2 or more, got {len(given)} and {len(result)}")
    draw, rounds = random.Random(seed), list(zip(given, result, strict=True))
    ratios = []
    for _ in range(DRAWS):
        drawn = draw.choices(rounds, k=len(rounds))
        ratios.append(median(a for a, _ in drawn) / median(b for _, b in drawn))
    return sorted(ratios)[int((1 - CONFIDENCE) * DRAWS)]


def synchronized(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The call; on a GPU, with all that it started there."""

    def waiting() -> None:
        call()
        torch.cuda.synchronize(device)

    return waiting if device.type == "cuda" else call


def medians(
    calls: Mapping[str, Callable[[], object]], device: torch.device, pairs: int, seconds: float
) -> dict[str, float]:
    """Median seconds of each call, from at most `pairs` rounds that began within `seconds`."""
    waiting = {name: synchronized(call, device) for name, call in calls.items()}
    timings = alternate(waiting, pairs, 1, seconds=seconds)
    return {name: timing.median for name, timing in timings.items()}
