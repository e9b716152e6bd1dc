"""torch's number of threads: checked, and set in a `with` block."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

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
