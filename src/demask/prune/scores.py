"""Scores: how important the units of a structure are; units of low scores are removed first.

A score is a callable that takes a `ScoreView` of candidates and returns a tensor [units]. It may
have the attribute `needs_inputs`: then statistics of the inputs of layers are gathered while the
model runs; and a method `compensate`, called with the units that go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from demask.errors import BadInput
from demask.prune.coupling.groups import Group, Member
from demask.prune.masks import Place
from demask.prune.score_inputs import InputStatistics
from demask.prune.structures import Candidates


@dataclass(frozen=True, eq=False)
class ScoreView:
    """What a score sees of the units of one group or weight.

    Attributes:
        candidates: the units: `units`, `members`, `reduce(member, values)`, `group`.
        places: by parameter, its places in the model.
        statistics: by weight, of the inputs of its layer; empty unless the score needs them.

    Example:
        >>> import torch
        >>> from demask import prune
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> def largest(view):  # the largest weight of each unit that reads the slices
        ...     return view.weight(view.readers[0]).abs().amax(0)
        >>> pruner = prune.Pruner(net, torch.zeros(1, 4), score=largest)
        >>> len(pruner.step(0.5).removed["0"])
        4
    """

    candidates: Candidates
    places: Mapping[str, tuple[Place, ...]]
    statistics: Mapping[str, InputStatistics]

    @property
    def group(self) -> Group | None:
        """The group whose slices are the units; None for units of one weight."""
        return self.candidates.group

    @property
    def weights(self) -> tuple[Member, ...]:
        """The members that compute the units by products: weights, not biases and norms."""
        return tuple(m for m in self.candidates.members if m.produces and m.is_weight)

    @property
    def readers(self) -> tuple[Member, ...]:
        """The members that are multiplied with the units."""
        return tuple(m for m in self.candidates.members if not m.produces)

    def weight(self, member: Member) -> Tensor:
        """The parameter of a member with its masks, detached."""
        return self.places[member.parameter][0].value

    def gradient(self, member: Member) -> Tensor:
        """The gradient of a member's parameter, of its shape; masked weights have none. Raises
        BadInput where no backward pass has run."""
        parameter = self.places[member.parameter][0].parameter
        if parameter.grad is None:
            raise BadInput(
                f"{member.parameter} has no gradient: run loss.backward() on some batches before "
                "Pruner.step(), and clear gradients after it"
            )
        return parameter.grad.detach()

    def inputs(self, member: Member) -> InputStatistics:
        """Statistics of the inputs of the layer that has a member's weight. Raises BadInput where
        none were gathered."""
        statistics = self.statistics.get(member.parameter)
        if statistics is None or not statistics.count:
            raise BadInput(
                f"no inputs of the layer of {member.parameter} were seen: run the model on some "
                "batches after creating the Pruner; parameters that their own module does not read "
                "(nn.MultiheadAttention.out_proj) cannot be scored by inputs"
            )
        return statistics

    def input_feature(self, member: Member) -> Tensor:
        """The input feature that each element of a reading weight is multiplied with, int64 of a
        shape that broadcasts to the weight's."""
        shape = self.places[member.parameter][0].value.shape
        features = len(self.inputs(member).mean)
        axis = self._input_axis(member, shape)
        line = [-1 if d == axis else 1 for d in range(len(shape))]
        index = torch.arange(shape[axis]).view(line)
        if features == shape[axis]:
            return index
        groups = features // shape[axis]  # of a convolution, whose outputs read features in turn
        outputs = torch.arange(shape[0]) // max(shape[0] // groups, 1)
        return index + outputs.view([-1] + [1] * (len(shape) - 1)) * shape[axis]

    def _input_axis(self, member: Member, shape: torch.Size) -> int:
        """The axis of a weight that its layer's input is multiplied along."""
        if not member.produces:
            return member.axis
        return 1 - member.axis if len(shape) > 1 else 0


Score = Callable[[ScoreView], Tensor]


def _summed(view: ScoreView, members: tuple[Member, ...], values: Callable[[Member], Tensor]) -> Tensor:
    """The sum over members of values, reduced to units, float64 [units]."""
    total = torch.zeros(view.candidates.units, dtype=torch.float64)
    for member in members:
        total += view.candidates.reduce(member, values(member).double())
    return total


@dataclass(frozen=True)
class L1:
    """The sum of magnitudes of the weights that compute a unit.

    Source: Li et al., Pruning filters for efficient convnets, 2017; Han et al., Learning both
    weights and connections, 2015, for elements.

    Example:
        >>> import torch
        >>> from demask import prune
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
        >>> net[0].weight.data = torch.tensor([[1.0, 1.0], [0.1, 0.1], [2.0, 0.0]])
        >>> prune.Pruner(net, torch.zeros(1, 2), score=prune.L1()).step(0.34).removed["0"]
        tensor([1])
    """

    def __call__(self, view: ScoreView) -> Tensor:
        """The scores of the units, float64 [units]."""
        return _summed(view, view.weights, lambda m: view.weight(m).abs())


@dataclass(frozen=True)
class L2:
    """The Euclidean norm of the weights that compute a unit.

    Source: He et al., Soft filter pruning, 2018.

    Example:
        >>> import torch
        >>> from demask import prune
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
        >>> pruner = prune.Pruner(net, torch.zeros(1, 2), score=prune.L2())
        >>> pruner.step(0.5).left
        {'0': 2}
    """

    def __call__(self, view: ScoreView) -> Tensor:
        """The scores of the units, float64 [units]."""
        return _summed(view, view.weights, lambda m: view.weight(m).square()).sqrt()


@dataclass(frozen=True)
class Taylor:
    """The first-order change of the loss when a unit is removed: (sum of weight x gradient)^2.

    The gradients are those in `parameter.grad`: run `loss.backward()` on some batches before
    `Pruner.step`. Source: Molchanov et al., Importance estimation for neural network pruning, 2019,
    equation 8, summed over all parameters that compute the unit.

    Example:
        >>> import torch
        >>> from demask import prune
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
        >>> pruner = prune.Pruner(net, torch.zeros(1, 2), score=prune.Taylor())
        >>> net(torch.randn(8, 2)).square().mean().backward()
        >>> pruner.step(0.5).left
        {'0': 2}
    """

    def __call__(self, view: ScoreView) -> Tensor:
        """The scores of the units, float64 [units]. Raises BadInput without gradients."""
        members = tuple(m for m in view.candidates.members if m.produces)
        return _summed(view, members, lambda m: view.weight(m) * view.gradient(m)).square()


@dataclass(frozen=True)
class ActivationScore:
    """Weights times the magnitude of what they are multiplied with.

    Statistics of inputs are gathered while the model runs, once the `Pruner` exists.

    Args:
        kind: "wanda" (default): the sum of |weight| x norm of its input over the weights of a unit,
            or over those that read a slice. "minitron": the mean magnitude of a slice where it is
            read, without weights.

    Raises:
        BadInput: another `kind`.

    Source: Sun et al., A simple and effective pruning approach for large language models (Wanda),
    2024; An et al., FLAP, 2024 (Wanda-sp); Muralidharan et al., Compact language models via pruning
    and knowledge distillation (Minitron), 2024.

    Example:
        >>> import torch
        >>> from demask import prune
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
        >>> pruner = prune.Pruner(net, torch.zeros(1, 2), score=prune.Activation())
        >>> _ = net(torch.randn(8, 2))  # its inputs are recorded
        >>> pruner.step(0.5).left
        {'0': 2}
    """

    kind: str = "wanda"
    needs_inputs: bool = field(default=True, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.kind not in ("wanda", "minitron"):
            raise BadInput(f"expected kind to be 'wanda' or 'minitron', got {self.kind!r}")

    def __call__(self, view: ScoreView) -> Tensor:
        """The scores of the units, float64 [units]. Raises BadInput where no inputs were seen."""
        members = view.readers if view.group is not None else view.weights

        def values(member: Member) -> Tensor:
            index, inputs = view.input_feature(member), view.inputs(member)
            if self.kind == "wanda":
                return view.weight(member).double().cpu().abs() * inputs.norm[index]
            return inputs.mean_magnitude[index].expand(view.weight(member).shape)

        return _summed(view, _needed(view, members), values)


@dataclass(frozen=True)
class Fluctuation:
    """The variance of a slice where it is read, times the squared norm of the weights that read it.

    What varies little is replaced by its mean: the bias of a layer that reads the slice gets
    mean x weight. A slice that does not change is then removed without any change of outputs.

    Args:
        compensation: whether biases are changed. Default: True. A layer without a bias gets one,
            which an optimizer that exists already does not train, and `Pruned` does not count.

    Source: An et al., Fluctuation-based adaptive structured pruning for large language models
    (FLAP), 2024, equations 4 and 6.

    Example:
        >>> import torch
        >>> from demask import prune
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
        >>> pruner = prune.Pruner(net, torch.zeros(1, 2), score=prune.Fluctuation())
        >>> _ = net(torch.randn(8, 2))
        >>> pruner.step(0.5).left
        {'0': 2}
    """

    compensation: bool = True
    needs_inputs: bool = field(default=True, init=False, repr=False)

    def __call__(self, view: ScoreView) -> Tensor:
        """The scores of the units, float64 [units]. Raises BadInput where no inputs were seen."""

        def values(member: Member) -> Tensor:
            variance = view.inputs(member).variance[view.input_feature(member)]
            return view.weight(member).double().cpu().square() * variance

        return _summed(view, _needed(view, view.readers), values)

    def compensate(self, view: ScoreView, gone: Tensor, masked: Mapping[str, InputStatistics]) -> dict[str, Tensor]:
        """By reading weight, what its layer's bias changes by, [outputs].

        Args:
            view: the units, with statistics of the inputs before.
            gone: the slices that were masked, bool [units].
            masked: by reading weight, statistics of the inputs of its layer since then: where a
                masked slice is constant, but not 0 (after a sigmoid), this is what it adds still.
        """
        changes = {}
        for member in view.readers if self.compensation else ():
            change = view.inputs(member).mean - masked[member.parameter].mean
            mean = change[view.input_feature(member)]
            line = [-1 if d == member.axis else 1 for d in range(len(view.weight(member).shape))]
            inside = ~member.mask(~gone).view(line)
            products = view.weight(member).double().cpu() * mean * inside
            place = view.places[member.parameter][0]
            changes[member.parameter] = per_output(place, products)
        return changes


def per_output(place: Place, products: Tensor) -> Tensor:
    """The sum of products of a layer's weight shape over all but its outputs, [outputs]."""
    transposed = getattr(place.module, "transposed", False) or (
        not hasattr(place.module, "out_features") and not hasattr(place.module, "out_channels")
    )
    axis = 1 if transposed else 0
    return products.sum([d for d in range(products.ndim) if d != axis])


@dataclass
class Random:
    """Uniform random numbers, of a generator of its own.

    Args:
        seed: of the generator. Default: 0.

    Example:
        >>> import torch
        >>> from demask import prune
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
        >>> pruner = prune.Pruner(net, torch.zeros(1, 2), score=prune.Random(seed=1))
        >>> pruner.step(0.5).left
        {'0': 2}
    """

    seed: int = 0
    _generator: torch.Generator = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)

    def __call__(self, view: ScoreView) -> Tensor:
        """The scores of the units, float64 [units]."""
        return torch.rand(view.candidates.units, dtype=torch.float64, generator=self._generator)


def _needed(view: ScoreView, members: tuple[Member, ...]) -> tuple[Member, ...]:
    """The members. Raises BadInput for none: nothing reads the units with a weight."""
    if not members:
        raise BadInput(f"{view.candidates.name} is read by no weight: score it by L1, L2, Taylor or Random, or skip it")
    return members
