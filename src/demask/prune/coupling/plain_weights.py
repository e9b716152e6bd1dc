"""Copies of models whose masked and parametrized weights are plain parameters."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.utils import parametrize, prune

from demask.graph.module_copy import structural_copy


def with_plain_weights(model: nn.Module) -> nn.Module:
    """The model, or a copy of it in which every tensor with a parametrization or a hook of
    torch.nn.utils.prune is a parameter of its plain name."""
    if not any(map(_has_computed_weights, model.modules())):
        return model
    copy = structural_copy(model, share=False)
    for module in copy.modules():
        for hook in [*module._forward_pre_hooks.values()]:
            if isinstance(hook, prune.BasePruningMethod):
                _make_plain(module, hook._tensor_name)
        if parametrize.is_parametrized(module):
            _without_parametrizations(module)
    return copy


def _without_parametrizations(module: nn.Module) -> None:
    """Replace the parametrized tensors of a copied module by plain parameters of their values, in
    place. Its class, which the original has too, stays as it is."""
    parametrizations: Any = module.parametrizations
    values = {name: getattr(module, name).detach().clone() for name in parametrizations}
    module.__class__ = parametrize.type_before_parametrizations(module)
    del module._modules["parametrizations"]
    for name, value in values.items():
        module.register_parameter(name, nn.Parameter(value))


def _has_computed_weights(module: nn.Module) -> bool:
    hooks = module._forward_pre_hooks.values()
    return parametrize.is_parametrized(module) or any(isinstance(hook, prune.BasePruningMethod) for hook in hooks)


def _make_plain(module: nn.Module, name: str) -> None:
    """Replace a pruned tensor of a module by a plain parameter of its value, in place."""
    value = getattr(module, f"{name}_orig").detach() * getattr(module, f"{name}_mask")
    for key, hook in [*module._forward_pre_hooks.items()]:
        if isinstance(hook, prune.BasePruningMethod) and hook._tensor_name == name:
            del module._forward_pre_hooks[key]
    delattr(module, name)
    del module._parameters[f"{name}_orig"], module._buffers[f"{name}_mask"]
    module.register_parameter(name, nn.Parameter(value))
