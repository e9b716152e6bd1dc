"""A cache, by input sizes and dtypes, of values that depend on no input and of planned memory.
Entries are dropped when weights change.

The number of entries is bounded; the least recently used is dropped first. Copies and files contain
none: the first call with new sizes builds an entry.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from demask.machine.arena import View, allocate

ENTRIES = 8  # at most, of a network
SPARE = 4  # arenas of an entry at most, for calls that run at the same time


@dataclass(slots=True)
class ShapeEntry:
    """What is cached for one tuple of input sizes.

    precomputed: values that depend on no input. size: bytes of an arena. views: the values in it.
    valid: whether the values are those of the present weights. take() and give() may be called from
    several threads.
    """

    precomputed: tuple[Any, ...]
    size: int
    views: tuple[View, ...]
    valid: Callable[[], bool]
    spare: list[list[Tensor]] = field(default_factory=list)

    def take(self) -> list[Tensor]:
        """The views of an arena that no other call uses until it is passed to give()."""
        try:
            return self.spare.pop()
        except IndexError:
            return allocate(self.size, self.views, torch.device("cpu"))

    def give(self, memory: list[Tensor]) -> None:
        """Return an arena for the next call."""
        if len(self.spare) < SPARE:
            self.spare.append(memory)


class ShapeCache:
    """Entries by input sizes, at most `ENTRIES`."""

    def __init__(self) -> None:
        self.known: OrderedDict[Any, ShapeEntry] = OrderedDict()
        self.lock = threading.Lock()

    def of(self, inputs: Sequence[Any], make: Callable[[], ShapeEntry]) -> ShapeEntry:
        """The entry for inputs of these sizes. `make` is called for new sizes, and after weights
        changed."""
        key = tuple([(x.shape, x.dtype) if isinstance(x, Tensor) else None for x in inputs])
        entry = self.known.get(key)
        if entry is None or not entry.valid():
            return self._renewed(key, make)
        try:  # noqa: SIM105  (contextlib.suppress costs as much as the lookup)
            self.known.move_to_end(key)
        except KeyError:  # another thread dropped it
            pass
        return entry

    def _renewed(self, key: Any, make: Callable[[], ShapeEntry]) -> ShapeEntry:
        """The entry of a key, built by `make` if it is missing or stale."""
        with self.lock:
            entry = self.known.get(key)
            if entry is None or not entry.valid():
                if entry is not None:
                    self.known.clear()  # the other entries depend on the same weights
                self.known[key] = entry = make()
            while len(self.known) > ENTRIES:
                self.known.popitem(last=False)
            self.known.move_to_end(key)
            return entry

    def __deepcopy__(self, memo: dict[int, Any]) -> ShapeCache:
        return ShapeCache()

    def __reduce__(self) -> tuple[Any, ...]:
        return ShapeCache, ()
