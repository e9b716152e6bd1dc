"""Recurrent calls on their way out: as ops that torch's exporter does not take apart.

It runs recurrent calls step by step on fake tensors to find shapes, which fixes the number of steps
(torch 2.13). Behind an op of ours it sees shapes alone, and the length stays dynamic.
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
    """A recurrent op: its name in ONNX, which of torch's gates stands at each place of ONNX's."""

    name: str
    gates: tuple[int, ...]
    attributes: Mapping[str, Any]


# ONNX: input, output, forget, cell; torch: input, forget, cell, output. And update, reset, hidden;
# torch: reset, update, new, whose reset gate works behind the product.
_KINDS = {
    "lstm.input": _OnnxRecurrentOp("LSTM", (0, 3, 1, 2), {}),
    "gru.input": _OnnxRecurrentOp("GRU", (1, 0, 2), {"linear_before_reset": 1}),
    "rnn_tanh.input": _OnnxRecurrentOp("RNN", (0,), {"activations": ["Tanh"]}),
    "rnn_relu.input": _OnnxRecurrentOp("RNN", (0,), {"activations": ["Relu"]}),
}


@torch.library.custom_op("demask::recur", mutates_args=())
def recur(
    name: str, x: Tensor, states: Sequence[Tensor], params: Sequence[Tensor], biases: bool,
    layers: int, two: bool, batch_first: bool,
) -> list[Tensor]:  # fmt: skip
    """The recurrent call `name` ("aten.lstm.input"), outside of training."""
    hx: Any = list(states) if "lstm" in name else states[0]
    call = aten_op(name.removeprefix("aten."))
    made = call(x, hx, list(params), biases, layers, 0.0, False, two, batch_first)
    return [value.clone() for value in made]


@recur.register_fake
def _(
    name: str, x: Tensor, states: Sequence[Tensor], params: Sequence[Tensor], biases: bool,
    layers: int, two: bool, batch_first: bool,
) -> list[Tensor]:  # fmt: skip
    out = x.new_empty([x.shape[0], x.shape[1], (2 if two else 1) * states[0].shape[2]])
    return [out, *(torch.empty_like(state) for state in states)]


def kept_whole(graph: fx.Graph) -> None:
    """Put `recur` in the place of recurrent calls, in a graph of ours."""
    for node in graph.nodes:
        if str(node.target) not in GATES:
            continue
        found = schema.arguments(node)
        hx = found["hx"]
        states = list(hx) if isinstance(hx, list | tuple) else [hx]
        layers, two = found["num_layers"], bool(found["bidirectional"])
        count = layers * (2 if two else 1) * (4 if found["has_biases"] else 2)
        if len(found["params"]) != count:
            raise NotExportable(
                "a projected LSTM", "the demasked graph", "ONNX's LSTM has no projection: spell it"
            )
        biases, first = bool(found["has_biases"]), bool(found["batch_first"])
        params = list(found["params"])
        node.args = (str(node.target), found["input"], states, params, biases, layers, two, first)
        node.kwargs, node.target = {}, torch.ops.demask.recur.default


def translation() -> dict[Any, Any]:
    """What torch's exporter writes for `recur`."""
    from onnxscript import opset18

    op: Any = opset18

    def written(name, x, states, params, biases, layers, two, batch_first):  # type: ignore[no-untyped-def]
        kind, width = _KINDS[name.removeprefix("aten.")], 2 if two else 1
        value = op.Transpose(x, perm=[1, 0, 2]) if batch_first else x
        each = len(params) // (layers * width)
        finals: list[list[Any]] = [[] for _ in states]
        for layer in range(layers):
            groups = [params[(layer * width + d) * each :][:each] for d in range(width)]
            starts = [op.Slice(s, [layer * width], [(layer + 1) * width], [0]) for s in states]
            made = _layer(op, kind, value, groups, starts, biases)
            turned = op.Transpose(made[0], perm=[0, 2, 1, 3])
            value = op.Reshape(turned, op.Constant(value_ints=[0, 0, -1]))
            for final, state in zip(finals, made[1:], strict=True):
                final.append(state)
        out = op.Transpose(value, perm=[1, 0, 2]) if batch_first else value
        return [out, *(f[0] if layers == 1 else op.Concat(*f, axis=0) for f in finals)]

    return {torch.ops.demask.recur.default: written}


def _layer(op: Any, kind: _OnnxRecurrentOp, x: Any, groups: Sequence[Sequence[Any]], starts: Sequence[Any],
           biases: bool) -> Sequence[Any]:  # fmt: skip
    """One layer's call: all steps (time, direction, batch, unit), and its last states."""
    hidden = groups[0][1].shape[1]
    order = [gate * hidden + unit for gate in kind.gates for unit in range(hidden)]

    def stacked(parts: Sequence[Any]) -> Any:
        places, first = op.Constant(value_ints=order), op.Constant(value_ints=[0])
        return op.Concat(
            *(op.Unsqueeze(op.Gather(p, places, axis=0), first) for p in parts), axis=0
        )

    weights, again = (stacked([group[k] for group in groups]) for k in (0, 1))
    added = None
    if biases:
        halves = [stacked([group[k] for group in groups]) for k in (2, 3)]
        added = op.Concat(*halves, axis=1)
    attributes = dict(kind.attributes)
    if "activations" in attributes:
        attributes["activations"] = attributes["activations"] * len(groups)
    direction = "bidirectional" if len(groups) == 2 else "forward"
    call = getattr(op, kind.name)
    return call(x, weights, again, added, None, *starts, hidden_size=hidden, direction=direction,
                **attributes)  # fmt: skip
