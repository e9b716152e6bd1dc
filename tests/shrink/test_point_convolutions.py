"""Positions that nobody reads, in no progression, through convolutions without a neighborhood."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import demask
from demask.ops import TABLE
from demask.shrink.layout.layout_analysis import LayoutAnalysis
from demask.shrink.pipeline import canonicalize, capture_program
from demask.shrink.rewrites.point_convolutions import carry_positions

DIMS = {
    1: ((64,), nn.Conv1d, nn.BatchNorm1d),
    2: ((8, 8), nn.Conv2d, nn.BatchNorm2d),
    3: ((2, 4, 8), nn.Conv3d, nn.BatchNorm3d),
}


class Net(nn.Module):
    """Convolutions of one position, a norm and a sum; of 64 positions 24 are read."""

    def __init__(self, dims: int, how: str, *, neighbors: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.size, conv, norm = DIMS[dims]
        self.how, self.keep = how, sorted(torch.randperm(64)[:24].tolist())
        self.register_buffer("mask", torch.zeros(64).index_fill(0, torch.tensor(self.keep), 1.0))
        self.a = conv(5, 8, 3, padding=1) if neighbors else conv(5, 8, 1)
        self.norm, self.b, self.head = norm(8), conv(8, 8, 1), nn.Linear(64, 3)
        with torch.no_grad():
            self.head.weight *= self.mask

    def forward(self, x):
        y = torch.relu(self.a(x))
        y = (self.b(torch.sigmoid(self.norm(y))) + y).flatten(2)
        if self.how == "gather":
            return y[:, :, self.keep]
        return y * self.mask if self.how == "mask" else self.head(y)


def share(slim: nn.Module) -> float:
    return slim.demasked.after.macs / slim.demasked.before.macs


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("how", ["gather", "mask", "reader"])
def test_only_positions_that_are_read_are_computed(dims, how):
    net = Net(dims, how).double().eval()
    slim = demask.demask(net, (torch.randn(2, 5, *net.size).double(),), result="graph")
    for batch in (2, 1, 5):
        x = torch.randn(batch, 5, *net.size).double()
        assert (slim(x) - net(x)).abs().max() <= 1e-12
    assert share(slim) == pytest.approx(24 / 64, abs=0.001)


def test_neighborhoods_are_computed_whole():
    net = Net(2, "gather", neighbors=True).double().eval()
    x = torch.randn(2, 5, 8, 8).double()
    slim = demask.demask(net, (x,), result="graph")
    assert (slim(x) - net(x)).abs().max() <= 1e-12
    first, second = 5 * 8 * 9 * 64, 8 * 8 * 64
    assert share(slim) == pytest.approx((first + second * 24 / 64) / (first + second), abs=0.001)


def test_a_progression_remains_a_stride():
    class Strided(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)

        def forward(self, x):
            return self.b(torch.relu(self.a(x)))[:, :, ::2, ::2]

    net, x = Strided().double().eval(), torch.randn(2, 3, 8, 8).double()
    slim = demask.demask(net, (x,), result="graph")
    assert (slim(x) - net(x)).abs().max() <= 1e-12
    program = canonicalize(capture_program(net, (x,), None, None), TABLE)
    assert carry_positions(LayoutAnalysis.of(program, TABLE)) is None
