"""Turns of contenders on one machine: nobody else at work, warm caches. The standard library only:
the server of another environment reads it too."""

from __future__ import annotations

import gc
from collections.abc import Callable
from statistics import median
from time import perf_counter, process_time, sleep

STEP, IDLE, MOST = 0.005, 0.1, 0.5  # seconds, share of a core, seconds


def settle(most: float = MOST) -> bool:
    """Whether this process came to rest: sleeps until its threads used less than a tenth of a core.

    Threads of a pool spin for a while after their work (5 to 60 ms were seen), which takes the core
    from whoever is next. most: seconds after which it gives up.
    """
    end = perf_counter() + most
    while perf_counter() < end:
        wall, busy = perf_counter(), process_time()
        sleep(STEP)
        if process_time() - busy < IDLE * (perf_counter() - wall):
            return True
    return False


def repeated(call: Callable[[], object], least: float) -> list[float]:
    """The seconds of every call, of one or more that take `least` seconds together."""
    taken = []
    start = now = perf_counter()
    while not taken or now - start < least:
        call()
        before, now = now, perf_counter()
        taken.append(now - before)
    return taken


def turn(call: Callable[[], object], least: float) -> float:
    """The median seconds of the calls of one turn: untimed ones first, then timed ones, both for
    `least` seconds, and at least one of each. The garbage collector is off meanwhile."""
    settle()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        repeated(call, least)
        return median(repeated(call, least))
    finally:
        if was_enabled:
            gc.enable()
