"""Parametrized weights of a smaller network: what they are computed from is cut where that commutes
with the parametrization, and training goes on as it would have; else they are named."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import demask
from demask.graph.module_copy import structural_copy

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated.*:FutureWarning")
NORMS: dict[str, Callable[..., nn.Module]] = {
    "weight norm": parametrizations.weight_norm,
    "weight norm, hook": nn.utils.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "spectral norm, hook": nn.utils.spectral_norm,
}
SOURCES = {
    "weight norm": ["parametrizations.weight.original0", "parametrizations.weight.original1"],
    "weight norm, hook": ["weight_g", "weight_v"],
    "spectral norm": ["parametrizations.weight.original"],
    "spectral norm, hook": ["weight_orig"],
}


def network(kind: str) -> nn.Sequential:
    """Units 0 to 2 of the first layer and 1 and 4 of the second are masked, as is what reads
    them."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    masked: list[tuple[Any, list[int], list[int]]] = [
        (net[0], [0, 1, 2], []),
        (net[2], [1, 4], [0, 1, 2]),
        (net[4], [], [1, 4]),
    ]
    for layer, rows, columns in masked:
        layer.weight.data[:, columns] = 0
        layer.bias.data[rows] = 0
        if kind.startswith("spectral"):
            layer.weight.data[rows] = 0
        NORMS[kind](layer)
        if kind.startswith("weight"):
            dict(layer.named_parameters())[SOURCES[kind][0]].data[rows] = 0
    return net


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        tuple(torch.randn(20, n, generator=draw, dtype=torch.float64) for n in (6, 3))  # type: ignore[misc]
        for _ in range(count)
    ]


def train(net: nn.Module, optimizer: torch.optim.Optimizer, rows: list[Any]) -> None:
    for x, y in rows:
        optimizer.zero_grad()
        (net.train()(x) - y).square().mean().backward()
        optimizer.step()


def slimmed(net: nn.Module, **options: Any) -> Any:
    return demask.demask(net, (torch.randn(5, 6, dtype=torch.float64),), **options)


@pytest.mark.parametrize("kind", NORMS)
def test_training_goes_on_in_what_a_norm_is_computed_from(kind: str) -> None:
    net, rows = network(kind), batches(5)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    train(net, optimizer, rows[:2])
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    slim = slimmed(net)
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert list(slim.state_dict()) == list(net.state_dict())
    shapes = [tuple(dict(slim[2].named_parameters())[name].shape) for name in SOURCES[kind]]
    assert shapes == [(6, 1), (6, 5)][-len(shapes) :]
    assert not any("parametrizations become" in note for note in slim.demasked.notes)
    large = structural_copy(net, share=False)
    momentum = torch.optim.SGD(large.parameters(), lr=0.05, momentum=0.9)
    momentum.load_state_dict(optimizer.state_dict())
    demask.carry(slim, optimizer)
    for model, steps in ((large, momentum), (slim, optimizer)):
        train(model, steps, rows[2:])
        model.eval()
    x = rows[0][0]
    torch.testing.assert_close(slim(x), large(x), rtol=1e-12, atol=1e-12)
    expanded = demask.expand(slim, net).eval()
    assert expanded.state_dict().keys() == net.state_dict().keys()
    torch.testing.assert_close(expanded(x), slim(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", NORMS)
def test_files_and_state_dicts_have_the_parametrization(kind: str, tmp_path: Path) -> None:
    slim, x = slimmed(network(kind)).eval(), torch.randn(4, 6, dtype=torch.float64)
    demask.save(slim, tmp_path / "net.demask")
    fresh = network(kind)
    for loaded in (demask.load(tmp_path / "net.demask", into=fresh), demask.resize(fresh, slim.state_dict())):
        assert list(loaded.state_dict()) == list(slim.state_dict())
        assert loaded[2].out_features == 6
        assert torch.equal(loaded.eval()(x), slim(x))
    plain = demask.load(
        tmp_path / "net.demask",
        into=nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)),
    )
    torch.testing.assert_close(plain(x), slim(x), rtol=1e-12, atol=1e-12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a graph comes back: the file has no code
        torch.testing.assert_close(demask.load(tmp_path / "net.demask")(x), slim(x))


def test_averages_of_parametrized_weights() -> None:
    net = network("weight norm")
    average = torch.optim.swa_utils.AveragedModel(net)
    state = average.state_dict()
    average.module[2].parametrizations.weight.original1.data *= 2
    expected = average.module[2].parametrizations.weight.original1.data
    for ema in (average, state):
        optimizer, slim = torch.optim.SGD(net.parameters(), lr=0.1), slimmed(net)
        demask.carry(slim, optimizer, ema=ema)
        own = ema if isinstance(ema, dict) else ema.state_dict()
        part = own["module.2.parametrizations.weight.original1"]
        assert torch.equal(part, expected[[0, 2, 3, 5, 6, 7]][:, 3:])


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


class Tanh(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class Adapter(nn.Module):
    """LoRA; its second factor is zero at first."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(rank, 8, dtype=torch.float64))
        self.b = nn.Parameter(torch.zeros(8, rank, dtype=torch.float64))
        self.a.data[:, :3] = 0

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


class Centered(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(1, keepdim=True)) * (x != 0)


class Leaking(nn.Module):
    """The removed columns are zeros, but training would change them."""

    def forward(self, x: Tensor) -> Tensor:
        return x - 0.1 * x.sum(1, keepdim=True) * (x != 0)


class Neighbor(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * x.roll(1, 0) * (x != 0)


class Gate(nn.Module):
    """Not a mask alone, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gate", torch.rand(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate


def masked_alike() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    layers: Any = net[0], net[2], net[4]
    for layer in layers[:2]:
        layer.weight.data[:3] = 0
        layer.bias.data[:3] = 0
    for layer in layers[1:]:
        layer.weight.data[:, :3] = 0
    return net


KEPT: dict[str, tuple[Callable[[], nn.Module], dict[str, tuple[int, ...]]]] = {
    "symmetric": (Symmetric, {"original": (5, 5)}),
    "tanh": (Tanh, {"original": (5, 5)}),
    "adapter": (lambda: Adapter(2), {"original": (5, 5), "0.a": (2, 5), "0.b": (5, 2)}),
    "square adapter": (lambda: Adapter(8), {"original": (5, 5), "0.a": (8, 5), "0.b": (5, 8)}),
    "buffer": (Gate, {"original": (5, 5), "0.gate": (5,)}),
    "mean of a row": (Centered, {}),
    "sum of a row": (Leaking, {}),
    "neighbor": (Neighbor, {}),
}


@pytest.mark.parametrize("kind", KEPT)
def test_parametrizations_of_a_users_own(kind: str) -> None:
    net = masked_alike()
    make, expected = KEPT[kind]
    layer: Any = net[2]
    parametrize.register_parametrization(layer, "weight", make())
    slim, x = slimmed(net), torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(slim.eval()(x), net.eval()(x), rtol=1e-12, atol=1e-12)
    notes = [note for note in slim.demasked.notes if "parametrizations become" in note]
    assert slim[2].weight.shape == (5, 5)
    if not expected:
        (note,) = notes
        assert note.endswith(f"2.weight ({make().__class__.__name__})")
        assert not parametrize.is_parametrized(slim[2])
        return
    assert not notes
    state = slim[2].parametrizations.weight.state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == expected


def test_a_norm_over_columns_that_are_not_zero_is_named() -> None:
    net = masked_alike()
    layer: Any = net[2]
    layer.weight.data[3:, :3] = 1
    parametrizations.weight_norm(layer)
    layer.parametrizations.weight.original1.data[:3] = 1  # rows of zeros have no norm
    layer.parametrizations.weight.original0.data[:3] = 0
    slim = slimmed(net)
    assert not parametrize.is_parametrized(slim[2])
    assert any("2.weight (WeightNorm)" in note for note in slim.demasked.notes)


def test_tied_parametrized_weights_are_named() -> None:
    net = masked_alike()
    layers: Any = net[0], net[2]
    net[0] = nn.Linear(8, 8).double()
    net[0].weight = layers[1].weight
    parametrize.register_parametrization(layers[1], "weight", Tanh())
    x = torch.randn(4, 8, dtype=torch.float64)
    slim: Any = demask.demask(net, (x,))
    torch.testing.assert_close(slim.eval()(x), net.eval()(x), rtol=1e-12, atol=1e-12)
    assert not parametrize.is_parametrized(slim[2])
    assert any("2.weight (Tanh)" in note for note in slim.demasked.notes)


def test_masks_below_a_norm_become_plain_and_the_norm_stays() -> None:
    net = masked_alike()
    layer: Any = net[2]
    parametrizations.weight_norm(layer)
    layer.parametrizations.weight.original1.data[:3] = 1
    layer.parametrizations.weight.original0.data[:3] = 0
    prune.ln_structured(net[4], "weight", amount=3, n=2, dim=1)
    slim = slimmed(net)
    assert sorted(name for name, _ in slim.named_parameters()) == [
        "0.bias",
        "0.weight",
        "2.bias",
        "2.parametrizations.weight.original0",
        "2.parametrizations.weight.original1",
        "4.bias",
        "4.weight",
    ]


class Lora(nn.Module):
    """A layer with an adapter, as peft has them: plain layers whose outputs are added."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.a = nn.Linear(inputs, rank, bias=False)
        self.b = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def test_adapters_of_plain_layers_are_cut() -> None:
    """Rows of the base and of the second factor, columns of the base and of the first one, and a
    rank that adds nothing."""
    torch.manual_seed(0)
    net = nn.Sequential(Lora(6, 8, 4), nn.ReLU(), Lora(8, 5, 4)).double()
    first, second = net[0], net[2]
    for weight in (first.base.weight, first.b.weight, first.base.bias[:, None]):
        weight.data[:3] = 0
    for weight in (second.base.weight, second.a.weight):
        weight.data[:, :3] = 0
    first.a.weight.data[1] = 0
    second.b.weight.data[:, 2] = 0
    slim = slimmed(net)
    assert {name: tuple(tensor.shape) for name, tensor in slim.named_parameters()} == {
        "0.base.weight": (5, 6),
        "0.base.bias": (5,),
        "0.a.weight": (3, 6),
        "0.b.weight": (5, 3),
        "2.base.weight": (5, 5),
        "2.base.bias": (5,),
        "2.a.weight": (3, 5),
        "2.b.weight": (5, 3),
    }
    first.b.weight.data[:] = 0  # a new adapter
    whole = slimmed(net, masks="declared")
    assert whole[0].a.weight.shape == (4, 6) and whole[0].b.weight.shape == (8, 4)
