"""Schedules: which fraction is removed after each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from demask.errors import BadInput


def check_fraction(fraction: float, what: str = "fraction") -> float:
    """The fraction. Raises BadInput if it is not a number from 0 to less than 1."""
    is_number = isinstance(fraction, (int, float)) and not isinstance(fraction, bool)
    if not is_number or not 0 <= fraction < 1:
        raise BadInput(f"expected {what} to be a number from 0 to less than 1, got {fraction!r}")
    return float(fraction)


def _check_count(count: int, what: str) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise BadInput(f"expected {what} to be an integer of 1 or more, got {count!r}")


@dataclass(frozen=True)
class OneShot:
    """The full fraction in the first step.

    Args:
        fraction: the fraction of all units, 0 to less than 1. Default: 0.5.

    Raises:
        BadInput: another fraction.

    Example:
        >>> from demask.prune import OneShot
        >>> OneShot(0.25)(1), OneShot(0.25)(2)
        (0.25, 0.25)
    """

    fraction: float = 0.5

    def __post_init__(self) -> None:
        check_fraction(self.fraction)

    def __call__(self, step: int) -> float:
        """The fraction of all units that is removed after a step, counted from 1."""
        return self.fraction


@dataclass(frozen=True)
class Cubic:
    """A fraction that rises fast at first, then slowly.

    fraction(t) = end + (start - end) (1 - t / steps)^3, after step t, and `end` from then on.
    Source: Zhu and Gupta, To prune, or not to prune, 2017, equation 1.

    Args:
        start: the fraction before the first step. Default: 0.
        end: the fraction after the last step. Default: 0.5.
        steps: the number of steps. Default: 10.

    Raises:
        BadInput: a fraction that is not from 0 to less than 1, or an `end` below `start`.

    Example:
        >>> from demask.prune import Cubic
        >>> [round(Cubic(0, 0.8, steps=4)(step), 3) for step in range(1, 6)]
        [0.463, 0.7, 0.788, 0.8, 0.8]
    """

    start: float = 0.0
    end: float = 0.5
    steps: int = 10

    def __post_init__(self) -> None:
        _check_count(self.steps, "steps")
        if check_fraction(self.end, "end") < check_fraction(self.start, "start"):
            raise BadInput(f"expected end to be at least start ({self.start}), got {self.end}")

    def __call__(self, step: int) -> float:
        """The fraction of all units that is removed after a step, counted from 1."""
        left = max(1 - step / self.steps, 0.0)
        return self.end + (self.start - self.end) * left**3


@dataclass(frozen=True)
class Iterative:
    """Equal parts, each followed by a recovery, such as some epochs of training.

    Args:
        rounds: the number of steps.
        recover: a function without arguments, which `Pruner.step` calls after each step; None
            (default): nothing is called.
        fraction: the fraction of all units after the last step, 0 to less than 1. Default: 0.5.

    Raises:
        BadInput: `rounds` is below 1, or another fraction.

    Example:
        >>> from demask.prune import Iterative
        >>> [Iterative(2, fraction=0.5)(step) for step in (1, 2, 3)]
        [0.25, 0.5, 0.5]
    """

    rounds: int
    recover: Callable[[], object] | None = None
    fraction: float = 0.5

    def __post_init__(self) -> None:
        _check_count(self.rounds, "rounds")
        check_fraction(self.fraction)

    def __call__(self, step: int) -> float:
        """The fraction of all units that is removed after a step, counted from 1."""
        return self.fraction * min(step / self.rounds, 1.0)
