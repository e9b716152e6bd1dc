"""Export of recurrent calls as custom ops, which torch's exporter does not decompose.

The exporter runs recurrent calls step by step on fake tensors to infer shapes, which fixes the
number of steps (torch 2.13). For a custom op it infers only shapes, and the length stays dynamic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from demask.errors import NotExportable
from demask.ops import schema
from demask.ops.entries.recurrent import GATES
from demask.ops.traits import aten_op


@dataclass(frozen=True, slots=True)
class _OnnxRecurrentOp:
    """A recurrent op of ONNX. gates: torch's gate at each position in ONNX's order."""

    name: str
    gates: tuple[int, ...]
    attributes: Mapping[str, Any]


# ONNX: input, output, forget, cell; torch: input, forget, cell, output. And update, reset, hidden;
# torch: reset, update, new, with the reset gate applied after the product.
_KINDS = {
    "lstm.input": _OnnxRecurrentOp("LSTM", (0, 3, 1, 2), {}),
    "gru.input": _OnnxRecurrentOp("GRU", (1, 0, 2), {"linear_before_reset": 1}),
    "rnn_tanh.input": _OnnxRecurrentOp("RNN", (0,), {"activations": ["Tanh"]}),
    "rnn_relu.input": _OnnxRecurrentOp("RNN", (0,), {"activations": ["Relu"]}),
}


@torch.library.custom_op("demask::recur", mutates_args=())
def recur(
    name: str,
    x: Tensor,
    states: Sequence[Tensor],
    params: Sequence[Tensor],
    biases: bool,
    layers: int,
    two: bool,
    batch_first: bool,
) -> list[Tensor]:
    """The recurrent call `name` ("aten.lstm.input"), outside of training."""
    hx: Any = list(states) if "lstm" in name else states[0]
    call = aten_op(name.removeprefix("aten."))
    outputs = call(x, hx, list(params), biases, layers, 0.0, False, two, batch_first)
    return [value.clone() for value in outputs]


@recur.register_fake
def _(
    name: str,
    x: Tensor,
    states: Sequence[Tensor],
    params: Sequence[Tensor],
    biases: bool,
    layers: int,
    two: bool,
    batch_first: bool,
) -> list[Tensor]:
    out = x.new_empty([x.shape[0], x.shape[1], (2 if two else 1) * states[0].shape[2]])
    return [out, *(torch.empty_like(state) for state in states)]


def wrap_recurrent(graph: fx.Graph) -> None:
    """Replace the recurrent calls of a graph by `recur`, in place."""
    for node in graph.nodes:
        if str(node.target) not in GATES:
            continue
        arguments = schema.arguments(node)
        hx = arguments["hx"]
        states = list(hx) if isinstance(hx, list | tuple) else [hx]
        layers, two = arguments["num_layers"], bool(arguments["bidirectional"])
        count = layers * (2 if two else 1) * (4 if arguments["has_biases"] else 2)
        if len(arguments["params"]) != count:
            raise NotExportable(
                "a projected LSTM", "the demasked graph", "ONNX's LSTM has no projection: write it as plain ops"
            )
        biases, batch_first = bool(arguments["has_biases"]), bool(arguments["batch_first"])
        params = list(arguments["params"])
        node.args = (str(node.target), arguments["input"], states, params, biases, layers, two, batch_first)
        node.kwargs, node.target = {}, torch.ops.demask.recur.default


def translation() -> dict[Any, Any]:
    """The ONNX function of `recur` for torch's exporter."""
    from onnxscript import opset18

    op: Any = opset18

    def written(name, x, states, params, biases, layers, two, batch_first):
        kind, directions = _KINDS[name.removeprefix("aten.")], 2 if two else 1
        value = op.Transpose(x, perm=[1, 0, 2]) if batch_first else x
        per_direction = len(params) // (layers * directions)
        finals: list[list[Any]] = [[] for _ in states]
        for layer in range(layers):
            groups = [params[(layer * directions + d) * per_direction :][:per_direction] for d in range(directions)]
            starts = [op.Slice(s, [layer * directions], [(layer + 1) * directions], [0]) for s in states]
            results = _layer(op, kind, value, groups, starts, biases)
            batch_second = op.Transpose(results[0], perm=[0, 2, 1, 3])
            value = op.Reshape(batch_second, op.Constant(value_ints=[0, 0, -1]))
            for final, state in zip(finals, results[1:], strict=True):
                final.append(state)
        out = op.Transpose(value, perm=[1, 0, 2]) if batch_first else value
        return [out, *(f[0] if layers == 1 else op.Concat(*f, axis=0) for f in finals)]

    return {torch.ops.demask.recur.default: written}


def _layer(
    op: Any, kind: _OnnxRecurrentOp, x: Any, groups: Sequence[Sequence[Any]], starts: Sequence[Any], biases: bool
) -> Sequence[Any]:
    """One layer's call: outputs of all steps (time, direction, batch, unit), and last states."""
    hidden = groups[0][1].shape[1]
    order = [gate * hidden + unit for gate in kind.gates for unit in range(hidden)]

    def stacked(parts: Sequence[Any]) -> Any:
        indices, first_axis = op.Constant(value_ints=order), op.Constant(value_ints=[0])
        return op.Concat(*(op.Unsqueeze(op.Gather(p, indices, axis=0), first_axis) for p in parts), axis=0)

    weights, recurrent_weights = (stacked([group[k] for group in groups]) for k in (0, 1))
    bias = None
    if biases:
        halves = [stacked([group[k] for group in groups]) for k in (2, 3)]
        bias = op.Concat(*halves, axis=1)
    attributes = dict(kind.attributes)
    if "activations" in attributes:
        attributes["activations"] = attributes["activations"] * len(groups)
    direction = "bidirectional" if len(groups) == 2 else "forward"
    call = getattr(op, kind.name)
    return call(
        x, weights, recurrent_weights, bias, None, *starts, hidden_size=hidden, direction=direction, **attributes
    )
