"""Scores: how important the units of a structure are; units of low scores are removed first.

A score is a callable that takes a `ScoreView` of candidates and returns a tensor [units]. It may
have the attribute `needs_inputs`: then statistics of the inputs of layers are gathered while the
model runs; and a method `compensate`, called with the units that go.

Statistics of the inputs of layers are gathered by one forward hook per layer; of each input feature:
how many values there were, their mean, variance and mean magnitude. They are gathered while the model
runs on whatever data, and averaged over ranks when scores are.

Sums of some megabyte of values are float32, around the mean of these values; those of all are
float64. So no input is converted in full, and a variance is right where the mean is large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from demask.errors import BadInput
from demask.prune.coupling import Group, Member
from demask.prune.masks import Place
from demask.prune.structures import Candidates

_CONVOLUTIONS = nn.modules.conv._ConvNd
_PART = 1 << 18  # values that are summed in float32, a megabyte: they stay in the cache meanwhile
_STATE = ("mean", "deviations", "magnitudes")


@dataclass(slots=True)
class InputStatistics:
    """Sums over the values of each input feature of a layer.

    count: of values per feature. mean: of the values. deviations: the sum of the squares of their
    differences from the mean. magnitudes: the sum of their absolute values. All float64 [features].
    """

    count: int
    mean: Tensor
    deviations: Tensor
    magnitudes: Tensor

    @property
    def variance(self) -> Tensor:
        """The variance of each feature (not corrected for bias), float64 [features]."""
        return self.deviations / self.count

    @property
    def norm(self) -> Tensor:
        """The Euclidean norm of each feature over all values, float64 [features]."""
        return (self.deviations + self.count * self.mean**2).sqrt()

    @property
    def mean_magnitude(self) -> Tensor:
        """The mean absolute value of each feature, float64 [features]."""
        return self.magnitudes / self.count

    def add(self, values: Tensor, axis: int = -1) -> None:
        """Add values, of any floating-point dtype and device. axis: that of the features.

        Means and deviations of parts are combined as in Chan, Golub and LeVeque, Updating formulae
        and a pairwise algorithm for computing sample variances, 1979.
        """
        if not values.numel():
            return
        values, axis = values.detach(), axis % values.ndim
        if axis == 0:  # one vector of features
            values, axis = values.unsqueeze(0), 1
        parts = values.split(max(_PART // values[0].numel(), 1))
        sums = torch.stack([_feature_sums(part, axis) for part in parts]).cpu().double()
        sizes = [part.numel() // part.shape[axis] for part in parts]
        counts = torch.tensor([self.count, *sizes], dtype=torch.float64).unsqueeze(1)
        offsets = sums[:, 1] / counts[1:]
        means = torch.cat([self.mean.unsqueeze(0), sums[:, 0] + offsets])
        inside = (sums[:, 2] - counts[1:] * offsets**2).clamp(min=0)
        self.count += sum(sizes)
        self.mean = (counts * means).sum(0) / self.count
        between = (counts * (means - self.mean) ** 2).sum(0)
        self.deviations = self.deviations + inside.sum(0) + between
        self.magnitudes = self.magnitudes + sums[:, 3].sum(0)  # not in place: of inference mode

    @classmethod
    def empty(cls, features: int) -> InputStatistics:
        """Statistics of no values."""
        return cls(0, *(torch.zeros(features, dtype=torch.float64) for _ in range(3)))


def _feature_sums(values: Tensor, axis: int) -> Tensor:
    """About each feature, [4, features]: a number near the mean, the sum of differences from it,
    that of their squares, and the sum of absolute values."""
    values = values if values.dtype == torch.float64 else values.float()
    others = [d for d in range(values.ndim) if d != axis]
    near = values.mean(others, keepdim=True)
    scratch = values - near
    differences = scratch.sum(others)
    squares = scratch.square_().sum(others)
    magnitudes = torch.abs(values, out=scratch).sum(others)
    return torch.stack((near.flatten(), differences, squares, magnitudes))


class InputRecorder:
    """Hooks that gather the statistics of the inputs of layers, by name of the layer's weight,
    while `is_active`."""

    def __init__(self, layers: Mapping[str, Iterable[Place]]):
        self.statistics: dict[str, InputStatistics] = {}
        self.is_active = True
        self._input_features = {name: _input_features(next(iter(at)).module) for name, at in layers.items()}
        self._handles: list[RemovableHandle] = []
        for name, places in layers.items():
            for place in places:
                hook = _Hook(self, name, place.module)
                self._handles.append(place.module.register_forward_pre_hook(hook, with_kwargs=True))

    def add(self, name: str, module: nn.Module, values: Tensor) -> None:
        """Add one input of a layer."""
        axis = -1 - len(module.kernel_size) if isinstance(module, _CONVOLUTIONS) else -1
        known = self.statistics.setdefault(name, InputStatistics.empty(values.shape[axis]))
        known.add(values, axis)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """The statistics as tensors and numbers."""
        return {
            name: {"count": s.count} | {key: getattr(s, key).clone() for key in _STATE}
            for name, s in self.statistics.items()
        }

    def read_state(self, state: Any) -> dict[str, InputStatistics]:
        """The statistics that `state_dict` returned; none where no layer has a hook. Raises
        BadInput for statistics of other layers."""
        if not isinstance(state, Mapping):
            raise BadInput(f"expected statistics of inputs by layer, got {state!r:.60}")
        other = sorted(set(state) - set(self._input_features)) if self._input_features else []
        if other:
            raise BadInput(
                f"expected statistics of the layers {', '.join(self._input_features)}, got some of "
                f"{other[0]!r}: this is the state of another pruner"
            )
        return {
            name: _layer_statistics(name, state[name], size)
            for name, size in self._input_features.items()
            if name in state
        }


def _input_features(module: Any) -> int | None:
    return getattr(module, "in_channels", getattr(module, "in_features", None))


def _layer_statistics(name: str, stored: Any, features: int | None) -> InputStatistics:
    """The statistics of one layer. Raises BadInput for others."""
    values: list[Any] = [stored.get(key) for key in _STATE] if isinstance(stored, Mapping) else []
    sizes = {tuple(v.shape) if isinstance(v, Tensor) else None for v in values}
    count = stored.get("count") if values else None
    fits = None not in sizes and len(sizes) == 1 and (features is None or sizes == {(features,)})
    if not isinstance(count, int) or not fits:
        raise BadInput(
            f"expected statistics of the {features or 'several'} input features of "
            f"the layer of {name}, got {stored!r:.60}: this is the state of another pruner"
        )
    return InputStatistics(count, *(value.clone().double() for value in values))


class _Hook:
    """A forward pre-hook that adds the first input of a layer to a recorder. Copies of the layer,
    such as those in the result of demask(), add nothing."""

    def __init__(self, recorder: InputRecorder, name: str, module: nn.Module):
        self.recorder, self.name, self.module = recorder, name, module

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        value = args[0] if args else next(iter(kwargs.values()), None)
        is_own = module is self.module and self.recorder.is_active
        if not is_own or not isinstance(value, Tensor) or _is_traced(value):
            return
        if value.is_floating_point():  # no indices of tables
            self.recorder.add(self.name, module, value)

    def __deepcopy__(self, memo: dict) -> _Hook:
        return self


def _is_traced(value: Tensor) -> bool:
    return torch.compiler.is_compiling() or type(value) is not Tensor


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


def _sum_over_members(view: ScoreView, members: tuple[Member, ...], values: Callable[[Member], Tensor]) -> Tensor:
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
        return _sum_over_members(view, view.weights, lambda m: view.weight(m).abs())


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
        return _sum_over_members(view, view.weights, lambda m: view.weight(m).square()).sqrt()


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
        return _sum_over_members(view, members, lambda m: view.weight(m) * view.gradient(m)).square()


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

        return _sum_over_members(view, _require_members(view, members), values)


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

        return _sum_over_members(view, _require_members(view, view.readers), values)

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


def _require_members(view: ScoreView, members: tuple[Member, ...]) -> tuple[Member, ...]:
    if not members:
        raise BadInput(f"{view.candidates.name} is read by no weight: score it by L1, L2, Taylor or Random, or skip it")
    return members
