"""The caller's class always comes back: every call stays one call, on smaller tensors."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import demask
import micro_recurrent  # noqa: F401  (their networks join MICROS)
import micro_sequences  # noqa: F401
from demask.graph.isolation import in_isolation
from demask.graph.provenance import Cut
from demask.ops import TABLE
from demask.shrink.layout.class_layout import FixedSizes
from demask.shrink.pipeline import canonicalize, programs_of, shrink_program
from micro import MICROS, Micro
from test_micro import difference

N = 16


def norm(n: int = N) -> nn.BatchNorm2d:
    """A norm with shifts, so that a dead channel is a constant other than 0."""
    layer = nn.BatchNorm2d(n)
    for values in (layer.weight, layer.bias, layer.running_mean):
        nn.init.uniform_(values, 0.3, 0.9)  # type: ignore[arg-type]
    return layer


def conv(i: int, o: int, **options: Any) -> nn.Conv2d:
    """A padded convolution of which every other output channel is dead."""
    layer = nn.Conv2d(i, o, 3, padding=1, **options)
    with torch.no_grad():
        dead = torch.randperm(o)[: o // 2]
        layer.weight[dead] = 0
        if layer.bias is not None:
            layer.bias[dead] = 0
    return layer


class Hard(nn.Module):
    """Two streams with shifts that meet, and one thing that is hard to cut between them and the
    last layer."""

    def __init__(self, kind: str):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        more = {"reflect": {"padding_mode": "reflect"}, "circular": {"padding_mode": "circular"}}
        self.a, self.n = conv(3, N), norm()
        wide, groups = 2 * N if kind == "glu" else N, 4 if kind == "groups" else 1
        self.b, self.m = conv(N, wide, bias=False, groups=groups), norm(wide)
        width = {"cat": 2 * N, "half": N // 2, "shuffle": N // 4}.get(kind, N)
        self.c = conv(width, N, **more.get(kind, {}))
        self.t = nn.ConvTranspose2d(N, N, 3, 2, 1)
        self.g = nn.GroupNorm(4, N)
        self.layer_norm, self.lstm = nn.LayerNorm(N), nn.LSTM(N, N, batch_first=True)
        self.slope, self.scale = nn.PReLU(N), nn.Parameter(torch.rand(1, N, 1, 1) + 0.5)
        self.last = nn.Linear({"flat": N * 64, "sum": 1}.get(kind, N), 4)
        with torch.no_grad():
            self.last.weight[:, ::5] = 0

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.n(self.a(x)))
        return AFTER[self.kind](self, MEETS.get(self.kind, residual)(self, x))


def residual(net: Hard, x: Tensor) -> Tensor:
    return x + F.relu(net.m(net.b(x)))


def pooled(net: Hard, x: Tensor) -> Tensor:
    return net.last(net.c(x).mean((2, 3)))


def inner(read: Callable[[Hard, Tensor], Tensor]) -> Callable[[Hard, Tensor], Tensor]:
    return lambda net, x: pooled(net, read(net, x))


def features(read: Callable[[Hard, Tensor], Tensor]) -> Callable[[Hard, Tensor], Tensor]:
    return lambda net, x: net.last(read(net, net.c(x).mean((2, 3))))


MEETS: dict[str, Callable[[Hard, Tensor], Tensor]] = {
    "glu": lambda net, x: F.glu(net.m(net.b(x)), 1),
    "gelu": lambda net, x: x + F.gelu(net.m(net.b(x))),
    "quotient": lambda net, x: x / (1 + F.softplus(net.m(net.b(x)))),
    "softmax": lambda net, x: F.softmax(net.m(net.b(x)), 1),
    "group_norm": lambda net, x: x + F.relu(net.g(net.b(x))),
    "cat": lambda net, x: torch.cat([x, F.relu(net.m(net.b(x)))], 1),
    "twice": lambda net, x: F.relu(net.m(net.b(F.relu(net.m(net.b(x)))))),
}
AFTER: dict[str, Callable[[Hard, Tensor], Any]] = {
    "plain": pooled,
    "glu": pooled,
    "gelu": pooled,
    "quotient": pooled,
    "softmax": pooled,
    "group_norm": pooled,
    "cat": pooled,
    "twice": pooled,
    "groups": pooled,
    "reflect": pooled,
    "circular": pooled,
    "transposed": inner(lambda net, x: net.t(x)),
    "pad": inner(lambda net, x: F.pad(x, (1, 1, 1, 1))),
    "mean_pool": inner(lambda net, x: F.avg_pool2d(x, 3, 1, 1)),
    "max_pool": inner(lambda net, x: F.max_pool2d(x, 3, 2, 1)),
    "half": inner(lambda net, x: x.chunk(2, 1)[0] * x.chunk(2, 1)[1]),
    "shuffle": inner(lambda net, x: F.pixel_shuffle(x, 2)),
    "slope": inner(lambda net, x: net.slope(x)),
    "scale": inner(lambda net, x: x * net.scale),
    "halves_swapped": inner(lambda net, x: torch.cat([x[:, 4:], x[:, :4]], 1)),
    "reversed": inner(lambda net, x: x[:, torch.arange(N - 1, -1, -1)]),
    "like": inner(lambda net, x: x + torch.ones_like(x)),
    "layer_norm": features(lambda net, y: net.layer_norm(y)),
    "rms": features(lambda net, y: y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)),
    "lstm": lambda net, x: net.last(net.lstm(net.c(x).flatten(2).transpose(1, 2))[0][:, -1]),
    "sorted": features(lambda net, y: y.sort(-1)[0]),
    "flat": lambda net, x: net.last(F.relu(net.c(x)).flatten(1)),
    "sum": lambda net, x: net.last(net.c(x).flatten(1).sum(1, keepdim=True)),
    "two_outputs": lambda net, x: (pooled(net, x), x),
}


def graphs(network: nn.Module) -> list[str]:
    return [path for path, part in network.named_modules() if isinstance(part, fx.GraphModule)]


def check_class(net: nn.Module, args: tuple[Any, ...]) -> Any:
    """The class result: of the class, without graphs, exact, at another batch as well."""
    slim: Any = demask.demask(net, args, result="class")
    assert type(slim) is type(net) and not graphs(slim) and not slim.demasked.effects
    for a, b in zip(flat(net(*args)), flat(slim(*args)), strict=True):
        assert difference(a, b) <= 1e-12
    assert count(slim) <= count(net)
    return slim


def flat(value: Any) -> list[Any]:
    return [x for x in torch.utils._pytree.tree_leaves(value) if isinstance(x, Tensor)]


def stored(network: nn.Module) -> int:
    """Parameters and floating-point buffers, as reports count them."""
    return count(network) + sum(b.numel() for b in network.buffers() if b.is_floating_point())


def count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize("kind", AFTER)
def test_hard_networks_come_back(kind: str) -> None:
    net, x = Hard(kind).double().eval(), torch.randn(2, 3, 8, 8).double()
    slim = check_class(net, (x,))
    assert count(slim) < count(net)
    other = torch.randn(3, 3, 8 if kind == "flat" else 11, 8).double()
    for a, b in zip(flat(net(other)), flat(slim(other)), strict=True):
        assert difference(a, b) <= 1e-12


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", MICROS, ids=lambda case: case.name)
def test_micro_networks_come_back(case: Micro) -> None:
    torch.manual_seed(3)
    model, args = case.make()
    args = tuple(a.double() if a.is_floating_point() else a for a in args)
    check_class(model.double().eval(), args)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", MICROS, ids=lambda case: case.name)
@in_isolation
def test_every_call_stays_one_call(case: Micro) -> None:
    """The law of the layouts: the calls of the program, on tensors that are no larger, and nothing
    that restores a shape."""
    torch.manual_seed(3)
    model, args = case.make()
    program = next(programs_of(model.eval(), args, None, None))
    _, record = shrink_program(program, TABLE, fixed=FixedSizes(modules=frozenset({""})))
    assert record.after.parameters == record.before.parameters
    before = canonicalize(program, TABLE, views=False)
    after, record = shrink_program(program, TABLE, fixed=FixedSizes())
    assert not record.effects and record.after.parameters <= record.before.parameters

    def families(graph: fx.Graph) -> list[str]:
        calls = [node for node in graph.nodes if node.op == "call_function"]
        names = [
            str(node.target).partition(".default")[0] for node in calls if isinstance(node.meta.get("val"), Tensor)
        ]
        return sorted(name.replace("reshape", "view").replace("_unsafe_", "") for name in names)

    if record.after.parameters < record.before.parameters:  # else the program as it was captured
        assert families(after.graph) == families(before.graph)


def test_one_channel_carries_the_constants_of_all() -> None:
    """Constants that enter a padded convolution need one channel, and nothing at the border."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 1), norm(8), nn.ReLU(), nn.Conv2d(8, 5, 3, padding=1))
    net[0].weight.data[:5], net[0].bias.data[:5] = 0, 0
    net, x = net.double().eval(), torch.randn(2, 3, 6, 6).double()
    slim = check_class(net, (x,))
    assert slim[0].out_channels == 3 + 1  # without a carrier, all 8 would be computed


def test_constants_of_a_weight_with_two_readers_stay() -> None:
    """A kernel that two calls read cannot carry the constants of one of them."""
    torch.manual_seed(0)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.n, self.b = conv(3, 8), norm(8), nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.b(self.n(self.a(x))))

    check_class(Twice().double().eval(), (torch.randn(2, 3, 6, 6).double(),))


@pytest.mark.parametrize("first", [0, 1])
def test_units_of_which_every_other_is_a_gate_are_cut_in_pairs(first: int) -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.up, self.down = nn.Linear(6, 16), nn.Linear(8, 4)
            with torch.no_grad():
                self.up.weight[[2, 3, 6, 7 - first]] = self.up.bias[[2, 3, 6, 7 - first]] = 0

        def forward(self, x: Tensor) -> Tensor:
            x = self.up(x)
            return self.down(x[..., 1::2] * torch.sigmoid(x[..., ::2]))

    slim = check_class(Gated().double().eval(), (torch.randn(2, 6).double(),))
    # Unit 3 has a gate of which a zero is left, unless it is 0 itself.
    assert (slim.up.out_features, slim.down.in_features) == ((14, 7), (12, 6))[not first]


class Joined(nn.Module):
    """A value that a join and another layer read; the layer behind the join ignores some of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(6, 8)
        self.last, self.other = nn.Linear(16, 3), nn.Linear(8, 3)
        with torch.no_grad():
            self.a.weight[4:], self.a.bias[4:] = 0, 0
            self.last.weight[:, :2] = 0

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        return self.last(torch.cat([a, self.b(x)], -1)) + self.other(a)


def test_joined_parts_have_what_other_readers_need() -> None:
    slim = check_class(Joined().double().eval(), (torch.randn(2, 6).double(),))
    assert (slim.a.out_features, slim.last.in_features, slim.other.in_features) == (4, 12, 4)


def grouped(ins: list[int], outs: list[int], groups: int, **options: Any) -> nn.Sequential:
    """A grouped convolution of 8 channels between two others. ins, outs: its dead channels; those
    that it reads are constants other than 0."""
    torch.manual_seed(0)
    middle = nn.Conv2d(8, 8, 3, groups=groups, **options)
    net = nn.Sequential(nn.Conv2d(3, 8, 1), norm(8), nn.ReLU(), middle, nn.ReLU(), nn.Conv2d(8, 2, 1))
    with torch.no_grad():
        net[0].weight[ins] = net[0].bias[ins] = middle.weight[outs] = 0
        net[1].bias[:] = 1
        if middle.bias is not None:
            middle.bias[outs] = 0
    return net.double().eval()


def test_groups_have_equally_many_channels() -> None:
    net = grouped([0, 1, 2, 4], [0, 4], 2)  # three of the first group are dead, one of the second
    slim = check_class(net, (torch.randn(2, 3, 8, 8).double(),))
    # One group of 4 inputs and 6 outputs would have 216 weights, two of 3 and 3 have 162.
    assert (slim[0].out_channels, tuple(slim[3].weight.shape), slim[3].groups) == (6, (6, 3, 3, 3), 2)


def test_uneven_groups_become_one() -> None:
    net = grouped([0, 1, 2, 4], [0, 1, 2, 4], 2)
    slim = check_class(net, (torch.randn(2, 3, 8, 8).double(),))
    # Two groups of 3 and 3, filled up, would have 162 weights; one of 4 and 4 has 144.
    assert (slim[0].out_channels, tuple(slim[3].weight.shape), slim[3].groups) == (4, (4, 4, 3, 3), 1)


def test_one_channel_of_each_group_carries_its_constants() -> None:
    x, other = torch.randn(2, 3, 8, 8).double(), torch.randn(3, 3, 5, 9).double()
    net = grouped([0, 1, 4, 5], [], 2, padding=1, bias=False)
    slim = check_class(net, (x,))
    assert slim[0].out_channels == 2 * (2 + 1) and tuple(slim[3].weight.shape) == (8, 3, 3, 3)
    assert difference(net(other), slim(other)) <= 1e-12
    # Of a group without live outputs nothing stays, of one with constants alone their carrier.
    slim = check_class(grouped([0, 1, 2, 3], [4, 5, 6, 7], 2, padding=1, bias=False), (x,))
    assert tuple(slim[3].weight.shape) == (4, 1, 3, 3)


def test_biases_of_groups_take_constants() -> None:
    x = torch.randn(2, 3, 8, 8).double()
    for result in ("class", "graph"):
        slim: Any = demask.demask(grouped([0, 4], [], 2, bias=False), (x,), result=result)
        assert not slim.demasked.effects and slim.get_parameter("3.bias").shape == (8,)
        assert tuple(slim.get_parameter("3.weight").shape) == (8, 3, 3, 3)


class Sized(nn.Module):
    """A module whose code says how many channels it has."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 32), nn.Linear(32, 6)
        with torch.no_grad():
            self.a.weight[3:20], self.a.bias[3:20] = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).unflatten(-1, (4, 8)).tanh().flatten(-2))


def test_a_module_whose_code_says_sizes_keeps_them_alone() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.sized, self.a, self.b = Sized(), nn.Linear(6, 32), nn.Linear(32, 4)
            with torch.no_grad():
                self.a.weight[3:20], self.a.bias[3:20] = 0, 0

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(self.sized(x)).relu())

    slim = check_class(Two().double().eval(), (torch.randn(2, 6).double(),))
    assert slim.a.out_features == 15 and slim.sized.a.out_features == 32


class TwoBlocks(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = conv(3, N)
        self.blocks = nn.Sequential(*(Block() for _ in range(2)))
        self.last = nn.Linear(N, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.stem(x)).mean((2, 3)))


def test_blocks_become_graphs_where_that_saves_much() -> None:
    net, x = TwoBlocks(4).double().eval(), torch.randn(2, 3, 8, 8).double()
    with pytest.warns(UserWarning, match=r"own class, with 2 of its modules as graphs: [\d,]+ par"):
        slim: Any = demask.demask(net, (x,))
    assert type(slim) is TwoBlocks and graphs(slim) == ["blocks.0", "blocks.1"]
    sizes = [count(demask.demask(net, (x,), result=result)) for result in ("graph", "class")]
    assert sizes[0] < count(slim) < sizes[1] < count(net)
    assert difference(net(x), slim(x)) <= 1e-12 and len(slim.demasked.graph_reasons) == 2
    saved = slim.demasked.before.parameters - slim.demasked.after.parameters
    assert saved == sum(p.numel() for p in net.parameters()) - sum(p.numel() for p in slim.parameters())

    shown = demask.report(slim)
    assert sum(shown.removed.values()) == saved and shown.added == shown.uncalled == 0

    for method in ("generate", "save_pretrained"):
        other: Any = TwoBlocks(4).double().eval()
        setattr(other, method, lambda x: x)
        groups = "same channels of blocks.0.b, stem and blocks.1.b; demask.prune.align does so where"
        with pytest.warns(UserWarning, match=f"own class: .*{groups}"):
            assert not graphs(demask.demask(other, (x,)))


@pytest.mark.parametrize("method", ["", "save_pretrained"])
def test_a_graph_comes_in_place_of_a_class_that_keeps_all_macs(method: str) -> None:
    """Positions that nobody reads cost no parameters."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.read = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(16, 2)
            nn.init.zeros_(self.read.weight[:, 4:])

        def forward(self, x: Tensor) -> Tensor:
            return self.read(self.b(F.relu(self.a(x))).mT)

    net: Any = Net().double().eval()
    if method:
        setattr(net, method, lambda: None)
    x = torch.randn(2, 16, 6).double()
    text = "" if method else "would keep all 3,456 MACs, of which the graph has 864"
    with pytest.warns(UserWarning, match=text) if text else contextlib.nullcontext():
        slim: Any = demask.demask(net, (x,))
    assert (type(slim) is Net) == bool(method)
    assert difference(net(x), slim(x)) <= 1e-12


def test_what_comes_back_is_chosen_by_parameters_or_by_macs() -> None:
    """The blocks have most of the MACs, and few of the parameters."""
    net, x = TwoBlocks(8000).double().eval(), torch.randn(2, 3, 16, 16).double()
    slim: Any = demask.demask(net, (x,))
    assert type(slim) is TwoBlocks and not graphs(slim)
    with pytest.warns(UserWarning, match=r"2 of its modules as graphs: [\d,]+ MACs, where one"):
        fast: Any = demask.demask(net, (x,), objective="macs")
    assert type(fast) is TwoBlocks and graphs(fast) == ["blocks.0", "blocks.1"]
    assert fast.demasked.after.macs < 0.8 * slim.demasked.after.macs
    assert difference(net(x), fast(x)) <= 1e-12
    with pytest.raises(demask.BadInput, match="'parameters' or 'macs', got 'speed'"):
        demask.demask(net, (x,), objective="speed")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.b, self.m = (conv(N, N, bias=False), norm(), conv(N, N, bias=False), norm())

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.m(self.b(F.relu(self.n(self.a(x))))))


class Branches(nn.Module):
    """Code that pads images of odd sizes, or takes another layer for larger ones."""

    def __init__(self, other: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.other = other
        self.a, self.b, self.c = conv(3, N), conv(N, 4), conv(N, 4)
        self.b.weight.data[:, :3] = 0

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] % 2:
            x = F.pad(x, (0, 1))
        return self.c(self.a(x)) if self.other and x.shape[-1] > 15 else self.b(self.a(x))


def test_code_that_branches_by_sizes_is_compared_at_other_sizes() -> None:
    x = torch.randn(2, 3, 8, 8).double()
    shapes = {"x": {0: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO}}
    net = Branches(False).double().eval()
    slim: Any = demask.demask(net, (x,), dynamic_shapes=shapes)
    assert type(slim) is Branches and slim.a.out_channels < N
    odd = torch.randn(1, 3, 8, 13).double()
    assert difference(net(odd), slim(odd)) <= 1e-12
    net = Branches(True).double().eval()
    slim = demask.demask(net, (x,), dynamic_shapes=shapes, result="class")
    wide = torch.randn(1, 3, 8, 17).double()
    assert type(slim) is Branches and difference(net(wide), slim(wide)) <= 1e-12
    assert math.isclose(count(slim), count(net))


class FrozenNorm(nn.Module):
    """A norm that is never trained, as detectors have it: buffers that its code combines."""

    def __init__(self, size: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(size) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, mean, variance = (buffer.reshape(1, -1, 1, 1) for buffer in self._buffers.values())
        scale = weight * (variance + 1e-5).rsqrt()
        return x * scale + (bias - mean * scale)


def test_buffers_that_code_reshapes_and_combines_are_cut_with_their_convolution() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 3), FrozenNorm(6), nn.ReLU(), nn.Conv2d(6, 4, 1))
    with torch.no_grad():
        net[0].weight[[1, 4]] = net[0].bias[[1, 4]] = 0
    x = torch.randn(2, 3, 9, 9)
    slim = demask.demask(net.eval(), (x,), result="class")
    assert [tuple(t.shape) for t in slim[1].state_dict().values()] == [(4,)] * 4
    assert torch.equal(slim[1].running_var, net[1].running_var[[0, 2, 3, 5]])
    torch.testing.assert_close(slim(x), net(x))


def test_the_cut_of_a_tensor_that_another_is_computed_from() -> None:
    vector = Cut("", (1, 6, 1, 1), (None, (0, 2), None, None))
    assert vector.along((6,)) == ((0, 2),)
    assert vector.along((1, 6, 1, 1)) == vector.kept
    table = Cut("", (1, 5, 6), (None, None, (0, 2)))
    assert table.along((9, 6)) == (None, (0, 2))
    assert table.along((9, 7)) is None
    assert Cut("", (5, 6), ((1,), (0, 2))).along((1, 6)) == (None, (0, 2))
