"""Hooks that a user registered on the modules of a network, and notes on those that are lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from demask.graph.result.computed_tensors import computes_tensor
from demask.graph.result.resize import module_at

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def user_hooks(module: nn.Module) -> list[Any]:
    """The hooks that a user registered on a module."""
    both = (hook for hooks in HOOKS for hook in getattr(module, hooks).values())
    return [hook for hook in both if not computes_tensor(hook)]


def describe_lost_hooks(model: nn.Module, network: nn.Module) -> Iterator[str]:
    """Notes on hooks of a model that its graph does not call. network: contains the modules of the
    graph, by their names in the model."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if user_hooks(module):
            names.setdefault(id(module), []).append(name)
    uncalled, computed = [], []
    for aliases in names.values():
        hooks = user_hooks(model.get_submodule(aliases[0]))
        parts = [part for name in aliases if (part := module_at(network, name)) is not None]
        if any(_has_hooks(module, hooks) for module in parts):
            continue
        called = any(type(module) is not nn.Module for module in parts)
        (computed if called else uncalled).append(aliases[0] or "the network itself")
    if uncalled:
        verb = "it is" if len(uncalled) == 1 else "they are"
        yield (
            f"the hooks of {', '.join(uncalled)} are not carried over: {verb} not called in "
            "this graph, which contains what hooks compute with tensors"
        )
    if computed:
        yield (
            f"the hooks of {', '.join(computed)} are not carried over: this graph contains what "
            "they compute with tensors"
        )


def _has_hooks(module: nn.Module, hooks: list[Any]) -> bool:
    """Whether a module has all of these hooks."""
    own = {id(hook) for hook in user_hooks(module)}
    return own >= {id(hook) for hook in hooks}
