"""Runs of a network on example inputs that change neither the network nor the inputs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from demask.graph.module_copy import structural_copy, without_caches

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def copy_in_eval(module: nn.Module | ExportedProgram, *, share: bool = True, caches: bool = False) -> nn.Module:
    """A copy in eval mode; its tensors are shared, or cloned. caches: whether a language model
    returns a cache of keys and values."""
    if isinstance(module, ExportedProgram):
        return module.module(check_guards=False)
    copied = structural_copy(module, share=share)
    if not caches:
        without_caches(copied)
    for part in copied.modules():
        part.training = False
    return copied


def run_seeded(module: nn.Module | Callable[..., Any], inputs: Inputs, *, grad: bool = False) -> Any:
    """The outputs of a network for copies of the inputs, its random numbers seeded."""
    args, kwargs = copy_inputs(inputs)
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.set_grad_enabled(grad), torch.random.fork_rng(devices=devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the network itself
        _seed()
        return module(*args, **kwargs)


def equal_outputs(a: Any, b: Any) -> bool:
    """Whether two outputs are equal; of those that are no tensors, whether their types are."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b)
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    if a.is_floating_point() and a.dtype.itemsize == 1:  # torch has few kernels for these
        a, b = a.float(), b.float()
    if torch.equal(a, b):
        return True
    return (a.is_floating_point() or a.is_complex()) and bool(((a == b) | (a.isnan() & b.isnan())).all())


def copy_inputs(inputs: Inputs) -> Inputs:
    """Copies of inputs: one of each tensor, so that a tensor that is passed twice still is one."""
    copies: dict[int, Any] = {}
    return pytree.tree_map(lambda leaf: copies.setdefault(id(leaf), _copy_leaf(leaf)), inputs)


def _copy_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else copy.deepcopy(leaf)


def _seed() -> None:
    """`torch.manual_seed(0)`, without what it does for accelerators where there is none: it formats
    the Python stack for each kind that is not in use."""
    if torch.accelerator.is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)
