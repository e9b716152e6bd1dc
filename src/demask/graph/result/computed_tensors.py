"""Tensors that modules compute from others before they read them: torch's parametrizations, and the
hooks of weight_norm, spectral_norm and prune."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from demask.graph.result.resize import tensors_of

# What torch's hooks compute a tensor from: its name with these suffixes.
_SUFFIXES: dict[type[Any], tuple[str, ...]] = {
    prune.BasePruningMethod: ("_orig", "_mask"),
    WeightNorm: ("_g", "_v"),
    SpectralNorm: ("_orig", "_u", "_v"),
}


@dataclass(frozen=True, slots=True, eq=False)
class ComputedTensor:
    """A tensor that a module computes.

    path, leaf: of the module, and the tensor's name in it. part: a copy of what computes it, with
    its parameters and copies of its buffers. hook: the hook that computes it, else None.
    """

    path: str
    leaf: str
    part: nn.Module
    hook: Any = None

    @property
    def name(self) -> str:
        """The tensor's name in the network."""
        return f"{self.path}.{self.leaf}".lstrip(".")

    def source_name(self, name: str) -> str:
        """The name in the network of one of its sources."""
        inside = "" if self.hook is not None else f"parametrizations.{self.leaf}."
        return f"{self.path}.{inside}{name}".lstrip(".")

    @property
    def kinds(self) -> str:
        """The classes that compute it, such as "WeightNorm"."""
        steps = [self.hook] if self.hook is not None else self.part.children()
        return ", ".join(type(step).__name__.lstrip("_") for step in steps)

    def sources(self) -> dict[str, Tensor]:
        """The tensors that it is computed from, by their names in `part`."""
        return dict(tensors_of(self.part))

    def source_names(self) -> list[str]:
        """The names in the network of its sources."""
        return [self.source_name(name) for name in self.sources()]

    def value(self, *, training: bool = False) -> Tensor:
        """The tensor in eval or in train mode, in which buffers of `part` may change."""
        self.part.train(training)
        if self.hook is None:
            return self.part()
        self.hook(self.part, ())
        return getattr(self.part, self.leaf)

    def is_mask(self) -> bool:
        """Whether it is one parameter times zeros and ones, which need not be computed again."""
        parameters = list(self.part.parameters())
        with torch.no_grad():
            value = self.value()
        return len(parameters) == 1 and torch.equal(value, parameters[0] * (value != 0))

    def zeros_of_mask(self) -> Tensor:
        """Where a tensor that is a mask times a parameter is zero for any parameter."""
        ones = {n: torch.ones_like(t) if isinstance(t, nn.Parameter) else t for n, t in self.sources().items()}
        with torch.no_grad():
            return self.with_sources(ones).value() == 0

    def with_sources(self, sources: Mapping[str, Tensor]) -> ComputedTensor:
        """The tensor computed from others, by their names in `part`."""
        vars(self.part).pop(self.leaf, None)  # of a hook
        memo: dict[int, Any] = {id(old): sources[name] for name, old in self.sources().items()}
        return ComputedTensor(self.path, self.leaf, copy.deepcopy(self.part, memo), self.hook)

    def attach(self, module: Any) -> None:
        """Let a module whose tensor is plain compute it, in place."""
        if self.hook is None:
            parametrize.register_parametrization(module, self.leaf, nn.Identity(), unsafe=True)
            module.parametrizations[self.leaf] = self.part.train(module.training)
            return
        value = self.value().detach()
        del module._parameters[self.leaf]
        module._parameters.update(self.part._parameters)
        module._buffers.update(self.part._buffers)
        setattr(module, self.leaf, value)
        module.register_forward_pre_hook(self.hook, prepend=True)


def computed_tensors(root: nn.Module) -> Iterator[ComputedTensor]:
    """The tensors that the modules of a network compute, each once."""
    for path, module in root.named_modules():
        yield from _of_hooks(path, module)
        yield from _of_parametrizations(path, module)


def parametrized_tensors(root: nn.Module) -> Iterator[ComputedTensor]:
    """The tensors that are computed otherwise than by masks."""
    return (computed for computed in computed_tensors(root) if not computed.is_mask())


def describe_plain(model: Any, slim: nn.Module) -> str:
    """A note on the tensors that a model computes otherwise than by a mask, and that are plain
    parameters in a smaller network; "" if there are none."""
    if not isinstance(model, nn.Module):
        return ""
    computed = {c.name for c in computed_tensors(slim)}
    names = [f"{c.name} ({c.kinds})" for c in parametrized_tensors(model) if c.name not in computed]
    text = "parametrizations become plain parameters of what they compute: "
    return text + ", ".join(names) if names else ""


def remove_parametrizations(root: nn.Module, which: Callable[[ComputedTensor], bool] = lambda _: True) -> None:
    """Replace computed tensors by plain ones of their values, in place. Tensors that are shared
    with another model are not written to."""
    for path, module in root.named_modules():
        for computed in _of_hooks(path, module):
            if which(computed):
                _remove_hook(module, computed)
        parts = list(_of_parametrizations(path, module))
        if any(map(which, parts)):
            del module._modules["parametrizations"]
            # Not by torch's function, which changes the class that copies share.
            module.__class__ = type(module).__bases__[0]
            for computed in parts:
                _set_plain(module, computed)
                if not which(computed):
                    computed.attach(module)


def run_hooks(root: nn.Module) -> None:
    """Compute the tensors that hooks compute before a call, in place."""
    for computed in computed_tensors(root):
        if computed.hook is not None:
            setattr(root.get_submodule(computed.path), computed.leaf, computed.value().detach())


def computes_tensor(hook: Any) -> bool:
    """Whether a hook is one of torch's that compute a tensor, a constant of the program."""
    return isinstance(hook, tuple(_SUFFIXES))


def _of_hooks(path: str, module: nn.Module) -> Iterator[ComputedTensor]:
    """The tensors that hooks compute, in the order of the hooks."""
    for hook in list(module._forward_pre_hooks.values()):
        for kind, suffixes in _SUFFIXES.items():
            if not isinstance(hook, kind):
                continue
            leaf: Any = getattr(hook, "_tensor_name", None) or getattr(hook, "name", "weight")
            part = nn.Module()
            for name in (leaf + suffix for suffix in suffixes):
                if module._parameters.get(name) is not None:
                    part.register_parameter(name, module._parameters[name])
                else:  # a buffer, or what another hook computes
                    part.register_buffer(name, getattr(module, name).detach().clone())
            yield ComputedTensor(path, leaf, part, hook)


def _of_parametrizations(path: str, module: Any) -> Iterator[ComputedTensor]:
    for leaf in module.parametrizations if parametrize.is_parametrized(module) else ():
        part = module.parametrizations[leaf]
        own = {id(parameter): parameter for parameter in part.parameters()}
        yield ComputedTensor(path, leaf, copy.deepcopy(part, own))


def _remove_hook(module: nn.Module, computed: ComputedTensor) -> None:
    """Replace what a hook computes by a plain tensor, in place."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if hook is computed.hook:
            del module._forward_pre_hooks[key]
    vars(module).pop(computed.leaf, None)
    for name in computed.sources():
        module._parameters.pop(name, None)
        module._buffers.pop(name, None)
    _set_plain(module, computed)


def _set_plain(module: nn.Module, computed: ComputedTensor) -> None:
    """Give a module the value of a computed tensor, in place: a parameter, if it is computed from
    any."""
    with torch.no_grad():
        value = computed.value().detach().clone()
    grads = [parameter.requires_grad for parameter in computed.part.parameters()]
    if grads:
        module.register_parameter(computed.leaf, nn.Parameter(value, any(grads)))
    else:
        module.register_buffer(computed.leaf, value)
