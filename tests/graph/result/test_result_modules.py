"""Layers of a result are modules that are called: hooks, pruning, training take effect."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.utils._pytree import tree_leaves

import demask
from demask.errors import BadInput
from demask.files import archive
from demask.graph.module_copy import structural_copy
from demask.graph.result.demasked_module import Demasked, build
from demask.graph.result.module_calls import KINDS, ROWS, graph_of_calls, kind_of
from demask.graph.result.resize import FROM_CALLS
from demask.graph.result.uncalled_modules import Uncalled
from demask.ops import TABLE
from demask.shrink.pipeline import capture_program, shrink_program
from graphs import to_graph

IMAGE, ROW = (2, 4, 9, 9), (2, 4)
MADE: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Linear(4, 5), ROW),
    (nn.Linear(4, 5, bias=False), ROW),
    (nn.Conv1d(4, 6, 3, 2, 1, groups=2), (2, 4, 9)),
    (nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 0), (1, 2), groups=2, bias=False), IMAGE),
    (nn.Conv3d(4, 6, 3), (2, 4, 5, 5, 5)),
    (nn.ConvTranspose1d(4, 6, 3, 2, 1, 1, 2), (2, 4, 9)),
    (nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, 2, dilation=2), IMAGE),
    (nn.ConvTranspose3d(4, 6, 3), (2, 4, 5, 5, 5)),
    (nn.LayerNorm((9, 9), eps=1e-3), IMAGE),
    (nn.LayerNorm(9, elementwise_affine=False), IMAGE),
    (nn.LayerNorm(9, bias=False), IMAGE),
    (nn.RMSNorm(9), IMAGE),
    (nn.RMSNorm(9, eps=1e-3), IMAGE),
    (nn.GroupNorm(2, 4), IMAGE),
    (nn.GroupNorm(2, 4, affine=False), IMAGE),
    (nn.BatchNorm1d(4), ROW),
    (nn.BatchNorm2d(4, eps=1e-3, momentum=0.3), IMAGE),
    (nn.BatchNorm2d(4, momentum=None), IMAGE),
    (nn.BatchNorm2d(4, affine=False), IMAGE),
    (nn.BatchNorm2d(4, track_running_stats=False), IMAGE),
    (nn.BatchNorm3d(4), (2, 4, 3, 3, 3)),
    (nn.Embedding(7, 5), ()),
    (nn.Embedding(7, 5, padding_idx=3), ()),
    (nn.Dropout(0.3), ROW),
    (nn.Dropout1d(), (2, 4, 9)),
    (nn.Dropout2d(), IMAGE),
    (nn.Dropout3d(), (2, 4, 3, 3, 3)),
    (nn.ReLU(), ROW),
    (nn.ReLU(inplace=True), ROW),
    (nn.ReLU6(), ROW),
    (nn.Hardtanh(-2.0, 3.0), ROW),
    (nn.LeakyReLU(0.2), ROW),
    (nn.ELU(0.5), ROW),
    (nn.CELU(0.5), ROW),
    (nn.SELU(), ROW),
    (nn.GELU(), ROW),
    (nn.GELU("tanh"), ROW),
    (nn.SiLU(inplace=True), ROW),
    (nn.Mish(), ROW),
    (nn.Sigmoid(), ROW),
    (nn.LogSigmoid(), ROW),
    (nn.Hardsigmoid(), ROW),
    (nn.Hardswish(), ROW),
    (nn.Tanh(), ROW),
    (nn.Softplus(2.0, 10.0), ROW),
    (nn.Softshrink(0.2), ROW),
    (nn.Hardshrink(0.2), ROW),
    (nn.Threshold(0.1, 2.0), ROW),
    (nn.PReLU(4), ROW),
    (nn.GLU(1), ROW),
    (nn.Softmax(1), ROW),
    (nn.LogSoftmax(-1), ROW),
    (nn.Softmax2d(), IMAGE),
    (nn.RReLU(0.1, 0.2), ROW),
    (nn.AlphaDropout(0.2), ROW),
    (nn.FeatureAlphaDropout(0.2), IMAGE),
    (nn.Bilinear(4, 4, 3), ROW),
    (nn.CosineSimilarity(1, 1e-3), ROW),
    (nn.InstanceNorm1d(4), (2, 4, 9)),
    (nn.InstanceNorm2d(4, affine=True), IMAGE),
    (nn.InstanceNorm3d(4, 1e-3, 0.2, True, True), (2, 4, 3, 3, 3)),
    (nn.Flatten(2), IMAGE),
    (nn.Unflatten(1, (2, 2)), ROW),
    (nn.PixelShuffle(2), IMAGE),
    (nn.PixelUnshuffle(3), IMAGE),
    (nn.ChannelShuffle(2), IMAGE),
    (nn.Unfold((3, 2), 2, 1), IMAGE),
    (nn.Fold(10, 2, stride=2), (2, 4, 25)),
    (nn.MaxPool1d(3), (2, 4, 9)),
    (nn.MaxPool2d((3, 2), 2, 1, ceil_mode=True), IMAGE),
    (nn.MaxPool3d(2, dilation=2), (2, 4, 5, 5, 5)),
    (nn.AvgPool1d(3, 2), (2, 4, 9)),
    (nn.AvgPool2d(3, 2, 1, True, False, 7), IMAGE),
    (nn.AvgPool3d((2, 1, 2)), (2, 4, 5, 5, 5)),
    (nn.AdaptiveAvgPool1d(3), (2, 4, 9)),
    (nn.AdaptiveAvgPool2d((3, 2)), IMAGE),
    (nn.AdaptiveAvgPool3d(1), (2, 4, 5, 5, 5)),
    (nn.AdaptiveMaxPool1d(3), (2, 4, 9)),
    (nn.AdaptiveMaxPool2d((3, 2)), IMAGE),
    (nn.AdaptiveMaxPool3d(1), (2, 4, 5, 5, 5)),
    (nn.ConstantPad1d((1, 2), 1.5), (2, 4, 9)),
    (nn.ConstantPad2d(1, -0.5), IMAGE),
    (nn.ConstantPad3d(1, 0.0), (2, 4, 3, 3, 3)),
    (nn.ZeroPad1d(2), (2, 4, 9)),
    (nn.ZeroPad2d((1, -2, 0, 3)), IMAGE),
    (nn.ZeroPad3d(1), (2, 4, 3, 3, 3)),
    (nn.ReflectionPad1d(2), (2, 4, 9)),
    (nn.ReflectionPad2d((1, 2, 0, 3)), IMAGE),
    (nn.ReflectionPad3d(1), (2, 4, 3, 3, 3)),
    (nn.ReplicationPad1d(2), (2, 4, 9)),
    (nn.ReplicationPad2d((1, 2, 0, 3)), IMAGE),
    (nn.ReplicationPad3d(1), (2, 4, 3, 3, 3)),
    (nn.CircularPad1d(2), (2, 4, 9)),
    (nn.CircularPad2d((1, 2, 0, 3)), IMAGE),
    (nn.CircularPad3d(1), (2, 4, 3, 3, 3)),
    (nn.LSTM(4, 6), (5, 3, 4)),
    (nn.LSTM(4, 6, 2, batch_first=True, dropout=0.2, bidirectional=True, proj_size=3), (5, 3, 4)),
    (nn.LSTM(4, 6, bias=False, proj_size=2), (5, 3, 4)),
    (nn.GRU(4, 6, 3, batch_first=True), (5, 3, 4)),
    (nn.GRU(4, 6, bias=False, bidirectional=True), (5, 3, 4)),
    (nn.RNN(4, 6), (5, 3, 4)),
    (nn.RNN(4, 6, 2, "relu", bidirectional=True), (5, 3, 4)),
    (nn.LSTMCell(4, 6), ROW),
    (nn.LSTMCell(4, 6, bias=False), ROW),
    (nn.GRUCell(4, 6), ROW),
    (nn.RNNCell(4, 6), ROW),
    (nn.RNNCell(4, 6, nonlinearity="relu"), ROW),
]
PAIRED = (nn.Bilinear, nn.CosineSimilarity)


class Holder(nn.Module):
    """A module under a name, after an op that nothing folds into it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.layer, nn.Embedding):
            return self.layer(x)
        return self.layer(x.sin(), *[x.cos()] * isinstance(self.layer, PAIRED))


def drawn(layer: nn.Module, shape: tuple[int, ...]) -> Tensor:
    return torch.randint(0, 7, (2, 3)) if isinstance(layer, nn.Embedding) else torch.randn(shape)


def test_every_kind_is_tried() -> None:
    assert {type(layer) for layer, _ in MADE} == set(ROWS)


@pytest.mark.parametrize("kind", FROM_CALLS)
def test_attributes_that_are_updated_from_calls_are_arguments_of_their_rows(kind) -> None:
    rows = [row for other in ROWS if issubclass(other, kind) for row in ROWS[other]]
    name = FROM_CALLS[kind]
    assert rows and {row.numbers.get(name) for row in rows} == {name}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layer, shape", MADE, ids=lambda v: str(v)[:40])
def test_a_row_is_what_export_captures(layer, shape) -> None:
    x = drawn(layer, shape)
    program = capture_program(Holder(layer).eval(), (x,), None, None)
    rows = {row.op: row for row in ROWS[type(layer)]}
    (call,) = [node for node in program.graph.nodes if node.target in rows]
    row = rows[call.target]
    assert row.module_arguments(layer) == row.call_arguments(call)


# By day half of the layers are tried with a file, and the others without their model.
@pytest.mark.sampled(24)
@pytest.mark.parametrize("layer, shape", MADE, ids=lambda v: str(v)[:40])
def test_a_layer_comes_back_and_through_a_file(layer, shape, tmp_path) -> None:
    model, x = Holder(copy.deepcopy(layer)).eval(), drawn(layer, shape)
    slim = to_graph(model, (x,))
    made = slim.get_submodule("layer")
    assert type(made) is type(layer) and kind_of(made) is type(layer)
    plain = copy.deepcopy(layer)
    if hasattr(plain, "inplace"):
        plain.inplace = False
    assert repr(made) == repr(plain)
    assert set(made.state_dict()) == set(layer.state_dict())
    demask.save(slim, tmp_path / "m.demask")
    back = demask.load(tmp_path / "m.demask")
    assert repr(back.get_submodule("layer")) == repr(plain)
    assert not graph_of_calls(slim).find_nodes(op="call_module")
    for network in (slim, back, copy.deepcopy(slim)):
        torch.testing.assert_close(network(x), model(x))
        assert len(network.graph.find_nodes(op="call_module")) == 1


@pytest.mark.sampled(8)
@pytest.mark.parametrize("layer, shape", MADE, ids=lambda v: str(v)[:40])
def test_a_layer_comes_back_without_its_model(layer, shape) -> None:
    model, x = Holder(copy.deepcopy(layer)).eval(), drawn(layer, shape)
    made = build(*shrink_program(capture_program(model, (x,), None, None), TABLE)).eval()
    assert type(made.get_submodule("layer")) is type(layer)
    torch.testing.assert_close(made(x), model(x))


class Chained(nn.Module):
    """A norm without parameters, whose size is that of its input, after a layer."""

    def __init__(self, layer: nn.Module, channels: int) -> None:
        super().__init__()
        self.layer, self.norm = layer, nn.GroupNorm(1, channels, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return self.norm(y if isinstance(y, Tensor) else y[0])


@pytest.mark.parametrize(
    "layer", [nn.AdaptiveMaxPool1d(2), nn.LSTM(9, 5), nn.GRU(9, 5)], ids=lambda m: type(m).__name__
)
def test_a_layer_follows_one_with_several_outputs(layer) -> None:
    net, x = Chained(layer, 4).eval(), torch.randn(3, 4, 9)
    slim = demask.demask(net, (x,), result="graph")
    assert isinstance(slim.layer, type(layer)) and slim.norm.num_channels == 4
    call = next(node for node in slim.graph.nodes if node.target == "layer")
    y, captured = layer(x), call.meta["val"]
    assert [v.shape for v in tree_leaves(captured)] == [v.shape for v in tree_leaves(y)]


class Residual(nn.Module):
    """Branches that keep different channels of a stream, so that its result stays a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.act = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True)
        self.body = nn.Module()
        self.body.one, self.body.two = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.norm, self.drop, self.gelu = nn.BatchNorm2d(8), nn.Dropout(0.2), nn.GELU()
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.stem(x)))
        x = x + self.gelu(self.body.one(x))
        x = x + self.act(self.body.two(x))
        return self.head(self.drop(x.mean((2, 3))))


X = torch.randn(2, 3, 10, 10)


def residual() -> nn.Module:
    torch.manual_seed(0)
    model = Residual()
    prune.random_structured(model.body.one, "weight", 3, dim=0)
    model.body.one.bias.data *= model.body.one.weight_mask[:, 0, 0, 0]
    mask = torch.ones(8)
    mask[5:] = 0
    model.body.two.weight.data *= mask[:, None, None, None]
    model.body.two.bias.data *= mask
    return model.eval()


@pytest.fixture(scope="module")
def made() -> Demasked:
    made = to_graph(residual(), (X,))
    assert any("index" in str(node.target) for node in made.graph.nodes)
    return made


@pytest.fixture
def slim(made) -> Demasked:
    return copy.deepcopy(made)


LAYERS = ["stem", "norm", "act", "body.one", "gelu", "body.two", "drop", "head"]


def test_layers_are_called_under_their_names(slim) -> None:
    assert {str(n.target) for n in slim.graph.find_nodes(op="call_module")} == set(LAYERS)
    assert not slim.graph.find_nodes(op="call_function", target=torch.ops.aten.conv2d.default)
    two = slim.body.two
    assert isinstance(two, nn.Conv2d) and (two.in_channels, two.out_channels) == (8, 5)
    assert two.weight.shape == (5, 8, 1, 1)
    assert all(isinstance(p, nn.Parameter) for p in slim.parameters())
    assert {n for n, _ in slim.named_parameters()} == {n.replace("_orig", "") for n, _ in residual().named_parameters()}


def test_hooks_fire_under_old_names(slim) -> None:
    seen: list[str] = []
    for name in LAYERS:
        hook = lambda *_, name=name: seen.append(name)  # noqa: E731
        slim.get_submodule(name).register_forward_hook(hook)
    slim(X)
    assert seen == ["stem", "norm", "act", "body.one", "gelu", "body.two", "act", "drop", "head"]
    slim.body.two.register_forward_hook(lambda module, args, out: torch.zeros_like(out))
    assert not torch.equal(slim(X), to_graph(residual(), (X,))(X))


def test_pruning_and_parametrizations_of_a_layer_take_effect(slim) -> None:
    before = slim(X)
    prune.ln_structured(slim.body.two, "weight", 2, n=1, dim=0)
    assert not torch.equal(slim(X), before)
    assert torch.equal(structural_copy(slim, share=False)(X), slim(X))
    with pytest.raises(BadInput, match="prune"):
        demask.save(slim, io.BytesIO())

    class Zero(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 0 * weight

    parametrize.register_parametrization(slim.head, "weight", Zero())
    assert torch.equal(slim(X), slim.head.bias.expand(2, 5))
    assert torch.equal(structural_copy(slim, share=False)(X), slim(X))


def test_a_layer_can_be_replaced(slim) -> None:
    class Low(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.a = base, nn.Linear(base.in_features, 2, bias=False)
            self.b = nn.Linear(2, base.out_features, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.b(self.a(x))

    before = slim(X)
    slim.head = Low(slim.head)
    assert not torch.equal(slim(X), before)


def test_two_rounds_train() -> None:
    model: nn.Module = residual()
    names = {name.replace("_orig", "") for name, _ in model.named_parameters()}
    for _ in range(2):
        model = to_graph(model, (X,)).train()
        assert {name for name, _ in model.named_parameters()} == names
        step = torch.optim.SGD(model.parameters(), 0.1)
        mean = model.norm.running_mean.clone()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        model(X).square().sum().backward()
        step.step()
        changed = [n for n, p in model.named_parameters() if not torch.equal(p, before[n])]
        assert set(changed) >= names - {"stem.bias"}  # which the norm takes away again
        assert not torch.equal(mean, model.norm.running_mean)
        prune.ln_structured(model.body.two, "weight", 1, n=1, dim=0)
        model.body.two.bias.data *= model.body.two.weight_mask[:, 0, 0, 0]
        model.eval()
    last = to_graph(model, (X,))
    assert last.body.two.out_channels == 3
    torch.testing.assert_close(last(X), model(X))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "put",
    [
        lambda m: m.register_forward_hook(print),
        lambda m: m.register_forward_pre_hook(print),
        lambda m: m.register_full_backward_hook(print),
        lambda m: m.register_full_backward_pre_hook(print),
        lambda m: m(X),
    ],
)
def test_what_is_put_on_a_holder_of_names_raises(slim, put, tmp_path) -> None:
    demask.save(slim, tmp_path / "m.demask")
    for network in (slim, copy.deepcopy(slim), demask.load(tmp_path / "m.demask")):
        assert type(network.body) is Uncalled
        with pytest.raises(BadInput, match=r"one, two, is not called .* layers inside"):
            put(network.body)


def test_pickles_hold_modules(slim) -> None:
    buffer = io.BytesIO()
    torch.save(slim, buffer)
    buffer.seek(0)
    back = torch.load(buffer, weights_only=False)
    assert torch.equal(back(X), slim(X)) and repr(back.body.two) == repr(slim.body.two)
    with pytest.raises(BadInput):
        back.body.register_forward_hook(print)


class Own(nn.Conv2d):
    """A convolution of another class with torch's forward."""


class Scaled(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight * 2, self.bias)


def test_subclasses_stay_where_they_compute_the_same(tmp_path) -> None:
    model = nn.Sequential(Own(3, 4, 1), nn.Tanh(), Scaled(4, 2, 1)).eval()
    slim = to_graph(model, (X,))
    assert type(slim.get_submodule("0")) is Own and type(slim.get_submodule("2")) is nn.Conv2d
    torch.testing.assert_close(slim(X), model(X))
    demask.save(slim, tmp_path / "m.demask")
    back = demask.load(tmp_path / "m.demask")
    assert type(back.get_submodule("0")) is nn.Conv2d
    torch.testing.assert_close(back(X), model(X))


def test_the_model_is_left_alone() -> None:
    model = residual()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    slim = to_graph(model, (X,)).train()
    slim(X)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert isinstance(next(iter(model.body.one._forward_pre_hooks.values())), prune.BasePruningMethod)
    assert model.act.inplace and model.body.two.out_channels == 8


def test_a_layer_cut_in_two_ways_is_called_as_functions() -> None:
    torch.manual_seed(0)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.a(x).relu()) + self.c(self.b(x).relu())

    model, x = Twice().eval(), torch.randn(3, 6)
    for layer, rows in ((model.a, slice(0, 3)), (model.b, slice(2, 6))):
        layer.weight.data[rows], layer.bias.data[rows] = 0, 0
    slim = to_graph(model, (x,))
    torch.testing.assert_close(slim(x), model(x))
    called = {str(n.target) for n in slim.graph.find_nodes(op="call_module")}
    if "c" not in called:
        with pytest.raises(BadInput, match="not called"):
            slim.c.register_forward_hook(print)


def test_files_of_modules_hold_numbers_alone(slim, tmp_path) -> None:
    import json
    import zipfile

    path = tmp_path / "m.demask"
    demask.save(slim, path)
    with zipfile.ZipFile(path) as file:
        document = json.loads(file.read("graph.json"))
    assert set(document["modules"]) == set(LAYERS)
    assert {spec["type"] for spec in document["modules"].values()} <= set(KINDS)
    changes = [{"kernel_size": "eval"}, {"stride": [[1]]}, {"groups": 2**40}, {"device": "cpu"}]
    changes += [{"padding_mode": "circular"}, {"in_channels": {"node": "x"}}, {"x": 1}]
    for change in changes:
        with pytest.raises(BadInput):
            archive._make_module("m", document["modules"]["body.two"] | change)
