"""Captures that the tests of a process share: torch.export takes a quarter of their time.

Tests of capture itself and of how long networks live, and those that run by night, capture by
themselves: the captures keep the networks that they were made from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from demask.graph.capture import shared_captures

MOST, LARGEST = 200, 2**20  # captures, and elements of the tensors of one, that stay in memory
OWN = ("tests/graph/", "tests/compat/", "tests/machine/", "tests/shrink/training/", "tests/whole/test_failures.py")


class Recent(deque):
    """The last captures of small networks."""

    def append(self, entry: Any) -> None:
        tensors = (t for m in entry.anatomy.modules for t in (*m.parameters(), *m.buffers()))
        if sum(t.numel() for t in tensors) <= LARGEST:
            super().append(entry)


CAPTURES = Recent(maxlen=MOST)


@contextmanager
def captured_once(item: pytest.Item) -> Iterator[None]:
    """A context in which a test uses captures of earlier ones."""
    is_own = item.nodeid.startswith(OWN) or item.get_closest_marker("nightly") is not None
    token = shared_captures._ENTRIES.set(None if is_own else CAPTURES)
    try:
        yield
    finally:
        shared_captures._ENTRIES.reset(token)
