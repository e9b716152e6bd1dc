"""Recurrent layers as a sequence of passes, for machines without recurrence.

    h_t = tanh(W x_t + b + V h_{t-1} + c)

becomes one product for the inputs of all times, and for every time a pass: a product with the state that the pass
before it fed back, and the activations. Source of the equations: torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from demask.graph.value import Value
from demask.ops.entries.recurrent import GATES, LSTM, count_parameters
from demask.rewrites.rule import Phase, case, rule

aten = torch.ops.aten
MOST = 4096  # times; a list with more passes is rather a program with a loop


class _FromState(nn.Module):
    """A recurrent layer whose initial states are an input."""

    def __init__(self, layer: nn.RNNBase):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, state: Tensor) -> Any:
        return self.layer(x, (state, 2 * state) if isinstance(self.layer, nn.LSTM) else state)


@rule(
    aten.lstm.input,
    aten.gru.input,
    aten.rnn_tanh.input,
    aten.rnn_relu.input,
    cases=(
        case(nn.Sequential(nn.LSTM(4, 3, batch_first=True)), (2, 5, 4)),
        case(nn.Sequential(nn.LSTM(4, 3, bias=False)), (5, 2, 4)),
        case(nn.Sequential(nn.LSTM(4, 5, proj_size=2)), (5, 2, 4)),
        case(nn.Sequential(nn.GRU(4, 3)), (5, 2, 4)),
        case(nn.Sequential(nn.GRU(4, 3, bias=False, batch_first=True)), (2, 5, 4)),
        case(nn.Sequential(nn.RNN(4, 3)), (5, 2, 4)),
        case(nn.Sequential(nn.RNN(4, 3, nonlinearity="relu")), (5, 2, 4)),
        case(_FromState(nn.LSTM(4, 3)), (5, 2, 4), (1, 2, 3)),
        case(_FromState(nn.GRU(4, 3)), (1, 2, 4), (1, 2, 3)),
    ),
    refused=(
        case(nn.Sequential(nn.GRU(4, 3, num_layers=2)), (5, 2, 4)),
        case(nn.Sequential(nn.RNN(4, 3, bidirectional=True)), (5, 2, 4)),
        case(nn.Sequential(nn.GRU(4, 3)), (5, 2, 4), dynamic={0: (0,)}),
        case(nn.Sequential(nn.RNN(1, 1)), (MOST + 1, 1, 1)),
    ),
    exact=False,
)
def recurrent_layer_as_passes(
    out: Value, x: Value, initial: Any, params: list[Value], has_biases: bool, layers: int, *_: Any
) -> tuple[Value | None, ...] | None:
    """A recurrent layer is a pass for every time, which reads the states of the pass before it."""
    time = 1 if out.arg("batch_first") else 0
    steps, name = x.shape[time], str(out.target)
    if layers != 1 or out.arg("bidirectional") or type(steps) is not int or steps > MOST:
        return None
    states = [state.select(0, 0) for state in (initial if isinstance(initial, list | tuple) else [initial])]
    weight, recurrent = params[:2]
    biases = params[2:4] if has_biases else [None, None]
    projection = params[-1] if count_parameters(out.node) > 2 + 2 * has_biases else None
    inputs, results = x.linear(weight, biases[0]), list[Value]()
    for t in range(steps):
        fed_back = states[0].linear(recurrent, biases[1])
        states = _pass(name, inputs.select(time, t), fed_back, states)
        if projection is not None:
            states[0] = states[0].linear(projection)
        results.append(states[0].unsqueeze(time))
    joined = results[0].cat(results[1:], time) if steps > 1 else results[0]
    return joined, *(state.unsqueeze(0) for state in states)


def _pass(name: str, entering: Value, fed_back: Value, states: list[Value]) -> list[Value]:
    """The states after a pass. entering, fed_back: [batch, gates * hidden], of the input and of the state before."""
    if name not in (LSTM, "aten.gru.input"):
        total = entering + fed_back
        return [total.tanh() if "tanh" in name else total.call(aten.relu.default, total)]
    count = GATES[name]
    width = entering.shape[1] // count

    def gates(value: Value) -> list[Value]:
        return [value.slice(1, k * width, (k + 1) * width) for k in range(count)]

    if name == LSTM:
        i, f, g, o = gates(entering + fed_back)
        cell = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
        return [o.sigmoid() * cell.tanh(), cell]
    (reset, update, new), (reset_by, update_by, new_by) = gates(entering), gates(fed_back)
    candidate = (new + (reset + reset_by).sigmoid() * new_by).tanh()
    return [candidate + (update + update_by).sigmoid() * (states[0] - candidate)]


RECURRENT_PASSES = Phase("passes of recurrent layers", (recurrent_layer_as_passes,))
