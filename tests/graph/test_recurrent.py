"""Recurrent networks with masked units, channels, layers and directions: exact at any batch and
length, no larger than a hand count, nothing left that no output depends on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import demask
from demask.graph.result.module_calls import graph_of_calls
from demask.ops import TABLE, Declined, Relation, Table, bind
from demask.ops.laws import call_node, missed
from graphs import to_graph
from micro_recurrent import rest
from test_micro import difference, weights

aten = torch.ops.aten
FEATURES, HIDDEN, OUT, WORDS = 6, 10, 3, 40
UNITS, CHANNELS = [0, 2, 3, 7], [1, 2, 4]  # dead ones


@dataclass(frozen=True)
class Config:
    """A recurrent layer; cell: its class; options: what it is called with."""

    name: str
    cell: type[nn.RNNBase]
    options: dict = field(default_factory=dict)
    states: bool = False  # initial states are inputs
    words: bool = False  # the input is a text, through an embedding

    def layer(self) -> nn.RNNBase:
        return self.cell(FEATURES, HIDDEN, **self.options)

    @property
    def gates(self) -> int:
        return {nn.LSTM: 4, nn.GRU: 3}.get(self.cell, 1)


CONFIGS = [
    Config("lstm", nn.LSTM),
    Config("gru", nn.GRU),
    Config("rnn_tanh", nn.RNN),
    Config("rnn_relu", nn.RNN, {"nonlinearity": "relu"}),
    Config("without_biases", nn.LSTM, {"bias": False}),
    Config("bidirectional", nn.LSTM, {"bidirectional": True}),
    Config("stacked", nn.GRU, {"num_layers": 3, "dropout": 0.25}),
    Config("stacked_bidirectional", nn.RNN, {"num_layers": 2, "bidirectional": True}),
    Config("projected", nn.LSTM, {"proj_size": 4, "num_layers": 2}),
    Config("batch_first", nn.GRU, {"batch_first": True, "bidirectional": True}),
    Config("with_states", nn.LSTM, {"num_layers": 2, "bidirectional": True}, states=True),
    Config("with_state", nn.GRU, {}, states=True),
    Config("tagger", nn.LSTM, {"batch_first": True, "bidirectional": True}, words=True),
]


class Net(nn.Module):
    """An embedding or a linear layer, a recurrent layer, a linear layer on every step; and the
    final states."""

    def __init__(self, config: Config):
        super().__init__()
        self.first = nn.Embedding(WORDS, FEATURES) if config.words else nn.Linear(5, FEATURES)
        self.layer = config.layer()
        width = (config.options.get("proj_size") or HIDDEN) * (2 if self.layer.bidirectional else 1)
        self.head = nn.Linear(width, OUT)

    def forward(self, x: Tensor, h: Tensor | None = None, c: Tensor | None = None) -> Tensor:
        given: Any = h if c is None else (h, c)
        made, _ = self.layer(self.first(x), given)
        return self.head(made)


def parts(layer: nn.RNNBase) -> list[str]:
    """The name of every layer and direction."""
    ways = ["", "_reverse"] if layer.bidirectional else [""]
    return [f"_l{k}{way}" for k in range(layer.num_layers) for way in ways]


def mask_units(net: Net, config: Config) -> None:
    rest(net.layer, config.gates, UNITS)
    for name in parts(net.layer) if net.layer.proj_size else []:
        net.layer.get_parameter(f"weight_hr{name}").data[:2] = 0


def mask_channels(net: Net, config: Config) -> None:
    """Half of them read by nobody, the others 0."""
    for name, value in net.layer.named_parameters():
        if "weight_ih_l0" in name:
            value.data[:, CHANNELS[:1]] = 0
    gone = net.first.weight.data.T if config.words else net.first.weight.data
    gone[CHANNELS[1:]] = 0
    if not config.words:
        net.first.bias.data[CHANNELS[1:]] = 0


def mask_layer(net: Net, config: Config) -> None:
    for name in parts(net.layer)[: 2 if net.layer.bidirectional else 1]:
        _clear(net.layer, name)


def mask_direction(net: Net, config: Config) -> None:
    for name in parts(net.layer):
        if name.endswith("_reverse"):
            _clear(net.layer, name)


def _clear(layer: nn.RNNBase, part: str) -> None:
    for name, value in layer.named_parameters():
        if name.endswith(part):
            value.data.zero_()


MASKS: dict[str, Callable[[Net, Config], None]] = {
    "nothing": lambda net, config: None,
    "units": mask_units,
    "channels": mask_channels,
    "layer": mask_layer,
    "direction": mask_direction,
}


def hand_count(config: Config, mask: str) -> int:
    """The weights of the smallest network, layer by layer, from the sizes that are left."""
    layer = config.layer()
    two, outs = 2 if layer.bidirectional else 1, layer.proj_size or HIDDEN
    cells = HIDDEN - len(UNITS) * (mask == "units" and not config.states)
    units = (outs - 2 * (mask == "units")) if layer.proj_size else cells
    features = FEATURES - len(CHANNELS) * (mask == "channels")
    dead = [
        (k == 0 and mask == "layer") or (w and mask == "direction") for k in range(layer.num_layers) for w in range(two)
    ]
    if config.states:
        dead = [False] * len(dead)
    total = (WORDS if config.words else 5 + 1) * features * (not all(dead[:two]))
    for k in range(layer.num_layers):
        alive = dead[k * two : (k + 1) * two].count(False)
        total += alive * part_count(config, features, cells, units, layer)
        features = alive * units
    return total + features * OUT + OUT


def part_count(config: Config, features: int, cells: int, units: int, layer: nn.RNNBase) -> int:
    """w_ih, w_hh, biases, w_hr of one layer and direction."""
    rows = config.gates * cells
    return rows * (features + units) + 2 * rows * layer.bias + (units * cells if layer.proj_size else 0)


def example(config: Config, length: int, batch: int) -> tuple[Tensor, ...]:
    layer = config.layer()
    sizes = (batch, length) if layer.batch_first else (length, batch)
    if config.words:
        return (torch.randint(WORDS, sizes),)
    count = 0 if not config.states else 2 if config.cell is nn.LSTM else 1
    states = [torch.randn(len(parts(layer)), batch, HIDDEN).double() for _ in range(count)]
    return (torch.randn(*sizes, 5).double(), *states)


def shapes(config: Config) -> tuple:
    both = {0: Dim.AUTO, 1: Dim.AUTO}
    states = 0 if not config.states else 2 if config.cell is nn.LSTM else 1
    return (both, *({1: Dim.AUTO} for _ in range(states)))


def made(config: Config, mask: str) -> Net:
    torch.manual_seed(3)
    net = Net(config).double().eval()
    with torch.no_grad():
        MASKS[mask](net, config)
    return net


CASES = [
    pytest.param(config, mask, id=f"{config.name}-{mask}")
    for config in CONFIGS
    for mask in MASKS
    if mask != "direction" or config.options.get("bidirectional")
]


# Every third by day: each mask with several layers.
@pytest.mark.sampled(36)
@pytest.mark.parametrize(("config", "mask"), CASES)
def test_exact_small_and_minimal(config: Config, mask: str, result: Callable[..., None]) -> None:
    result(suite="recurrent", network=config.name, mask=mask)
    net = made(config, mask)
    slim = to_graph(net, example(config, 5, 2), dynamic_shapes=shapes(config))
    before, after = slim.demasked.before.parameters, slim.demasked.after.parameters
    result(before=before, after=after)
    if config.states and mask in ("units", "layer", "direction"):
        result(note="its states are inputs, and units without weights still hold them")
    errors = []
    for length, batch in [(5, 2), (5, 7), (9, 2), (9, 7), (1, 1)]:
        inputs = example(config, length, batch)
        errors.append(difference(net(*inputs), slim(*inputs)))
    result(error=max(errors), allowed=1e-10)
    assert max(errors) <= 1e-10
    assert weights(slim) <= hand_count(config, mask), str(slim.graph)
    assert slim.demasked.after.macs <= slim.demasked.before.macs
    # Units of zero weights that only remember a given state have gates that do not matter.
    if not config.states or mask in ("nothing", "channels"):
        assert missed(slim, example(config, 8, 48)) == []


@pytest.mark.sampled(12)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(("config", "mask"), [c for c in CASES if c.values[1] == "units"])
def test_an_ordinary_module(config: Config, mask: str) -> None:
    net = made(config, mask)
    inputs = example(config, 5, 2)
    slim = to_graph(net, inputs, dynamic_shapes=shapes(config))
    again = to_graph(slim, inputs, dynamic_shapes=shapes(config))
    assert {k: v.shape for k, v in slim.state_dict().items()} == {k: v.shape for k, v in again.state_dict().items()}
    assert len(slim.graph.nodes) == len(again.graph.nodes)
    assert difference(slim(*inputs), copy.deepcopy(slim)(*inputs)) == 0
    slim(*inputs).sum().backward()
    assert all(p.grad is not None for p in slim.parameters())
    for dtype in (torch.float32, torch.float64):
        moved = [v.to(dtype) if v.is_floating_point() else v for v in inputs]
        assert copy.deepcopy(slim).to(dtype)(*moved).dtype == dtype


def test_files_hold_any_length(tmp_path: Path) -> None:
    config = next(c for c in CONFIGS if c.name == "bidirectional")
    slim = to_graph(made(config, "units"), example(config, 5, 2), dynamic_shapes=shapes(config))
    demask.save(slim, tmp_path / "slim")
    demask.to_pt2(slim, tmp_path / "slim.pt2")
    inputs = example(config, 9, 7)
    expected = slim(*inputs)
    assert difference(expected, demask.load(tmp_path / "slim")(*inputs)) == 0
    plain = torch.export.load(tmp_path / "slim.pt2").module()
    assert difference(expected, plain(*inputs)) == 0


def test_names_and_gradients_are_those_of_the_layer() -> None:
    config = CONFIGS[0]
    net, inputs = made(config, "units"), example(config, 5, 2)
    slim = to_graph(net, inputs)
    assert set(slim.state_dict()) == set(net.state_dict())
    for module in (net, slim):
        module(*inputs).square().sum().backward()
    for name, cut in slim.demasked.cuts.items():
        wanted = net.get_parameter(cut.source).grad
        for axis, kept in enumerate(cut.kept):
            if kept is not None:
                wanted = wanted.index_select(axis, torch.tensor(kept))
        torch.testing.assert_close(slim.get_parameter(name).grad, wanted)


def test_what_cannot_become_smaller_stays_one_call() -> None:
    config = next(c for c in CONFIGS if c.name == "stacked_bidirectional")
    slim = to_graph(made(config, "nothing"), example(config, 5, 2))
    assert [n.target for n in graph_of_calls(slim).nodes].count(aten.rnn_tanh.input) == 1
    assert slim.demasked.before == slim.demasked.after
    steps, two = 5 * 2, 2
    count = two * HIDDEN * (FEATURES + HIDDEN + 2 * HIDDEN + HIDDEN)
    assert slim.demasked.before.macs == steps * (5 * FEATURES + count + 2 * HIDDEN * OUT)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("given", [False, True])
def test_final_states_of_every_layer_and_direction(cell: type[nn.RNNBase], given: bool) -> None:
    """Outputs and states whole, with zeros where units are gone."""
    torch.manual_seed(5)
    net = cell(FEATURES, HIDDEN, 2, bidirectional=True).double()
    rest(net, 4 if cell is nn.LSTM else 3, UNITS)
    x, states = (torch.randn(5, 3, FEATURES).double(), [torch.randn(4, 3, HIDDEN).double() for _ in "hc"])
    for state in states:
        state[:, :, UNITS] = 0
    args = (x, tuple(states) if cell is nn.LSTM else states[0]) if given else (x,)
    slim = to_graph(net, args)
    assert difference(net(*args), slim(*args)) <= 1e-10
    full, small = (m.get_parameter("weight_hh_l1_reverse").shape[1] for m in (net, slim))
    assert (full, small) == (HIDDEN, HIDDEN if given else HIDDEN - len(UNITS))


def test_final_states_are_as_good_a_reader_as_any() -> None:
    """Unit 0 is read as a final state alone, unit 1 by unit 0, unit 2 by nobody."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            _, (_, c) = self.layer(x)
            return c[0, :, 0]

    torch.manual_seed(0)
    net = Last().double()
    with torch.no_grad():
        net.layer.weight_hh_l0[:, 2] = 0
    x = torch.randn(5, 3, 4).double()
    slim = to_graph(net, (x,))
    assert difference(net(x), slim(x)) <= 1e-10
    assert slim.get_parameter("layer.weight_hh_l0").shape == (8, 2)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_alive(value: float) -> None:
    config = CONFIGS[0]
    net = made(config, "units")
    with torch.no_grad():
        net.layer.weight_ih_l0[2 * HIDDEN + UNITS[0], 0] = value
    slim = to_graph(net, example(config, 5, 2))
    assert slim.get_parameter("layer.weight_hh_l0").shape == (4 * 7, 7)


def test_biases_may_cancel_where_they_are_added() -> None:
    for config, kept in ((CONFIGS[0], 6), (CONFIGS[1], 10), (CONFIGS[2], 6)):
        net = made(config, "units")
        with torch.no_grad():
            rows = [2 * HIDDEN + u for u in UNITS] if config.gates > 1 else UNITS
            net.layer.bias_ih_l0[rows], net.layer.bias_hh_l0[rows] = 0.5, -0.5
        x = example(config, 5, 2)
        slim = to_graph(net, x)
        assert difference(net(*x), slim(*x)) <= 1e-10
        assert slim.get_parameter("layer.weight_hh_l0").shape[1] == kept


@pytest.mark.parametrize(("bias", "kept"), [(-0.5, 6), (0.0, 6), (0.25, 10)])
def test_a_rectified_unit_that_stays_below_zero_is_gone(bias: float, kept: int) -> None:
    config = CONFIGS[3]
    net, x = made(config, "units"), example(config, 5, 2)
    with torch.no_grad():
        net.layer.bias_ih_l0[UNITS] = bias
    slim = to_graph(net, x)
    assert difference(net(*x), slim(*x)) <= 1e-10
    assert slim.get_parameter("layer.weight_hh_l0").shape == (kept, kept)


def test_dropout_between_layers_is_left_alone() -> None:
    x, h = torch.randn(5, 2, 4), torch.zeros(2, 2, 3)
    params = [p.detach() for p in nn.GRU(4, 3, 2).parameters()]
    node = call_node(aten.gru.input, x, h, params, True, 2, 0.5, True, False, False)
    found = bind(node, TABLE)
    assert isinstance(found, Declined)
    assert "random numbers" in found.text


def test_every_operand_of_a_projected_call_is_told_apart() -> None:
    params = [p.detach() for p in nn.LSTM(4, 6, proj_size=3).parameters()]
    states = [torch.zeros(1, 2, 3), torch.zeros(1, 2, 6)]
    call = call_node(aten.lstm.input, torch.randn(5, 2, 4), states, params, True, 1, 0.0, False, False, False)
    relation = bind(call, TABLE)
    assert isinstance(relation, Relation)
    assert relation.back == {"p^"}
    assert relation.looped == {"k", "c", "p"}
    assert relation.contracted == {"i"}
    assert relation.factors == (0, 3)


@pytest.mark.parametrize("config", CONFIGS[:3], ids=lambda config: config.name)
def test_an_entry_that_forgets_the_biases_is_found_out(config: Config) -> None:
    """Planted: units with zero weights, whose biases move them all the same."""
    name = f"aten.{config.name}.input"
    wrong = replace(TABLE[name], stays=lambda b, c: torch.ones_like(b, dtype=torch.bool))
    table = Table([(n, wrong if n == name else entry) for n, entry in TABLE.items()])
    net, inputs = made(config, "units"), example(config, 5, 2)
    with torch.no_grad():
        net.layer.bias_ih_l0.normal_()
    assert difference(net(*inputs), to_graph(net, inputs)(*inputs)) <= 1e-10
    slim = to_graph(net, inputs, table=table, check=False)
    assert difference(net(*inputs), slim(*inputs)) > 1e-3


class Cell(nn.Module):
    """A layer whose states are inputs, with their batch on axis 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 6, batch_first=True)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return self.layer(x, (h, c))


def test_verify_gives_states_the_batch_of_the_other_inputs() -> None:
    net, inputs = Cell().eval(), (torch.randn(2, 5, 4), *torch.randn(2, 1, 2, 6).unbind())
    slim = to_graph(net, inputs, dynamic_shapes="all")
    found = demask.verify(net, slim, inputs)
    assert found.ok
    assert found.runs == 12  # four draws, and batches 1 and 3 of one, in two dtypes
