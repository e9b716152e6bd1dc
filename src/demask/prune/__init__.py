"""Pruning: masks for what matters least, in any training loop; `demask.demask` removes it.

`Pruner` masks channels, heads, units or single weights, step by step. Its parts can be exchanged: a
score, a structure, an allocation, a schedule. `groups` shows which slices go together.

Example:
    >>> import demask, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> x = torch.zeros(1, 4)
    >>> demask.prune.Pruner(net, x).step(0.5).left
    {'0': 4}
    >>> demask.demask(net, (x,)).get_parameter("0.weight").shape
    torch.Size([4, 4])
"""

from typing import Any

from demask.prune.align import Alignment, align
from demask.prune.allocation.budgets import MACs
from demask.prune.allocation.latency import Latency, LatencyPlan
from demask.prune.allocation.layer_seconds import NetworkTime, NetworkTimer
from demask.prune.allocation.shares import Global, OutlierWeighted, Uniform
from demask.prune.coupling import Group, Member, groups
from demask.prune.pruner import Pruned, Pruner
from demask.prune.recovery import distillation_loss, recalibrate_norms
from demask.prune.schedules import Cubic, Iterative, OneShot
from demask.prune.scores import L1, L2, Fluctuation, Random, ScoreView, Taylor
from demask.prune.scores import ActivationScore as Activation
from demask.prune.search import Search, search
from demask.prune.sensitivity import Sensitivity, SensitivityRow, sensitivity
from demask.prune.trial import SearchTrial
from demask.registry import RUNNERS

__all__ = [
    "L1", "L2", "Activation", "Alignment", "Cubic", "Fluctuation", "Global", "Group", "Iterative",
    "Latency", "LatencyPlan", "MACs", "Member", "NetworkTime", "NetworkTimer", "OneShot",
    "OutlierWeighted", "Pruned", "Pruner", "Random", "ScoreView", "Search", "SearchTrial",
    "Sensitivity", "SensitivityRow", "Taylor", "Uniform", "align", "checkpoint",
    "distillation_loss", "groups", "recalibrate_norms", "search", "sensitivity",
]  # fmt: skip
checkpoint: Any  # of a package above this one, at its first use


def __getattr__(name: str) -> Any:
    """`checkpoint`, which a package above this one has."""
    if name == "checkpoint":
        return RUNNERS.get(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
