"""A demasked network of the caller's own class: its modules, numbers, hooks, methods and files."""

from __future__ import annotations

import copy
import importlib
import operator
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

import demask
import micro_recurrent  # noqa: F401  (their networks join MICROS)
import micro_sequences  # noqa: F401
from demask.errors import Mismatch
from demask.failures import strict
from demask.graph.result.resize import update_attributes
from demask.judge import compare
from demask.shrink.own_class.proof import find_difference
from demask.shrink.pipeline import canonicalize, capture_program
from micro import MICROS, Micro
from rounds import rounds
from test_micro import made


class Net(nn.Module):
    """Two layers, half of the units of the first zero; a method and an attribute."""

    def __init__(self, units: int = 16) -> None:
        super().__init__()
        self.a, self.b, self.label = nn.Linear(8, units), nn.Linear(units, 4), "mine"

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(x)))

    def predict(self, x: Tensor) -> Tensor:
        return self(x).argmax(-1)


def half(net: Net) -> Net:
    with torch.no_grad():
        net.a.weight[::2] = 0
        net.a.bias[::2] = 0
    return net.eval()


class Heads(nn.Module):
    """Attention whose code reads how many heads there are, the second half of which is not read."""

    def __init__(self, heads: int = 4, width: int = 8) -> None:
        super().__init__()
        self.heads, self.width, self.inner = heads, width, heads * width
        self.qkv, self.out = nn.Linear(32, 3 * self.inner), nn.Linear(self.inner, 32)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).split(self.inner, -1)
        q, k, v = (t.view(batch, length, self.heads, self.width).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(batch, length, self.inner))


class Numbered(Heads):
    """One that also knows which it is: a number that is none of its sizes, and that its call does
    not read."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = self.layer_idx = place


def half_of_heads() -> Heads:
    net = Heads().eval()
    with torch.no_grad():
        net.out.weight[:, 16:] = 0
    return net


class Residual(nn.Module):
    """Two convolutions that are added, masked alike or not."""

    def __init__(self, alike: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 3, padding=1)
        self.c = nn.Conv2d(8, 4, 3)
        with torch.no_grad():
            for layer, start in ((self.a, 0), (self.b, 0 if alike else 2)):
                layer.weight[start : start + 4] = 0
                layer.bias[start : start + 4] = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.a(x) + self.b(x)))


def test_class_attributes_and_methods_stay_and_numbers_follow() -> None:
    net, x = half(Net()), torch.randn(3, 8)
    slim: Any = demask.demask(net, (x,))
    assert type(slim) is Net and slim.label == "mine"
    assert (slim.a.out_features, slim.b.in_features) == (8, 8)
    assert torch.equal(slim.predict(x), net.predict(x))
    assert slim.demasked.form == "class" and net.a.out_features == 16
    assert slim(torch.randn(5, 2, 8)).shape == (5, 2, 4)  # sizes are the class's own
    assert demask.verify(net, slim, (x,)).ok


@pytest.mark.sampled(12)
@pytest.mark.parametrize("case", MICROS, ids=lambda c: c.name)
def test_exact_and_small_whatever_comes_back(case: Micro) -> None:
    model, args = made(case)
    slim = demask.demask(model, args)
    assert demask.verify(model, slim, args, check=False).ok
    record: Any = slim.demasked
    assert record.form == ("class" if type(slim) is type(model) else "graph")
    graphs = any(isinstance(module, fx.GraphModule) for module in slim.modules())
    assert bool(record.graph_reasons) == graphs
    if type(slim) is not type(model):
        assert sum(p.numel() for p in slim.parameters()) <= case.weights


def test_the_number_of_heads_follows() -> None:
    net, x = half_of_heads(), torch.randn(2, 5, 32)
    slim: Any = demask.demask(net, (x,))
    assert (type(slim), slim.heads, slim.width, slim.inner) == (Heads, 2, 8, 16)
    assert slim.demasked.numbers[""] == {"heads": 2, "inner": 16}
    assert demask.verify(net, slim, (x,)).ok


def test_numbers_that_the_call_does_not_read_stay() -> None:
    net = Numbered(4).eval()  # as many as there are heads
    net.out.weight.data[:, 16:] = 0
    slim: Any = demask.demask(net, (torch.randn(2, 5, 32),))
    assert (slim.heads, slim.inner, slim.place, slim.layer_idx) == (2, 16, 4, 4)


def test_a_wrong_number_is_refused() -> None:
    """One head of twice the width has the same shapes; the programs differ."""
    net, x = half_of_heads(), torch.randn(2, 5, 32)
    slim: Any = demask.demask(net, (x,))
    right = canonicalize(capture_program(slim, (x,), None, None), demask.ops.TABLE)
    assert find_difference(right, canonicalize(capture_program(slim, (x,), None, None), demask.ops.TABLE)) is None
    slim.heads, slim.width = 1, 16
    wrong = canonicalize(capture_program(slim, (x,), None, None), demask.ops.TABLE)
    assert find_difference(right, wrong) is not None


def test_numbers_are_read_where_the_code_of_a_layer_computes_sizes_first() -> None:
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.get_attr("weight")
    height = graph.call_function(operator.floordiv, (7, 2))
    call = graph.call_function(torch.ops.aten.conv2d.default, (x, weight))
    call.kwargs = {"groups": 4}
    call.meta["val"] = torch.zeros(1, 4, 3, 3)
    layer = nn.Conv2d(8, 8, 3, groups=8)
    layer.weight = nn.Parameter(torch.zeros(4, 1, 3, 3))
    update_attributes(layer, [height, call])
    assert (layer.groups, layer.in_channels, layer.out_channels) == (4, 4, 4)


def test_moves_are_compared_by_where_elements_come_from() -> None:
    def program(change: Any) -> Any:
        class Moves(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return change(x) * 2

        return capture_program(Moves(), (torch.randn(3, 8),), None, None)

    halves = program(lambda x: x.split(4, 1)[1])
    assert find_difference(halves, program(lambda x: x[:, 4:])) is None
    assert find_difference(halves, program(lambda x: x.view(-1, 2, 4)[:, 1])) is None
    assert find_difference(halves, program(lambda x: x[:, 3:7])) is not None
    assert find_difference(halves, program(lambda x: x.view(-1, 4, 2)[..., 1])) is not None


def test_a_constant_goes_into_a_bias_that_there_was_not() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3, bias=False)).double().eval()
    with torch.no_grad():
        net[0].weight[:2] = 0
    x = torch.randn(5, 4).double()
    slim: Any = demask.demask(net, (x,))
    assert type(slim) is nn.Sequential and isinstance(slim[1].bias, nn.Parameter)
    assert demask.verify(net, slim, (x,)).ok


def test_masks_apart_cost_zeros_and_a_warning_says_where() -> None:
    x = torch.randn(2, 3, 8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(demask.demask(Residual(True).eval(), (x,)), Residual)
    net = Residual(False).eval()
    with pytest.warns(UserWarning, match="mask the same channels of a and b"):
        slim: Any = demask.demask(net, (x,))
    assert type(slim) is Residual
    exported = torch.export.export(net, (x,))
    with pytest.raises(demask.NeedsGraph, match="an ExportedProgram has no class") as caught:
        demask.demask(exported, result="class")
    assert caught.value.places
    with pytest.raises(demask.BadInput, match="'auto', 'class' or 'graph'"):
        demask.demask(net, (x,), result="module")


class Branches(nn.Module):
    """Another layer for larger batches."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 2)
        with torch.no_grad():
            self.b.weight[:, :4] = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.b(y) if x.shape[0] > 3 else self.c(y)


def test_code_that_branches_by_sizes_is_a_graph_with_checks() -> None:
    net = Branches().eval()
    slim: Any = demask.demask(net, (torch.randn(5, 4),))
    assert any(isinstance(part, fx.GraphModule) for part in slim.modules())
    with pytest.raises(ValueError):
        slim(torch.randn(2, 4))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, alpha: float) -> Tensor:
        return self.b(self.a(x) * alpha)


def test_a_number_of_the_call_decides_what_goes_so_it_is_a_graph() -> None:
    slim: Any = demask.demask(Scaled().eval(), (torch.randn(3, 4), 0.0))
    assert any(isinstance(part, fx.GraphModule) for part in slim.modules())


@pytest.mark.parametrize("kind", ["prune", "parametrize"])
def test_the_model_is_not_changed(kind: str) -> None:
    net, x = Net().eval(), torch.randn(3, 8)
    if kind == "prune":
        prune.ln_structured(net.a, "weight", amount=0.5, n=2, dim=0)
    else:
        parametrize.register_parametrization(net.a, "weight", Rows())
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    expected = net(x)
    slim: Any = demask.demask(net, (x,))
    assert before.keys() == net.state_dict().keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert torch.equal(net(x), expected)
    assert type(slim) is Net and type(slim.a) is nn.Linear
    assert {name for name, _ in slim.named_parameters()} == {"a.weight", "a.bias", "b.weight", "b.bias"}
    torch.testing.assert_close(slim(x), expected)


class Rows(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * (torch.arange(len(weight)) % 2)[:, None]


def test_hooks_put_on_before_fire_after() -> None:
    net, x, seen = half(Net()), torch.randn(3, 8), []
    net.a.register_forward_hook(lambda module, _, made: seen.append(made.shape[-1]))
    slim = demask.demask(net, (x,))
    seen.clear()
    slim(x)
    assert seen == [8]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.n = nn.Conv2d(width, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.b, self.m = nn.Conv2d(16, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.m(self.b(torch.relu(self.n(self.a(x))))))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front, self.run, self.head = nn.Linear(6, 16), nn.LSTM(16, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(torch.tanh(self.front(x)))[0])


def test_three_rounds_of_a_residual_network() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), Block(8), Block(8), nn.Flatten(), nn.Linear(8 * 36, 4))
    rounds(net, (torch.randn(4, 3, 8, 8),), lambda n: [(b.a, b.n) for b in n[1:3]])


def test_three_rounds_of_a_recurrent_network() -> None:
    rounds(Tagger(), (torch.randn(5, 2, 6),), lambda n: [(n.front,)])


def test_what_is_done_to_modules_works_on_a_result(tmp_path: Path) -> None:
    net, x = half(Net()), torch.randn(3, 8)
    slim: Any = demask.demask(net, (x,))
    again: Any = pickle.loads(pickle.dumps(slim))
    assert torch.equal(again(x), slim(x)) and again.demasked == slim.demasked
    assert torch.equal(copy.deepcopy(slim)(x), slim(x))
    mean = torch.optim.swa_utils.AveragedModel(slim)
    mean.update_parameters(slim)
    assert torch.equal(mean(x), slim(x))
    state = {name: torch.zeros_like(p) for name, p in slim.named_parameters()}
    assert not torch.func.functional_call(slim, state, (x,)).any()
    compiled: Any = torch.compile(slim, backend="eager")
    torch.testing.assert_close(compiled(x), slim(x))
    prune.ln_structured(slim.a, "weight", amount=0.5, n=2, dim=0)
    twice: Any = demask.demask(slim, (x,))
    assert type(twice) is Net
    torch.testing.assert_close(twice(x), slim(x))


def test_files_of_a_result(tmp_path: Path) -> None:
    net, x = half_of_heads(), torch.randn(2, 5, 32)
    slim: Any = demask.demask(net, (x,))
    demask.save(slim, tmp_path / "net.demask")
    loaded: Any = demask.load(tmp_path / "net.demask", into=Heads())
    assert type(loaded) is Heads and loaded.heads == 2
    assert torch.equal(loaded(x), slim(x)) and loaded.demasked.numbers == slim.demasked.numbers
    graph: Any = demask.load(tmp_path / "net.demask")
    torch.testing.assert_close(graph(x), slim(x))
    demask.to_pt2(slim, tmp_path / "net.pt2")
    torch.testing.assert_close(torch.export.load(tmp_path / "net.pt2").module()(x), slim(x))
    with pytest.raises(demask.BadInput, match="as large"):
        demask.load(tmp_path / "net.demask", into=Heads(1))


def test_a_state_dict_resizes_a_fresh_network() -> None:
    net, x = half(Net()), torch.randn(3, 8)
    slim: Any = demask.demask(net, (x,))
    fresh: Any = demask.resize(Net(), slim.state_dict())
    assert torch.equal(fresh(x), slim(x)) and fresh.a.out_features == 8
    fresh.load_state_dict(slim.state_dict())
    heads: Any = demask.demask(half_of_heads(), (torch.randn(2, 5, 32),))
    with pytest.raises(demask.BadInput, match=r"inner = 32.*numbers"):
        demask.resize(Heads(), heads.state_dict())
    other: Any = demask.resize(Heads(), heads.state_dict(), heads.demasked.numbers)
    y = torch.randn(1, 3, 32)
    assert torch.equal(other(y), heads(y))
    with pytest.raises(demask.BadInput, match=r"lacks b\.bias"):
        demask.resize(Net(), {n: t for n, t in slim.state_dict().items() if n != "b.bias"})


def test_parts_by_globs_and_by_themselves() -> None:
    front = nn.Sequential(half(Net()), nn.Linear(4, 8))
    net = nn.Sequential(front, nn.Linear(8, 8), half(Net()))
    x = torch.randn(3, 8)
    slim: Any = demask.demask(net.eval(), (x,), modules=["*.0"])
    assert slim[0][0].a.out_features == 8 and slim[2].a.out_features == 16
    assert demask.report(slim).after.parameters < demask.report(slim).before.parameters
    assert demask.verify(net, slim, (x,)).ok
    auto: Any = demask.demask(net, (x,), modules="auto")
    assert auto[2].a.out_features == 8 and torch.allclose(auto(x), net(x))
    with pytest.raises(demask.BadInput, match="no submodule"):
        demask.demask(net, (x,), modules=["*.nothing"])


class Chaotic(nn.Module):
    """What rounding differs by becomes a million times as large."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(1e6 * self.b(F.relu(self.a(x))))


def half_chaotic(dtype: torch.dtype) -> tuple[Chaotic, Tensor]:
    """One with every second unit zero, and an example."""
    torch.manual_seed(0)
    net, x = Chaotic().eval(), torch.randn(5, 64)
    with torch.no_grad():
        net.a.weight[::2] = 0
        net.a.bias[::2] = 0
    return net.to(dtype), x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("result", ["class", "graph"])
def test_a_result_may_round_as_the_network_does(result: Any, dtype: torch.dtype) -> None:
    net, x = half_chaotic(dtype)
    slim: Any = demask.demask(net, (x,), result=result)
    assert slim.a.out_features == 128 and slim.demasked.form == result
    ulps = compare(net(x), slim(x)).ulps()
    assert ulps > 10_000  # far beyond 64
    wide, same = copy.deepcopy(net).double(), copy.deepcopy(slim).double()
    torch.testing.assert_close(same(x.double()), wide(x.double()), rtol=1e-7, atol=1e-7)


def shifted(monkeypatch: pytest.MonkeyPatch, layer: str, by: float) -> None:
    """Plants a fault: a number is added to a bias of a result of the network's own class, before
    it is compared with the network."""
    module = importlib.import_module("demask.shrink.strategies")
    describe = module.describe_difference

    def planted(slim: Any, *args: Any, **kwargs: Any) -> str:
        with torch.no_grad():
            slim.get_submodule(layer).bias += by
        return describe(slim, *args, **kwargs)

    monkeypatch.setattr(module, "describe_difference", planted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_wrong_tensor_is_no_rounding(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the network rounds."""
    net, x = half_chaotic(dtype)
    shifted(monkeypatch, "b", 1e-3 if dtype == torch.float32 else 1e-12)
    with pytest.raises(Mismatch, match="the network computes something else"):
        demask.demask(net, (x,))
    with strict(False):
        assert type(demask.demask(net, (x,))) is not Chaotic


class Casting(nn.Module):
    """One that computes in float32 between layers of float64."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16).double(), nn.Linear(16, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(self.a(x).float(), self.b.weight.float(), self.b.bias.float())
        return y.double()


def test_types_that_a_network_computes_in_decide_what_rounding_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A millionth is rounding where a part of the network is float32, and none in float64."""
    x = torch.randn(3, 8, dtype=torch.float64)
    plain, casting = half(Net()).double(), half(Casting())
    shifted(monkeypatch, "b", 1e-6)
    with strict(False):
        assert type(demask.demask(plain, (x,))) is not Net
    assert type(demask.demask(casting, (x,))) is Casting


def test_parametrizations_that_become_plain_are_named() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6), nn.Linear(6, 4)).eval()
    nn.utils.parametrizations.weight_norm(net[0])
    nn.utils.parametrizations.spectral_norm(net[3])
    prune.ln_structured(net[2], "weight", amount=0.5, n=2, dim=0)  # a mask is no news
    slim: Any = demask.demask(net, (torch.randn(3, 8),))
    (note,) = (note for note in slim.demasked.notes if "parametrizations" in note)
    assert note.endswith(": 3.weight (SpectralNorm)")  # its removed columns are part of its norm
