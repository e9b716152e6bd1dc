"""Caches of values derived from tensors: plans of weights, work splits and formats of matrices.

An entry is removed when the memory of any of its tensors is freed. So a value must not refer to
them: a tensor that a cache refers to is never freed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from demask.kernels.memory_probe import MemoryProbe

PLANS = 8  # per program and weights, one per input size; also programs per weights
MAX_COUNTED = 64  # input sizes whose calls are counted
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes -> integer type

VERSION = attrgetter("_version")
Value = TypeVar("Value")
Planned = tuple[Any, tuple[int, ...]]  # plan or None; numbers of the inputs that must be contiguous


def identity(tensors: Sequence[Tensor]) -> tuple[Hashable, ...]:
    """A key of the memory and layout of tensors: equal for equal views, as long as they live."""
    return tuple([(id(t.untyped_storage()), t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors])


def version(tensor: Tensor) -> int:
    """Counter of the writes into a tensor that torch sees; 0 for inference tensors."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


class TensorCache(Generic[Value]):
    """Values by keys that contain the `identity` of tensors.

    limit: largest number of entries; all are removed before it would be exceeded.
    """

    def __init__(self, limit: int | None = None):
        self.entries: dict[Hashable, Value] = {}
        self.limit = limit
        self.finalizers: dict[Hashable, list[weakref.finalize]] = {}
        self.lock = threading.Lock()

    def put(self, key: Hashable, tensors: Sequence[Tensor], value: Value) -> Value:
        """Cache a value until one of the tensors is freed; returns the value."""
        with self.lock:
            if len(self.entries) == self.limit and key not in self.entries:
                self.clear()
            if key not in self.finalizers:
                # A storage is one Python object as long as any tensor uses it.
                ends = [weakref.finalize(t.untyped_storage(), self.remove, key) for t in tensors]
                for end in ends:
                    end.atexit = False
                self.finalizers[key] = ends
            self.entries[key] = value
        return value

    def remove(self, key: Hashable) -> None:
        self.entries.pop(key, None)
        for finalizer in self.finalizers.pop(key, ()):
            finalizer.detach()

    def clear(self) -> None:
        for key in list(self.entries):
            self.remove(key)


class ChangeCounter:
    """Counts changes of tensors without a version counter, by comparison with copies."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.last: tuple[list[Tensor], int] = [], 0  # replaced as a whole: read without the lock

    def edition(self, tensors: Sequence[Tensor]) -> int:
        """A number that changes whenever one of the tensors does."""
        # Compared as integers, since NaN does not equal itself.
        bits = [t.detach().view(BITS[t.element_size()]) for t in tensors]
        copies, edition = self.last
        if len(copies) == len(bits) and all(map(torch.equal, copies, bits)):
            return edition
        with self.lock:
            copies, edition = self.last
            if len(copies) != len(bits) or not all(map(torch.equal, copies, bits)):
                self.last = [b.clone() for b in bits], edition + 1
            return self.last[1]


class PlanCache:
    """Plans of one program for one set of weights, by weight versions, input sizes and threads.

    Plans that the next call invalidates cost more than they save: after each discarded plan, a new
    one waits for one more call that needs it. So weights in training get no plans.
    """

    parse: Callable[[str], Any]  # set by subclasses: text -> program
    new_plan: Callable[..., Planned]  # set by subclasses: (inputs, weights) -> plan

    def __init__(self, text: str):
        self.text, self.program = text, self.parse(text)
        self.lock = threading.Lock()
        self.plans: dict[Any, Any] = {}
        self.calls: dict[Any, int] = {}
        self.versions: tuple[int, ...] = ()
        self.discarded = 0
        self.changes = ChangeCounter()
        self.edition = 0
        self.probe: MemoryProbe | None = None  # of the weights

    def versions_of(self, weights: Sequence[Tensor]) -> tuple[int, ...]:
        """Versions that change whenever a weight does."""
        try:
            versions = tuple(map(VERSION, weights))
        except RuntimeError:  # inference tensors have no version counter
            return (self.changes.edition(weights),)
        probe = self.probe
        if probe is not None and not probe.same():
            with self.lock:
                if self.probe is probe:
                    self.probe, self.edition = None, self.edition + 1
        return (*versions, self.edition)

    def plan(self, key: Any, inputs: list[Tensor], weights: list[Tensor]) -> Planned:
        """The plan of a key; (None, ()) if there is none or it would not be reused.

        key: the versions of the weights, followed by everything else the plan depends on.
        """
        if (plan := self.plans.get(key)) is not None:
            return plan
        with self.lock:
            if key in self.plans:
                return self.plans[key]
            if key[0] != self.versions:
                self.versions, self.discarded = key[0], self.discarded + bool(self.plans)
                self.plans, self.calls = {}, {}
            if len(self.calls) == MAX_COUNTED:
                self.calls = {}
            self.calls[key] = self.calls.get(key, 0) + 1
            if self.calls[key] <= self.discarded:
                return None, ()
            if len(self.plans) == PLANS:
                self.plans.pop(next(iter(self.plans)))
                self.discarded += 1
            plan = self.plans[key] = self.new_plan(inputs, weights)
            if plan[0] is not None and self.probe is None:
                from demask.kernels.memory_probe import MemoryProbe  # needs llvmlite

                self.probe = MemoryProbe(weights)
            return plan


WEIGHTS: TensorCache[list[PlanCache]] = TensorCache()
_NEW = threading.Lock()


def plans_of(weights: list[Tensor], text: str, kind: type[PlanCache]) -> Any:
    """The plan cache of a program for these weights."""
    key = identity(weights)
    for plans in WEIGHTS.entries.get(key, ()):
        if plans.text == text and type(plans) is kind:
            return plans
    new = kind(text)
    with _NEW:
        WEIGHTS.put(key, weights, [new, *WEIGHTS.entries.get(key, ())][:PLANS])
    return new
