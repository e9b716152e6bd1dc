"""Networks over graphs in plain torch: sizes by hand, and the same numbers on other graphs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import demask

HALF = slice(0, 8)
SUMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "index_add": lambda zero, to, y: zero.index_add(0, to, y),
    "scatter_add": lambda zero, to, y: zero.scatter_add(0, to[:, None].expand_as(y), y),
    "in place": lambda zero, to, y: zero.scatter_add_(0, to[:, None].expand_as(y), y),
    "index_put": lambda zero, to, y: zero.index_put((to,), y, accumulate=True),
    "scatter_reduce": lambda zero, to, y: zero.scatter_reduce(0, to[:, None].expand_as(y), y, "sum"),
}


class Convolution(nn.Module):
    """A sum over neighbors, and a bias after it."""

    def __init__(self, i: int, o: int, how: str):
        super().__init__()
        self.lin, self.bias = nn.Linear(i, o, bias=False), nn.Parameter(torch.randn(o))
        self.how = how

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        y = self.lin(x)
        return SUMS[self.how](y.new_zeros(len(x), y.shape[1]), edges[1], y[edges[0]]) + self.bias


class EdgeConv(nn.Module):
    def __init__(self, i: int, o: int):
        super().__init__()
        self.a, self.b = nn.Linear(2 * i, 16), nn.Linear(16, o)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        ends = [x.index_select(0, edge) for edge in (edges[1], edges[0])]
        y = self.b(F.relu(self.a(torch.cat([ends[0], ends[1] - ends[0]], -1))))
        zero = x.new_zeros(len(x), y.shape[1])
        return zero.scatter_reduce(0, edges[1][:, None].expand_as(y), y, "amax", include_self=False)


class Isomorphism(nn.Module):
    def __init__(self, i: int, o: int):
        super().__init__()
        self.eps = nn.Parameter(torch.tensor(0.1))
        self.net = nn.Sequential(nn.Linear(i, 16), nn.ReLU(), nn.Linear(16, o))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        total = torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]])
        return self.net((1 + self.eps) * x + total)


class Aggregators(nn.Module):
    """Mean, maximum, minimum and deviation of the messages (principal neighborhood aggregation)."""

    def __init__(self, i: int, o: int):
        super().__init__()
        self.pre, self.post = nn.Linear(2 * i, 8), nn.Linear(i + 8 * 4, o)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        y = F.relu(self.pre(torch.cat([x[edges[1]], x[edges[0]]], -1)))
        index, zero = edges[1][:, None].expand_as(y), y.new_zeros(len(x), y.shape[1])
        mean, most, least, square = (
            zero.scatter_reduce(0, index, v, how, include_self=False)
            for v, how in ((y, "mean"), (y, "amax"), (y, "amin"), (y * y, "mean"))
        )
        deviation = (square - mean**2).clamp(min=0).add(1e-5).sqrt()
        return self.post(torch.cat([x, mean, most, least, deviation], -1))


class Attention(nn.Module):
    """Attention over the edges of a node: a softmax per segment."""

    def __init__(self, i: int, o: int, heads: int):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(i, o) for _ in range(3))
        self.out, self.heads = nn.Linear(o, o), heads

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        n = len(x)
        q, k, v = (f(x).view(n, self.heads, -1) for f in (self.q, self.k, self.v))
        a = (q[edges[1]] * k[edges[0]]).sum(-1)
        lowest = a.new_full((n, self.heads), float("-inf"))
        top = lowest.scatter_reduce(0, edges[1][:, None].expand_as(a), a, "amax")
        w = (a - top[edges[1]]).exp()
        w = w / w.new_zeros(n, self.heads).index_add(0, edges[1], w)[edges[1]]
        zero = v.new_zeros(n, self.heads, v.shape[2])
        return self.out(zero.index_add(0, edges[1], v[edges[0]] * w[..., None]).flatten(1))


class Two(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x, edges)), edges)


class Pooled(nn.Module):
    """Sum, mean and maximum over the nodes of each of four graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(6, 16), nn.Linear(48, 3)

    def forward(self, x: Tensor, of: Tensor) -> Tensor:
        y = F.relu(self.a(x))
        zero = y.new_zeros(4, 16)
        count = zero[:, 0].index_add(0, of, torch.ones_like(of, dtype=y.dtype)).clamp(min=1)
        total = zero.index_add(0, of, y)
        most = zero.scatter_reduce(0, of[:, None].expand_as(y), y, "amax")
        return self.c(torch.cat([total, total / count[:, None], most], 1))


class Segments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(6, 16), nn.Linear(32, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        y = F.relu(self.a(x))
        parts = [torch.segment_reduce(y, how, lengths=lengths, initial=0) for how in ("sum", "mean")]
        return self.c(torch.cat(parts, 1))


def graph(nodes: int = 10, edges: int = 30) -> tuple[Tensor, Tensor]:
    return torch.randn(nodes, 6), torch.randint(0, nodes, (2, edges))


def members(nodes: int = 12, _: int = 0) -> tuple[Tensor, Tensor]:
    return torch.randn(nodes, 6), torch.randint(4, (nodes,))


def lengths(nodes: int = 12, _: int = 0) -> tuple[Tensor, Tensor]:
    return torch.randn(nodes, 6), torch.tensor([3, 0, nodes - 4, 1])


def dead(*layers: nn.Linear, rows: slice = HALF) -> None:
    with torch.no_grad():
        for layer in layers:
            layer.weight[rows] = 0
            layer.bias[rows] = 0


def convolution(how: str) -> nn.Module:
    net = Two(Convolution(6, 16, how), Convolution(16, 3, how))
    with torch.no_grad():
        net.first.lin.weight[HALF], net.first.bias[HALF] = 0, 0
    return net


def edge_conv() -> nn.Module:
    net = Two(EdgeConv(6, 8), EdgeConv(8, 3))
    dead(net.first.a), dead(net.first.b, rows=slice(0, 4))
    return net


def isomorphism() -> nn.Module:
    net = Two(Isomorphism(6, 8), Isomorphism(8, 3))
    dead(net.first.net[0]), dead(net.first.net[2], rows=slice(0, 4))
    return net


def aggregators() -> nn.Module:
    net = Two(Aggregators(6, 8), Aggregators(8, 3))
    dead(net.first.pre, net.first.post, rows=slice(0, 4))
    return net


def attention() -> nn.Module:
    """Two of four heads have no values."""
    net = Two(Attention(6, 16, 4), Attention(16, 3, 1))
    dead(net.first.v)
    return net


def pooled(net: nn.Module) -> nn.Module:
    dead(net.a)
    return net


# name: the network, its inputs, its parameters counted by hand, and whether its class remains.
NETWORKS = {
    **{how: (lambda how=how: convolution(how), graph, 8 * 6 + 8 + 3 * 8 + 3, True) for how in SUMS},
    "edge_conv": (edge_conv, graph, 8 * 13 + 4 * 9 + 16 * 9 + 3 * 17, True),
    "isomorphism": (isomorphism, graph, 2 + 8 * 7 + 4 * 9 + 16 * 5 + 3 * 17, True),
    "aggregators": (aggregators, graph, 4 * 13 + 4 * (1 + 6 + 16) + 8 * 9 + 3 * (1 + 4 + 32), True),
    "attention": (attention, graph, 3 * 8 * 7 + 16 * 9 + 3 * 3 * 17 + 3 * 4, True),
    "pooled": (lambda: pooled(Pooled()), members, 8 * 7 + 3 * 25, False),  # 16 is in its code
    "segments": (lambda: pooled(Segments()), lengths, 8 * 7 + 3 * 17, True),
}


def check(net: nn.Module, slim: nn.Module, inputs: Callable, sizes: tuple) -> None:
    for size in sizes:
        args = inputs(*size)
        expected, actual = net(*args), slim(*args)
        assert (expected - actual).abs().max() <= 1e-10 * expected.abs().max().clamp(min=1)


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", NETWORKS)
def test_sizes_by_hand(name):
    torch.manual_seed(0)
    make, inputs, parameters, own_class = NETWORKS[name]
    net = make().eval()
    says = nullcontext() if own_class else pytest.warns(UserWarning, match="would keep all")
    with says:
        slim = demask.demask(net, inputs())
    assert sum(p.numel() for p in slim.parameters()) == parameters
    assert (type(slim) is type(net)) is own_class
    check(net, slim, inputs, ((), (4, 51), (17, 2), (17, 30)))


@pytest.mark.parametrize("name", NETWORKS)
def test_constants_are_summed_over_any_number_of_neighbors(name):
    torch.manual_seed(0)
    make, inputs, _, _ = NETWORKS[name]
    net = make().eval()
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.ndim == 1:
                parameter[parameter == 0] = 0.25
    slim = demask.demask(net, inputs(), result="graph")
    check(net, slim, inputs, ((), (17, 30)))
    if name in ("pooled", "segments"):  # rows of the layer are computed nowhere
        assert slim.get_parameter("a.weight").shape == (8, 6)


def test_features_that_nobody_reads():
    torch.manual_seed(0)
    net = Two(Convolution(6, 16, "index_add"), Convolution(16, 3, "index_add")).eval()
    with torch.no_grad():
        net.second.lin.weight[:, HALF] = 0
    slim = demask.demask(net, graph(), result="graph")
    assert slim.get_parameter("first.lin.weight").shape == (8, 6)
    check(net, slim, graph, ((), (17, 30)))


@pytest.mark.parametrize(
    ("how", "initial", "constant", "is_known"),
    [
        ("sum", 0.0, 0.0, True),
        ("sum", 1.0, 0.0, True),
        ("sum", 0.0, 0.5, False),
        ("amax", 2.0, 0.5, True),
        ("amax", 0.0, 0.5, False),
        ("amin", 0.0, 0.5, True),
        ("prod", 0.0, 0.5, True),
        ("prod", 2.0, 1.0, True),
        ("prod", 2.0, 0.5, False),
        ("mean", 0.5, 0.5, True),
        ("mean", 0.0, 0.5, False),
    ],
)
def test_what_any_number_of_values_leaves_alike(how, initial, constant, is_known):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor, of: Tensor) -> Tensor:
            y = self.a(x)
            start = y.new_full((4, 4), initial)
            return self.b(start.scatter_reduce(0, of[:, None].expand_as(y), y, how))

    torch.manual_seed(0)
    net = Net().eval()
    with torch.no_grad():
        net.a.weight[:2], net.a.bias[:2] = 0, constant
    slim = demask.demask(net, members(), result="graph")
    assert slim.get_parameter("b.weight").shape == (3, 2 if is_known else 4)
    check(net, slim, members, ((), (3,), (17,)))
