"""Masks in modules: written, read back and removed.

A tensor that its module's `forward` reads gets a hook of `torch.nn.utils.prune`: the parameter
`weight` becomes `weight_orig`, the same object, next to the buffer `weight_mask`. A tensor that is
parametrized already, or is read without its module being called (`out_proj` of
`nn.MultiheadAttention`), gets a parametrization. Both multiply, so that masked weights stay zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.utils.hooks import RemovableHandle

from demask.errors import BadInput
from demask.graph.capture.fold_constants import plain_name


class Mask(nn.Module):
    """A parametrization that multiplies with `mask`, a buffer of zeros and ones."""

    mask: Tensor

    def __init__(self, mask: Tensor):
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight: Tensor) -> Tensor:
        """The masked weight."""
        return weight * self.mask


class Place(NamedTuple):
    """A tensor of a module that is or was a parameter, under its plain name."""

    module: nn.Module
    name: str

    @property
    def parametrized(self) -> bool:
        return parametrize.is_parametrized(self.module, self.name)

    @property
    def steps(self) -> Any:
        """The parametrizations of the tensor, a `ParametrizationList`."""
        parametrizations: Any = self.module.parametrizations
        return parametrizations[self.name]

    @property
    def pruned(self) -> bool:
        return f"{self.name}_orig" in self.module._parameters

    @property
    def value(self) -> Tensor:
        """The tensor with its masks, detached."""
        if self.pruned:
            masked = getattr(self.module, f"{self.name}_mask")
            return getattr(self.module, f"{self.name}_orig").detach() * masked
        with torch.no_grad():
            return getattr(self.module, self.name).detach()

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that training moves. Of a parametrization with several, the first."""
        if self.pruned:
            return getattr(self.module, f"{self.name}_orig")
        if self.parametrized:
            return next(self.steps.parameters())
        return getattr(self.module, self.name)

    @property
    def own_mask(self) -> Tensor | None:
        """The buffer that contains the mask; None without one."""
        if self.pruned:
            return getattr(self.module, f"{self.name}_mask")
        for step in self.steps if self.parametrized else ():
            if isinstance(step, Mask):
                return step.mask
        return None


def find_places(model: nn.Module) -> dict[str, tuple[Place, ...]]:
    """By plain name of a parameter ("conv.weight"), every place of it in the model: several for a
    tied parameter, which has its first name."""
    names: dict[int, str] = {}
    places: dict[str, list[Place]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name in _tensor_names(module):
            full, place = f"{path}.{name}".lstrip("."), Place(module, name)
            first = names.setdefault(id(place.parameter), full)
            if place not in places.setdefault(first, []):
                places[first].append(place)
    return {name: tuple(same) for name, same in places.items()}


def _tensor_names(module: nn.Module) -> Iterator[str]:
    """The plain names of a module's parameters, masked and parametrized ones among them."""
    if not isinstance(module, (parametrize.ParametrizationList, nn.ModuleDict)):
        yield from (plain_name(n) for n, p in module._parameters.items() if p is not None)
    if parametrize.is_parametrized(module):
        parametrizations: Any = module.parametrizations
        yield from parametrizations


def read_masks(model: nn.Module) -> dict[str, Tensor]:
    """By parameter, a copy of its mask, bool, True where it stays; those without one are absent."""
    masks = {}
    for name, places in find_places(model).items():
        own = next((p.own_mask for p in places if p.own_mask is not None), None)
        if own is not None:
            masks[name] = own.detach() != 0
    return masks


def write_masks(model: nn.Module, masks: Mapping[str, Tensor], uncalled: frozenset[str]) -> None:
    """Mask parameters, in place. What the model masks already stays masked.

    Args:
        masks: by parameter, bool of its shape, True where it stays.
        uncalled: names of parameters that are read without their module being called.
    """
    places = find_places(model)
    for name, mask in masks.items():
        for place in places[name]:
            _write_mask(place, mask, by_hook=name not in uncalled)


def _write_mask(place: Place, mask: Tensor, *, by_hook: bool) -> None:
    own = place.own_mask
    if own is not None:
        own.mul_(mask.to(own.device))
        if place.pruned:  # what the hook computes before the next forward
            setattr(place.module, place.name, place.parameter * own)
        return
    values = mask.to(place.value)
    if place.parametrized or not by_hook:
        parametrize.register_parametrization(place.module, place.name, Mask(values), unsafe=True)
    else:
        prune.custom_from_mask(place.module, place.name, values)


def remove_masks(model: nn.Module) -> None:
    """Multiply masked parameters with their masks, in place, and make them plain parameters again,
    the same objects. A mask after another parametrization stays: its zeros have no parameter."""
    for places in find_places(model).values():
        for place in places:
            if place.pruned:
                _remove_hook(place)
            elif place.parametrized:
                _remove_parametrization(place)


def _remove_hook(place: Place) -> None:
    module, name, parameter = place.module, place.name, place.parameter
    with torch.no_grad():
        parameter.mul_(getattr(module, f"{name}_mask"))
    for key, hook in [*module._forward_pre_hooks.items()]:
        if isinstance(hook, prune.BasePruningMethod) and hook._tensor_name == name:
            del module._forward_pre_hooks[key]
    delattr(module, name)
    del module._parameters[f"{name}_orig"], module._buffers[f"{name}_mask"]
    setattr(module, name, parameter)


def _remove_parametrization(place: Place) -> None:
    steps = place.steps
    if len(steps) == 1 and isinstance(steps[0], Mask):
        with torch.no_grad():
            steps.original.mul_(steps[0].mask)
        parametrize.remove_parametrizations(place.module, place.name, leave_parametrized=False)


def replace_masks(model: nn.Module, masks: Mapping[str, Tensor], uncalled: frozenset[str]) -> None:
    """Set the masks of a model to others, also larger ones, in place."""
    for places in find_places(model).values():
        for place in places:
            if place.own_mask is not None:
                place.own_mask.fill_(1)
    write_masks(model, masks, uncalled)


def check_masks(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Raise BadInput for a mask of a parameter that the model lacks, or of another shape."""
    places = find_places(model)
    if not isinstance(masks, Mapping):
        raise BadInput(f"expected masks by name of a parameter, got {masks!r:.60}")
    for name, mask in masks.items():
        if name not in places:
            raise BadInput(f"expected masks of the model's parameters, got one of {name!r}")
        shape = places[name][0].parameter.shape if not places[name][0].parametrized else (places[name][0].value.shape)
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != shape:
            got = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"{mask!r:.60}"
            raise BadInput(f"expected a bool mask of {tuple(shape)} for {name}, got {got}")


def find_uncalled(model: nn.Module, args: tuple, kwargs: Mapping | None) -> frozenset[str]:
    """The names of the parameters whose modules are not called when the model is, as in eval mode
    on the example inputs; training flags are restored."""
    called: set[nn.Module] = set()
    hooks: list[RemovableHandle] = []
    try:
        for module in model.modules():
            hooks.append(module.register_forward_pre_hook(lambda m, _: called.add(m)))
        run_in_eval_mode(model, args, kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return frozenset(
        name for name, places in find_places(model).items() if any(place.module not in called for place in places)
    )


def run_in_eval_mode(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> None:
    """Run a model without gradients in eval mode; the flags of its modules are restored."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            model(*args, **dict(kwargs or {}))
    finally:
        for module, mode in modes:
            module.training = mode
