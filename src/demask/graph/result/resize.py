"""Replacement of tensors in the modules of a network, and update of the modules' attributes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, fx, nn

from demask.compat.modules import ConvNd, NormBase
from demask.ops import schema


def assign_tensor(root: nn.Module, name: str, tensor: Tensor) -> bool:
    """Set a tensor (a Parameter, or the value of a buffer) by its name, also a bias of a layer
    without one; whether the network has that name."""
    path, _, leaf = name.rpartition(".")
    try:
        module = root.get_submodule(path)
    except AttributeError:
        return False
    if leaf in module._buffers and not isinstance(tensor, nn.Parameter):
        module._buffers[leaf] = tensor
    elif leaf in module._parameters and isinstance(tensor, nn.Parameter):
        setattr(module, leaf, tensor)  # recurrent layers also store it in a list
    elif isinstance(vars(module).get(leaf), Tensor):
        vars(module)[leaf] = tensor
    else:
        return False
    return True


def tensors_of(root: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers, with all their names."""
    return [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]


def _linear(m: Any) -> dict[str, Any]:
    return {"out_features": m.weight.shape[0], "in_features": m.weight.shape[1]}


def _conv(m: Any) -> dict[str, Any]:
    first, second = m.weight.shape[:2]
    ins, outs = (first, second * m.groups) if m.transposed else (second * m.groups, first)
    return {"in_channels": ins, "out_channels": outs}


def _features(m: Any) -> dict[str, Any]:
    vector = m.weight if m.weight is not None else m.running_mean
    return {} if vector is None else {"num_features": vector.shape[0]}


def _normalized(m: Any) -> dict[str, Any]:
    return {} if m.weight is None else {"normalized_shape": tuple(m.weight.shape)}


def _channels(m: Any) -> dict[str, Any]:
    return {} if m.weight is None else {"num_channels": m.weight.shape[0]}


def _rows(m: Any) -> dict[str, Any]:
    return {"num_embeddings": m.weight.shape[0], "embedding_dim": m.weight.shape[1]}


def _recurrent(m: Any) -> dict[str, Any]:
    return {
        "input_size": m.weight_ih_l0.shape[1],
        "hidden_size": m.weight_ih_l0.shape[0] // _GATES.get(m.mode, 1),
        "proj_size": m.weight_hr_l0.shape[0] if m.proj_size else 0,
    }


def _cell(m: Any) -> dict[str, Any]:
    return {"input_size": m.weight_ih.shape[1], "hidden_size": m.weight_hh.shape[1]}


def _prelu(m: Any) -> dict[str, Any]:
    return {"num_parameters": m.weight.shape[0]}


_GATES = {"LSTM": 4, "GRU": 3}
# The attributes of a class of modules that are determined by its tensors.
NUMBERS: dict[type[nn.Module], Callable[[Any], dict[str, Any]]] = {
    nn.Linear: _linear,
    ConvNd: _conv,
    NormBase: _features,
    nn.GroupNorm: _channels,
    nn.LayerNorm: _normalized,
    nn.RMSNorm: _normalized,
    nn.Embedding: _rows,
    nn.EmbeddingBag: _rows,
    nn.RNNBase: _recurrent,
    nn.RNNCellBase: _cell,
    nn.PReLU: _prelu,
}
# Attributes that a cut changes and that tensors do not determine: those of the same name among the
# arguments of the call. `module_calls.ROWS` does not say which of a call's arguments a cut changes,
# and has no rows for subclasses whose forward differs.
FROM_CALLS: dict[type[nn.Module], str] = {
    ConvNd: "groups",
    nn.GroupNorm: "num_groups",
    nn.LayerNorm: "normalized_shape",
    nn.RMSNorm: "normalized_shape",
}


def has_numbers(module: nn.Module) -> bool:
    """Whether the attributes of a module that depend on its tensors are known."""
    return any(isinstance(module, kind) for kind in NUMBERS)


_INDEX = re.compile(r"(^|_)(idx|id|index)$")  # names of numbers that are no sizes


def numbers_of(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are integers above 1, or lists or tuples of integers."""
    numbers: dict[str, Any] = {}
    for name, value in vars(module).items():
        if _INDEX.search(name):
            continue
        if (type(value) is int and value > 1 and not name.startswith("__")) or (
            isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value)
        ):
            numbers[name] = value
    return numbers


def update_attributes(module: nn.Module, calls: Iterable[fx.Node] = ()) -> None:
    """Set a layer's attributes (`in_features`, `groups`, ...) from its tensors, in place. calls: of
    the layer, for attributes that tensors do not determine."""
    arguments = [schema.arguments(c) for c in calls if isinstance(c.meta.get("val"), Tensor)]
    for kind, name in FROM_CALLS.items():
        call = next((a for a in arguments if name in a), None)
        if isinstance(module, kind) and call is not None:
            value = call[name]
            if isinstance(value, int):
                setattr(module, name, value)
            elif isinstance(value, (list, tuple)):
                setattr(module, name, tuple(value))
    for kind, numbers in NUMBERS.items():
        if isinstance(module, kind):
            for name, value in numbers(module).items():
                setattr(module, name, value)


def module_at(root: nn.Module, path: str) -> nn.Module | None:
    """The module at a path; None if there is none."""
    try:
        return root.get_submodule(path)
    except AttributeError:
        return None


def put_module(root: nn.Module, path: str, module: nn.Module) -> None:
    """Replace a module, in the same position among its siblings."""
    parent, _, leaf = path.rpartition(".")
    root.get_submodule(parent)._modules[leaf] = module
