"""The zeros that `demask.prune.align` left in a network, remembered in it: as long as they are the
same, there is nothing more to align."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_ZEROS = "_demask_aligned"  # attribute of a network: by parameter, an axis and its zero slices

Slices = tuple[int, tuple[int, ...]]


def zero_slices(value: Tensor, axis: int) -> Slices:
    """An axis of a tensor, and the positions of it where all numbers are zero."""
    rows = value.detach().movedim(axis, 0).flatten(1) if value.ndim > 1 else value.detach()[:, None]
    return axis, tuple((rows == 0).all(1).nonzero().flatten().tolist())


def remembered_zeros(network: Any) -> dict[str, Slices]:
    """By parameter, an axis and its zero slices as `align` left them; {} in other networks."""
    return dict(vars(network).get(_ZEROS, {})) if isinstance(network, nn.Module) else {}


def remember_zeros(network: nn.Module, zeros: Mapping[str, Slices]) -> None:
    """Add the zero slices of parameters to what a network remembers, in place."""
    vars(network)[_ZEROS] = {**remembered_zeros(network), **zeros}


def is_aligned(network: Any) -> bool:
    """Whether a network was aligned, and has the same zero slices since."""
    zeros = remembered_zeros(network)
    return bool(zeros) and all(
        value is not None and zero_slices(value, slices[0]) == slices
        for value, slices in ((_value(network, name), slices) for name, slices in zeros.items())
    )


def _value(network: nn.Module, name: str) -> Tensor | None:
    """The masked value of a parameter, by its plain name; None where the network has none."""
    path, _, leaf = name.rpartition(".")
    module = dict(network.named_modules(remove_duplicate=False)).get(path)
    if module is None:
        return None
    if f"{leaf}_orig" in module._parameters:
        return getattr(module, f"{leaf}_orig").detach() * getattr(module, f"{leaf}_mask")
    with torch.no_grad():
        return getattr(module, leaf, None)
