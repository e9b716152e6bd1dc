"""Statistics of the inputs of layers, gathered by one forward hook per layer.

Of each input feature of a layer: how many values there were, their mean, mean square and mean
magnitude. They are gathered while the model runs on whatever data, and averaged over ranks when
scores are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from demask.prune.masks import Place

_CONVOLUTIONS = nn.modules.conv._ConvNd


@dataclass(slots=True)
class InputStatistics:
    """Sums over the values of each input feature of a layer.

    count: of values per feature. sums, squares, magnitudes: of the values, their squares and their
    absolute values, float64 [features].
    """

    count: int
    sums: Tensor
    squares: Tensor
    magnitudes: Tensor

    @property
    def mean(self) -> Tensor:
        """The mean of each feature, float64 [features]."""
        return self.sums / self.count

    @property
    def variance(self) -> Tensor:
        """The variance of each feature (not corrected for bias), float64 [features]."""
        return (self.squares / self.count - self.mean**2).clamp(min=0)

    @property
    def norm(self) -> Tensor:
        """The Euclidean norm of each feature over all values, float64 [features]."""
        return self.squares.sqrt()

    @property
    def mean_magnitude(self) -> Tensor:
        """The mean absolute value of each feature, float64 [features]."""
        return self.magnitudes / self.count

    def add(self, values: Tensor) -> None:
        """Add values [..., features]."""
        rows = values.detach().reshape(-1, values.shape[-1]).double().cpu()
        self.count += len(rows)
        self.sums += rows.sum(0)
        self.squares += rows.square().sum(0)
        self.magnitudes += rows.abs().sum(0)

    @classmethod
    def empty(cls, features: int) -> InputStatistics:
        """Statistics of no values."""
        return cls(0, *(torch.zeros(features, dtype=torch.float64) for _ in range(3)))


class InputRecorder:
    """Hooks that gather the statistics of the inputs of layers, by name of the layer's weight,
    while `is_active`."""

    def __init__(self, layers: Mapping[str, Iterable[Place]]):
        self.statistics: dict[str, InputStatistics] = {}
        self.is_active = True
        self._handles: list[RemovableHandle] = []
        for name, places in layers.items():
            for place in places:
                hook = _Hook(self, name, place.module)
                self._handles.append(place.module.register_forward_pre_hook(hook, with_kwargs=True))

    def add(self, name: str, module: nn.Module, values: Tensor) -> None:
        """Add one input of a layer."""
        if isinstance(module, _CONVOLUTIONS):
            values = values.movedim(-1 - len(module.kernel_size), -1)
        known = self.statistics.setdefault(name, InputStatistics.empty(values.shape[-1]))
        known.add(values)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """The statistics as tensors and numbers."""
        return {
            name: {
                "count": s.count,
                "sums": s.sums.clone(),
                "squares": s.squares.clone(),
                "magnitudes": s.magnitudes.clone(),
            }
            for name, s in self.statistics.items()
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the statistics by what `state_dict` returned."""
        self.statistics = {
            name: InputStatistics(
                int(s["count"]), *(s[key].clone() for key in ("sums", "squares", "magnitudes"))
            )
            for name, s in state.items()
        }


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
