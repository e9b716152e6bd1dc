"""Copies of a caller's model, which is not changed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn


def structural_copy(model: nn.Module, *, share: bool, uncopied: Collection[nn.Module] = ()) -> nn.Module:
    """A copy of the module tree with shared or cloned tensors; tied tensors remain tied. uncopied:
    modules in it that are in the copy themselves.

    Unlike `copy.deepcopy` it accepts models with active pruning hooks, whose weights are computed
    tensors.
    """
    memo: dict[int, object] = {id(module): module for module in uncopied}
    memo |= {id(tensor): tensor for module in uncopied for tensor in _tensors(module)}
    for tensor in _tensors(model):
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor if share else _cloned(tensor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch warns of copied pytree specs
        return copy.deepcopy(model, memo)


def copy_with_state(model: nn.Module) -> nn.Module:
    """A copy in eval mode, whose calls change neither buffers nor attributes of `model`; parameters
    are shared."""
    return own_state(without_caches(structural_copy(model, share=True)).eval())


def own_state(copied: nn.Module) -> nn.Module:
    """Clone the buffers and the tensors in attributes of a copy that shares them, in place."""
    for module in copied.modules():
        for pool in (module._buffers, vars(module)):
            for name, value in pool.items():
                if isinstance(value, Tensor):
                    pool[name] = value.detach().clone()
    return copied


def without_caches(model: nn.Module) -> nn.Module:
    """Set `use_cache` of language models to False, in place: a cache of keys and values is an
    object with state, which a graph cannot return. model: a copy of the caller's."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False  # type: ignore[union-attr]
    return model


def buffers_as_numbers(work: nn.Module) -> list[str]:
    """Replace integer buffers by Python numbers, on which code may branch, in place; the names of
    the buffers. work: a copy of the caller's model."""
    names = []
    for path, module in work.named_modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and is_number(name, buffer):
                del module._buffers[name]
                setattr(module, name, buffer.item())
                names.append(f"{path}.{name}".lstrip("."))
    return names


def is_number(name: str, tensor: Tensor) -> bool:
    """Whether a tensor of a module is an integer scalar, on which the module's code may branch."""
    integral = not tensor.is_floating_point() and not tensor.ndim
    return integral and name != "num_batches_tracked"


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers and tensors that are attributes."""
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
