"""What a pass keeps between calls, per tuple of input sizes and dtypes: values that no input
reaches, and memory. Values computed from weights are dropped when the weights change.

A bounded number of plans is held, the one used longest ago dropped first. Copies and files hold
none: each is made again by the first call with its sizes.
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

KEPT = 8  # plans of a network
SPARE = 4  # arenas of a plan: calls that run at the same time


@dataclass(slots=True)
class ShapeEntry:
    """For one tuple of input sizes: values computed once, and where values lie in an arena of
    `size` bytes. valid: whether the values are those of the weights as they are now. take() and
    give() may be called from several threads."""

    kept: tuple[Any, ...]
    size: int
    views: tuple[View, ...]
    valid: Callable[[], bool]
    spare: list[list[Tensor]] = field(default_factory=list)

    def take(self) -> list[Tensor]:
        """Memory that nobody else uses until it is given back."""
        try:
            return self.spare.pop()
        except IndexError:
            return allocate(self.size, self.views, torch.device("cpu"))

    def give(self, memory: list[Tensor]) -> None:
        """Hand memory back for the next call."""
        if len(self.spare) < SPARE:
            self.spare.append(memory)


class Plans:
    """Plans by input sizes, at most `KEPT`."""

    def __init__(self) -> None:
        self.known: OrderedDict[Any, ShapeEntry] = OrderedDict()
        self.lock = threading.Lock()

    def of(self, inputs: Sequence[Any], make: Callable[[], ShapeEntry]) -> ShapeEntry:
        """The plan for inputs of these sizes; `make` is called for new ones, and after weights
        changed."""
        key = tuple([(x.shape, x.dtype) if isinstance(x, Tensor) else None for x in inputs])
        plan = self.known.get(key)
        if plan is None or not plan.valid():
            return self._made(key, make)
        try:  # noqa: SIM105  (contextlib.suppress costs as much as the lookup)
            self.known.move_to_end(key)
        except KeyError:  # another thread dropped it
            pass
        return plan

    def _made(self, key: Any, make: Callable[[], ShapeEntry]) -> ShapeEntry:
        with self.lock:
            plan = self.known.get(key)
            if plan is None or not plan.valid():
                if plan is not None:
                    self.known.clear()  # those of other sizes are of the same weights
                self.known[key] = plan = make()
            while len(self.known) > KEPT:
                self.known.popitem(last=False)
            self.known.move_to_end(key)
            return plan

    def __deepcopy__(self, memo: dict[int, Any]) -> Plans:
        return Plans()

    def __reduce__(self) -> tuple[Any, ...]:
        return Plans, ()
