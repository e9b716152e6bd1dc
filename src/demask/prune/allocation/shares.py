"""Allocations by scores: how many units of each group or weight stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from demask.prune.schedules import check_fraction

Scores = Mapping[str, Tensor]


def count_left(units: int, fraction: float) -> int:
    """How many of some units stay where a fraction is removed: at least one.

    >>> count_left(8, 0.5), count_left(3, 0.5), count_left(2, 0.99)
    (4, 2, 1)
    """
    return max(units - int(units * fraction + 1e-9), 1)


@dataclass(frozen=True)
class Uniform:
    """The same fraction of every group or weight, rounded down; at least one unit stays.

    Example:
        >>> import torch
        >>> from demask.prune import Uniform
        >>> Uniform()({"a": torch.ones(8), "b": torch.ones(3)}, 0.5, None)
        {'a': 4, 'b': 2}
    """

    def __call__(self, scores: Scores, fraction: float, pruner: Any) -> dict[str, int]:
        """By group or weight, how many units stay."""
        return {name: count_left(len(score), fraction) for name, score in scores.items()}


@dataclass(frozen=True)
class Global:
    """The lowest scores of the full network.

    Args:
        floor: the fraction of each group or weight that stays at least, 0 to less than 1; one unit
            always stays. Default: 0.1.
        normalize: whether scores are divided by the mean of their group or weight first, without
            which large layers and small ones cannot be compared. Default: True.

    Raises:
        BadInput: another `floor`.

    Example:
        >>> import torch
        >>> from demask.prune import Global
        >>> scores = {"a": torch.tensor([1.0, 1.0, 1.0, 1.0]), "b": torch.tensor([0.1, 0.1, 9.8])}
        >>> Global()(scores, 0.3, None)
        {'a': 4, 'b': 1}
    """

    floor: float = 0.1
    normalize: bool = True

    def __post_init__(self) -> None:
        check_fraction(self.floor, "floor")

    def __call__(self, scores: Scores, fraction: float, pruner: Any) -> dict[str, int]:
        """By group or weight, how many units stay."""
        least = {name: count_left(len(s), 1 - self.floor) if self.floor else 1 for name, s in scores.items()}
        removable, owners = [], []
        for k, (name, score) in enumerate(scores.items()):
            scale = score.mean() if self.normalize and bool(score.mean() > 0) else 1.0
            lowest = (score / scale).sort().values[: len(score) - least[name]]
            removable.append(lowest)
            owners.append(torch.full((len(lowest),), k))
        total = sum(map(len, scores.values()))
        order = torch.argsort(torch.cat(removable), stable=True)[: int(total * fraction + 1e-9)]
        gone = torch.bincount(torch.cat(owners)[order], minlength=len(scores)).tolist()
        return {name: len(s) - n for (name, s), n in zip(scores.items(), gone, strict=True)}


@dataclass(frozen=True)
class OutlierWeighted:
    """Less of the groups or weights with more outliers: scores above a multiple of their mean.

    The fractions are between `fraction` - `spread` and `fraction` + `spread`, and their mean over
    units is `fraction`. Source: Yin et al., Outlier weighed layerwise sparsity (OWL), 2024.

    Args:
        multiple: scores above this multiple of their group's mean are outliers. Default: 5.
        spread: the largest difference of a fraction from the mean. Default: 0.08.

    Raises:
        BadInput: a `spread` that is not from 0 to less than 1.

    Example:
        >>> import torch
        >>> from demask.prune import OutlierWeighted
        >>> even, uneven = torch.ones(100), torch.ones(100).index_fill(0, torch.arange(5), 50.0)
        >>> OutlierWeighted(spread=0.1)({"even": even, "uneven": uneven}, 0.5, None)
        {'even': 40, 'uneven': 60}
    """

    multiple: float = 5.0
    spread: float = 0.08

    def __post_init__(self) -> None:
        check_fraction(self.spread, "spread")

    def __call__(self, scores: Scores, fraction: float, pruner: Any) -> dict[str, int]:
        """By group or weight, how many units stay."""
        sizes = torch.tensor([len(s) for s in scores.values()], dtype=torch.float64)
        outliers = torch.stack([(s > self.multiple * s.mean()).double().mean() for s in scores.values()])
        width = float(outliers.max() - outliers.min())
        if width > 0:
            spread = min(self.spread, fraction, 1 - fraction)
            relative = (outliers - outliers.min()) / width * 2 * spread
            shift = (relative * sizes).sum() / sizes.sum() - relative
            fractions = (fraction + shift).clamp(0, 1).tolist()
        else:
            fractions = [fraction] * len(scores)
        return {
            name: count_left(len(score), share) for (name, score), share in zip(scores.items(), fractions, strict=True)
        }
