"""A network that runs only for the rows on which its pilot is not confident.

In a stream, rows that need the full network are queued until they fill a call of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from demask.errors import BadInput
from demask.graph.module_copy import structural_copy
from demask.machine.clock import Timing, median_seconds, race
from demask.numerics import is_number
from demask.ops import TABLE, Table
from demask.pilot.conditions.base import Args, Conditioned, Decision, Kwargs, text
from demask.pilot.simplifiers.simplify import Simplifier, simplifier, simplify

SMALL = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class Routed:
    """What the last call did.

    rows: of the call. escalated: rows that the full network ran. calls: of the full network.
    latency:
    of a stream, seconds from the arrival of a batch to its complete answers.
    """

    rows: int
    escalated: int
    calls: int
    latency: Timing | None = None

    @property
    def share(self) -> float:
        """The share of rows that the full network ran."""
        return self.escalated / self.rows if self.rows else 0.0


def scores(outputs: Any) -> Tensor:
    """The class scores of a network's outputs: the first tensor, [rows, classes]."""
    leaves = pytree.tree_leaves(outputs)
    first = leaves[0] if leaves else None
    if not isinstance(first, Tensor) or first.ndim != 2 or not first.is_floating_point():
        got = list(first.shape) if isinstance(first, Tensor) else type(first).__name__
        raise BadInput(f"to route, a network's first output must be class scores, floats [rows, classes]; got {got}")
    return first


def picked(call: Any, rows: Tensor, count: int) -> Any:
    """Inputs of some rows: of every tensor that has `count` rows."""

    def of(leaf: Any) -> Any:
        has_rows = isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == count
        return leaf.index_select(0, rows) if has_rows else leaf

    return pytree.tree_map(of, call)


def margin(logits: Tensor) -> Tensor:
    """The difference of the two largest probabilities: [rows, classes] -> [rows], 0 to 1.

    >>> margin(torch.tensor([[0.0, 0.0], [20.0, -20.0]]))
    tensor([0., 1.])
    """
    if logits.shape[1] < 2:
        raise BadInput(f"expected scores of two classes or more, got {list(logits.shape)}")
    best = logits.softmax(1).topk(2, dim=1).values
    return best[:, 0] - best[:, 1]


def softmax(logits: Tensor) -> Tensor:
    """The largest probability: [rows, classes] -> [rows], 1 / classes to 1."""
    return logits.softmax(1).amax(1)


def entropy(logits: Tensor) -> Tensor:
    """1 less the entropy divided by that of equal probabilities: [rows, classes] -> [rows].

    >>> entropy(torch.zeros(1, 4)).abs() < 1e-6
    tensor([True])
    """
    logs = logits.log_softmax(1)
    return 1 + (logs.exp() * logs.clamp(min=math.log(SMALL))).sum(1) / math.log(logits.shape[1])


CONFIDENCES: Mapping[str, Callable[[Tensor], Tensor]] = {"margin": margin, "softmax": softmax, "entropy": entropy}


class StreamRouter(Protocol):
    """What a stream needs of a `demask.pilot.router.Router`."""

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
        first = WaitingRows(self.owner, _map_rows(self.inputs, lambda leaf: leaf[:count]), self.places[:count])
        self.inputs = _map_rows(self.inputs, lambda leaf: leaf[count:])
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
            self._enter_call(number, inputs_of_batch if isinstance(inputs_of_batch, tuple) else (inputs_of_batch,))
            while self._waiting_count() >= self.batch:
                self._run_full_network(self.batch)
            while self.wait is not None and self._oldest() < number - self.wait:
                self._run_full_network(min(self.batch, self._waiting_count()))
            yield from self._complete_batches(tagged)
        while self.rows:
            self._run_full_network(min(self.batch, self._waiting_count()))
        yield from self._complete_batches(tagged)
        latency = Timing.of(self.late) if self.late else None
        self.router.last = Routed(self.seen, self.escalated, self.calls, latency)

    def _enter_call(self, number: int, args: Args) -> None:
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
        self._close_group(self.open[-1])

    def _waiting_count(self) -> int:
        return sum(len(rows.places) for rows in self.rows)

    def _oldest(self) -> float:
        return self.rows[0].owner.number if self.rows else float("inf")

    def _run_full_network(self, count: int) -> None:
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
            inputs = _map_rows(inputs, lambda leaf: _repeat_last_row(leaf, self.batch))
        better, start = self.router.full(*inputs), 0
        self.calls += 1
        for one, size in zip(group, sizes, strict=True):
            part = _map_rows(better, lambda leaf, low=start, high=start + size: leaf[low:high])
            owner, start = one.owner, start + size
            owner.outputs = self.router.merged(owner.outputs, part, one.places)
            owner.missing -= size
            self._close_group(owner)

    def _close_group(self, one: Waiting) -> None:
        if not one.missing:
            self.late.append(perf_counter() - one.since)

    def _complete_batches(self, tagged: bool) -> Iterator[Any]:
        """Batches with all their answers, of which those in order leave first."""
        for one in list(self.open):
            if one.missing and not tagged:
                return
            if not one.missing:
                self.open.remove(one)
                yield (one.number, one.outputs) if tagged else one.outputs


def _repeat_last_row(leaf: Tensor, rows: int) -> Tensor:
    """The tensor with its last row repeated until there are `rows`."""
    return torch.cat([leaf, leaf[-1:].expand(rows - len(leaf), *leaf.shape[1:])])


def _map_rows(tree: Any, change: Any) -> Any:
    return pytree.tree_map(change, tree)


ANSWERS = ("full", "both")
PAIRS, SECONDS = 7, 5.0  # calls of pilot and full network that are compared, and how long at most
NEAR = 1e-3  # of the largest output: kernels sum a row alone differently from one among others
ENOUGH = 16  # rows of an example from which the share of confident ones is estimated


@dataclass(frozen=True, slots=True)
class ThresholdRoute:
    """Rows of which the pilot is not surer than `threshold` go to the full network;
    `demask.pilot.route.Route` documents the fields."""

    name: ClassVar[str] = "route"
    threshold: float
    confidence: str = "margin"
    answer: str = "full"

    def __post_init__(self) -> None:
        known = is_number(self.threshold)
        if not known or not (0 <= self.threshold <= 1 or self.threshold == math.inf):
            raise BadInput(f"expected a threshold from 0 to 1, such as 0.5, or inf, got {self.threshold!r}")
        if self.confidence not in CONFIDENCES:
            raise BadInput(f"expected a confidence of {tuple(CONFIDENCES)}, got {self.confidence!r}")
        if self.answer not in ANSWERS:
            raise BadInput(f"expected an answer of {ANSWERS}, got {self.answer!r}")

    def applied(self, model: nn.Module, args: Args, kwargs: Kwargs, pilot: Any, table: Table = TABLE) -> Router:
        """A network with the same inputs that runs `model` only where `pilot` is not confident.

        The full network alone is run where routing is not sound (rows depend on each other, or on
        the number of rows) or not faster on this machine; `conditioned.decisions` says why. Pilot
        and full network are timed with the example; with 16 rows or more, the time of the rows that
        need the full network counts, too.

        Args:
            model: the full network, which is not changed.
            args: example inputs by position, one example per row.
            kwargs: example inputs by name, or None.
            pilot: an nn.Module with the same inputs, or a simplifier or its text.
            table: facts about each ATen op; default: the library's table.

        Raises:
            BadInput: `pilot` has another type, the example has no rows, or the two networks'
                outputs do not match or are no class scores [rows, classes].
            NotExportable: torch.export cannot capture the model, from which a simplifier derives
                the pilot.
        """
        named = dict(kwargs or {})
        full = call_copy(model)
        cheap, words = pilot_network(pilot, model, args, named, table)
        router = Router(full, cheap, self, words)
        with torch.no_grad():
            reason = _why_rows_depend(router, args, named) or _why_slower(router, args, named)
        return router.alone(reason) if reason else router


class Router(nn.Module):
    """A network of two: a cheap pilot, and a full network for rows where the pilot is not sure.

    Rows are the examples of a batch. `condition` with the text "route:0.8" builds a router, and
    checks that rows do not depend on each other and that routing is faster; a router that is built
    directly checks nothing. Both networks return class scores [rows, classes], or a structure of
    tensors [rows, ...] whose first tensor is the class scores.

    Args:
        full: the full network.
        pilot: a cheaper network with the same inputs and output shapes.
        route: the `Route`: threshold, measure of confidence, and which answer is returned.
        words: name of the pilot in `conditioned`; default "": the name of the pilot's class.

    Attributes:
        last: record of the last call: `rows`, `escalated` (rows that the full network ran), `calls`
            of the full network and `share` (escalated / rows), all 0 before the first call. After a
            stream, `latency` is the time in seconds from a batch's arrival to its answers:
            `median`, `low` and `high` (10 % and 90 % quantiles), `count`; else None.
        conditioned: the `Conditioned`, with the decision about the network.
        whole: whether the full network runs alone, as with a threshold of inf.

    Raises:
        BadInput: `full` or `pilot` is no network, or `route` no `Route`; when the router is called:
            the first output is no class scores, float [rows,
            classes], or has one class alone with confidence "margin".
        RuntimeError, ValueError: when the router is called: the outputs of the two networks differ
            in shape or in structure.

    Example:
        >>> import torch
        >>> from demask.pilot import Route, Router
        >>> net, small = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
        >>> careful, bold = Router(net, small, Route(1.0)), Router(net, small, Route(0.0))
        >>> x = torch.randn(8, 4)
        >>> torch.allclose(careful(x), net(x), atol=1e-6), torch.allclose(bold(x), small(x), atol=1e-6)
        (True, True)
    """

    def __init__(self, full: nn.Module, pilot: nn.Module, route: ThresholdRoute, words: str = ""):
        super().__init__()
        for value, kind in ((full, nn.Module), (pilot, nn.Module), (route, ThresholdRoute)):
            if not isinstance(value, kind):
                raise BadInput(f"expected two networks (nn.Module) and a Route, such as Route(0.5), got {value!r:.40}")
        self.full, self.pilot, self.route = full, pilot, route
        self.last = Routed(0, 0, 0)
        self.whole = route.threshold == math.inf
        what = f"rows not above {route.threshold:g} ({route.confidence}) are run in full"
        why = "a threshold of inf" if self.whole else "the pilot answers the others"
        decision = Decision("network", "the full network alone" if self.whole else what, why)
        name = words or type(pilot).__name__
        self.conditioned = Conditioned(route, name, self.whole, (decision,))

    def alone(self, reason: str) -> Router:
        """A router of the same networks that runs the full network alone.

        Args:
            reason: why, for `conditioned.decisions`.
        """
        refused = Router(self.full, self.pilot, self.route)
        refused.whole = True
        decision = Decision("network", "the full network alone", reason)
        refused.conditioned = Conditioned(self.route, self.conditioned.pilot, True, (decision,))
        return refused

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Outputs of the pilot, in which the rows of low confidence are the full network's.

        Arguments are those of the two networks.
        """
        if self.whole:
            outputs = self.full(*args, **kwargs)
            rows = len(scores(outputs))
            self.last = Routed(rows, rows, 1)
            return outputs
        outputs = self.pilot(*args, **kwargs)
        unsure, rows = self.unsure(outputs), len(scores(outputs))
        self.last = Routed(rows, len(unsure), int(len(unsure) > 0))
        if not len(unsure):
            return outputs
        some = picked((args, kwargs), unsure, rows)
        return self.merged(outputs, self.full(*some[0], **some[1]), unsure)

    def unsure(self, outputs: Any) -> Tensor:
        """The numbers of the rows that need the full network, ascending, int64 [unsure rows].

        Args:
            outputs: outputs of the pilot; rows with NaN scores count as not sure.
        """
        sure = CONFIDENCES[self.route.confidence](scores(outputs)) > self.route.threshold
        return (~sure).nonzero().flatten()

    def merged(self, outputs: Any, better: Any, rows: Tensor) -> Any:
        """The pilot's outputs, in which some rows are replaced by those of the full network.

        Args:
            outputs: outputs of the pilot for all rows.
            better: outputs of the full network for the rows `rows`.
            rows: numbers of these rows, int64 [rows to replace].
        """
        if self.route.answer == "both":
            better = _average_scores(pytree.tree_map(lambda leaf: leaf[rows], outputs), better)
        return pytree.tree_map(lambda old, new: old.to(new.dtype).index_copy(0, rows, new), outputs, better)

    def stream(
        self,
        inputs: Iterable[Any],
        *,
        batch: int = 64,
        wait: int | None = None,
        fixed: bool = False,
        tagged: bool = False,
    ) -> Iterator[Any]:
        """An iterator over the outputs of a stream of batches, in order.

        Rows for the full network wait until `batch` of them fill a call, since many networks take
        nearly as long for five rows as for twenty. After the stream `last` has the latency.

        Args:
            inputs: batches, each a tensor or a tuple of tensors with the same number of rows.
            batch: rows per call of the full network, 1 or more; default 64.
            wait: limit of the delay, 0 or more: the outputs of a batch are returned when `wait` + 1
                later batches have been read, or before; default None: no limit.
            fixed: whether every call of the full network has exactly `batch` rows, for networks
                that take no other number (the last row is repeated); default False.
            tagged: whether to return pairs (number of the batch, outputs), each as soon as it is
                complete; default False.

        Raises:
            BadInput: `batch` or `wait` is out of range, or an input has not as many rows as the
                pilot's outputs.
        """
        if batch < 1 or (wait is not None and wait < 0):
            raise BadInput(f"expected batch >= 1 and wait >= 0, got {batch} and {wait}")
        return Queue(self, batch, wait, fixed).answers(inputs, tagged)


def _average_scores(outputs: Any, better: Any) -> Any:
    """The full network's outputs, its class scores averaged with the pilot's."""
    leaves, spec = pytree.tree_flatten(better)
    mine, other = scores(better).log_softmax(1), scores(outputs).log_softmax(1)
    leaves[0] = torch.logaddexp(mine, other.to(mine.dtype)) - math.log(2)
    return pytree.tree_unflatten(leaves, spec)


def call_copy(model: nn.Module) -> nn.Module:
    """What the user has, in eval mode, sharing its weights."""
    return structural_copy(model, share=True).eval()


def pilot_network(
    pilot: Any, model: nn.Module, args: Args, kwargs: dict[str, Any], table: Table
) -> tuple[nn.Module, str]:
    """The pilot as a network, and what it is called."""
    if isinstance(pilot, nn.Module):
        return call_copy(pilot), type(pilot).__name__
    if isinstance(pilot, str | Simplifier):
        by = simplifier(pilot)
        return simplify(model, args, kwargs, by=by, table=table).eval(), by.text()
    raise BadInput(
        f"route needs a pilot that answers: an nn.Module, or a simplifier such as 'bits:8'; got {type(pilot).__name__}"
    )


def _why_rows_depend(router: Router, args: Args, kwargs: dict[str, Any]) -> str:
    """Why rows cannot be run separately, in words; "" where they can."""
    whole, cheap = router.full(*args, **kwargs), router.pilot(*args, **kwargs)
    rows = len(scores(whole))
    if not rows:
        raise BadInput("route needs an example of one row or more, to see that rows are independent")
    shapes = [[(tuple(leaf.shape), leaf.dtype) for leaf in pytree.tree_leaves(outputs)] for outputs in (whole, cheap)]
    if shapes[0] != shapes[1]:
        raise BadInput(
            "pilot and full network must have the same outputs: the full network's are "
            f"{shapes[0]}, the pilot's {shapes[1]}"
        )
    if any(shape[:1] != (rows,) for shape, _ in shapes[0]):
        raise BadInput(f"every output must have {rows} rows, one per example: {shapes[0]}")
    places = torch.tensor([rows - 1, 0, rows - 1], device=scores(whole).device)
    some = picked((args, kwargs), places, rows)
    try:
        reordered = router.full(*some[0], **some[1])
    except (RuntimeError, ValueError, TypeError) as error:
        return f"it does not take another number of rows: {str(error).splitlines()[0]:.100}"
    for one, other in zip(pytree.tree_leaves(whole), pytree.tree_leaves(reordered), strict=True):
        expected = one[places]
        if other.shape != expected.shape:
            return "an output has other rows than inputs have: inputs are not rows alone"
        size = float(expected.abs().nan_to_num(0.0, posinf=0.0).max()) if expected.numel() else 0.0
        if not torch.allclose(other, expected, rtol=NEAR, atol=NEAR * size, equal_nan=True):
            return "its rows depend on each other: some of them alone have other answers"
    return ""


def _why_slower(router: Router, args: Args, kwargs: dict[str, Any]) -> str:
    """Why routing does not pay, in words; "" where it does."""
    if router.whole:
        return ""
    outputs = router.pilot(*args, **kwargs)
    rows, unsure = len(scores(outputs)), router.unsure(outputs)
    calls = {"pilot": partial(router.pilot, *args, **kwargs), "full": partial(router.full, *args, **kwargs)}
    known = rows >= ENOUGH
    if known and len(unsure):
        some = picked((args, kwargs), unsure, rows)
        calls["rest"] = partial(router.full, *some[0], **some[1])
    taken = median_seconds(race(calls, PAIRS, 1, seconds=SECONDS, device=scores(outputs).device))
    pilot, full, rest = taken["pilot"], taken["full"], taken.get("rest", 0.0)
    if pilot + rest < full:
        return ""
    share = f" and {len(unsure)} of {rows} rows in full {1e3 * rest:.3g} ms" if rest else ""
    return (
        f"it does not pay: the pilot takes {1e3 * pilot:.3g} ms{share}, the full network "
        f"{1e3 * full:.3g} ms ({text(router.route)})"
    )


__all__ = ["Router", "ThresholdRoute", "call_copy", "pilot_network"]
