"""Allocations within a budget: multiply-adds, or milliseconds on this machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from demask.errors import BadInput
from demask.machine.cost import Costs
from demask.machine.threads import checked_threads, set_threads
from demask.machine.timing import sample_seconds
from demask.prune.allocation.context import NetworkContext
from demask.prune.allocation.knapsack import Choice, Item, Knapsack, spaced_counts
from demask.prune.allocation.layer_seconds import SEGMENT, TORCH, NetworkSeconds
from demask.prune.removal_cost import CountedProducts
from demask.registry import RUNNERS
from demask.shrink.demask import demask
from demask.text_table import number_table, render_text
from demask.tune.layer_costs import LayerCosts

if TYPE_CHECKING:
    from demask.prune.pruner import Pruner

Scores = Mapping[str, Tensor]  # by group, [size]: higher is more important
MOST_COUNTS = 64  # counts per group in the knapsack of multiply-adds
TIMED_COUNTS = 16  # in that of seconds
TRIALS, TOLERANCE, MARGIN = 5, 0.05, 0.98  # networks measured; prediction; share to aim at
LEAST_SHARE, MOST_REST = 0.2, 0.5  # of a line through measured networks: see `_line`
LEAST_USED = 0.94  # of the budget, below which another network is tried
CALLS, BLOCK, SECONDS = 210, 7, 2.5  # of the timing of a network


@dataclass(frozen=True, slots=True)
class MACs:
    """As much importance as fits in a number of multiply-adds of one call on the example inputs.

    The multiply-adds are those after `demask`. Scores are added across groups, so they must have
    one scale, as `Taylor` has.

    Args:
        budget: multiply-adds, an int; or a share of the original ones, a float from 0 to 1.
        floor: the share of its slices that each group retains at least; one slice always stays.

    Example:
        >>> from demask.prune.allocation.budgets import MACs
        >>> MACs(budget=0.5)
        MACs(budget=0.5, floor=0.05)
    """

    budget: float
    floor: float = 0.05

    def __post_init__(self) -> None:
        _check(self.budget, "budget", "multiply-adds, or a share from 0 to 1")
        _check_floor(self.floor)

    def __call__(self, scores: Scores, fraction: float, pruner: Pruner) -> dict[str, Tensor]:
        """The slices that stay: by group, bool [size].

        Args:
            scores: by group, [size].
            fraction: how far this step goes, relative to the last fraction of the schedule: half of
                it removes half of the multiply-adds that are to go in all.
            pruner: the pruner that asks.

        Raises:
            BadInput: the budget is less than what the floors leave, or units are no slices.
        """
        context = NetworkContext.of(pruner, fraction)
        cost = pruner.removal_cost
        whole = cost.macs({})
        final = self.budget * whole if _is_share(self.budget) else self.budget
        budget = exact = whole + (final - whole) * context.progress
        problem = Problem.of(scores, context, self.floor, MOST_COUNTS)
        counted = CountedProducts.of(cost.products, context.left)
        while True:
            choice = problem.best(counted, budget, "{:,.0f} MACs".format)
            masks = problem.masks(choice)
            over = cost.macs({**context.left, **masks}) - exact
            if over <= 0:
                return masks
            budget -= max(over, 1)  # slices of one group may cost more than their mean


@dataclass(frozen=True, slots=True)
class Trial:
    """A network that was built and timed. predicted: milliseconds, before it was built."""

    counts: Choice
    predicted_ms: float
    measured_ms: float
    runner: str


class LatencyPlan(dict[str, Tensor]):
    """The slices that stay, by group, with the measurements that led to them.

    Attributes:
        trials: the networks measured, in order; `chosen` is one of them.
        budget_ms: the budget.
        original_ms: milliseconds of the network with all slices left, optimized.
    """

    def __init__(self, masks: Mapping[str, Tensor], trials: Sequence[Trial], chosen: Trial,
                 budget_ms: float, original_ms: float):  # fmt: skip
        super().__init__(masks)
        self.trials, self.chosen = tuple(trials), chosen
        self.budget_ms, self.original_ms = budget_ms, original_ms

    def __str__(self) -> str:
        table = number_table("network", "predicted ms", "measured ms", "slices")
        table.add_row("all slices", "", f"{self.original_ms:.3f}", "")
        for number, trial in enumerate(self.trials, 1):
            mark = " (chosen)" if trial is self.chosen else ""
            table.add_row(f"trial {number}{mark}", f"{trial.predicted_ms:.3f}",
                          f"{trial.measured_ms:.3f}", str(sum(trial.counts.values())))  # fmt: skip
        return render_text(table, f"budget: {self.budget_ms:g} ms")


@dataclass(frozen=True, slots=True)
class Latency:
    """As much importance as fits in the milliseconds of one call on this machine.

    The call is on the example inputs, of `demask.optimize(demask.demask(model))`. Seconds of layers
    at several widths are measured and summed; networks at the solutions are built, measured and
    used to correct the sum, until a network is within the budget and was predicted well
    (`TOLERANCE`). As HALP (Shen et al. 2022) and ZipLM (Kurtic et al. 2023) do.

    Args:
        budget_ms: milliseconds.
        threads: number of CPU threads; None: `torch.get_num_threads()`.
        floor: the share of its slices that each group retains at least; one slice always stays.
        cache: path of the file for measured costs, False for none; as for `demask.optimize`.
        measure: seconds of a network, called with it, the arguments and keywords of one call, in
            the place of building it with `demask.optimize` and timing it; returns seconds and
            "segment" or "torch".
        progress: called with a short text at each step.

    Example:
        >>> from demask.prune.allocation.budgets import Latency
        >>> Latency(budget_ms=2.5).budget_ms
        2.5
    """

    budget_ms: float
    threads: int | None = None
    floor: float = 0.05
    cache: Any = None
    measure: Callable[..., tuple[float, str]] | None = None
    progress: Callable[[str], object] = lambda words: None

    def __post_init__(self) -> None:
        _check(self.budget_ms, "budget_ms", "milliseconds")
        _check_floor(self.floor)
        checked_threads(self.threads)

    def __call__(self, scores: Scores, fraction: float, pruner: Pruner) -> LatencyPlan:
        """The slices that stay: by group, bool [size], and what was measured.

        Args:
            scores: by group, [size].
            fraction: how far this step goes, relative to the last fraction of the schedule.
            pruner: the pruner that asks.

        Raises:
            BadInput: the network that the floors leave takes longer than the budget, or units are
                no slices.
        """
        context = NetworkContext.of(pruner, fraction)
        threads = checked_threads(self.threads)
        costs = Costs.open(self.cache, threads=threads)
        asker = LayerCosts(costs, pruner.coupling.program.example)
        measure = self.measure or partial(measure_optimized, threads=threads, cache=self.cache)
        problem = Problem.of(scores, context, self.floor, TIMED_COUNTS)
        with set_threads(threads):
            search = _LatencySearch(self, context, problem, asker, measure)
            plan = search.run()
        costs.save()
        return plan


@dataclass(frozen=True, slots=True)
class Problem:
    """The groups to allocate: their scores, which slices are left, and the counts to choose of."""

    scores: Mapping[str, Tensor]
    left: Mapping[str, Tensor]
    items: Mapping[str, Item]

    @classmethod
    def of(cls, scores: Scores, context: NetworkContext, floor: float, most: int) -> Problem:
        """The problem for these scores. most: the number of counts of each group, about."""
        left = {name: context.left[name] for name in context.names}
        items = {}
        for name in context.names:
            own, size = scores[name][left[name]], int(left[name].sum())
            least = min(max(math.ceil(floor * len(left[name])), 1), size)
            counts = spaced_counts(least, size, max(math.ceil(size / most), 1))
            items[name] = Item.of(own, counts)
        return cls(scores, left, items)

    def best(self, cost: Any, budget: float, name: Callable[[float], str]) -> Choice:
        """The best counts within a budget."""
        return Knapsack(self.items, cost, budget).best(name)

    def value(self, choice: Choice) -> float:
        """The importance of the slices that stay."""
        return sum(i.values[i.counts.index(choice[n])] for n, i in self.items.items())

    def least(self) -> Choice:
        """The least counts."""
        return {name: item.counts[0] for name, item in self.items.items()}

    def most(self) -> Choice:
        """All slices that are left."""
        return {name: item.counts[-1] for name, item in self.items.items()}

    def masks(self, choice: Choice) -> dict[str, Tensor]:
        """The masks that retain the best slices of each group; the first of equal ones."""
        masks = {}
        for name, count in choice.items():
            scores = self.scores[name].double().cpu().masked_fill(~self.left[name], -torch.inf)
            best = torch.sort(scores, descending=True, stable=True).indices[:count]
            masks[name] = torch.zeros_like(self.left[name]).index_fill_(0, best, True)
        return masks


@dataclass(slots=True)
class _LatencySearch:
    """The search for a network within a budget. measured: seconds by counts, with what runs it."""

    options: Latency
    context: NetworkContext
    problem: Problem
    asker: LayerCosts
    measure: Callable[..., tuple[float, str]]
    measured: list[tuple[Choice, float]] = field(default_factory=list)
    tables: dict[str, NetworkSeconds] = field(default_factory=dict)
    runner: str = SEGMENT
    trials: list[Trial] = field(default_factory=list)

    def run(self) -> LatencyPlan:
        """The plan; raises BadInput if the least network takes longer than the budget."""
        whole = self.problem.most()
        original = self._measure(whole)
        budget = self._budget(original)
        if original <= budget:
            ms = 1e3 * original
            self.trials.append(Trial(whole, ms, ms, self.runner))
        while not self.trials or not self._is_done(budget):
            choice = self._next(MARGIN * budget)
            if any(choice == trial.counts for trial in self.trials):
                break
            self._try(choice)
        chosen = self._chosen(budget)
        masks = self.problem.masks(chosen.counts)
        return LatencyPlan(masks, self.trials, chosen, 1e3 * budget, 1e3 * original)

    def _budget(self, original: float) -> float:
        """Seconds of this step: the way from the original to the budget, as far as it is now."""
        final = self.options.budget_ms / 1e3
        return max(final, original + (final - original) * self.context.progress)

    def _is_done(self, budget: float) -> bool:
        """Whether the last network was predicted well, fits, and uses the budget."""
        last = self.trials[-1]
        if len(self.trials) == TRIALS or last.counts == self.problem.most():
            return True
        error = abs(last.predicted_ms / last.measured_ms - 1)
        return error <= TOLERANCE and LEAST_USED <= last.measured_ms / (1e3 * budget) <= 1

    def _chosen(self, budget: float) -> Trial:
        """The most important network within the budget. Raises BadInput if none is."""
        fitting = [t for t in self.trials if t.measured_ms <= 1e3 * budget]
        if fitting:
            return max(fitting, key=lambda t: self.problem.value(t.counts))
        least = self.problem.least()
        if all(trial.counts != least for trial in self.trials):
            self._try(least)
            return self._chosen(budget)
        ms = min(trial.measured_ms for trial in self.trials)
        raise BadInput(
            f"expected a budget of at least {ms:.3g} ms, the least that was measured with these "
            f"groups and floors on this machine; got {1e3 * budget:.3g} ms"
        )

    def _try(self, choice: Choice) -> None:
        """Predict a network, build it, measure it."""
        start, share = self._line(self.options.budget_ms / 1e3)
        predicted = start + share * self._table().total(choice)
        seconds = self._measure(choice)
        self.trials.append(Trial(choice, 1e3 * predicted, 1e3 * seconds, self.runner))
        self.options.progress(
            f"predicted {1e3 * predicted:.3f} ms, measured {1e3 * seconds:.3f} ms"
        )

    def _measure(self, choice: Choice) -> float:
        """Measured seconds of the network with these counts."""
        network = self.context.masked(self.problem.masks(choice))
        seconds, self.runner = self.measure(network, self.context.args, self.context.kwargs)
        self.measured.append((choice, seconds))
        return seconds

    def _table(self) -> NetworkSeconds:
        """The seconds of layers, as the last network runs them."""
        if self.runner not in self.tables:
            cost, left = self.context.pruner.removal_cost, self.context.left
            table = NetworkSeconds.of(cost, left, self.asker, self.runner)
            self.tables[self.runner] = table
        return self.tables[self.runner]

    def _next(self, budget: float) -> Choice:
        """The best counts whose predicted seconds are within a budget; the least if none are."""
        table = self._table()
        start, share = self._line(budget)
        room = (budget - start) / share
        if table.total(self.problem.least()) > room:
            return self.problem.least()
        return self.problem.best(table, room, "{:.3g} s of layers".format)

    def _line(self, seconds: float) -> tuple[float, float]:
        """Seconds of networks near `seconds` as a linear function of those of their layers, the
        constant and the factor.

        It goes through the nearest measured networks above and below, else through the two nearest,
        or through one: with the rest of its time as the constant, unless that is most of it.
        """
        table = self._table()
        points = sorted(
            ((table.total(choice), taken) for choice, taken in self.measured),
            key=lambda point: abs(point[1] - seconds),
        )
        x, y = points[0]
        others = [p for p in points if (p[1] > seconds) != (y > seconds)] or points[1:]
        for other_x, other_y in others[:1]:
            share = (y - other_y) / (x - other_x) if x != other_x else 0.0
            if share > LEAST_SHARE * y / x:
                return y - share * x, share
        rest = y - x
        return (rest, 1.0) if 0 <= rest < MOST_REST * seconds else (0.0, y / x)


def measure_optimized(
    network: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, threads: int,
    cache: Any = None,
) -> tuple[float, str]:  # fmt: skip
    """Seconds of a network demasked and optimized, and what runs its layers."""
    slim = demask(network, args, kwargs, check=False, result="graph")
    fast = RUNNERS.get("optimize")(slim, args, kwargs, threads=threads, cache=cache)
    is_segment = fast.demasked.decisions[0].chosen.startswith("segments")
    return time_network(fast, args, kwargs, threads), SEGMENT if is_segment else TORCH


def time_network(
    network: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], threads: int
) -> float:
    """Seconds of a call: the least median of `BLOCK` consecutive calls. Other processes on the
    machine only add to it, and not to all blocks."""
    call = {"": partial(network, *args, **kwargs)}
    with torch.no_grad(), set_threads(threads):
        seconds = sample_seconds(call, CALLS, seconds=SECONDS)[""]
    blocks = [seconds[k : k + BLOCK] for k in range(0, max(len(seconds) - BLOCK, 1), BLOCK)]
    return min(median(block) for block in blocks)


def _is_share(budget: float) -> bool:
    return isinstance(budget, float) and budget <= 1


def _check(value: Any, name: str, meaning: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise BadInput(f"expected {name}, {meaning}, above 0, got {value!r:.40}")


def _check_floor(floor: Any) -> None:
    if not isinstance(floor, (int, float)) or not 0 <= floor <= 1:
        raise BadInput(f"expected a floor from 0 to 1, got {floor!r:.40}")
