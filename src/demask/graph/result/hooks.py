"""Hooks that a user put on the modules of a network, and what becomes of them in its graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.utils import prune

from demask.graph.result.resize import module_at

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_COMPUTED = ("WeightNorm", "SpectralNorm")


def computes_weight(hook: Any) -> bool:
    """Is a hook one of torch's that compute a weight? A program holds the weight computed."""
    return isinstance(hook, prune.BasePruningMethod) or type(hook).__name__ in _COMPUTED


def hooks_of(module: nn.Module) -> list[Any]:
    """The hooks that a user put on a module."""
    both = (hook for hooks in HOOKS for hook in getattr(module, hooks).values())
    return [hook for hook in both if not computes_weight(hook)]


def lost_hooks(model: nn.Module, network: nn.Module) -> Iterator[str]:
    """What to say of hooks of a model that its graph does not call. network: the modules of the
    graph, by the names that the model has for them."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if hooks_of(module):
            names.setdefault(id(module), []).append(name)
    uncalled, computed = [], []
    for aliases in names.values():
        hooks = hooks_of(model.get_submodule(aliases[0]))
        made = [found for name in aliases if (found := module_at(network, name)) is not None]
        if any(_holds(module, hooks) for module in made):
            continue
        called = any(type(module) is not nn.Module for module in made)
        (computed if called else uncalled).append(aliases[0] or "the network itself")
    if uncalled:
        one = "it is" if len(uncalled) == 1 else "they are"
        yield (f"the hooks of {', '.join(uncalled)} are not carried over: {one} not called in this "
               "graph, which holds what hooks compute with tensors")  # fmt: skip
    if computed:
        yield (f"the hooks of {', '.join(computed)} are not carried over: this graph holds what "
               "they compute with tensors")  # fmt: skip


def _holds(module: nn.Module, hooks: list[Any]) -> bool:
    held = {id(hook) for hook in hooks_of(module)}
    return held >= {id(hook) for hook in hooks}
