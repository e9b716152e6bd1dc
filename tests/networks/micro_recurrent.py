"""Micro-networks of recurrent layers, hand-counted; `micro.MICROS` holds them too."""

from __future__ import annotations

import torch
from torch import nn

from micro import Made, Net, dead, image, micro


def _recurrent(layer: nn.RNNBase, head: nn.Linear) -> Made:
    """Every output of a recurrent layer (batch first) into a linear one."""
    net = Net(lambda m, x: m["head"](m["layer"](x)[0]), layer=layer, head=head)
    return net, image(3, 7, layer.input_size)


HALF = [0, 2, 3, 5, 8, 9, 12, 15]


def rest(layer: nn.RNNBase, gates: int, units: list[int], only: int | None = None) -> nn.RNNBase:
    """Zero the rows of units, and their biases, in every layer and direction: of all gates, or of
    `only` one."""
    with torch.no_grad():
        for name, value in layer.named_parameters():
            if "weight_hr" not in name:
                value.view(gates, layer.hidden_size, -1)[only if only is not None else slice(None)][..., units, :] = 0
    return layer


@micro(4 * 8 * 16 + 4 * 8 * 8 + 2 * 4 * 8 + 8 * 4 + 4)
def lstm() -> Made:
    return _recurrent(rest(nn.LSTM(16, 16, batch_first=True), 4, HALF), nn.Linear(16, 4))


@micro(4 * 8 * 16 + 4 * 8 * 8 + 2 * 4 * 8 + 8 * 4 + 4)
def lstm_that_lost_one_gate() -> Made:
    return _recurrent(rest(nn.LSTM(16, 16, batch_first=True), 4, HALF, 2), nn.Linear(16, 4))


@micro(4 * (3 * 8 * 16 + 3 * 8 * 8 + 2 * 3 * 8) + 16 * 4 + 4)
def gru_of_two_layers_and_directions() -> Made:
    layer = nn.GRU(16, 16, 2, bidirectional=True, batch_first=True)
    return _recurrent(rest(layer, 3, HALF), nn.Linear(32, 4))


@micro(8 * 16 + 8 * 8 + 2 * 8 + 8 * 4 + 4)
def rnn() -> Made:
    return _recurrent(rest(nn.RNN(16, 16, batch_first=True), 1, HALF), nn.Linear(16, 4))


@micro(8 * 16 + 8 * 8 + 2 * 8 + 8 * 4 + 4)
def rnn_below_zero() -> Made:
    layer = rest(nn.RNN(16, 16, nonlinearity="relu", batch_first=True), 1, HALF)
    with torch.no_grad():
        layer.bias_ih_l0[HALF], layer.bias_hh_l0[HALF] = 0.25, -0.5
    return _recurrent(layer, nn.Linear(16, 4))


@micro(4 * 8 * 16 + 4 * 8 * 4 + 2 * 4 * 8 + 4 * 8 + 4 * 4 + 4)
def projected_lstm() -> Made:
    layer = rest(nn.LSTM(16, 16, proj_size=8, batch_first=True), 4, HALF)
    with torch.no_grad():
        layer.weight_hr_l0[[1, 2, 5, 6]] = 0
    return _recurrent(layer, nn.Linear(8, 4))


# torch tells a projected call by its cells being more than its outputs.
@micro(4 * 9 * 16 + 4 * 9 * 8 + 2 * 4 * 9 + 8 * 9 + 8 * 4 + 4)
def projected_lstm_with_as_many_outputs_as_cells() -> Made:
    layer = rest(nn.LSTM(16, 16, proj_size=8, batch_first=True), 4, HALF)
    return _recurrent(layer, nn.Linear(8, 4))


# Units whose state is an input are alive; those that nobody reads are not.
@micro(4 * 12 * 16 + 4 * 12 * 12 + 2 * 4 * 12 + 12 * 4 + 4)
def lstm_from_input_states() -> Made:
    layer, head = rest(nn.LSTM(16, 16, batch_first=True), 4, HALF), nn.Linear(16, 4)
    with torch.no_grad():
        head.weight[:, HALF[:4]] = 0
        layer.weight_hh_l0[:, HALF[:4]] = 0
    net = Net(lambda m, x, h, c: m["head"](m["layer"](x, (h.unsqueeze(0), c.unsqueeze(0)))[0]), layer=layer, head=head)
    return net, (torch.randn(3, 7, 16), torch.randn(3, 16), torch.randn(3, 16))


@micro(4 * 8 * 16 + 4 * 8 * 8 + 2 * 4 * 8 + 8 * 4 + 4)
def lstm_units_that_nobody_reads() -> Made:
    layer, head = nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 4)
    with torch.no_grad():
        head.weight[:, HALF] = 0
        layer.weight_hh_l0[:, HALF] = 0
    return _recurrent(layer, head)


@micro(6 * 8 + 8 + 3 * 5 * 8 + 3 * 5 * 5 + 2 * 3 * 5 + 5 * 4 + 4)
def constants_into_a_gru() -> Made:
    net = Net(
        lambda m, x: m["head"](m["layer"](m["first"](x))[0]),
        first=dead(nn.Linear(6, 16), HALF, bias=False),
        layer=nn.GRU(16, 5, batch_first=True),
        head=nn.Linear(5, 4),
    )
    return net, image(3, 7, 6)
