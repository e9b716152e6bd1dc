"""Recurrent layers of a result are modules of torch.nn that are called."""

from __future__ import annotations

import copy
import functools
import io
import json
import zipfile
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils import _pytree as pytree

import demask
from demask.errors import BadInput
from demask.files import archive
from demask.graph.result.module_calls import graph_of_calls
from demask.graph.result.uncalled_modules import Uncalled
from graphs import to_graph
from micro_recurrent import rest

aten = torch.ops.aten
X = torch.randn(7, 4, 5)
DEAD = [0, 2, 3, 7]
GATES = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}


class Net(nn.Module):
    """A recurrent layer between two linear ones; out come all steps and the last states."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(5, 6), layer
        self.head = nn.Linear((layer.proj_size or 10) * (1 + layer.bidirectional), 3)

    def forward(self, x: Tensor, state: Any = None) -> Any:
        out, last = self.layer(self.first(x), state)
        return self.head(out), last


LAYERS = [
    nn.LSTM(6, 10),
    nn.LSTM(6, 10, 2, batch_first=True, dropout=0.25, bidirectional=True),
    nn.LSTM(6, 10, 2, proj_size=4),
    nn.GRU(6, 10, 3, bias=False),
    nn.GRU(6, 10, bidirectional=True),
    nn.RNN(6, 10, 2, "relu", batch_first=True),
]


def pruned(layer: nn.RNNBase) -> nn.Module:
    """A network whose recurrent layer has four dead units in every part, and reads four features
    of six."""
    torch.manual_seed(0)
    net = Net(copy.deepcopy(layer))
    rest(net.layer, GATES[type(layer)], DEAD)
    net.first.weight.data[:2], net.first.bias.data[:2] = 0, 0
    return net.eval()


@functools.cache
def pair_of(k: int) -> tuple[nn.Module, Any]:
    net = pruned(LAYERS[k])
    return net, to_graph(net, (X,))


@pytest.fixture(params=range(len(LAYERS)), ids=map(str, LAYERS))
def pair(request) -> tuple[nn.Module, Any]:
    """A network with one of the layers, and it demasked: copies of those that all tests share."""
    return copy.deepcopy(pair_of(request.param))


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b)


def flat(made: Any) -> tuple[Tensor, ...]:
    return tuple(pytree.tree_leaves(made))


def test_a_pruned_layer_is_a_smaller_module(pair) -> None:
    net, slim = pair
    made, old = slim.layer, net.layer
    assert {str(n.target) for n in slim.graph.find_nodes(op="call_module")} == {"first", "layer", "head"}
    assert type(made) is type(old) and made.input_size == 4
    assert made.hidden_size == 6
    assert (made.num_layers, made.bidirectional) == (old.num_layers, old.bidirectional)
    assert (made.batch_first, made.dropout, made.bias) == (old.batch_first, old.dropout, old.bias)
    assert [*made.state_dict()] == [*old.state_dict()]
    same(slim(X)[0], net(X)[0])
    for network in (slim, copy.deepcopy(slim)):
        layer = network.layer
        assert all(
            getattr(layer, name) is held
            for name, held in zip(layer._flat_weights_names, layer._flat_weights, strict=True)
        )


@pytest.mark.sampled(8)
def test_it_goes_through_files_pickles_and_onnx(pair, tmp_path) -> None:
    net, slim = pair
    demask.save(slim, tmp_path / "m.demask")
    buffer = io.BytesIO()
    torch.save(slim, buffer)
    buffer.seek(0)
    back = demask.load(tmp_path / "m.demask")
    for network in (back, torch.load(buffer, weights_only=False)):
        assert repr(network.layer) == repr(slim.layer)
        assert all(not weight.is_meta for weight in network.layer._flat_weights)
        same(network(X), slim(X))
    if not net.layer.proj_size:  # which ONNX has not
        demask.to_onnx(slim, tmp_path / "m.onnx", (X,))
        same(demask.from_onnx(tmp_path / "m.onnx")(X), flat(slim(X)))
    again = to_graph(slim, (X,))
    assert repr(again.layer) == repr(slim.layer)
    same(again(X), slim(X))


def test_spelled_calls_compute_what_modules_do(pair) -> None:
    _, slim = pair
    plain = torch.fx.GraphModule(copy.deepcopy(slim), graph_of_calls(slim))
    assert not plain.graph.find_nodes(op="call_module")
    same(plain(X), flat(slim(X)))
    assert all("val" in node.meta for node in plain.graph.nodes if node.target is aten.new_zeros.default)


@pytest.mark.sampled(4)
def test_hooks_and_pruning_take_effect(pair) -> None:
    net, _ = pair
    seen: list[tuple[int, int]] = []
    net.layer.register_forward_hook(lambda m, args, out: seen.append((len(args), len(out))))
    slim = to_graph(net, (X,))
    seen.clear()
    before = slim(X)[0]
    assert seen == [(1, 2)]
    prune.l1_unstructured(slim.layer, "weight_hh_l0", 0.5)
    after = slim(X)[0]
    assert not torch.equal(after, before)
    same(to_graph(slim, (X,))(X)[0], after)


@pytest.mark.sampled(8)
def test_three_rounds_train(pair) -> None:
    model, sizes = pair[0], [10]
    for _ in range(3):
        model = to_graph(model, (X,)).train()
        step = torch.optim.SGD(model.parameters(), 0.01)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        model(X)[0].square().sum().backward()
        step.step()
        assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
        sizes.append(model.layer.proj_size or model.layer.hidden_size)
        rest(model.layer, GATES[type(model.layer)], [0])
        if model.layer.proj_size:
            for name, value in model.layer.named_parameters():
                value.data[:1] *= "weight_hr" not in name
            model.head.weight.data[:, 0] = 0
        model.eval()
    last = to_graph(model, (X,))
    same(last(X)[0], model(X)[0])
    assert {str(n.target) for n in last.graph.find_nodes(op="call_module")} >= {"layer"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_state_is_handed_on(kind, count) -> None:
    net = Net(kind(6, 10, count, bidirectional=True)).eval()
    state: Any = torch.randn(2 * count, 4, 10)
    state = (state, torch.randn(2 * count, 4, 10)) if kind is nn.LSTM else state
    net.first.weight.data[:2], net.first.bias.data[:2] = 0, 0  # which splits the call
    slim = to_graph(net, (X, state))
    assert slim.layer.input_size == 4 and type(slim.layer) is kind
    same(slim(X, state), net(X, state))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cell", [nn.LSTMCell(5, 6), nn.GRUCell(5, 6), nn.RNNCell(5, 6)], ids=str)
def test_cells_step(cell) -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = cell

        def forward(self, x: Tensor) -> Tensor:
            state = None
            for step in x:
                state = self.cell(step, state)
            return state

    net = Steps().eval()
    slim = to_graph(net, (X,))
    assert [str(n.target) for n in slim.graph.find_nodes(op="call_module")] == ["cell"] * 7
    same(slim(X), net(X))


class Steps(Net):
    """Of a network, all steps alone."""

    def forward(self, x: Tensor, state: Any = None) -> Any:
        return super().forward(x, state)[:1]


@pytest.mark.parametrize("kind", [Net, Steps])
def test_parts_of_different_widths_are_calls(kind) -> None:
    net = kind(nn.LSTM(6, 10, bidirectional=True)).eval()
    rest(net.layer, 4, DEAD)
    for leaf in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        fresh = getattr(nn.LSTM(6, 10), f"{leaf}_l0")
        getattr(net.layer, f"{leaf}_l0_reverse").data.copy_(fresh.data)
    slim = to_graph(net, (X,))
    assert len(slim.graph.find_nodes(op="call_function", target=aten.lstm.input)) == 2
    assert type(slim.layer) is Uncalled
    names = [name for name, _ in slim.named_parameters()]
    with pytest.raises(BadInput, match="a pruning of weight_hh_l0 would never run"):
        prune.l1_unstructured(slim.layer, "weight_hh_l0", 0.5)
    assert [name for name, _ in slim.named_parameters()] == names
    same(slim(X)[0], net(X)[0])


def test_the_last_states_of_single_layers() -> None:
    class Odd(Net):
        def forward(self, x: Tensor, state: Any = None) -> Any:
            out, (h, c) = self.layer(self.first(x), state)
            return self.head(out), h[-1], c[0]

    net = Odd(nn.LSTM(6, 10, 2)).eval()
    rest(net.layer, 4, DEAD)
    slim = to_graph(net, (X,))
    assert type(slim.layer) is nn.LSTM and slim.layer.num_layers == 2
    same(slim(X), net(X))


def test_files_bound_the_layers_of_a_module(tmp_path) -> None:
    demask.save(to_graph(pruned(LAYERS[0]), (X,)), tmp_path / "m.demask")
    with zipfile.ZipFile(tmp_path / "m.demask") as file:
        spec = json.loads(file.read("graph.json"))["modules"]["layer"]
    assert archive._make_module("layer", spec).hidden_size == 6
    for change in ({"num_layers": 10**6}, {"num_layers": -1}, {"hidden_size": "x"}, {"mode": 1}):
        with pytest.raises(BadInput):
            archive._make_module("layer", spec | change)


@pytest.mark.sampled(12)
def test_it_is_compiled_like_the_modules_of_torch(pair) -> None:
    """Which break the graph, unless torch is asked to trace them."""
    _, slim = pair
    torch._dynamo.reset()
    same(torch.compile(slim, backend="eager")(X), slim(X))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        same(torch.compile(slim, backend="eager", fullgraph=True)(X), slim(X))
