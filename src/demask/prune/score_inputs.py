"""Statistics of the inputs of layers, gathered by one forward hook per layer.

Of each input feature of a layer: how many values there were, their mean, variance and mean
magnitude. They are gathered while the model runs on whatever data, and averaged over ranks when
scores are.

Sums of some megabyte of values are float32, around the mean of these values; those of all are
float64. So no input is converted as a whole, and a variance is right where the mean is large.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from demask.errors import BadInput
from demask.prune.masks import Place

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
        sums = torch.stack([_sums(part, axis) for part in parts]).cpu().double()
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


def _sums(values: Tensor, axis: int) -> Tensor:
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
        self._features = {name: _features(next(iter(at)).module) for name, at in layers.items()}
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
        other = sorted(set(state) - set(self._features)) if self._features else []
        if other:
            raise BadInput(
                f"expected statistics of the layers {', '.join(self._features)}, got some of "
                f"{other[0]!r}: this is the state of another pruner"
            )
        return {name: _read(name, state[name], size) for name, size in self._features.items() if name in state}


def _features(module: Any) -> int | None:
    """The input features of a layer; None where they are not stated."""
    return getattr(module, "in_channels", getattr(module, "in_features", None))


def _read(name: str, stored: Any, features: int | None) -> InputStatistics:
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
    """Whether a value is symbolic: while torch.export or torch.compile captures."""
    return torch.compiler.is_compiling() or type(value) is not Tensor
