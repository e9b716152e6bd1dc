"""Negative controls: what looks dead and is not stays, and the answer stays the same."""

import pytest
import torch
from torch import Tensor, nn

import demask

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def seeded():
    """Layers draw their weights from the global generator: a few in a hundred have only dead units
    on inputs as few as these."""
    torch.manual_seed(0)


class Fn(nn.Module):
    """Layers by name, and a forward over them."""

    def __init__(self, forward, **layers):
        super().__init__()
        self.run = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *xs):
        return self.run(self, *xs)


def linear(i: int, o: int, rows=(), value: float = 0.0, bias: float | None = 0.0) -> nn.Linear:
    """A Linear some of whose rows are one value, their bias too (None: kept)."""
    layer = nn.Linear(i, o)
    layer.weight.data[list(rows)] = value
    if bias is not None:
        layer.bias.data[list(rows)] = bias
    return layer


def slimmed(net: nn.Module, *args: Tensor) -> tuple[nn.Module, Tensor, Tensor]:
    net = net.double().eval()
    slim = demask.demask(net, args, result="graph")
    with torch.no_grad():
        return slim, net(*args), slim(*args)


def assert_same(net: nn.Module, *args: Tensor) -> nn.Module:
    """Equal to 1e-10, NaN and Inf at the same places; and not vacuous."""
    slim, expected, found = slimmed(net, *args)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10, equal_nan=True)
    finite = torch.isfinite(expected)
    assert torch.equal(finite, torch.isfinite(found))
    if expected.is_floating_point() and bool(finite.any()):
        with torch.no_grad():
            # Wider than the inputs: what is constant on a few small ones need not be on these.
            other = net(*(4 * torch.randn_like(a) if a.is_floating_point() else a for a in args))
        assert not torch.equal(other[finite], expected[finite]), "the control depends on nothing"
    return slim


def x(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def weights(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_a_filter_that_sums_to_zero_is_alive():
    conv = nn.Conv2d(1, 3, (1, 2), bias=False)
    conv.weight.data[1] = torch.tensor([1.0, -1.0])
    slim = assert_same(nn.Sequential(conv, nn.ReLU(), nn.Conv2d(3, 2, 1)), x(2, 1, 5, 7))
    assert slim.get_parameter("0.weight").shape == (3, 1, 1, 2)


def test_rows_and_columns_that_cancel_are_alive():
    layer, after = nn.Linear(4, 6, bias=False), nn.Linear(6, 2)
    layer.weight.data[2] = torch.tensor([3.0, -3.0, 0.5, -0.5])
    after.weight.data[:, 4] = torch.tensor([2.0, -2.0])
    slim = assert_same(nn.Sequential(layer, nn.Tanh(), after), x(3, 4))
    assert slim.get_parameter("0.weight").shape == (6, 4)


@pytest.mark.parametrize("tiny", [5e-324, 1e-300, -1e-308])
def test_tiny_weights_are_alive(tiny):
    net = nn.Sequential(linear(4, 5), nn.Linear(5, 3)).double()
    net[0].weight.data[2], net[0].bias.data[2] = tiny, 0.0
    slim = demask.demask(net, (x(2, 4),), result="graph")
    assert slim.get_parameter("0.weight").shape == (5, 4)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_rows_that_are_not_finite_are_alive(value):
    net = nn.Sequential(linear(4, 6, [1], value), nn.Linear(6, 3))
    slim = assert_same(net, x(2, 4))
    assert slim.get_parameter("0.weight").shape == (6, 4)


@pytest.mark.parametrize("value", [NAN, INF])
def test_one_element_that_is_not_finite_keeps_its_row(value):
    layer = linear(4, 6, [1, 2])
    layer.weight.data[1, 3] = value
    slim = assert_same(nn.Sequential(layer, nn.ReLU()), x(2, 4))
    assert slim.get_parameter("0.weight").shape == (5, 4)


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_bias_that_is_not_finite_stays(value):
    assert_same(nn.Sequential(linear(4, 6, [1, 2], 0.0, value), nn.ReLU()), x(2, 4))


def test_statistics_that_are_not_finite_stay():
    norm = nn.BatchNorm1d(5)
    norm.running_mean[2], norm.running_var[3] = NAN, INF
    assert_same(nn.Sequential(linear(4, 5, [1]), norm, nn.Linear(5, 5)), x(2, 4))
    assert_same(nn.Sequential(linear(4, 5, [1]), norm, nn.ReLU()), x(2, 4))


def test_a_reciprocal_of_a_dead_channel_is_infinite():
    net = Fn(lambda m, v: 1 / torch.relu(m.a(v)), a=linear(4, 6, [1, 2]))
    _, expected, found = slimmed(net, x(2, 4))
    assert torch.equal(expected, found)
    assert bool(torch.isinf(found[:, 1:3]).all())


WAKING = {
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "cos": torch.cos,
    "softplus": nn.functional.softplus,
    "hardsigmoid": nn.functional.hardsigmoid,
    "log_sigmoid": nn.functional.logsigmoid,
    "plus": lambda v: v + 0.3,
    "reversed": lambda v: 1 - v,
    "power": lambda v: 2.0**v,
    "is zero": lambda v: v + (v == 0).double(),
    "filled": lambda v: v.masked_fill(v == 0, 0.7),
    "where": lambda v: torch.where(v == 0, 0.4, v),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", WAKING)
def test_a_dead_channel_wakes(name):
    """f(0) != 0, and both a Linear and a padded convolution read it."""
    wake = WAKING[name]
    net = Fn(lambda m, v: m.b(wake(m.a(v))), a=linear(4, 6, [1, 2]), b=nn.Linear(6, 3))
    assert_same(net, x(2, 4))
    conv = nn.Conv2d(3, 6, 3, padding=1)
    conv.weight.data[[1, 4]], conv.bias.data[[1, 4]] = 0, 0
    net = Fn(lambda m, v: m.b(wake(m.a(v))), a=conv, b=nn.Conv2d(6, 3, 3, padding=1))
    assert_same(net, x(2, 3, 5, 7))


WHOLE = {
    "softmax": lambda v: v.softmax(1),
    "log_softmax": lambda v: v.log_softmax(1),
    "amax": lambda v: (v - 3).amax(1),
    "max": lambda v: (v - 3).max(1)[0],
    "mean": lambda v: v.exp().mean(1),
    "std": lambda v: v.std(1),
    "argmax": lambda v: (v - 3).argmax(1) + v.sum(1),
    "sort": lambda v: v.sort(1)[0],
    "cumsum": lambda v: v.exp().cumsum(1),
    "norm": lambda v: nn.functional.normalize(v + 1, dim=1),
    "layer norm": lambda v: nn.functional.layer_norm(v, (6,)),
    "product": lambda v: (v + 1).prod(1),
    "logsumexp": lambda v: v.logsumexp(1),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("bias", [0.0, 0.6])
@pytest.mark.parametrize("name", WHOLE)
def test_a_dead_channel_counts_in_the_whole_axis(name, bias):
    whole = WHOLE[name]
    assert_same(Fn(lambda m, v: whole(m.a(v)), a=linear(4, 6, [1, 2], 0.0, bias)), x(3, 4))


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_minus_zero_is_zero(zero):
    layer = linear(4, 6, [0, 3, 5], zero, zero)
    slim = assert_same(nn.Sequential(layer, nn.ReLU(), nn.Linear(6, 2)), x(2, 4))
    assert slim.get_parameter("0.weight").shape == (3, 4)
    assert slim.get_parameter("2.weight").shape == (2, 3)


def test_equal_rows_are_not_dead():
    net = nn.Sequential(linear(4, 6, [1, 2], 0.25, None), nn.ReLU(), nn.Linear(6, 2))
    assert weights(assert_same(net, x(2, 4))) == weights(net)


RUN_TIME = {
    "of the input": lambda m, v: m.b(m.a(v) * (v[:, :1] > 0)),
    "of the activation": lambda m, v: (lambda h: m.b(h * (h > 0.1)))(m.a(v)),
    "learned gate": lambda m, v: m.b(m.a(v) * (torch.sigmoid(m.g(v)) > 0.5)),
    "top values": lambda m, v: (lambda h: m.b(h * (h >= h.topk(2, 1)[0][:, -1:])))(m.a(v)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", RUN_TIME)
def test_a_mask_made_at_run_time_is_no_constant(name):
    net = Fn(RUN_TIME[name], a=nn.Linear(4, 6), b=nn.Linear(6, 3), g=nn.Linear(4, 6))
    slim = assert_same(net, x(5, 4))
    assert slim.get_parameter("a.weight").shape == (6, 4)


def test_a_mask_given_as_an_input_is_no_constant():
    net = Fn(lambda m, v, mask: m.b(m.a(v) * mask), a=nn.Linear(4, 6), b=nn.Linear(6, 3)).double()
    mask = torch.tensor([1.0, 0, 0, 1, 0, 1], dtype=torch.float64)
    slim = demask.demask(net, (x(2, 4), mask), result="graph")
    assert weights(slim) == weights(net)
    with torch.no_grad():
        for other in (mask, 1 - mask):
            torch.testing.assert_close(slim(x(2, 4), other), net(x(2, 4), other), rtol=0, atol=1e-12)


def test_a_zero_input_is_no_constant():
    """The example is all zeros; the network is not."""
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    slim = demask.demask(net, (torch.zeros(2, 4, dtype=torch.float64),), result="graph")
    assert weights(slim) == weights(net)
    torch.testing.assert_close(slim(x(2, 4)), net(x(2, 4)), rtol=0, atol=1e-12)


def test_zeros_that_no_slice_holds_are_kept():
    layer = nn.Linear(6, 6, bias=False)
    layer.weight.data.mul_(torch.eye(6))
    net = nn.Sequential(layer, nn.ReLU(), nn.Linear(6, 2))
    assert weights(assert_same(net, x(3, 6))) == weights(net)


def test_a_dead_channel_with_a_live_reader_elsewhere_is_kept():
    after = nn.Linear(6, 3)
    after.weight.data[:, [1, 2]] = 0
    both = lambda m, h: m.b(h).sum(1) + h.sum(1)  # noqa: E731
    net = Fn(lambda m, v: both(m, m.a(v)), a=nn.Linear(4, 6), b=after)
    slim = assert_same(net, x(2, 4))
    assert slim.get_parameter("a.weight").shape == (6, 4)
    assert slim.get_parameter("b.weight").shape == (3, 4)
