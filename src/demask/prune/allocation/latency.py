"""An allocation within a budget of milliseconds on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from demask.errors import BadInput
from demask.graph.capture.shared_captures import share_captures
from demask.machine.clock import checked_threads, set_threads
from demask.machine.cost import Costs
from demask.prune.allocation.budgets import NetworkContext, Problem, Scores, check_budget, check_floor
from demask.prune.allocation.knapsack import Choice
from demask.prune.allocation.layer_seconds import NetworkSeconds, NetworkTime, NetworkTimer, clock_of
from demask.text_table import number_table, render_text
from demask.tune.layer_costs import LayerCosts

if TYPE_CHECKING:
    from demask.prune.pruner import Pruner

TIMED_COUNTS = 16  # counts per group in the knapsack
TRIALS, TOLERANCE, MARGIN = 6, 0.05, 0.98  # networks measured; prediction; share to aim at
LEAST_USED = 0.94  # of the budget, below which another network is tried
BACK_OFF = 0.92  # of the aim, where no network was within the budget
LEAST_SHARE, MOST_REST = 0.2, 0.5  # of a line through measured networks: see `_linear_fit`


@dataclass(frozen=True, slots=True)
class Trial:
    """A network that was built and timed. predicted: milliseconds, before it was built."""

    counts: Choice
    predicted_ms: float
    measured_ms: float


class LatencyPlan(dict[str, Tensor]):
    """The slices that stay, by group, with the measurements that led to them.

    Attributes:
        trials: the networks measured, in order; `chosen` is one of them.
        budget_ms: the budget.
        original_ms: milliseconds of the network with all slices left, optimized.

    Example:
        >>> import torch
        >>> from demask import prune
        >>> trial = prune.allocation.latency.Trial({"0": 3}, 0.9, 1.0)
        >>> plan = prune.LatencyPlan({"0": torch.ones(3) > 0}, [trial], trial, 1.5, 2.0)
        >>> plan.chosen.measured_ms, int(plan["0"].sum())
        (1.0, 3)
    """

    def __init__(
        self, masks: Mapping[str, Tensor], trials: Sequence[Trial], chosen: Trial, budget_ms: float, original_ms: float
    ):
        super().__init__(masks)
        self.trials, self.chosen = tuple(trials), chosen
        self.budget_ms, self.original_ms = budget_ms, original_ms

    def __str__(self) -> str:
        table = number_table("network", "predicted ms", "measured ms", "slices")
        table.add_row("all slices", "", f"{self.original_ms:.3f}", "")
        for number, trial in enumerate(self.trials, 1):
            mark = " (chosen)" if trial is self.chosen else ""
            table.add_row(
                f"trial {number}{mark}",
                f"{trial.predicted_ms:.3f}",
                f"{trial.measured_ms:.3f}",
                str(sum(trial.counts.values())),
            )
        return render_text(table, f"budget: {self.budget_ms:g} ms")


@dataclass(frozen=True, slots=True)
class Latency:
    """As much importance as fits in the milliseconds of one call on this machine.

    The call is on the example inputs, of `demask.optimize(demask.demask(model))`. Seconds of layers
    at several widths are measured and summed; networks at the solutions are built, measured and
    used to correct the sum, until a network is within the budget and was predicted well
    (`TOLERANCE`). Scores are compared as by `MACs`. As HALP (Shen et al. 2022) and ZipLM (Kurtic et al. 2023) do.

    Args:
        budget_ms: milliseconds.
        threads: number of CPU threads; None: `torch.get_num_threads()`.
        floor: the share of its slices that each group retains at least; one slice always stays.
        cache: path of the file for measured costs, False for none; as for `demask.optimize`.
        measure: called with a network, arguments and keywords of one call; returns a `NetworkTime`.
            None: a new `NetworkTimer` in every step, which times networks in turns with that of all
            slices. Pass one where all steps of a schedule should be timed at one speed.
        progress: called with a short text at each step.

    Example:
        >>> from demask.prune import Latency
        >>> Latency(budget_ms=2.5).budget_ms
        2.5
    """

    budget_ms: float
    threads: int | None = None
    floor: float = 0.05
    cache: Any = None
    measure: Callable[..., NetworkTime] | None = None
    progress: Callable[[str], object] = lambda words: None

    def __post_init__(self) -> None:
        check_budget(self.budget_ms, "budget_ms", "milliseconds")
        check_floor(self.floor)
        checked_threads(self.threads)

    def __call__(self, scores: Scores, fraction: float, pruner: Pruner) -> LatencyPlan:
        """The slices that stay: by group, bool [size], and what was measured.

        Args:
            scores: by group, [size].
            fraction: how far this step is, relative to the last fraction of the schedule.
            pruner: the pruner that asks.

        Raises:
            BadInput: the network that the floors leave takes longer than the budget, or units are
                no slices.
        """
        context = NetworkContext.of(pruner, fraction)
        threads = checked_threads(self.threads)
        costs = Costs.open(self.cache, threads=threads, clock=clock_of(threads))
        asker = LayerCosts(costs, pruner.coupling.program.example)
        measure = self.measure or NetworkTimer(threads, self.cache)
        problem = Problem.of(scores, context, self.floor, TIMED_COUNTS)
        with set_threads(threads), share_captures():
            search = _LatencySearch(self, context, problem, asker, measure)
            plan = search.run()
        costs.save()
        return plan


@dataclass(frozen=True, slots=True)
class _Prediction:
    """Seconds of a network as a function of counts, by the fastest runner of its layers.

    lines: per runner, the constant, the factor, and the seconds of its layers.
    """

    lines: tuple[tuple[float, float, NetworkSeconds], ...]

    def total(self, counts: Mapping[str, int]) -> float:
        return min(start + share * layers.total(counts) for start, share, layers in self.lines)


@dataclass(slots=True)
class _LatencySearch:
    """The search for a network within a budget. measured: seconds of networks, by counts."""

    options: Latency
    context: NetworkContext
    problem: Problem
    asker: LayerCosts
    measure: Callable[..., NetworkTime]
    measured: list[tuple[Choice, NetworkTime]] = field(default_factory=list)
    tables: dict[str, NetworkSeconds] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)

    def run(self) -> LatencyPlan:
        """The plan; raises BadInput if the least network takes longer than the budget."""
        unpruned = self.problem.most()
        original = self._measure_network(unpruned)
        budget = self._seconds_of_step(original)
        if original <= budget:
            self.trials.append(Trial(unpruned, 1e3 * original, 1e3 * original))
        aim, least = MARGIN * budget, self.problem.least()
        while not self.trials or not self._is_done(budget):
            prediction = self._prediction_near(budget)
            choice = self._next_choice(prediction, aim)
            is_new = all(choice != trial.counts for trial in self.trials)
            if is_new:
                predicted, measured = 1e3 * prediction.total(choice), 1e3 * self._measure_network(choice)
                self.trials.append(Trial(choice, predicted, measured))
                self.options.progress(f"predicted {predicted:.3f} ms, measured {measured:.3f} ms")
            elif self._trials_within(budget) or choice == least:
                break
            if not is_new or len(self.trials) >= TRIALS:
                aim *= BACK_OFF  # measurements vary: aim lower rather than give up
        chosen = self._best_measured(budget)
        masks = self.problem.masks(chosen.counts)
        return LatencyPlan(masks, self.trials, chosen, 1e3 * budget, 1e3 * original)

    def _seconds_of_step(self, original: float) -> float:
        """Seconds of this step: the way from the original to the budget, as far as it is now."""
        final = self.options.budget_ms / 1e3
        return max(final, original + (final - original) * self.context.progress)

    def _is_done(self, budget: float) -> bool:
        """Whether the last network was predicted well, fits, and uses the budget."""
        last = self.trials[-1]
        if last.counts == self.problem.most():
            return True
        if len(self.trials) >= TRIALS and self._trials_within(budget):
            return True
        error = abs(last.predicted_ms / last.measured_ms - 1)
        return error <= TOLERANCE and LEAST_USED <= last.measured_ms / (1e3 * budget) <= 1

    def _best_measured(self, budget: float) -> Trial:
        """The most important network within the budget. Raises BadInput if none is."""
        fitting = self._trials_within(budget)
        if fitting:
            return max(fitting, key=lambda t: self.problem.value(t.counts))
        ms = min(trial.measured_ms for trial in self.trials)
        raise BadInput(
            f"expected a budget of at least {ms:.3g} ms, the least that was measured with these "
            f"groups and floors on this machine; got {1e3 * budget:.3g} ms"
        )

    def _trials_within(self, budget: float) -> list[Trial]:
        return [trial for trial in self.trials if trial.measured_ms <= 1e3 * budget]

    def _measure_network(self, choice: Choice) -> float:
        network = self.context.masked(self.problem.masks(choice))
        measured = self.measure(network, self.context.args, self.context.kwargs)
        self.measured.append((choice, measured))
        return measured.seconds

    def _next_choice(self, prediction: _Prediction, budget: float) -> Choice:
        """The best counts whose predicted seconds are within a budget; the least if none are."""
        if prediction.total(self.problem.least()) > budget:
            return self.problem.least()
        return self.problem.best(prediction, budget, "{:.3g} s".format)

    def _prediction_near(self, seconds: float) -> _Prediction:
        runners = dict.fromkeys(r for _, measured in self.measured for r in measured.runners)
        return _Prediction(tuple((*self._linear_fit(r, seconds), self._runner_seconds(r)) for r in runners))

    def _runner_seconds(self, runner: str) -> NetworkSeconds:
        if runner not in self.tables:
            cost, left = self.context.pruner.removal_cost, self.context.left
            self.tables[runner] = NetworkSeconds.of(cost, left, self.asker, runner)
        return self.tables[runner]

    def _linear_fit(self, runner: str, seconds: float) -> tuple[float, float]:
        """Seconds of networks near `seconds` as a linear function of those of their layers, the
        constant and the factor.

        It passes through the nearest measured networks above and below, else through the two
        nearest, or through one: with the rest of its time as the constant, unless that is most.
        """
        table = self._runner_seconds(runner)
        points = sorted(
            (
                (table.total(choice), measured.runners[runner])
                for choice, measured in self.measured
                if runner in measured.runners
            ),
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
