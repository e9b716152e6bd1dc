"""Networks on another device than the CPU: demasked on the CPU, and moved back.

Facts are computed on the CPU, from a copy of the network.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from demask.errors import BadInput
from demask.graph.module_copy import structural_copy

CPU = torch.device("cpu")


def device_of(model: nn.Module | ExportedProgram, args: Any, kwargs: Any) -> torch.device:
    """The device of a network and its inputs, if it is one other than the CPU; else the CPU. Raises
    BadInput where there are several."""
    if isinstance(model, ExportedProgram):
        tensors = [*model.state_dict.values(), *model.constants.values()]
    elif isinstance(model, nn.Module):
        tensors = [*model.parameters(), *model.buffers()]
    else:
        tensors = []
    leaves = [*tensors, *pytree.tree_leaves((args, kwargs))]
    devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)} - {CPU}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise BadInput(f"expected a network on one device, got {names}: move it to one first")
    return next(iter(devices), CPU)


def copy_to_cpu(
    model: nn.Module | ExportedProgram, args: Any, kwargs: Any
) -> tuple[nn.Module | ExportedProgram, Any, Any]:
    """A copy of the network, and its inputs, on the CPU."""
    if isinstance(model, ExportedProgram):
        from torch.export.passes import move_to_device_pass

        copy: Any = move_to_device_pass(model, "cpu")
    else:
        copy = structural_copy(model, share=False).to(CPU)
        if isinstance(copy, fx.GraphModule):
            move_module(copy, CPU)
    args, kwargs = pytree.tree_map(lambda leaf: leaf.to(CPU) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
    return copy, args, kwargs


def run_through_cpu(function: Callable[..., nn.Module], model: Any, args: Any, kwargs: Any, **options: Any) -> Any:
    """The result of a function of networks for one on another device: computed for a copy on the
    CPU, then moved back. None for a network on the CPU."""
    if (device := device_of(model, args, kwargs)) == CPU:
        return None
    return move_module(function(*copy_to_cpu(model, args, kwargs), **options), device)


def move_tensors(tree: Any, device: torch.device) -> Any:
    """The pytree with its tensors on a device."""
    return pytree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, tree)


def move_module(module: nn.Module, device: torch.device) -> nn.Module:
    """The module on a device, including the devices in its graph, if it has one."""

    def replace_device(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
        node.args = map_aggregate(node.args, replace_device)
        node.kwargs = map_aggregate(node.kwargs, replace_device)
    if isinstance(module, fx.GraphModule):
        module.recompile()
    return module.to(device)
