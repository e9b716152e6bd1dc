"""Copies of a caller's model that leave the caller's alone."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn


def structural_copy(model: nn.Module, *, share: bool) -> nn.Module:
    """A copy of the module tree; its tensors are shared, or cloned.

    Unlike `copy.deepcopy` it takes models with active pruning hooks, whose weights are computed
    tensors. Tensors stay tied where they were tied.
    """
    memo: dict[int, object] = {}
    for tensor in _tensors(model):
        memo[id(tensor)] = tensor if share else _cloned(tensor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, of copied pytree specs
        return copy.deepcopy(model, memo)


def without_caches(model: nn.Module) -> nn.Module:
    """Have the language models in a copy of ours return no cache of keys and values, unless a call
    asks for one: a cache is an object with a state, which no graph returns."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False  # type: ignore[union-attr]
    return model


def buffers_as_numbers(work: nn.Module) -> list[str]:
    """Make the whole numbers that `work`, a copy of ours, stores as buffers Python numbers, by
    which code may decide; their names."""
    names = []
    for path, module in work.named_modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and is_number(name, buffer):
                del module._buffers[name]
                setattr(module, name, buffer.item())
                names.append(f"{path}.{name}".lstrip("."))
    return names


def is_number(name: str, tensor: Tensor) -> bool:
    """Is a tensor of a module a whole number, by which its code may decide?"""
    whole = not tensor.is_floating_point() and not tensor.ndim
    return whole and name != "num_batches_tracked"


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        yield from (p for p in module._parameters.values() if p is not None)
        yield from (b for b in module._buffers.values() if b is not None)
        yield from (v for v in vars(module).values() if isinstance(v, Tensor))


def _cloned(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        value = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(value, tensor.requires_grad)
    return value
