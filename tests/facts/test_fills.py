"""What a mask hides is never made into NaN: quotients, roots and logarithms where it is off."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

import demask
from demask.errors import Mismatch
from demask.ops import Relation
from fuzz.generate import generate
from graphs import to_graph
from night import at_night
from test_fuzz import broken, chunks
from test_micro import difference

QUOTIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "division": lambda x, y: x / (1 + y),
    "reciprocal": lambda x, y: x * (1 + y).reciprocal(),
    "root": lambda x, y: x * (1 + y).rsqrt(),
    "logarithm": lambda x, y: x * (1 + y).log(),
    "power": lambda x, y: x * (1 + y) ** -0.75,
    "remainder": lambda x, y: torch.remainder(x, 1 + y),
    "whole": lambda x, y: ((9 * x).long() // (1 + y).long()).to(x.dtype),
    "index": lambda x, y: x * torch.arange(3.0).to(x)[(2 / (1 + y)).long()],
}


class Joint(nn.Module):
    """A quotient whose second operand is known where what is read of it meets constants, and is
    not read elsewhere, row by row."""

    def __init__(self, quotient: Callable[..., Tensor]) -> None:
        super().__init__()
        self.quotient = quotient
        self.register_buffer("first", torch.tensor([[0.0, 1, 0], [1, 1, 1], [0, 1, 1]]))
        self.register_buffer("last", torch.tensor([[1.0, 0, 0], [1, 0, 1], [1, 1, 1]]))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.first
        return self.quotient(x, y * y) * self.last


class Side(nn.Module):
    """A quotient over values that are known in some channels, of which some columns are read."""

    def __init__(self, quotient: Callable[..., Tensor]) -> None:
        super().__init__()
        self.quotient = quotient
        self.register_buffer("channels", torch.tensor([0.0, 1, 0, 0]).view(1, 4, 1, 1))
        self.register_buffer("bias", torch.randn(1, 1, 3, 3))
        self.register_buffer("columns", torch.rand(1, 4, 1, 3) * torch.tensor([1.0, 0, 1]))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.channels
        x = x - x.amax(3, keepdim=True) + self.bias
        y = F.avg_pool2d(x * x, (3, 1), 1, (1, 0))
        return self.quotient(x, y) * self.columns + self.bias


def error(net: nn.Module, *shape: int) -> float:
    slim = to_graph(net.double().eval(), (torch.randn(3, *shape).double(),))
    draws = [torch.randn(batch, *shape).double() for batch in (3, 1)]
    return max(difference(net(x), slim(x)) for x in draws)


@pytest.mark.parametrize("name", QUOTIENTS)
def test_no_quotient_of_fills(name):
    torch.manual_seed(0)
    assert error(Joint(QUOTIENTS[name]), 3, 3) <= 1e-10


@pytest.mark.parametrize("name", ["division", *at_night(*list(QUOTIENTS)[1:])])
def test_no_quotient_of_fills_in_a_side_network(name):
    torch.manual_seed(0)
    assert error(Side(QUOTIENTS[name]), 4, 3, 3) <= 1e-10


def test_a_quotient_of_fills_is_noticed(monkeypatch):
    monkeypatch.setattr(Relation, "total", True)
    assert broken(generate(83, fills=True))
    with pytest.raises((AssertionError, Mismatch)):
        error(Side(QUOTIENTS["division"]), 4, 3, 3)


class Corner(nn.Module):
    """What is computed in one place alone is read, beside what is known there, along two axes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("row", torch.tensor([[1.0], [0], [0]]))
        self.register_buffer("read", torch.tensor([[0.0, 1, 0, 0], [1, 1, 0, 1], [1, 0, 0, 1]]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.maximum(x * self.row + 0.3, y) * self.read


def test_fills_of_two_axes():
    net, given = Corner().double(), (torch.randn(5, 3, 4).double(), torch.randn(5, 3, 4).double())
    assert difference(net(*given), to_graph(net, given)(*given)) == 0


class PerImage(nn.Module):
    """Constant channels that differ from image to image enter a padded convolution."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv
        self.register_buffer("scale", torch.tensor([1.0, 0, 1, 0]).view(4, 1, 1))
        self.register_buffer("shift", torch.randn(2, 4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x * self.scale + self.shift)


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_constants_that_differ_from_image_to_image(kind, groups):
    torch.manual_seed(0)
    net, x = PerImage(kind(4, 4, 3, padding=1, groups=groups)).double(), torch.randn(2, 4, 5, 6)
    assert difference(net(x.double()), to_graph(net, (x.double(),))(x.double())) <= 1e-10


class Tokens(nn.Module):
    """Constant features of any number of tokens, summed by a product."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.layer.weight.data[1] = 0

    def forward(self, x: Tensor) -> Tensor:
        return torch.ones_like(x[..., :1]).transpose(1, 2) @ self.layer(x)


def test_sums_of_constants_over_any_number_of_tokens():
    net, sizes = Tokens().double(), ({0: Dim.AUTO, 1: Dim.AUTO},)
    slim = to_graph(net, (torch.randn(3, 5, 4).double(),), dynamic_shapes=sizes)
    for tokens in (5, 7):
        x = torch.randn(2, tokens, 4).double()
        assert difference(net(x), slim(x)) <= 1e-10


class Moments(nn.Module):
    """Variance and mean, by one call, of features of which three are constants."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)
        self.first.weight.data[[1, 3, 4]] = 0

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(self.first(x), 1, correction=1)
        return self.last(variance + mean)


def test_every_output_of_a_call_is_known():
    net, x = Moments().double(), torch.randn(3, 5, 6).double()
    slim = to_graph(net, (x,))
    assert (slim.first.weight.shape, slim.last.weight.shape) == ((3, 6), (2, 3))
    assert difference(net(x), slim(x)) <= 1e-10


class Positions(nn.Module):
    """Two heads that attend to values of the positions alone, and lose another one each."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.values = nn.Conv1d(6, 6, 1), nn.Linear(8, 4)
        self.queries, self.last = nn.Linear(8, 4), nn.Linear(4, 8)
        with torch.no_grad():
            for dead in (self.mix.weight, self.values.weight[0], self.values.bias[0]):
                dead.zero_()
            self.last.weight[:, 3] = 0

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.queries(x), self.queries(x), self.values(self.mix(x)))
        q, k, v = (part.view(-1, 6, 2, 2).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.last(y.transpose(1, 2).reshape(-1, 6, 4))


def test_fills_in_the_order_of_each_head():
    torch.manual_seed(0)
    net = Positions()
    assert error(net, 6, 8) <= 1e-10


class Mixed(nn.Module):
    """A constant in float64 meets values in float32: the product is float64."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).double()
        self.layer.weight.data.zero_()
        self.layer.bias.data.fill_(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x.float() * self.layer(x)


def test_constants_decide_the_dtype():
    net, x = Mixed().eval(), torch.randn(3, 4).double()
    assert difference(net(x), to_graph(net, (x,))(x)) == 0


@pytest.mark.parametrize("seeds", [range(81, 84), *at_night(*chunks(100, 300))], ids=str)
def test_random_masks_meet_quotients(seeds):
    for seed in seeds:
        assert broken(generate(seed, fills=True)) == "", seed


class Masked(nn.Module):
    """Attention of two heads, masked by values of the input; of each head other values are read."""

    def __init__(self):
        super().__init__()
        self.v, self.o = nn.Linear(6, 8), nn.Linear(8, 6)
        self.o.weight.data[:, [0, 1, 6, 7]] = 0

    def forward(self, x):
        q, v = x.unflatten(2, (2, 3)).transpose(1, 2), self.v(x).unflatten(2, (2, 4))
        allowed = (x[:, None, None, :, 0] > -9).expand(-1, -1, x.shape[1], -1)
        made = F.scaled_dot_product_attention(q, q, v.transpose(1, 2), allowed)
        return self.o(made.transpose(1, 2).flatten(2))


def test_a_mask_of_attention_is_no_index():
    """Values that no later layer reads may be anything, behind whichever mask."""
    net, x = Masked().eval(), torch.randn(2, 5, 6)
    slim = to_graph(net, (x,))
    assert slim.get_parameter("v.weight").shape == (4, 6)
    torch.testing.assert_close(slim(x), net(x))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("behind", ["convolution", "resize"])
def test_a_constant_channel_that_is_not_finite_stays_where_it_was(value: float, behind: str):
    """A map of it would be NaN where a window reads padding: 0 times infinity."""
    torch.manual_seed(0)
    first = nn.Conv2d(3, 8, 3)
    with torch.no_grad():
        first.weight[::2] = 0
        first.bias[0] = value
    nets = {"convolution": nn.Conv2d(8, 4, 3, padding=1), "resize": nn.Upsample(scale_factor=2, mode="bilinear")}
    net, x = nn.Sequential(first, nets[behind]).eval(), torch.randn(2, 3, 9, 9)
    expected, found = net(x), to_graph(net, (x,), check=False)(x)
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("positions", [[], [1]])
@pytest.mark.parametrize("x", [torch.arange(14).view(2, 7), torch.arange(14.0).view(2, 7)], ids=["int64", "float32"])
def test_a_constant_is_written_at_any_number_of_positions(x: torch.Tensor, positions: list[int]) -> None:
    class Written(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.clone()
            y[:, positions] = 0.25
            return y

    assert torch.equal(demask.demask(Written(), (x,))(x), Written()(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norms_of_small_numbers_without_a_stated_epsilon(dtype: torch.dtype) -> None:
    """Of half precisions it is that of float32, in which they are computed."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.RMSNorm(16), nn.Linear(16, 3)).eval()
    with torch.no_grad():
        net[0].weight.mul_(1e-3)[::2], net[0].bias.mul_(1e-3)[::2] = 0, 0
    net, x = net.to(dtype), torch.randn(4, 8).to(dtype)
    slim = to_graph(net, (x,))
    assert slim.get_parameter("0.weight").shape == (8, 8)
    torch.testing.assert_close(slim(x), net(x), rtol=0, atol=0.02 if dtype is torch.bfloat16 else 1e-6)
