"""A knob set by data, with a guarantee about data not seen.

Choosing a threshold and judging it on the same examples flatters it: by half a point of accuracy on
some thousand images. So examples are split in three. On the first it is chosen where to begin, on
the second thresholds are tested one after the other, from careful to bold, until one fails, and on
the third the last that passed is measured. Each test may err with probability 1 - level, and yet
all of them together do: the order is fixed before the second split is looked at, and who is wrong
at all must first have been wrong at the first wrong threshold (Bauer 1991; Angelopoulos et al.
2021, "Learn then Test").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from demask.errors import BadInput
from demask.failures import public
from demask.pilot.rate_bounds import paired_bound, paired_p_value, rate_p_value, upper_bound

LOSS, LEVEL = 0.002, 0.95
MOST = 2**24  # examples of one split, beyond which no number is named


class Splits(NamedTuple):
    """Three sets of examples, as indices, int64 and disjoint: on which to choose, to bound, and to
    report."""

    choose: Tensor
    bound: Tensor
    report: Tensor


def splits(n: int, seed: int = 0, parts: Sequence[float] = (1, 1, 1)) -> Splits:
    """`n` examples dealt into three at random, in the given proportions.

    Raises BadInput where a part would be empty.

    >>> [len(part) for part in splits(10, seed=0, parts=(1, 4, 5))]
    [1, 4, 5]
    """
    if len(parts) != 3 or min(parts) <= 0:
        raise BadInput(f"expected three positive parts (choose, bound, report), got {parts}")
    first, second = (round(n * sum(parts[:k]) / sum(parts)) for k in (1, 2))
    if not 0 < first < second < n:
        raise BadInput(f"{n} examples are too few to be split as {tuple(parts)}: a part is empty")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    return Splits(order[:first], order[first:second], order[second:])


@dataclass(frozen=True, slots=True, eq=False)
class Outcomes:
    """What each example came to under each value of a knob, beside the full network.

    knobs: values, the most careful first. lost: the full network was right and the conditioned one
    is wrong. won: the other way round. differs: their answers differ. bool [knobs, examples] each.
    labelled: whether there were labels; without them an answer that differs counts as lost.
    """

    knobs: tuple[float, ...]
    lost: Tensor
    won: Tensor
    differs: Tensor
    labelled: bool = True

    def __post_init__(self) -> None:
        shapes = {tuple(part.shape) for part in (self.lost, self.won, self.differs)}
        if len(shapes) != 1 or len(self.lost) != len(self.knobs) or self.lost.ndim != 2:
            raise BadInput(f"expected [{len(self.knobs)} knobs, examples] three times, "
                           f"got {sorted(shapes)}")  # fmt: skip

    def at(self, examples: Tensor) -> Outcomes:
        """Those of some examples, int64 [examples]."""
        lost, won, differs = (part[:, examples] for part in (self.lost, self.won, self.differs))
        return Outcomes(self.knobs, lost, won, differs, self.labelled)

    def measured(self) -> tuple[Measured, ...]:
        """The counts, per knob."""
        lost, won, differs = (part.sum(1).tolist() for part in (self.lost, self.won, self.differs))
        examples = self.lost.shape[1]
        return tuple(Measured(examples, *counts, labelled=self.labelled)
                     for counts in zip(lost, won, differs, strict=True))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measured:
    """How many of some examples changed: for the worse, for the better, and at all."""

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
        """What the loss does not exceed, with probability `level` at least."""
        if not self.labelled:
            return self.disagreement_bound(level)
        return paired_bound(self.lost, self.won, self.examples, level)

    def disagreement_bound(self, level: float = LEVEL) -> float:
        """What the disagreement does not exceed, with probability `level` at least."""
        return upper_bound(self.differs, self.examples, level)

    def p_value(self, loss: float, level: float = LEVEL, examples: int | None = None) -> float:
        """Of "the loss is `loss` or more". examples: as if these rates came of so many."""
        n = examples or self.examples
        lost, won = (round(k * n / self.examples) for k in (self.lost, self.won))
        if not self.labelled:
            return rate_p_value(lost, n, loss)
        return paired_p_value(lost, won, n, loss, level)


@dataclass(frozen=True, slots=True)
class Guarantee:
    """A knob's value and what holds of it.

    threshold: the value; None where no value can be guaranteed, and the full network is to be run.
    The loss (accuracy lost, or without labels the disagreement) is at most `loss`, in a new example
    of the same kind, unless the drawing of the second split was one of the unlucky 1 - level.
    p_value: of the last test passed. passed, tested: how many values. reported: on the third split,
    which had no part in the choice; its bounds hold each by itself at `level`. enough: where the
    threshold is None, how many examples in all would do at the rates of the value tested; None
    where no number would.
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
        """Of the loss, from the third split alone."""
        return self.reported.loss_bound(self.level)

    @property
    def disagreement_bound(self) -> float:
        """Of the disagreement with the full network, from the third split alone."""
        return self.reported.disagreement_bound(self.level)

    def __str__(self) -> str:
        kind = "accuracy lost" if self.reported.labelled else "answers that differ"
        found, level = self.reported, f"{self.level:.0%}"
        sizes = " + ".join(f"{size:,}" for size in self.sizes)
        lines = [("examples (choose + bound + report)", sizes), ("values tested, passed",
                 f"{self.tested}, {self.passed}")]  # fmt: skip
        if self.threshold is None:
            value = (f"none: run the full network (p = {self.p_value:.3g} at the most promising; "
                     f"{self._missing()})")  # fmt: skip
        else:
            value = f"{self.threshold:.6g} (p = {self.p_value:.3g})"
        lines += [
            ("threshold", value),
            (f"{kind}, guaranteed at {level}", f"at most {100 * self.loss:.2f} points"),
            (f"{kind}, third split", f"{100 * found.loss:+.2f} points, at most "
             f"{100 * self.loss_bound:.2f} at {level}"),
            ("disagreement, third split", f"{found.disagreement:.2%}, at most "
             f"{self.disagreement_bound:.2%} at {level}"),
        ]  # fmt: skip
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:{width}}  {value}" for name, value in lines)

    def _missing(self) -> str:
        """How many examples a threshold would take."""
        if self.enough is None:
            return "it loses too much for any number of examples"
        return (
            f"at its rates about {self.enough:,} examples in all would do, not {sum(self.sizes):,}"
        )


def compared(
    knobs: Sequence[float], full: Tensor, conditioned: Tensor, labels: Tensor | None = None
) -> Outcomes:
    """What classes come to: full [examples], conditioned [knobs, examples], labels [examples] or
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
    """What a conditioned network answers beside the full one, for each value of its knob.

    factory: makes the conditioned network of a value. knobs: the most careful first. batches: a
    tensor or an args tuple each. labels: classes, int64 [examples] in the order of the batches.
    answer: classes from outputs; by default the largest of the first output's last axis.
    """
    read = answer or (lambda made: pytree.tree_leaves(made)[0].argmax(-1))
    calls = [one if isinstance(one, tuple) else (one,) for one in batches]
    if not calls:
        raise BadInput("expected batches of examples to learn from, got none")
    full = torch.cat([read(model(*args)) for args in calls])
    if labels is not None and (labels.shape != full.shape or labels.is_floating_point()):
        raise BadInput(f"expected labels as {list(full.shape)} classes, integers, one per example, "
                       f"got {labels.dtype} {list(labels.shape)}")  # fmt: skip
    rows = []
    for knob in knobs:
        network = factory(knob)
        rows.append(torch.cat([read(network(*args)) for args in calls]))
    return compared(knobs, full, torch.stack(rows), labels)


def by_mean(outcomes: Outcomes, loss: float = LOSS) -> float | None:
    """The boldest value of the knob whose loss is at most `loss` on these examples, or None.

    It promises nothing: of new examples half lose more.
    """
    found = [knob for knob, one in zip(outcomes.knobs, outcomes.measured(), strict=True)
             if one.loss <= loss]  # fmt: skip
    return found[-1] if found else None


@public
def guarantee(
    outcomes: Outcomes,
    loss: float = LOSS,
    level: float = LEVEL,
    *,
    split: Splits | None = None,
    seed: int = 0,
) -> Guarantee:
    """The boldest value of a knob whose loss is at most `loss`, of examples like these, with
    probability `level` at least; and what it loses on examples of its own.

    Begins at the value that the first split finds most certain, and goes on to bolder ones on the
    second while each passes its test. The loss is the share of examples that only the full network
    gets right, less the share that only the conditioned one does (`paired_p_value`); without labels
    the share of answers that differ (Clopper and Pearson's test). Examples must be independent
    draws of what the network will meet. split: as `splits` makes it; None for thirds by `seed`.

    >>> chance = torch.Generator().manual_seed(0)
    >>> noise = torch.rand(3000, generator=chance)
    >>> differs = torch.stack([noise < 0.0002, noise < 0.05])
    >>> made = Outcomes((0.9, 0.5), differs, torch.zeros_like(differs), differs, labelled=False)
    >>> guarantee(made, loss=0.01).threshold
    0.9
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
        found = tests[k].p_value(loss, level)
        tested += 1
        if not found <= 1 - level:
            p = found if last is None else p
            break
        last, passed, p = k, passed + 1, found
    report = outcomes.at(split.report)
    sizes = (len(split.choose), len(split.bound), len(split.report))
    if last is None:
        nothing = Measured(sizes[2], 0, 0, 0, outcomes.labelled)
        least = _enough(tests[start], loss, level)
        total = None if least is None else -(-least * sum(sizes) // sizes[1])
        return Guarantee(None, loss, level, p, passed, tested, sizes, nothing, total)
    return Guarantee(outcomes.knobs[last], loss, level, p, passed, tested, sizes,
                     report.measured()[last])  # fmt: skip


def _enough(found: Measured, loss: float, level: float) -> int | None:
    """Of how many examples with these rates the test is passed; None: of none up to `MOST`."""
    if found.loss >= loss:
        return None  # it is what the test is to exclude
    high = found.examples
    while found.p_value(loss, level, high) > 1 - level:
        high *= 2
        if high > MOST:
            return None
    low = high // 2
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        low, high = (
            (middle, high) if found.p_value(loss, level, middle) > 1 - level else (low, middle)
        )
    return high


def _most_certain(found: Sequence[Measured], loss: float, level: float, n: int) -> int:
    """The value that passes most surely on `n` examples of these rates; of several the first."""
    return min(range(len(found)), key=lambda k: (found[k].p_value(loss, level, n), found[k].loss))


__all__ = ["Guarantee", "Measured", "Outcomes", "Splits", "by_mean", "compared", "guarantee",
           "observed", "splits"]  # fmt: skip
