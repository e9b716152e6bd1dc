"""Modules that are not called in eval mode follow what is cut of their inputs, or are named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import demask


class Head(nn.Module):
    """An auxiliary classifier, of a size of its own."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, 4, 1), nn.BatchNorm2d(4)
        self.drop, self.fc = nn.Dropout(0.5), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.drop(F.relu(self.norm(self.conv(x))).mean((2, 3))))


class Stage(nn.Module):
    """Its own head is called in train mode alone."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv, self.aux = nn.Conv2d(inputs, outputs, 3, padding=1), Head(outputs)
        self.rate = 0.5

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        x = F.dropout(torch.relu(self.conv(x)), self.rate, self.training)
        return x, self.aux(x) if self.training else None


class Net(nn.Module):
    """Channels 0 to 2 of the first stage and 1 and 4 of the second are masked."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.fc = Stage(3, 8), Stage(8, 6), nn.Linear(6, 3)
        self.spare = nn.Linear(6, 2)
        mask(self.one.conv, [0, 1, 2])
        mask(self.two.conv, [1, 4])
        self.double()

    def forward(self, x: Tensor) -> Any:
        x, first = self.one(x)
        x, second = self.two(x)
        y = self.fc(x.mean((2, 3)))
        return (y, first, second) if self.training else y

    def embed(self, x: Tensor) -> Tensor:
        return self.spare(self.two(self.one(x)[0])[0].mean((2, 3)))


def mask(layer: Any, rows: list[int]) -> None:
    layer.weight.data[rows] = 0
    layer.bias.data[rows] = 0


def images() -> Tensor:
    return torch.randn(2, 3, 6, 6, dtype=torch.float64)


def without_chance(net: Any) -> Any:
    """The network in train mode, its heads without dropout and batch statistics."""
    net.train()
    for stage in (net.one, net.two):
        stage.aux.eval()
        stage.rate = 0.0
    return net


def test_heads_of_train_mode_follow(tmp_path: Path) -> None:
    net, x = Net(), images()
    slim: Any = demask.demask(net, (x,))
    assert slim.one.aux.conv.weight.shape == (4, 5, 1, 1)
    assert slim.two.aux.conv.weight.shape == (4, 4, 1, 1)
    assert slim.training and slim.one.aux.drop.training
    assert type(slim) is Net and type(slim.one) is Stage and type(slim.one.aux) is Head
    expected = without_chance(net)(x)
    for actual in (
        without_chance(slim)(x),
        without_chance(demask.resize(Net(), slim.state_dict()))(x),
        without_chance(demask.expand(slim, net))(x),
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    demask.save(slim, tmp_path / "net.demask")
    loaded = demask.load(tmp_path / "net.demask", into=Net())
    torch.testing.assert_close(without_chance(loaded)(x), expected, rtol=1e-12, atol=1e-12)


def test_training_goes_on_in_heads() -> None:
    net, x = Net(), images()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    slim: Any = demask.demask(net, (x,))
    large = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    demask.carry(slim, optimizer)
    for model, steps in ((net, large), (slim, optimizer)):
        for _ in range(3):
            steps.zero_grad()
            sum(y.square().mean() for y in without_chance(model)(x)).backward()
            steps.step()
    torch.testing.assert_close(without_chance(slim)(x), without_chance(net)(x), rtol=1e-12, atol=0)


def test_modules_that_no_mode_calls_are_named() -> None:
    notes: dict[str, str] = {}
    for result in ("class", "graph"):
        slim: Any = demask.demask(Net(), (images(),), result=result)
        (notes[result],) = (note for note in slim.demasked.notes if "spare" in note)
    assert notes["class"].startswith("spare is not called") and " 6 " in notes["class"]
    assert notes["graph"].endswith("not called in eval mode: one.aux, two.aux, spare")


def test_heads_that_nothing_was_cut_for_are_as_they_were() -> None:
    net = Net()
    for stage in (net.one, net.two):
        nn.init.ones_(stage.conv.weight)
    slim: Any = demask.demask(net, (images(),))
    assert slim.one.aux.conv.weight.shape == (4, 8, 1, 1)
    assert not any("is not called" in note for note in slim.demasked.notes)


class ReadsMore(Net):
    """What no reader of eval mode needs, its head reads."""

    def __init__(self) -> None:
        super().__init__()
        self.two.conv.weight.data[:, 7] = 0


class Fails(Net):
    def forward(self, x: Tensor) -> Any:
        if self.training:
            raise RuntimeError("no training here")
        return super().forward(x)


@pytest.mark.parametrize("kind", [ReadsMore, Fails])
def test_heads_that_cannot_follow_are_named(kind: Callable[[], Net]) -> None:
    net, x = kind(), images()
    slim: Any = demask.demask(net, (x,))
    torch.testing.assert_close(slim.eval()(x), net.eval()(x), rtol=1e-12, atol=1e-12)
    assert slim.one.conv.weight.shape[0] == 5 - (kind is ReadsMore)
    notes = "\n".join(slim.demasked.notes)
    assert "one.aux is not called" in notes and "two.aux is not called" in notes
    assert slim.one.aux.conv.weight.shape == (4, 8, 1, 1)
