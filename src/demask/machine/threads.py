"""Torch's number of threads, set for a block and put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def set_threads(count: int) -> Iterator[None]:
    """Torch computes with `count` threads in the block, with as many as before after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
