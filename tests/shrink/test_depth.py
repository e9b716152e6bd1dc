"""Layers that return their input leave their list."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import demask
from test_micro import difference


class Layer(nn.Module):
    """A residual layer that knows its number."""

    def __init__(self, number: int):
        super().__init__()
        self.layer_idx = number
        self.a, self.b = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.a(x).relu())


class Deep(nn.Module):
    """Layers one after another; by_number: those that the code names."""

    def __init__(self, dead: tuple[int, ...], by_number: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.by_number = nn.ModuleList(Layer(k) for k in range(4)), by_number
        self.out = nn.Linear(6, 2)
        for k in dead:
            layer: Any = self.layers[k]
            layer.b.weight.data.zero_(), layer.b.bias.data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        for layer in [self.layers[k] for k in (0, 1, 2, 3)] if self.by_number else self.layers:
            x = layer(x)
        return self.out(x)


X = torch.randn(3, 6, generator=torch.Generator().manual_seed(1)).double()


@pytest.mark.parametrize("modules", [None, "auto"])
def test_dead_layers_go_and_later_ones_have_other_numbers(modules: str | None) -> None:
    net = Deep((0, 2)).double().eval()
    slim: Any = demask.demask(net, (X,), modules=modules)
    assert type(slim) is Deep and len(slim.layers) == 2 and len(net.layers) == 4
    assert [layer.layer_idx for layer in slim.layers] == [0, 1]
    assert difference(net(X), slim(X)) <= 1e-12
    record = slim.demasked
    size = sum(p.numel() for p in net.layers[0].parameters())
    assert record.before.parameters - record.after.parameters == 2 * size
    assert record.removed["layers.0"] == record.removed["layers.2"] == size
    assert record.cuts["layers.1.a.weight"].source == "layers.3.a.weight"
    assert any("add nothing" in note and "layers.0, layers.2" in note for note in record.notes)


def test_what_cannot_go_stays() -> None:
    for net in (Deep((1,), by_number=True), Deep((0, 1, 2, 3))):
        slim: Any = demask.demask(net.double().eval(), (X,))
        assert len(slim.layers) == 4 and difference(net(X), slim(X)) <= 1e-12
    net = Deep((1,)).double().eval()
    net.layers[1].b.bias.data[0] = 1e-3  # adds a constant
    slim = demask.demask(net, (X,))
    assert len(slim.layers) == 4 and difference(net(X), slim(X)) <= 1e-12
    net = Deep((1,)).double().eval()
    slim = demask.demask(net, (X,), masks="declared")  # its zeros may be trained
    assert len(slim.layers) == 4


def test_a_layer_that_returns_its_input_on_the_example_alone_stays() -> None:
    class Rare(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return x + (x - 100).relu()

    net = Deep(())
    net.layers[1] = Rare(1)
    net = net.double().eval()
    slim: Any = demask.demask(net, (X,))
    assert len(slim.layers) == 4
    assert difference(net(X + 200), slim(X + 200)) <= 1e-12
