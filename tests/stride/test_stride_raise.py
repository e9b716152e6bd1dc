"""raise_strides(): whatever keeps every s-th position behind a convolution makes it strided."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demask.graph.result.module_calls import graph_of_calls
from demask.stride import raise_strides
from night import at_night

aten = torch.ops.aten


def grid(y: Tensor, s: int, value: float = 1.0, dtype=torch.float32) -> Tensor:
    mask = torch.zeros(1, 1, *y.shape[2:], dtype=dtype)
    mask[:, :, ::s, ::s] = value
    return mask


def pooled(y: Tensor, s: int) -> Tensor:
    return F.max_pool2d(y, s, s, ceil_mode=True)


def summed(y: Tensor, s: int) -> Tensor:
    return F.avg_pool2d(y, s, s, ceil_mode=True, divisor_override=1)


def split(y: Tensor, s: int) -> Tensor:
    mask = grid(y, s)
    return pooled(F.relu(y) * mask, s) - pooled(F.relu(-y) * mask, s)


# What is kept of y; the second says whether values must not be negative.
WAYS = {
    "slice": (lambda y, s: y[:, :, ::s, ::s], False),
    "pool of one": (lambda y, s: F.max_pool2d(y, 1, s), False),
    "mask and pool": (lambda y, s: pooled(y * grid(y, s), s), True),
    "two masks": (lambda y, s: pooled(y * grid(y, s, 4.0), s) * 0.25, True),
    "select and pool": (lambda y, s: pooled(torch.where(grid(y, s) > 0, y, -math.inf), s), False),
    "select zero and pool": (lambda y, s: pooled(torch.where(grid(y, s) > 0, y, 0.0), s), True),
    "filled and pool": (lambda y, s: pooled(y.masked_fill(grid(y, s) == 0, -math.inf), s), False),
    "mask and sum": (lambda y, s: summed(y * grid(y, s), s), False),
    "mask and average": (
        lambda y, s: F.avg_pool2d(y * grid(y, s), s, s, ceil_mode=True, divisor_override=s * s) * float(s * s),
        False,
    ),
    "split": (split, False),
}
ACTS = {"linear": nn.Identity(), "ReLU": nn.ReLU(), "leaky": nn.LeakyReLU(), "sigmoid": nn.Sigmoid()}


class Sampled(nn.Module):
    def __init__(self, way, s: int, act: nn.Module, **geometry):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(4, 8, **geometry), nn.BatchNorm2d(8)
        self.act, self.way, self.s = act, way, s
        self.norm.running_mean.normal_()

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self.act(self.norm(self.conv(x))), self.s)


def strides(module: nn.Module) -> list[list[int]]:
    convs = [n for n in graph_of_calls(module).nodes if str(n.target).startswith("aten.conv")]  # type: ignore[union-attr]
    return [list(n.args[3]) if len(n.args) > 3 else [1, 1] for n in convs]  # type: ignore[arg-type]


def others(module: nn.Module) -> set[str]:
    """Calls that keep or drop positions."""
    names = ("slice", "pool", "where", "mul", "sub", "masked_fill", "index")
    calls = {str(n.target) for n in graph_of_calls(module).nodes if n.op == "call_function"}  # type: ignore[union-attr]
    return {call for call in calls if any(name in call for name in names)}


@pytest.mark.sampled(28)
@pytest.mark.parametrize(("way", "s", "act"), [*itertools.product(WAYS, [2, 3], ACTS)])
def test_every_way_to_subsample_becomes_a_stride_where_it_is_sound(way, s, act):
    keep, positive = WAYS[way]
    model = Sampled(keep, s, ACTS[act], kernel_size=3, padding=1).double().eval()
    x = torch.randn(2, 4, 14, 17, dtype=torch.float64)
    made = raise_strides(model, (x,))
    sound = not positive or act in ("ReLU", "sigmoid")
    assert not sound or strides(made) == [[s, s]]
    assert bool(others(made)) is not sound
    with torch.no_grad():
        assert (made(x) - model(x)).abs().max() <= 1e-12


GEOMETRY = [(1, 2, 1, 0, 1), (3, 2, 2, 0, 1), (5, 3, 1, 2, 4), (2, 2, 1, 1, 2), (7, 4, 1, 3, 1), (3, 2, 3, 2, 4)]


@pytest.mark.parametrize("k,s,d,p,g", GEOMETRY)
@pytest.mark.parametrize("size", [(8, 9), *at_night(((13, 13),), ((7, 16),))])
def test_geometry(k, s, d, p, g, size):
    geometry = {"kernel_size": k, "dilation": d, "padding": p, "groups": g}
    reach = d * (k - 1) + 1
    if any(n + 2 * p < reach for n in size):
        pytest.skip("the kernel is larger than the image")
    model = Sampled(WAYS["slice"][0], s, nn.ReLU(), **geometry).double().eval()
    x = torch.randn(1, 4, *size, dtype=torch.float64)
    made = raise_strides(model, (x,))
    with torch.no_grad():
        assert (made(x) - model(x)).abs().max() <= 1e-12
    assert not others(made)


def test_what_somebody_else_reads_whole_stays():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 8, 3, padding=1)

        def forward(self, x):
            y = self.conv(x)
            return y[:, :, ::2, ::2], y

    model, x = Both().eval(), torch.randn(1, 4, 8, 8)
    assert strides(raise_strides(model, (x,))) == [[1, 1]]


class Joined(nn.Module):
    """Two branches that are added, one that is joined, sampled behind."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(4, 8, 1)
        self.c, self.last = nn.Conv2d(4, 4, 5, padding=2), nn.Conv2d(12, 3, 1)

    def forward(self, x):
        y = torch.cat([F.relu(self.a(x) + self.b(x)), self.c(x)], 1)
        return self.last(F.silu(y)[:, :, ::2, ::2])


def test_through_sums_and_joins():
    model, x = Joined().double().eval(), torch.randn(1, 4, 9, 12, dtype=torch.float64)
    made = raise_strides(model, (x,))
    assert sorted(strides(made)) == [[1, 1], [2, 2], [2, 2], [2, 2]] and not others(made)
    with torch.no_grad():
        assert (made(x) - model(x)).abs().max() <= 1e-12


def test_convolutions_that_read_a_grid_alone():
    """A stride that was pushed behind as dilation comes back."""
    first, second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=2, dilation=2)
    model = nn.Sequential(first, nn.ReLU(), second, nn.MaxPool2d(1, 2)).double().eval()
    x = torch.randn(1, 3, 16, 16, dtype=torch.float64)
    made = raise_strides(model, (x,))
    assert strides(made) == [[2, 2], [1, 1]]
    with torch.no_grad():
        assert (made(x) - model(x)).abs().max() <= 1e-12


class Phases(nn.Module):
    """A strided convolution as the sum over the phases of its input."""

    def __init__(self):
        super().__init__()
        self.taps = nn.Parameter(torch.randn(2, 3, 3, 3))

    def forward(self, x):
        def part(i, j):
            taps = self.taps[:, :, i::2, j::2]
            rows, columns = 2 + taps.shape[2], 2 + taps.shape[3]
            return F.conv2d(x[:, :, i : i + 2 * rows - 1 : 2, j : j + 2 * columns - 1 : 2], taps)

        return part(0, 0) + part(0, 1) + part(1, 0) + part(1, 1)


def test_a_sum_over_phases_is_one_convolution():
    model, x = Phases().double().eval(), torch.randn(1, 3, 8, 8, dtype=torch.float64)
    made = raise_strides(model, (x,))
    assert strides(made) == [[2, 2]]
    with torch.no_grad():
        assert (made(x) - model(x)).abs().max() <= 1e-12


def test_zeros_in_weights_stay():
    model = Sampled(WAYS["slice"][0], 2, nn.ReLU(), kernel_size=3, padding=1).eval()
    with torch.no_grad():
        model.conv.weight[:4], model.conv.bias[:4] = 0, 0  # type: ignore[index]
    made = raise_strides(model, (torch.randn(1, 4, 8, 8),))
    assert made.get_parameter("conv.weight").shape == (8, 4, 3, 3)
    assert made.get_parameter("conv.weight").data_ptr() != model.conv.weight.data_ptr()
