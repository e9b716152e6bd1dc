"""Sums and groups of what was cut differently: constants are counted once, with their sign."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import demask
from test_micro import difference


class Net(nn.Module):
    """Two convolutions of 8 channels, masked each in its own way, biases kept, and what reads
    both."""

    def __init__(self, read: Callable[..., Tensor], dead: Sequence[list[int]], groups: int = 1):
        super().__init__()
        torch.manual_seed(0)
        self.read = read
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)
        self.last = nn.Conv2d(8, 4, 3, groups=groups)
        with torch.no_grad():
            for layer, channels in zip((self.a, self.b), dead, strict=True):
                layer.weight[channels] = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.read(self.a(x), self.b(x)))


def reduced(net: nn.Module) -> nn.Module:
    """What demask makes of it: smaller, and the same."""
    net, x = net.double().eval(), torch.randn(2, 3, 9, 9).double()
    slim = demask.demask(net, (x,), check=False, result="graph")
    assert difference(net(x), slim(x)) <= 1e-12
    assert slim.demasked.after.parameters < slim.demasked.before.parameters
    return slim


@pytest.mark.parametrize(
    "read",
    [
        lambda a, b: a - b,
        lambda a, b: b - a,
        lambda a, b: a + b,
        lambda a, b: torch.add(a, b, alpha=3),
        lambda a, b: torch.sub(a, b, alpha=0.5),
    ],
    ids=["a - b", "b - a", "a + b", "a + 3 b", "a - b / 2"],
)
@pytest.mark.parametrize("dead", [([0, 1, 5], [2, 6, 7]), ([0, 1, 2, 3], [4, 5, 6, 7])], ids=str)
def test_sums_of_operands_cut_differently(read: Callable[..., Tensor], dead: list[list[int]]):
    reduced(Net(read, dead))


def test_a_multiple_is_not_the_operand_itself():
    net = Net(lambda a, b: torch.add(a * 0.0, b, alpha=2), ([], [1, 2]))
    with torch.no_grad():
        net.a.weight.zero_(), net.a.bias.zero_()
    reduced(net)


@pytest.mark.parametrize("first", [[0, 1], [2, 3]])
def test_a_constant_beside_a_group_is_counted_once(first: list[int]):
    reduced(Net(lambda a, b: a, ([*first, 4], []), groups=2))


class Heads(nn.Module):
    """Attention of two heads of four channels; of its values channels 0, 1 and 5 are constant."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.last = (nn.Linear(8, 8) for _ in range(4))
        with torch.no_grad():
            self.v.weight[[0, 1, 5]] = 0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        made = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.last(made.transpose(1, 2).flatten(2))


def test_constants_of_one_head_leave_the_product_behind_attention():
    """One call makes all heads alike: channel 0 is computed since channel 4 is, and not read."""
    net, x = Heads().double().eval(), torch.randn(2, 5, 8).double()
    slim = demask.demask(net, (x,), check=False, result="graph")
    assert difference(net(x), slim(x)) <= 1e-12
    assert slim.get_parameter("last.weight").shape[1] == 5
