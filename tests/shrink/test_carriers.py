"""Channels that stand for others: what no input decides needs few channels, at every image size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import demask
from demask.facts.carriers import CarriedChannels, _read_taps
from test_class_layout import check_class
from test_micro import difference

SIZES = ((9, 9), (14, 7), (1, 1), (2, 5), (1, 3), (4, 4))  # of images


class Padded(nn.Module):
    """Half of 32 channels are constants that enter windows which read zeros, of each channel."""

    def __init__(self, kind: str, kernel: int = 3, stride: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.first, self.norm = kind, nn.Conv2d(3, 32, 1), nn.BatchNorm2d(32)
        self.each = nn.Conv2d(32, 32, kernel, stride, kernel // 2, groups=32, bias=False)
        self.after, self.last = nn.BatchNorm2d(32), nn.Conv2d(32, 4, 1, bias=False)
        self.reduce, self.excite = nn.Conv2d(32, 6, 1), nn.Conv2d(6, 32, 1)
        self.other = nn.Conv2d(32, 4, 3, padding=1)
        with torch.no_grad():
            self.first.weight[::2] = self.first.bias[::2] = self.excite.weight[::4] = 0
            for norm in (self.norm, self.after):
                norm.bias.uniform_(0.5, 1)
                norm.weight.uniform_(0.5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        if self.kind == "pool":
            return self.last(F.avg_pool2d(x, 3, 1, 1)) + self.other(x)
        x = self.after(self.each(x))
        x = F.silu(x) if self.kind == "silu" else x
        if self.kind == "excite":
            scale = F.relu(self.reduce(x.mean((2, 3), keepdim=True)))
            x = x * torch.sigmoid(self.excite(scale))
        return self.other(x) if self.kind == "padded" else self.last(x)


@pytest.mark.parametrize(
    ("kind", "kernel", "stride", "channels"),
    [
        # One channel carries constants and their averages alike.
        ("pool", 3, 1, 16 + 1),
        # A kernel of 9 taps has 9 responses, of which a bias takes the one that is a constant; 4
        # more stay, of which combinations would let rounding grow.
        ("depthwise", 3, 1, 16 + 8 + 4),
        ("depthwise", 3, 2, 16 + 8 + 4),
        ("depthwise", 1, 1, 16),
        # No bias takes constants before padding.
        ("padded", 3, 1, 16 + 9 + 3),
        # Along an axis 4 kinds of places, two neighbors or one or none: 16, a bias takes one.
        ("silu", 3, 1, 16 + 15 + 1),
        # Of the constants' channels, every other one has a scale that no input decides: 8 of them.
        ("excite", 3, 1, 16 + 16),
    ],
)
def test_channels_are_carried(kind: str, kernel: int, stride: int, channels: int) -> None:
    net, x = Padded(kind, kernel, stride).double().eval(), torch.randn(2, 3, 9, 9).double()
    slim: Any = demask.demask(net, (x,), dynamic_shapes="all", result="class")
    assert type(slim) is Padded and slim.first.out_channels == channels
    graph: Any = demask.demask(net, (x,), dynamic_shapes="all", result="graph")
    for size in SIZES:
        other = torch.randn(3, 3, *size).double()
        for small in (slim, graph):
            assert difference(net(other), small(other)) <= 1e-12, size


class Shared(Padded):
    """Two calls read the channels that constants with borders are among. other: which of them the second one,
    a second output, reads."""

    def __init__(self, other: slice | Tensor) -> None:
        super().__init__("depthwise")
        self.channels, self.second = other, nn.Conv2d(len(torch.arange(32)[other]), 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.after(self.each(self.norm(self.first(x))))
        return self.last(x), self.second(x[:, self.channels])


@pytest.mark.parametrize(
    "other", [slice(None), slice(8), slice(8, 16), slice(0, 32, 2), slice(1, 32, 2), torch.tensor([4, 2, 9, 30])]
)
def test_a_call_reads_the_carriers_that_another_one_chose(other: slice | Tensor) -> None:
    net, x = Shared(other).double().eval(), torch.randn(2, 3, 9, 9).double()
    graph: Any = demask.demask(net, (x,), dynamic_shapes="all", result="graph", check=False)
    for size in SIZES:
        image = torch.randn(3, 3, *size).double()
        assert difference(net(image), graph(image)) <= 1e-12, size


class Sparse(nn.Module):
    """Two blocks of a convolution of each channel and sparse ones that sum them, of which some outputs, those that
    nothing reads, have weights of carriers that others lack."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Conv2d(3, 32, 1)
        self.each = nn.ModuleList(nn.Conv2d(32, 32, 3, padding=1, groups=32) for _ in range(2))
        self.sums = nn.ModuleList(nn.Conv2d(32, 32, 1) for _ in range(2))
        self.skip, self.last = nn.Conv2d(32, 4, 1), nn.Conv2d(32, 4, 1)
        with torch.no_grad():
            for conv in (self.first, *self.each, *self.sums, self.skip, self.last):
                conv.weight[torch.rand_like(conv.weight) < 0.9] = 0

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.each[0](self.first(x)))
        skip = self.skip(x)
        return self.last(F.hardswish(self.each[1](self.sums[0](x)) * self.sums[1](x))) + skip


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("result", ["class", "graph"])
def test_carriers_are_read_by_outputs_that_are_computed(seed: int, result: Any) -> None:
    net, x = Sparse(seed).double().eval(), torch.randn(2, 3, 9, 9).double()
    slim: Any = demask.demask(net, (x,), dynamic_shapes="all", result=result, check=False)
    for size in SIZES[:3]:
        image = torch.randn(3, 3, *size).double()
        assert difference(net(image), slim(image)) <= 1e-12, size


def test_one_image_size_has_fewer_kinds_of_places() -> None:
    net = Padded("silu").double().eval()
    slim = check_class(net, (torch.randn(2, 3, 9, 9).double(),))
    assert slim.first.out_channels == 16 + 8 + 3  # 9 kinds of places


def test_a_graph_has_no_more_channels_than_the_class() -> None:
    net, x = Padded("pool").double().eval(), torch.randn(2, 3, 9, 9).double()
    graph: Any = demask.demask(net, (x,), result="graph")
    assert graph.get_parameter("first.weight").shape[0] <= 16 + 1


def test_kinds_of_places() -> None:
    def places(*window: Any) -> set[str]:
        return {"".join(map(str, row)) for row in _read_taps(*window).int().tolist()}

    assert places(3, 1, 1, 1, 9) == {"011", "111", "110"}
    assert places(3, 1, 1, 1, None) == {"011", "111", "110", "010"}
    assert places(3, 2, 1, 1, 8) == {"011", "111"}
    assert places(3, 1, "same", 2, 5) == places(3, 1, 2, 2, 5) == {"011", "111", "110"}
    assert places(2, 1, "same", 1, 5) == {"11", "10"}
    assert places(3, 1, "valid", 1, None) == {"111"}


def test_carriers_span_what_is_dropped() -> None:
    values = torch.tensor([[1.0, 2], [2, 4], [0, 3], [1, 1], [5, 5]]).double()
    valid = torch.tensor([[True, True, True, True, False]])
    live = torch.tensor([True, False, False, False, False])
    channels = CarriedChannels(1, values[None], valid, None, False, False)
    assert channels.lacking(live).tolist() == [False, False, True, False, False]
    stays = live | channels.lacking(live)
    ((_, dropped, carriers, factors, constant),) = channels.combinations(stays)
    assert dropped.tolist() == [1, 3] and not bool(constant.any())
    torch.testing.assert_close(factors @ values[carriers], values[dropped])
    biased = CarriedChannels(1, values[None], valid, None, True, False)
    assert not bool(biased.lacking(live).any())
    ((_, dropped, carriers, factors, constant),) = biased.combinations(live)
    torch.testing.assert_close(factors @ values[carriers] + constant[:, None], values[dropped])


@pytest.mark.parametrize("seed", range(20))
def test_combinations_do_not_grow_rounding(seed: int) -> None:
    """Carriers that are nearly parallel span what others need with factors of 1e8: such channels
    stay, as those do of which a combination is much larger in its summands."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(1, 40, 3, generator=draw, dtype=torch.float64)
    rows = rows @ torch.randn(1, 3, 25, generator=draw, dtype=torch.float64)
    rows[0, 1] = rows[0, 0] * 2 + rows[0, 2] * 1e-8
    rows[0, 2:9] = rows[0, 0] + rows[0, 2:9] * 1e-3
    valid = torch.rand(1, 40, generator=draw) < 0.9
    channels = CarriedChannels(1, rows, valid, None, bool(seed % 2), False)
    live = torch.zeros(40, dtype=torch.bool)
    live[: 1 + seed % 4] = True
    live |= channels.lacking(live)
    assert not bool(channels.lacking(live).any())
    assert int(live.sum()) < 20, "hardly any channel goes"
    for _, dropped, carriers, factors, constant in channels.combinations(live):
        summands = factors.abs() @ rows[0, carriers].norm(dim=1)
        assert float((summands / rows[0, dropped].norm(dim=1)).max()) <= 4
        made = factors @ rows[0, carriers] + constant[:, None]
        torch.testing.assert_close(made, rows[0, dropped], rtol=1e-9, atol=1e-9)
