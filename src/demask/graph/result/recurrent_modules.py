"""Recurrent modules of torch.nn: names of their tensors, and their initial states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from demask.ops import schema
from demask.ops.traits import FULLS, ZEROS

aten = torch.ops.aten


def tensor_suffixes(layers: int, two: bool) -> list[str]:
    """The suffixes of the names of a module's tensors, per layer and direction.

    >>> tensor_suffixes(1, True)
    ['l0', 'l0_reverse']
    """
    return [f"l{layer}{direction}" for layer in range(layers) for direction in ("", "_reverse")[: 1 + two]]


def tensor_names(arguments: Mapping[str, Any]) -> list[str]:
    """The names of the tensors of a call of several layers and directions, in order. arguments: of
    the call, by name."""
    parts = tensor_suffixes(arguments["num_layers"], arguments["bidirectional"])
    biases = ("bias_ih", "bias_hh") if arguments["has_biases"] else ()
    leaves = ("weight_ih", "weight_hh", *biases, "weight_hr")
    count = len(arguments["params"]) // len(parts)
    return [f"{leaf}_{part}" for part in parts for leaf in leaves[:count]]


def begins_with_zeros(call: fx.Node) -> bool:
    """Whether the initial state of a call is zero, the default of modules."""
    arguments = schema.arguments(call)
    states = arguments["hx"] if isinstance(arguments["hx"], (list, tuple)) else [arguments["hx"]]
    return all(map(is_zeros, states))


def is_state(node: fx.Node) -> bool:
    """Whether a call is one of those that compute a zero state."""
    return node.target is aten.sym_size.int or is_zeros(node)


def is_zeros(node: Any) -> bool:
    """Whether a node is a call that returns zeros."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    return node.target in ZEROS or (node.target in FULLS and schema.arguments(node)["fill_value"] == 0)


def create_zero_state(x: fx.Node, module: Any) -> Any:
    """New nodes: the zero state of a module with input x, as an argument of its op."""
    graph, stacked = x.graph, isinstance(module, nn.RNNBase)
    batch = graph.call_function(aten.sym_size.int, (x, int(stacked and not module.batch_first)))
    first = [module.num_layers * (2 if module.bidirectional else 1)] if stacked else []
    widths = [module.hidden_size]
    if isinstance(module, (nn.LSTM, nn.LSTMCell)):
        widths.insert(0, getattr(module, "proj_size", 0) or module.hidden_size)
    states = [graph.call_function(aten.new_zeros.default, (x, [*first, batch, width])) for width in widths]
    if (value := x.meta.get("val")) is not None:
        size = batch.meta["val"] = value.shape[batch.args[1]]
        for state, width in zip(states, widths, strict=True):
            state.meta["val"] = value.new_zeros([*first, size, width])
    return states if len(states) == 2 else states[0]


def remove_unnamed(module: nn.RNNBase, names: list[str]) -> None:
    """Remove all tensors but those with these names from a recurrent module, in place, and update
    its attributes."""
    parts = module.num_layers * (2 if module.bidirectional else 1)
    count = len(names) // parts
    parameters = {name: module._parameters[name] for name in names}
    module._parameters = parameters
    module._flat_weights_names = names
    module._all_weights = [names[k * count : (k + 1) * count] for k in range(parts)]
    projection = parameters.get("weight_hr_l0")
    module.proj_size = 0 if projection is None else projection.shape[0]
    module._init_flat_weights()


def refresh_tensors(module: nn.Module) -> None:
    """Update the references of a recurrent module to its tensors after they were replaced."""
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()
