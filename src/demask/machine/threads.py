"""Torch's number of threads, checked, set for a block and put back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from demask.errors import BadInput

PER_CORE, LEAST = 4, 64  # threads allowed for each core, and on any machine


def checked_threads(count: int | None) -> int:
    """A number of threads that this machine can start; None: torch's.

    BadInput for less than one and for many more than there are cores: torch then ends the process.

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
    """Torch computes with `count` threads in the block, with as many as before after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(checked_threads(count))
    try:
        yield
    finally:
        torch.set_num_threads(before)
