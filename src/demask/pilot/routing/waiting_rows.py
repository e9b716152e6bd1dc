"""Rows that need the full network, queued until they fill a call of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from demask.errors import BadInput
from demask.machine.clock import Timing
from demask.pilot.conditions.base import text
from demask.pilot.routing.confidence import Routed, picked, scores


class StreamRouter(Protocol):
    """What a stream needs of a `demask.pilot.routing.router.Router`."""

    full: nn.Module
    pilot: nn.Module
    route: Any
    whole: bool
    last: Routed

    def unsure(self, outputs: Any, /) -> Tensor: ...
    def merged(self, outputs: Any, better: Any, rows: Tensor, /) -> Any: ...


@dataclass(slots=True)
class Waiting:
    """One batch: its number, when it came, the pilot's answers, and how many rows are missing."""

    number: int
    since: float
    outputs: Any
    missing: int


@dataclass(slots=True)
class WaitingRows:
    """Rows of one batch that wait: their inputs, and where their answers belong."""

    owner: Waiting
    inputs: Any
    places: Tensor

    def taken(self, count: int) -> WaitingRows:
        """The first `count` of them, which are removed."""
        first = WaitingRows(self.owner, _map(self.inputs, lambda leaf: leaf[:count]), self.places[:count])
        self.inputs = _map(self.inputs, lambda leaf: leaf[count:])
        self.places = self.places[count:]
        return first


@dataclass(slots=True)
class Queue:
    """The stream of a router. Answers of a batch are complete once its last row was answered."""

    router: StreamRouter
    batch: int
    wait: int | None
    fixed: bool
    rows: list[WaitingRows] = field(default_factory=list)
    open: list[Waiting] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    seen: int = 0
    escalated: int = 0
    calls: int = 0

    def answers(self, inputs: Iterable[Any], tagged: bool) -> Iterator[Any]:
        """The answers to each batch; tagged: with its number, as soon as they are complete."""
        number = -1
        for number, inputs_of_batch in enumerate(inputs):
            self._enter(number, inputs_of_batch if isinstance(inputs_of_batch, tuple) else (inputs_of_batch,))
            while self._waiting_count() >= self.batch:
                self._run(self.batch)
            while self.wait is not None and self._oldest() < number - self.wait:
                self._run(min(self.batch, self._waiting_count()))
            yield from self._complete(tagged)
        while self.rows:
            self._run(min(self.batch, self._waiting_count()))
        yield from self._complete(tagged)
        self._report()

    def _enter(self, number: int, args: tuple[Any, ...]) -> None:
        since, router = perf_counter(), self.router
        if router.whole:
            outputs = router.full(*args)
            rows = len(scores(outputs))
            self.escalated, self.calls = self.escalated + rows, self.calls + 1
            self.open.append(Waiting(number, since, outputs, 0))
        else:
            outputs = router.pilot(*args)
            rows, places = len(scores(outputs)), router.unsure(outputs)
            if any(not isinstance(t, Tensor) or t.shape[:1] != (rows,) for t in args):
                raise BadInput(f"expected tensors of {rows} rows in batch {number} of a stream ({text(router.route)})")
            one = Waiting(number, since, outputs, len(places))
            self.open.append(one)
            self.escalated += len(places)
            if len(places):
                self.rows.append(WaitingRows(one, picked(args, places, rows), places))
        self.seen += rows
        self._close(self.open[-1])

    def _waiting_count(self) -> int:
        return sum(len(rows.places) for rows in self.rows)

    def _oldest(self) -> float:
        return self.rows[0].owner.number if self.rows else float("inf")

    def _run(self, count: int) -> None:
        """The full network, for the rows that have waited longest."""
        group: list[WaitingRows] = []
        while count:
            first = self.rows[0]
            group.append(first.taken(min(count, len(first.places))))
            count -= len(group[-1].places)
            if not len(first.places):
                self.rows.pop(0)
        inputs = pytree.tree_map(lambda *parts: torch.cat(parts), *[one.inputs for one in group])
        sizes = [len(one.places) for one in group]
        if self.fixed:
            inputs = _map(inputs, lambda leaf: _filled(leaf, self.batch))
        better, start = self.router.full(*inputs), 0
        self.calls += 1
        for one, size in zip(group, sizes, strict=True):
            part = _map(better, lambda leaf, low=start, high=start + size: leaf[low:high])
            owner, start = one.owner, start + size
            owner.outputs = self.router.merged(owner.outputs, part, one.places)
            owner.missing -= size
            self._close(owner)

    def _close(self, one: Waiting) -> None:
        if not one.missing:
            self.late.append(perf_counter() - one.since)

    def _complete(self, tagged: bool) -> Iterator[Any]:
        """Batches with all their answers, of which those in order leave first."""
        for one in list(self.open):
            if one.missing and not tagged:
                return
            if not one.missing:
                self.open.remove(one)
                yield (one.number, one.outputs) if tagged else one.outputs

    def _report(self) -> None:
        latency = Timing.of(self.late) if self.late else None
        self.router.last = Routed(self.seen, self.escalated, self.calls, latency)


def _filled(leaf: Tensor, rows: int) -> Tensor:
    """The tensor with its last row repeated until there are `rows`."""
    return torch.cat([leaf, leaf[-1:].expand(rows - len(leaf), *leaf.shape[1:])])


def _map(tree: Any, change: Any) -> Any:
    return pytree.tree_map(change, tree)


__all__ = ["Queue"]
