"""Recurrent modules of torch.nn: the names of their tensors, and the state that they begin with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from demask.ops import schema
from demask.ops.traits import FULLS, ZEROS

aten = torch.ops.aten


def parts_of(layers: int, two: bool) -> list[str]:
    """The layers and directions of a module, as the names of its tensors end.

    >>> parts_of(1, True)
    ['l0', 'l0_reverse']
    """
    return [f"l{layer}{way}" for layer in range(layers) for way in ("", "_reverse")[: 1 + two]]


def names_of(found: Mapping[str, Any]) -> list[str]:
    """The names of the tensors that a call of several layers and directions reads, in their order.
    found: its arguments."""
    parts = parts_of(found["num_layers"], found["bidirectional"])
    biases = ("bias_ih", "bias_hh") if found["has_biases"] else ()
    leaves = ("weight_ih", "weight_hh", *biases, "weight_hr")
    count = len(found["params"]) // len(parts)
    return [f"{leaf}_{part}" for part in parts for leaf in leaves[:count]]


def begins_with_zeros(call: fx.Node) -> bool:
    """Is the state that a call begins with what its module begins with where it is given none?"""
    found = schema.arguments(call)
    states = found["hx"] if isinstance(found["hx"], (list, tuple)) else [found["hx"]]
    return all(map(is_zeros, states))


def is_state(node: fx.Node) -> bool:
    """Is a call one of those that make a state to begin with?"""
    return node.target is aten.sym_size.int or is_zeros(node)


def is_zeros(node: Any) -> bool:
    """Is a node a call that makes zeros?"""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    return node.target in ZEROS or (
        node.target in FULLS and schema.arguments(node)["fill_value"] == 0
    )


def zero_state(x: fx.Node, module: Any) -> Any:
    """New nodes: the state that a module begins with where it is given none, as its op takes it.
    x: its input."""
    graph, stacked = x.graph, isinstance(module, nn.RNNBase)
    batch = graph.call_function(aten.sym_size.int, (x, int(stacked and not module.batch_first)))
    first = [module.num_layers * (2 if module.bidirectional else 1)] if stacked else []
    widths = [module.hidden_size]
    if isinstance(module, (nn.LSTM, nn.LSTMCell)):
        widths.insert(0, getattr(module, "proj_size", 0) or module.hidden_size)
    states = [graph.call_function(aten.new_zeros.default, (x, [*first, batch, width]))
              for width in widths]  # fmt: skip
    if (value := x.meta.get("val")) is not None:
        size = batch.meta["val"] = value.shape[batch.args[1]]
        for state, width in zip(states, widths, strict=True):
            state.meta["val"] = value.new_zeros([*first, size, width])
    return states if len(states) == 2 else states[0]


def rename(module: nn.RNNBase, names: list[str]) -> None:
    """Have a module of several layers and directions hold the tensors of these names alone, and
    say so."""
    parts = module.num_layers * (2 if module.bidirectional else 1)
    count = len(names) // parts
    held = {name: module._parameters[name] for name in names}
    module._parameters = held
    module._flat_weights_names = names
    module._all_weights = [names[k * count : (k + 1) * count] for k in range(parts)]
    projection = held.get("weight_hr_l0")
    module.proj_size = 0 if projection is None else projection.shape[0]
    module._init_flat_weights()


def refresh(module: nn.Module) -> None:
    """Let a module see the tensors that were put in the places of its own."""
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()
