"""Bounds from counts, held to exact sums; thresholds with a guarantee, held to simulations."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from demask.errors import BadInput
from demask.pilot.guarantee import (
    Guarantee,
    Measured,
    Outcomes,
    binomial_at_most,
    by_mean,
    clopper_pearson,
    compared,
    difference_at_most,
    guarantee,
    observed,
    paired_bound,
    paired_p_value,
    splits,
    upper_bound,
)

# (events, draws, low, high) at 95 %, from published tables of Clopper and Pearson's interval.
TABLE = [
    (0, 10, 0.0, 0.3085),
    (1, 10, 0.0025, 0.4450),
    (5, 10, 0.1871, 0.8129),
    (10, 10, 0.6915, 1.0),
    (4, 20, 0.0573, 0.4366),
    (81, 263, 0.2527, 0.3676),
]


@pytest.mark.parametrize(("k", "n", "low", "high"), TABLE)
def test_intervals_are_those_of_the_tables(k: int, n: int, low: float, high: float) -> None:
    found = clopper_pearson(k, n)
    assert [round(v, 4) for v in found] == [low, high]


def at_most(k: int, n: int, rate: Fraction) -> Fraction:
    """P(Bin(n, rate) <= k) in exact arithmetic."""
    return sum((math.comb(n, j) * rate**j * (1 - rate) ** (n - j) for j in range(k + 1)), Fraction(0))


@pytest.mark.parametrize(("k", "n"), [(0, 1), (0, 60), (3, 60), (59, 60), (30, 300)])
def test_a_bound_is_where_the_exact_tail_is_what_is_left(k: int, n: int) -> None:
    bound = Fraction(upper_bound(k, n, 0.95))
    small = Fraction(1, 10**9)
    assert at_most(k, n, bound + small) < Fraction(1, 20) < at_most(k, n, bound - small)


def test_large_counts_keep_their_digits() -> None:
    high = upper_bound(500, 100_000, 0.95)
    normal = 0.005 + 1.6449 * math.sqrt(0.005 * 0.995 / 1e5)
    assert abs(high - normal) < 2e-5


def paired_mass(n: int, changes: float, loss: float) -> Tensor:
    """The probability of each (lost, won), float64 [n + 1, n + 1]."""
    up, down = (changes + loss) / 2, (changes - loss) / 2
    lost = torch.arange(n + 1, dtype=torch.float64)[:, None]
    won = torch.arange(n + 1, dtype=torch.float64)
    rest = n - lost - won
    ways = math.lgamma(n + 1) - torch.lgamma(lost + 1) - torch.lgamma(won + 1)
    logs = ways - torch.lgamma(rest.clamp(min=0) + 1)
    high, low = torch.tensor([up, down], dtype=torch.float64)
    logs = logs + torch.xlogy(lost, high) + torch.xlogy(won, low) + rest * math.log1p(-changes)
    return torch.where(rest >= 0, logs.exp(), 0.0)


@pytest.mark.parametrize(("n", "loss"), [(200, 0.02), (200, 0.0)])
def test_the_paired_test_errs_as_rarely_as_it_says(n: int, loss: float) -> None:
    """By enumeration, at the edge of the hypothesis, for rates of changes up to 12 %; what is not
    enumerated counts as rejected."""
    rejected = torch.ones(n + 1, n + 1, dtype=torch.bool)
    for lost in range(24):
        for won in range(34):
            rejected[lost, won] = paired_p_value(lost, won, n, loss, 0.95) <= 0.05
    rates = [loss + (0.12 - loss) * k / 20 for k in range(1, 21)]
    errors = [float(paired_mass(n, rate, loss)[rejected].sum()) for rate in rates]
    assert max(errors) <= 0.05
    assert max(errors) > 0.01  # and it is not so careful as to be useless


def test_the_worst_rate_of_changes_is_the_largest() -> None:
    lost, won, n, loss = 30, 50, 4000, 0.002
    most = upper_bound(lost + won, n, 1 - 0.1 * 0.05)
    rates = [loss + (most - loss) * k / 20 for k in range(1, 21)]
    chances = [difference_at_most(lost - won, n, rate, loss) for rate in rates]
    assert chances == sorted(chances)
    assert paired_p_value(lost, won, n, loss) == pytest.approx(chances[-1] + 0.005, abs=1e-12)


def test_the_law_of_the_difference_is_that_of_three_outcomes() -> None:
    mass = paired_mass(50, 0.3, 0.1)
    place = torch.arange(51)[:, None] - torch.arange(51)
    for most in (-8, 0, 3, 12):
        found = difference_at_most(most, 50, 0.3, 0.1)
        assert found == pytest.approx(float(mass[place <= most].sum()), abs=1e-10)


def test_a_paired_bound_is_the_least_loss_that_is_rejected() -> None:
    bound = paired_bound(45, 45, 4000)
    assert paired_p_value(45, 45, 4000, bound) <= 0.05 < paired_p_value(45, 45, 4000, bound - 1e-6)
    assert paired_bound(10, 60, 4000) == 0.0
    # Most examples change: all that is known is that no more are lost than change.
    assert paired_bound(300, 300, 1000) == pytest.approx(upper_bound(600, 1000, 0.995))


def test_splits_share_nothing_and_leave_nothing_out() -> None:
    parts = splits(1001, seed=3, parts=(1, 4, 5))
    assert [len(part) for part in parts] == [100, 400, 501]
    assert torch.cat(parts).sort().values.tolist() == list(range(1001))
    assert torch.equal(splits(1001, 3, (1, 4, 5)).bound, parts.bound)
    assert not torch.equal(splits(1001, 4, (1, 4, 5)).bound, parts.bound)


SHARES = (0.5, 0.3, 0.2, 0.15, 0.1, 0.05, 0.0)  # of examples that are run in full
KNOBS = tuple(1 - share for share in SHARES[::-1])[::-1]


def drawn(n: int, seed: int) -> Outcomes:
    """Examples of a network whose loss rises as the knob gets bolder: 0.2 % at the fourth value
    exactly, more behind it."""
    chance = torch.rand(n, generator=torch.Generator().manual_seed(seed))
    lost = torch.stack([chance < rate for rate in (0.004, 0.006, 0.011, 0.017, 0.02, 0.03, 0.05)])
    won = torch.stack([chance > 1 - rate for rate in (0.012, 0.014, 0.014, 0.015, 0.015, 0.015, 0.015)])
    return Outcomes(KNOBS, lost, won, lost | won)


TRUTH = dict(zip(KNOBS, (-0.008, -0.008, -0.003, 0.002, 0.005, 0.015, 0.035), strict=True))


def violations(seeds: int, n: int, judge) -> int:
    """In how many of some draws a value is chosen that really loses 0.2 % or more."""
    found = [judge(drawn(n, seed)) for seed in range(seeds)]
    return sum(knob is not None and TRUTH[knob] >= 0.002 for knob in found)


@cache
def guaranteed(seed: int) -> Guarantee:
    return guarantee(drawn(3000, seed), 0.002)


def test_a_guarantee_is_broken_no_more_often_than_it_says() -> None:
    seeds = 100
    chosen = [guaranteed(seed).threshold for seed in range(seeds)]
    broken = sum(knob is not None and TRUTH[knob] >= 0.002 for knob in chosen)
    assert broken <= upper_count(seeds, 0.05)
    # The rule without a guarantee breaks it about half the time: the test can see a violation.
    assert violations(seeds, 3000, lambda made: by_mean(made, 0.002)) > 0.3 * seeds


@pytest.mark.nightly
def test_a_guarantee_is_broken_rarely_over_many_draws() -> None:
    seeds = 3000
    broken = violations(seeds, 6000, lambda made: guarantee(made, 0.002).threshold)
    assert broken <= upper_count(seeds, 0.05)


def upper_count(n: int, rate: float) -> int:
    """What a count of events of this rate exceeds once in a thousand times."""
    return next(k for k in range(n + 1) if binomial_at_most(k, n, rate) > 0.999)


def test_skipping_the_third_split_would_flatter() -> None:
    """The third split's loss is an honest one: on average that of the population."""
    found = [guaranteed(seed) for seed in range(200)]
    gaps = [one.reported.loss - TRUTH[one.threshold] for one in found if one.threshold is not None]
    assert len(gaps) >= 50
    spread = math.sqrt(sum(gap * gap for gap in gaps) / len(gaps))
    assert abs(sum(gaps) / len(gaps)) < 4 * spread / math.sqrt(len(gaps))


def test_testing_stops_at_the_first_value_that_fails() -> None:
    """A bolder value that would pass by luck is not reached."""
    n = 3000
    lost = torch.zeros(3, n, dtype=torch.bool)
    lost[1] = True  # the second value is wrong about everything, the third about nothing
    made = Outcomes((0.9, 0.5, 0.1), lost, torch.zeros_like(lost), lost, labelled=False)
    found = guarantee(made, 0.01)
    assert (found.threshold, found.passed, found.tested) == (0.9, 1, 2)


def test_each_split_has_its_own_part() -> None:
    """What is promised rests on the second split, what is reported on the third."""
    split = splits(3000)
    for part, threshold, differs in ((split.bound, None, 0), (split.choose, 0.9, 0), (split.report, 0.9, 1000)):
        lost = torch.zeros(1, 3000, dtype=torch.bool)
        lost[:, part] = True
        made = Outcomes((0.9,), lost, torch.zeros_like(lost), lost)
        found = guarantee(made, 0.01, split=split)
        assert (found.threshold, found.reported.differs) == (threshold, differs)


def test_nothing_is_promised_where_nothing_holds() -> None:
    lost = torch.ones(2, 300, dtype=torch.bool)
    made = Outcomes((0.9, 0.5), lost, torch.zeros_like(lost), lost)
    found = guarantee(made, 0.002)
    assert found.threshold is None
    assert "none: run the full network" in str(found)
    assert by_mean(made, 0.002) is None


@pytest.mark.parametrize(("labelled", "most"), [(True, 8100), (False, 4600)])
def test_too_few_examples_are_told_how_many_would_do(labelled: bool, most: int) -> None:
    """At 0.2 points even a network that never differs needs more than a thousand examples."""

    def answer(n: int) -> Guarantee:
        never = torch.zeros(1, n, dtype=torch.bool)
        return guarantee(Outcomes((0.5,), never, never, never, labelled), 0.002)

    found = answer(1000)
    assert found.threshold is None and found.enough is not None and found.enough < most
    assert f"about {found.enough:,} examples in all would do, not 1,000" in str(found)
    assert answer(found.enough + 3).threshold == 0.5  # thirds are rounded
    assert answer(int(0.97 * found.enough)).threshold is None


def test_a_network_that_loses_too_much_is_told_so() -> None:
    lost = torch.arange(3000)[None] % 100 == 0
    found = guarantee(Outcomes((0.5,), lost, torch.zeros_like(lost), lost), 0.002)
    assert found.enough is None and "for any number of examples" in str(found)


def test_a_guarantee_as_a_table() -> None:
    found = Guarantee(0.75, 0.002, 0.95, 0.03, 4, 5, (10, 40, 1000), Measured(1000, 3, 5, 9))
    lines = str(found).splitlines()
    assert lines[0].split("  ")[-1].strip() == "10 + 40 + 1,000"
    assert "0.75 (p = 0.03)" in lines[2]
    assert "at most 0.20 points" in lines[3]
    assert lines[4].endswith(f"-0.20 points, at most {100 * found.loss_bound:.2f} at 95%")
    assert "0.90%, at most 1.57%" in lines[5]


def test_outcomes_of_answers() -> None:
    full, labels = torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1, 1, 0])
    made = torch.tensor([[0, 1, 2, 2], [1, 1, 1, 1]])
    found = compared((0.9, 0.1), full, made, labels)
    assert found.measured() == (Measured(4, 0, 0, 0), Measured(4, 1, 1, 3))
    bare = compared((0.9, 0.1), full, made).measured()[1]
    assert (bare.lost, bare.won, bare.loss, bare.labelled) == (3, 0, 0.75, False)
    assert bare.loss_bound() == bare.disagreement_bound()


class Rounded(nn.Module):
    """A network whose weights are rounded to multiples of a step."""

    def __init__(self, model: nn.Linear, step: float):
        super().__init__()
        self.model, self.step = model, step

    def forward(self, x: Tensor) -> Tensor:
        weight = self.model.weight
        return x @ ((weight / self.step).round() * self.step if self.step else weight).T


def test_any_knob_can_be_guaranteed() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(16, 4, bias=False).eval(), torch.randn(900, 16)
    batches = [(part,) for part in x.split(100)]
    made = observed(model, lambda step: Rounded(model, step), (0.0, 0.001, 1.0), batches)
    counts = [one.differs for one in made.measured()]
    assert counts[0] == 0
    assert counts[2] > 100
    assert guarantee(made, loss=0.05).threshold == 0.001


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: clopper_pearson(3, 2), "got 3 of 2"),
        (lambda: upper_bound(0, 0), "got 0 of 0"),
        (lambda: upper_bound(1, 2, 1.0), "expected a level between 0 and 1"),
        (lambda: paired_p_value(1, 1, 10, -0.1), "expected a loss of 0 to 1"),
        (lambda: paired_p_value(6, 6, 10, 0.1), "got 12 of 10"),
        (lambda: splits(2), "too few"),
        (lambda: splits(10, parts=(1, 0, 1)), "three positive parts"),
        (lambda: guarantee(drawn(30, 0), level=95), "such as 0.95"),
        (lambda: Outcomes((0.1,), *[torch.zeros(2, 5, dtype=torch.bool)] * 3), "1 knobs"),
    ],
)
def test_what_is_wrong_is_said(call, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        call()
