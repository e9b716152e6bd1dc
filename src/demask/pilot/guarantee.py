"""A parameter chosen from data, with a guarantee for new data.

A threshold that is chosen and evaluated on the same examples looks better than it is: by half a
point of accuracy on some thousand images. So examples are split in three. The first split chooses
where to begin; on the second thresholds are tested one after the other, from careful to bold, until
one fails; on the third the last that passed is measured. Each test errs with probability 1 - level
at most, and so do all of them together: the order is fixed before the second split is used, and
for any error there must have been one at the first wrong threshold (Bauer 1991; Angelopoulos et al.
2021, "Learn then Test").

Bounds on rates are exact, without a normal approximation, so they hold for rare events too. A count of
independent draws is binomial. The interval of Clopper and Pearson inverts its two tails. The difference
of two rates on the same examples (how often a change for the worse happens, less how often one for the
better does) is that of three outcomes, of which two are counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from demask.errors import BadInput
from demask.failures import public
from demask.numerics import is_integer, is_number

NUISANCE = 0.1  # of the error allowed: what bounding the unknown rate of changes may cost
STEPS = 40  # of bisection: a bound is at most 1e-12 above the exact one
KEPT = 2**14  # cached bounds: neighboring thresholds and later splits need the same ones
SPAN = 12  # standard deviations beyond which a sum is cut off; what is left there is added


def clopper_pearson(k: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """An exact interval for the rate of an event that occurred `k` times in `n` independent draws.

    The interval contains the true rate with probability `level` or more; the error is at most (1 -
    level) / 2 on either side (Clopper and Pearson 1934). The interval is valid for rare events,
    too.

    Args:
        k: number of draws in which the event occurred, 0 to n.
        n: number of draws, 1 or more.
        level: probability, between 0 and 1; default 0.95.

    Returns:
        (low, high), two floats from 0 to 1.

    Raises:
        BadInput: `k` or `n` is no integer, or `k`, `n` or `level` is out of range.

    Example:
        >>> from demask.pilot import clopper_pearson
        >>> low, high = clopper_pearson(3, 100)  # measured: 3 %
        >>> round(low, 4), round(high, 4)
        (0.0062, 0.0852)
    """
    tail = (1 - _checked(k, n, level)) / 2
    low = 1 - _largest(lambda rate: binomial_at_most(n - k, n, rate) > tail) if k else 0.0
    return low, upper_bound(k, n, 1 - tail)


@lru_cache(KEPT)
def upper_bound(k: int, n: int, level: float = 0.95) -> float:
    """The rate that an event seen `k` times in `n` draws does not exceed, with probability `level`
    at least: one side of Clopper and Pearson's interval.

    >>> round(upper_bound(0, 100), 4)  # 3 in 100, the rule of three
    0.0295
    """
    tail = 1 - _checked(k, n, level)
    return 1.0 if k == n else _largest(lambda rate: binomial_at_most(k, n, rate) > tail)


def rate_p_value(k: int, n: int, rate: float) -> float:
    """How probable `k` events or fewer are in `n` draws, if they happen at `rate` or more often.

    >>> round(rate_p_value(0, 3, 0.5), 3)
    0.125
    """
    _checked(k, n, 0.5)
    return binomial_at_most(k, n, rate)


@lru_cache(KEPT)
def paired_p_value(lost: int, won: int, n: int, loss: float, level: float = 0.95) -> float:
    """The p-value of "lost less won is a rate of `loss` or more", on the same `n` examples.

    lost, won: how many examples changed for the worse and for the better. Below 1 - level, the
    statement is rejected with an error of 1 - level at most, whatever the rate of changes.

    McNemar's test (1947) for a margin, exact and without conditioning on the number of changes. The
    rate d of changes is unknown: it is bounded from above at a tenth of the error, and the rest is
    tested at the worst d below that (Berger and Boos 1994). For d <= 1/2 the polynomial of one
    example, (d - loss)/2 + (1 - d) z + (d + loss)/2 z², has real roots, so lost - won is the
    difference of two independent binomial counts: its law is known, and has one peak, next to the
    mean (Darroch 1964). In the tail below it the probability grows with d, so the worst d is
    the largest.

    Why not the bound of Hoeffding and Bentkus, which is usual for losses in [0, 1]: of a loss in
    [-1, 1] that is nearly always 0 it knows the range but not the rate of changes. With 4 % changes
    among 4,000 examples it would ask for five times the margin.

    >>> paired_p_value(lost=20, won=60, n=4000, loss=0.002) < 0.05
    True
    >>> paired_p_value(lost=45, won=45, n=4000, loss=0.002) < 0.05
    False
    """
    if not 0 <= loss < 1:
        raise BadInput(f"expected a loss of 0 to 1, as a share of examples, got {loss}")
    _checked(lost + won, n, level)
    spent = NUISANCE * (1 - level)
    changes = upper_bound(lost + won, n, 1 - spent)
    if changes < loss:
        return spent  # so few changes cannot be so great a loss
    if changes > 0.5 or lost - won + 1 > (n - 1) * loss:
        return 1.0  # not the tail below the mean: nothing is rejected there
    return min(1.0, difference_at_most(lost - won, n, changes, loss) + spent)


def paired_bound(lost: int, won: int, n: int, level: float = 0.95) -> float:
    """An upper bound of the accuracy that a change to a network loses on new examples, from counts.

    A change makes some right answers wrong and some wrong answers right. The loss is the rate of
    the first less the rate of the second. With probability `level` or more, the loss is at most the
    returned rate. The bound inverts an exact McNemar test (1947) with a margin.

    Args:
        lost: number of examples that were right before the change and are wrong after it, 0 or
            more.
        won: number of examples that were wrong before and are right after, 0 or more.
        n: number of all examples, changed or not, 1 or more.
        level: probability, between 0 and 1; default 0.95.

    Returns:
        A float from 0 to 1; 1 where the counts exclude no loss.

    Raises:
        BadInput: a count is negative or no integer, `lost + won` is above `n`, `n` is below 1, or
            `level` is out of range.

    Example:
        >>> from demask.pilot import paired_bound
        >>> round(paired_bound(lost=45, won=45, n=4000), 4)  # as many lost as won: 0 measured
        0.0047
        >>> paired_bound(lost=20, won=60, n=4000)  # the change is an improvement
        0.0
    """
    for count in (lost, won, lost + won):
        _checked(count, n, level)
    return _largest(lambda loss: paired_p_value(lost, won, n, loss, level) > 1 - level)


def difference_at_most(most: int, n: int, changes: float, loss: float) -> float:
    """P(lost - won <= most), if `changes` of examples change, and `loss` more to the worse.

    The factors of the polynomial are Bernoulli trials of probabilities a and b with a + b = 1 +
    loss and a b = (changes + loss) / 2, so lost - won is Bin(n, b) - Bin(n, 1 - a).
    """
    root = math.sqrt(max(0.0, 1 + loss * loss - 2 * changes))
    # (1 + loss - root) / 2 without its cancellation, and 1 - a likewise.
    up = (changes + loss) / (1 + loss + root)
    down = (changes - loss) / (1 - loss + root)
    counts, chance = _masses(n, down)
    low, above = _masses(n, up)
    sums = above.cumsum(0)
    index = (counts + most - low[0]).clamp(-1, len(sums) - 1).long()
    reached = torch.where(index < 0, 0.0, sums[index.clamp(min=0)])
    cut = 2 - float(chance.sum()) - float(above.sum())  # of both sums: counted against us
    return float((chance * reached).sum()) + max(0.0, cut)


def _masses(n: int, rate: float) -> tuple[Tensor, Tensor]:
    """Counts and their probabilities among n draws, as far from the mean as matters: float64."""
    mean, spread = int(n * rate), _spread(n, rate)
    counts = _range(mean - spread, min(n, mean + 1 + spread))
    return counts, _log_mass(counts, n, rate).exp()


def _log_mass(counts: Tensor, n: int, rate: float) -> Tensor:
    total = torch.tensor(float(n), dtype=torch.float64)
    ways = torch.lgamma(total + 1) - torch.lgamma(counts + 1) - torch.lgamma(total - counts + 1)
    rates = torch.tensor(rate, dtype=torch.float64)
    return ways + torch.xlogy(counts, rates) + torch.special.xlog1py(total - counts, -rates)


def binomial_at_most(k: int, n: int, rate: float) -> float:
    """P(Bin(n, rate) <= k), by the shorter of its two sums."""
    if k >= n:
        return 1.0
    spread = _spread(n, rate)
    if k < n * rate:
        return float(_log_mass(_range(k - spread, k), n, rate).exp().sum())
    return 1 - float(_log_mass(_range(k + 1, min(n, k + 1 + spread)), n, rate).exp().sum())


def _spread(n: int, rate: float) -> int:
    """So many counts from the mean, or from any count beyond it, what is left is below 1e-30 of the
    largest probability on the way (Bernstein)."""
    return int(SPAN * math.sqrt(n * rate * (1 - rate)) + SPAN * SPAN / 2) + 1


def _range(low: int, high: int) -> Tensor:
    return torch.arange(max(0, low), high + 1, dtype=torch.float64)


def _largest(holds: Callable[[float], bool]) -> float:
    """The upper end of where a property of [0, 1] holds that holds up to some point: never below
    that point."""
    low, high = 0.0, 1.0
    if not holds(low):
        return low
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return high


def _checked(k: int, n: int, level: float) -> float:
    if not (is_integer(k) and is_integer(n) and 0 <= k <= n and n >= 1):
        raise BadInput(f"expected counts of 0 to n >= 1 examples, got {k} of {n}")
    if not is_number(level) or not 0 < level < 1:
        raise BadInput(f"expected a level between 0 and 1, such as 0.95, got {level!r}")
    return level


LOSS, LEVEL = 0.002, 0.95
MOST = 2**24  # examples of one split, beyond which no number is searched


class Splits(NamedTuple):
    """Three disjoint sets of examples: to choose a parameter, to test it, to report its loss.

    Attributes:
        choose: numbers of the examples that choose the first value to test, int64 [examples].
        bound: numbers of the examples on which values are tested, int64 [examples].
        report: numbers of the examples on which the result is measured, int64 [examples].
    """

    choose: Tensor
    bound: Tensor
    report: Tensor


def splits(n: int, seed: int = 0, parts: Sequence[float] = (1, 1, 1)) -> Splits:
    """Three random disjoint sets of the numbers 0 to n - 1: to choose, to test and to report.

    `guarantee` chooses a parameter on the first set, tests it on the second (`bound`), and measures
    it on the third.

    Args:
        n: number of examples, at least 3.
        seed: seed of the random order; default 0.
        parts: proportions of the three sets, each above 0; default (1, 1, 1).

    Returns:
        A named tuple (choose, bound, report) of int64 tensors, which contain 0 to n - 1 once each.

    Raises:
        BadInput: `parts` are not three positive numbers, or a set would be empty.

    Example:
        >>> from demask.pilot import splits
        >>> choose, bound, report = splits(10, parts=(1, 4, 5))
        >>> len(choose), len(bound), sorted([*choose.tolist(), *bound.tolist(), *report.tolist()])
        (1, 4, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """
    if not is_integer(n) or not is_integer(seed):
        raise BadInput(f"expected integers as n and seed, got {n!r} and {seed!r}")
    if len(parts) != 3 or not all(map(is_number, parts)) or min(parts) <= 0:
        raise BadInput(f"expected three positive parts (choose, bound, report), got {parts}")
    first, second = (round(n * sum(parts[:k]) / sum(parts)) for k in (1, 2))
    if not 0 < first < second < n:
        raise BadInput(f"{n} examples are too few to be split as {tuple(parts)}: a part is empty")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    return Splits(order[:first], order[first:second], order[second:])


@dataclass(frozen=True, slots=True, eq=False)
class Outcomes:
    """Changed answers of a conditioned network, for each value of its parameter and each example.

    `compared` builds it from predicted classes.

    Attributes:
        knobs: values of the parameter, the most careful first.
        lost: bool [values, examples]: the full network is right, the conditioned one wrong.
        won: bool [values, examples]: the full network is wrong, the conditioned one right.
        differs: bool [values, examples]: the two answers differ.
        labelled: whether right and wrong are known; without labels `lost` equals `differs`. Default
            True.

    Raises:
        BadInput: the three tensors do not have the shape [values, examples].
    """

    knobs: tuple[float, ...]
    lost: Tensor
    won: Tensor
    differs: Tensor
    labelled: bool = True

    def __post_init__(self) -> None:
        parts = self.lost, self.won, self.differs
        if not self.knobs or not all(isinstance(part, Tensor) for part in parts):
            raise BadInput(
                "expected a value of the parameter or more, and lost, won and differs "
                f"as tensors; got {len(self.knobs)} values and "
                f"{', '.join(type(part).__name__ for part in parts)}"
            )
        shapes = {tuple(part.shape) for part in parts}
        if len(shapes) != 1 or len(self.lost) != len(self.knobs) or self.lost.ndim != 2:
            raise BadInput(f"expected [{len(self.knobs)} knobs, examples] three times, got {sorted(shapes)}")

    def at(self, examples: Tensor) -> Outcomes:
        """The outcomes of some examples, int64 [examples]."""
        lost, won, differs = (part[:, examples] for part in (self.lost, self.won, self.differs))
        return Outcomes(self.knobs, lost, won, differs, self.labelled)

    def measured(self) -> tuple[Measured, ...]:
        """The counts, per knob."""
        lost, won, differs = (part.sum(1).tolist() for part in (self.lost, self.won, self.differs))
        examples = self.lost.shape[1]
        return tuple(
            Measured(examples, *counts, labelled=self.labelled) for counts in zip(lost, won, differs, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """Numbers of examples whose answer changed: for the worse, for the better, and at all.

    Attributes:
        examples: number of examples.
        lost: examples that only the full network gets right.
        won: examples that only the conditioned network gets right.
        differs: examples on which the answers differ.
        labelled: whether right and wrong are known; without labels `lost` equals `differs`.
    """

    examples: int
    lost: int
    won: int
    differs: int
    labelled: bool = True

    @property
    def loss(self) -> float:
        """Lost less won, as a share: negative where the conditioned network is better."""
        return (self.lost - self.won) / self.examples

    @property
    def disagreement(self) -> float:
        """The share of answers that differ from the full network's."""
        return self.differs / self.examples

    def loss_bound(self, level: float = LEVEL) -> float:
        """A bound that the loss does not exceed, with probability `level` at least."""
        if not self.labelled:
            return self.disagreement_bound(level)
        return paired_bound(self.lost, self.won, self.examples, level)

    def disagreement_bound(self, level: float = LEVEL) -> float:
        """A bound that the disagreement does not exceed, with probability `level` at least."""
        return upper_bound(self.differs, self.examples, level)

    def p_value(self, loss: float, level: float = LEVEL, examples: int | None = None) -> float:
        """The p-value of "the loss is `loss` or more", as if the rates were of `examples`."""
        n = examples or self.examples
        lost, won = (round(k * n / self.examples) for k in (self.lost, self.won))
        if not self.labelled:
            return rate_p_value(lost, n, loss)
        return paired_p_value(lost, won, n, loss, level)


@dataclass(frozen=True, slots=True)
class Guarantee:
    """The result of `guarantee`: a value of a parameter, and a bound on the loss that it causes.

    The loss is the accuracy lost or, without labels, the share of answers that differ from the full
    network's. On new examples from the same distribution the loss of `threshold` is at most `loss`,
    with probability `level`. The examples were split at random: the first set chose the value to
    test first, the second tested values, the third (with no part in the choice) measured the
    result. `print` shows a guarantee as a table.

    Attributes:
        threshold: the chosen value of the parameter; None where no value passed its test, which
            means: run the full network.
        loss: greatest loss, a share of examples, 0 to 1.
        level: probability with which the loss is not exceeded, between 0 and 1.
        p_value: p-value of the last test that passed; where none did, of the first test.
        passed: number of values that passed.
        tested: number of values that were tested.
        sizes: numbers of examples in the first, second and third set.
        reported: counts on the third set: `examples`, `lost` (only the full network is right),
            `won` (the reverse), `differs`, and the shares `loss` and `disagreement`; counts of 0
            where `threshold` is None.
        enough: where `threshold` is None, about how many examples in all would be enough for the
            first value tested, at its measured rates; None where a value passed or where no number
            is enough.
        loss_bound: upper bound of the loss at `level`, from the third set alone.
        disagreement_bound: upper bound of the share of answers that differ, likewise.

    Example:
        >>> import torch
        >>> from demask.pilot import guarantee
        >>> from demask.pilot.guarantee import compared
        >>> full = torch.zeros(3000, dtype=torch.int64)  # classes of the full network
        >>> outcomes = compared([0.5], full, full[None])  # 0.5 changes no answer
        >>> never = guarantee(outcomes, loss=0.01)
        >>> never.threshold, never.sizes, never.loss_bound < 0.01
        (0.5, (1000, 1000, 1000), True)
    """

    threshold: float | None
    loss: float
    level: float
    p_value: float
    passed: int
    tested: int
    sizes: tuple[int, int, int]
    reported: Measured
    enough: int | None = None

    @property
    def loss_bound(self) -> float:
        """Upper bound of the loss at `level`, from the third set alone."""
        return self.reported.loss_bound(self.level)

    @property
    def disagreement_bound(self) -> float:
        """Upper bound of the share of answers that differ, at `level`, from the third set alone."""
        return self.reported.disagreement_bound(self.level)

    def __str__(self) -> str:
        kind = "accuracy lost" if self.reported.labelled else "answers that differ"
        measured, level = self.reported, f"{self.level:.0%}"
        sizes = " + ".join(f"{size:,}" for size in self.sizes)
        lines = [
            ("examples (choose + bound + report)", sizes),
            ("values tested, passed", f"{self.tested}, {self.passed}"),
        ]
        if self.threshold is None:
            value = f"none: run the full network (p = {self.p_value:.3g} at the most promising; {self._missing()})"
        else:
            value = f"{self.threshold:.6g} (p = {self.p_value:.3g})"
        lines += [
            ("threshold", value),
            (f"{kind}, guaranteed at {level}", f"at most {100 * self.loss:.2f} points"),
            (
                f"{kind}, third split",
                f"{100 * measured.loss:+.2f} points, at most {100 * self.loss_bound:.2f} at {level}",
            ),
            (
                "disagreement, third split",
                f"{measured.disagreement:.2%}, at most {self.disagreement_bound:.2%} at {level}",
            ),
        ]
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:{width}}  {value}" for name, value in lines)

    def _missing(self) -> str:
        if self.enough is None:
            return "it loses too much for any number of examples"
        return f"at its rates about {self.enough:,} examples in all would do, not {sum(self.sizes):,}"


def compared(knobs: Sequence[float], full: Tensor, conditioned: Tensor, labels: Tensor | None = None) -> Outcomes:
    """The outcomes of classes: full [examples], conditioned [knobs, examples], labels [examples] or
    None, integers. knobs: the most careful first.

    >>> full, labels = torch.tensor([0, 1, 2]), torch.tensor([0, 1, 1])
    >>> compared([0.9, 0.5], full, torch.tensor([[0, 1, 2], [1, 1, 1]]), labels).measured()[1]
    Measured(examples=3, lost=1, won=1, differs=2, labelled=True)
    """
    differs = conditioned != full
    if labels is None:
        return Outcomes(tuple(knobs), differs, torch.zeros_like(differs), differs, False)
    right, still = full == labels, conditioned == labels
    return Outcomes(tuple(knobs), right & ~still, ~right & still, differs)


@torch.no_grad()
def observed(
    model: nn.Module,
    factory: Callable[[float], nn.Module],
    knobs: Sequence[float],
    batches: Iterable[Any],
    labels: Tensor | None = None,
    answer: Callable[[Any], Tensor] | None = None,
) -> Outcomes:
    """The outcomes of a conditioned network against the full one, for each value of its parameter.

    factory: returns the conditioned network of a value. knobs: the most careful first. batches: a
    tensor or an args tuple each. labels: classes, int64 [examples] in the order of the batches.
    answer:
    classes from outputs; by default the largest of the first output's last axis.
    """
    read = answer or (lambda outputs: pytree.tree_leaves(outputs)[0].argmax(-1))
    calls = [one if isinstance(one, tuple) else (one,) for one in batches]
    if not calls:
        raise BadInput("expected batches of examples to learn from, got none")
    full = torch.cat([read(model(*args)) for args in calls])
    if labels is not None and (labels.shape != full.shape or labels.is_floating_point()):
        raise BadInput(
            f"expected labels as {list(full.shape)} classes, integers, one per example, "
            f"got {labels.dtype} {list(labels.shape)}"
        )
    rows = []
    for knob in knobs:
        network = factory(knob)
        rows.append(torch.cat([read(network(*args)) for args in calls]))
    return compared(knobs, full, torch.stack(rows), labels)


def by_mean(outcomes: Outcomes, loss: float = LOSS) -> float | None:
    """The most aggressive value of a parameter whose measured loss is small, without a bound.

    The most aggressive value is the one that leaves out most work. On new examples the loss may be
    larger; `guarantee` returns a value that was tested.

    Args:
        outcomes: for each value of the parameter (the most careful first) and each example, whether
            the answer became wrong, right or different: a `demask.pilot.guarantee.Outcomes`.
        loss: greatest loss on these examples, a share; default 0.002. The loss is the share of
            answers that became wrong less the share that became right.

    Returns:
        The last value of `outcomes.knobs` whose loss is at most `loss`, a float; None if all values
        lose more.

    Raises:
        BadInput: `outcomes` is no `Outcomes`, or has no examples.

    Example:
        >>> import torch
        >>> from demask.pilot import by_mean
        >>> from demask.pilot.guarantee import Outcomes
        >>> lost = torch.tensor([[False] * 10, [True] * 5 + [False] * 5])  # 0.5 loses half
        >>> by_mean(Outcomes((0.9, 0.5), lost, torch.zeros_like(lost), lost), loss=0.1)
        0.9
    """
    if not isinstance(outcomes, Outcomes) or not outcomes.lost.shape[1]:
        raise BadInput(f"expected demask.pilot.guarantee.Outcomes of one example or more, got {outcomes!r:.40}")
    accepted = [knob for knob, one in zip(outcomes.knobs, outcomes.measured(), strict=True) if one.loss <= loss]
    return accepted[-1] if accepted else None


@public
def guarantee(
    outcomes: Outcomes, loss: float = LOSS, level: float = LEVEL, *, split: Splits | None = None, seed: int = 0
) -> Guarantee:
    """A `Guarantee`: the most aggressive value of a parameter whose loss on new data is bounded.

    Values are ordered from careful (close to the full network) to aggressive (least work). The loss
    of the chosen value on new examples is at most `loss`, with probability `level`. The loss is the
    share of examples that only the full network gets right, less the share that only the
    conditioned network gets right; without labels it is the share of answers that differ. Examples
    must be independent draws from the distribution of later inputs.

    The examples are split in three. The first set chooses the value that is most certain to pass.
    From that value on, values are tested on the second set, each more aggressive than the one
    before, until one fails; the last that passed is the result, measured on the third set. If the
    first one fails, no value passes. The method is fixed-sequence testing (Bauer 1991; Angelopoulos
    et al. 2021, "Learn then Test").

    Args:
        outcomes: for each value of the parameter (the most careful first) and each example, whether
            the answer became wrong, right or different: a `demask.pilot.guarantee.Outcomes`, which
            `demask.pilot.guarantee.compared` builds from predicted classes.
        loss: greatest loss, a share of examples, at least 0 and below 1; default 0.002.
        level: probability, between 0 and 1; default 0.95.
        split: the three sets, as `splits` returns them; default None: thirds, by `seed`.
        seed: seed of the default split; default 0.

    Returns:
        A `Guarantee`, whose `threshold` is None if no value passes: then run the full network.

    Raises:
        BadInput: `loss` or `level` is out of range, or there are too few examples to split.

    Example:
        >>> import torch
        >>> from demask.pilot import guarantee
        >>> from demask.pilot.guarantee import compared
        >>> full = torch.zeros(3000, dtype=torch.int64)  # classes of the full network
        >>> other = full + (torch.arange(3000) % 20 == 0)  # 5 % of the classes changed
        >>> outcomes = compared([0.9, 0.5], full, torch.stack([full, other]))  # of 0.9 and of 0.5
        >>> guarantee(outcomes, loss=0.01).threshold
        0.9
        >>> print(guarantee(outcomes, loss=0.0).threshold)  # no value passes
        None
    """
    if not 0 <= loss < 1:
        raise BadInput(f"expected a loss of 0 to 1, as a share of examples, got {loss}")
    if not 0 < level < 1:
        raise BadInput(f"expected a level between 0 and 1, such as 0.95, got {level}")
    split = splits(outcomes.lost.shape[1], seed) if split is None else split
    tests = outcomes.at(split.bound).measured()
    start = _most_certain(outcomes.at(split.choose).measured(), loss, level, len(split.bound))
    last, passed, tested, p = None, 0, 0, 1.0
    for k in range(start, len(tests)):
        p_value = tests[k].p_value(loss, level)
        tested += 1
        if not p_value <= 1 - level:
            p = p_value if last is None else p
            break
        last, passed, p = k, passed + 1, p_value
    report = outcomes.at(split.report)
    sizes = (len(split.choose), len(split.bound), len(split.report))
    if last is None:
        nothing = Measured(sizes[2], 0, 0, 0, outcomes.labelled)
        least = _enough(tests[start], loss, level)
        total = None if least is None else -(-least * sum(sizes) // sizes[1])
        return Guarantee(None, loss, level, p, passed, tested, sizes, nothing, total)
    return Guarantee(outcomes.knobs[last], loss, level, p, passed, tested, sizes, report.measured()[last])


def _enough(measured: Measured, loss: float, level: float) -> int | None:
    """Of how many examples with these rates the test is passed; None: of none up to `MOST`."""
    if measured.loss >= loss:
        return None  # it is what the test is to exclude
    high = measured.examples
    while measured.p_value(loss, level, high) > 1 - level:
        high *= 2
        if high > MOST:
            return None
    low = high // 2
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        low, high = (middle, high) if measured.p_value(loss, level, middle) > 1 - level else (low, middle)
    return high


def _most_certain(measured: Sequence[Measured], loss: float, level: float, n: int) -> int:
    """The value that passes most surely on `n` examples of these rates; of several the first."""
    return min(range(len(measured)), key=lambda k: (measured[k].p_value(loss, level, n), measured[k].loss))


__all__ = ["Guarantee", "Measured", "Outcomes", "Splits", "by_mean", "compared", "guarantee", "observed", "splits"]
