"""Copies of a network in which some slices of some groups are masked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from demask.errors import BadInput, DemaskError
from demask.failures import described
from demask.graph.module_copy import structural_copy
from demask.graph.provenance import Sizes
from demask.machine.cost import Costs
from demask.prune.allocation.layer_seconds import TORCH, NetworkSeconds
from demask.prune.coupling import as_arguments
from demask.prune.pruner import Pruner
from demask.prune.scores import L1
from demask.tune.layer_costs import LayerCosts


@dataclass(frozen=True, slots=True)
class PerGroup:
    """The allocation that masks a certain number of units of each group, whatever the fraction.

    removed: by name of a group or weight, units to mask in all; others stay uncut.
    """

    removed: Mapping[str, int]

    def __call__(self, scores: Mapping[str, Tensor], fraction: float, context: Any) -> dict[str, int]:
        return {name: len(score) - self.removed.get(name, 0) for name, score in scores.items()}


@dataclass(frozen=True, slots=True)
class PruningOptions:
    """What a `Pruner` needs besides a network and amounts: `Pruner` documents each."""

    score: Any = field(default_factory=L1)
    structure: str = "channel"
    skip: Sequence[str] = ()


def pruner_of_copy(
    model: nn.Module, example_inputs: Any, options: PruningOptions, removed: Mapping[str, int] | None = None
) -> Pruner:
    """A pruner of a copy of `model` in eval mode, that masks `removed` units in its first step.

    `model` does not change. The copy has its gradients, and was called on the example inputs: what
    scores may read.
    """
    copy = structural_copy(model, share=False)
    for ours, theirs in zip(copy.parameters(), model.parameters(), strict=True):
        ours.grad = None if theirs.grad is None else theirs.grad.detach().clone()
    pruner = Pruner(
        copy.eval(),
        example_inputs,
        score=options.score,
        structure=options.structure,
        skip=options.skip,
        allocation=PerGroup(removed or {}),
    )
    args, kwargs = as_arguments(example_inputs)
    with torch.no_grad():
        copy(*args, **(kwargs or {}))
    return pruner


def masked_copy(
    model: nn.Module, example_inputs: Any, removed: Mapping[str, int], options: PruningOptions
) -> tuple[nn.Module, Sizes]:
    """A copy of `model` in eval mode with plain weights, in which `removed` units are zero; and the
    size of what `demask` makes of it, counted from the op table."""
    pruner = pruner_of_copy(model, example_inputs, options, removed)
    sizes = pruner.step().after
    pruner.remove()
    return pruner.model, sizes


class PredictedTime:
    """Milliseconds of a call of a pruned network on the example inputs: the sum over its layers,
    each measured on this machine at some widths, as torch runs it."""

    def __init__(self, pruner: Pruner):
        self._costs = Costs.open(threads=torch.get_num_threads())
        self._left = pruner.removal_cost.left(pruner.masks())
        asker = LayerCosts(self._costs, pruner.coupling.program.example)
        self._table = NetworkSeconds.of(pruner.removal_cost, self._left, asker, TORCH)

    def milliseconds(self, removed: Mapping[str, int]) -> float:
        """Those of the network without so many slices of its groups."""
        counts = {name: int(self._left[name].sum()) - n for name, n in removed.items() if name in self._left}
        return 1e3 * self._table.total(counts)

    def save(self) -> None:
        """Store the measurements for later processes."""
        self._costs.save()


def call_evaluate(evaluate: Callable[[nn.Module], Any], model: nn.Module, what: str) -> float:
    """What `evaluate` returns, as a float; BadInput where it raises or returns no finite number.
    what: the network in words, for the message."""
    try:
        accuracy = float(evaluate(model))
    except DemaskError:
        raise
    except Exception as error:
        raise BadInput(f"evaluate failed on {what}: {described(error)}") from error
    if accuracy != accuracy or abs(accuracy) == float("inf"):
        raise BadInput(
            f"evaluate returned {accuracy} for {what}: expected a finite number, higher for a better network"
        )
    return accuracy
