"""Hooks that write weights before each call, such as `layer.weight.data.mul_(mask)`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from demask.graph.module_copy import structural_copy


def apply_weight_hooks(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> nn.Module | None:
    """A copy of a model with the weights that its hooks write, and without these hooks.

    Hooks that run before a module, return None and leave its inputs alone can only write. None if
    the model has none, or if a second call writes other weights.
    """
    work = structural_copy(model, share=False).eval()
    calls: dict[tuple[nn.Module, int], bool] = {}
    hooks: dict[tuple[nn.Module, int], Callable[..., Any]] = {}
    for module in work.modules():
        for key, hook in module._forward_pre_hooks.items():
            hooks[module, key] = hook
            module._forward_pre_hooks[key] = functools.partial(_observe, hook, calls, (module, key))
    after = []
    for _ in range(2):
        try:
            with torch.no_grad():
                work(*args, **kwargs)
        except Exception:  # the caller tells that the model itself fails
            return None
        after.append([value.clone() for value in _tensors(work)])
    if not calls or not all(map(torch.equal, *after)):
        return None
    for (module, key), only_writes in calls.items():
        if only_writes:
            del module._forward_pre_hooks[key]
        else:
            module._forward_pre_hooks[key] = hooks[module, key]
    for copied, own in zip(work.modules(), model.modules(), strict=True):
        copied.training = own.training
    return work if any(calls.values()) else None


def _observe(hook: Callable[..., Any], calls: dict[Any, bool], place: Any, module: nn.Module, *inputs: Any) -> Any:
    """The result of a hook; notes whether it returned None and left the inputs alone."""
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    before = [tensor.clone() for tensor in tensors]
    result = hook(module, *inputs)
    only_writes = result is None and all(map(torch.equal, tensors, before))
    calls[place] = calls.get(place, True) and only_writes
    return result


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
