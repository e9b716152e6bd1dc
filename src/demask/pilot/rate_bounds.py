"""Exact bounds on rates from counts: no normal approximation, so they hold for rare events too.

A count of independent draws is binomial. The interval of Clopper and Pearson inverts its two tails.
The difference of two rates on the same examples (how often a change for the worse happens, less how
often one for the better does) is that of three outcomes, of which two are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from demask.errors import BadInput
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
    low = 1 - _largest(lambda rate: _at_most(n - k, n, rate) > tail) if k else 0.0
    return low, upper_bound(k, n, 1 - tail)


@lru_cache(KEPT)
def upper_bound(k: int, n: int, level: float = 0.95) -> float:
    """The rate that an event seen `k` times in `n` draws does not exceed, with probability `level`
    at least: one side of Clopper and Pearson's interval.

    >>> round(upper_bound(0, 100), 4)  # 3 in 100, the rule of three
    0.0295
    """
    tail = 1 - _checked(k, n, level)
    return 1.0 if k == n else _largest(lambda rate: _at_most(k, n, rate) > tail)


def rate_p_value(k: int, n: int, rate: float) -> float:
    """How probable `k` events or fewer are in `n` draws, if they happen at `rate` or more often.

    >>> round(rate_p_value(0, 3, 0.5), 3)
    0.125
    """
    _checked(k, n, 0.5)
    return _at_most(k, n, rate)


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
    return min(1.0, _difference_at_most(lost - won, n, changes, loss) + spent)


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


def _difference_at_most(most: int, n: int, changes: float, loss: float) -> float:
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
    place = (counts + most - low[0]).clamp(-1, len(sums) - 1).long()
    reached = torch.where(place < 0, 0.0, sums[place.clamp(min=0)])
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


def _at_most(k: int, n: int, rate: float) -> float:
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


__all__ = ["clopper_pearson", "paired_bound", "paired_p_value", "rate_p_value", "upper_bound"]
