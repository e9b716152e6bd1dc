"""Sizes as numbers in the arithmetic of tensors: read at run time, with masked channels around."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import demask
from test_micro import difference

FORMULAS: dict[str, Callable[[Tensor, Any, Any, Any], Tensor]] = {
    "mean by hand": lambda y, n, h, w: y - y.sum((2, 3), keepdim=True) / (h * w),
    "ratio": lambda y, n, h, w: y * (h / w),
    "sum": lambda y, n, h, w: y + h,
    "sum with a factor": lambda y, n, h, w: y.sub(h, alpha=2),
    "reversed": lambda y, n, h, w: w - y,
    "reciprocal": lambda y, n, h, w: h / y.exp(),
    "batch": lambda y, n, h, w: y / n,
    "limit": lambda y, n, h, w: y.clamp(max=w - h),
    "filled like": lambda y, n, h, w: y + torch.full_like(y, h),
    "filled": lambda y, n, h, w: y * y.new_full((n, 1, h, w), w),
    "positions": lambda y, n, h, w: y + torch.arange(h, dtype=y.dtype)[:, None] / h,
}


class Net(nn.Module):
    def __init__(self, formula: Callable[..., Tensor], bias: float) -> None:
        super().__init__()
        self.formula = formula
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        with torch.no_grad():
            self.a.weight[:3], self.a.bias[:3] = 0, bias

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        n, _, h, w = y.shape
        return self.b(self.formula(y, n, h, w))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("bias", [0.0, 0.5])
@pytest.mark.parametrize("name", FORMULAS)
def test_exact_at_any_size(name: str, bias: float) -> None:
    torch.manual_seed(0)
    net = Net(FORMULAS[name], bias).double().eval()
    shapes = (dict.fromkeys((0, 2, 3), Dim.AUTO),)
    slim = demask.demask(net, (torch.randn(2, 3, 8, 10).double(),), dynamic_shapes=shapes, result="graph")
    assert slim.get_parameter("a.weight").shape[0] == 5
    for batch, height, width in ((1, 9, 7), (3, 5, 11)):
        x = torch.randn(batch, 3, height, width).double()
        assert difference(net(x), slim(x)) <= 1e-10


class Found(nn.Module):
    """Returns where its output is positive: how many places, the values decide."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        y = self.b(torch.relu(self.a(x)))
        return y, torch.nonzero(y > 0)


def test_sizes_that_values_decide():
    torch.manual_seed(0)
    model, x = Found().eval(), torch.randn(5, 4)
    with torch.no_grad():
        model.a.weight[:4] = 0
    slim = demask.demask(model, (x,), result="graph")
    assert slim.get_parameter("a.weight").shape == (4, 4)
    for draw in (x, torch.randn(3, 4)):
        assert torch.equal(slim(draw)[1], model(draw)[1])


@pytest.mark.parametrize(
    "reduce",
    [
        lambda y: y.sum(0),
        lambda y: y.mean(0),
        lambda y: y.var(0),
        lambda y: y.prod(0).exp(),
        lambda y: y.norm(dim=0),
        lambda y: y.logsumexp(0),
        lambda y: y.cumsum(0)[-1],
    ],
    ids=["sum", "mean", "variance", "product", "norm", "logsumexp", "cumsum"],
)
def test_reductions_of_constants_over_a_batch_of_any_size(reduce: Callable[[Tensor], Tensor]):
    class Reduced(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(reduce(self.a(x)))

    torch.manual_seed(1)
    net = Reduced(FORMULAS["sum"], 0.5).double().eval()
    slim = demask.demask(net, (torch.randn(3, 3, 6, 5).double(),), check=False, result="graph")
    for batch in (3, 2, 7):
        x = torch.randn(batch, 3, 6, 5).double()
        assert difference(net(x), slim(x)) <= 1e-12


@pytest.mark.parametrize("kind", ["bool", "float", "input"])
def test_a_query_whose_keys_are_all_masked_reads_nothing(kind: str):
    """Attention is 0 there, although all values are equal constants."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v, self.b = nn.Linear(4, 8), nn.Linear(8, 3)
            mask = torch.ones(5, 5).tril(-1).bool()
            zero = torch.zeros(5, 5).masked_fill(~mask, -math.inf)
            self.register_buffer("mask", zero if kind == "float" else mask)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            mask = mask if kind == "input" else self.mask
            return self.b(F.scaled_dot_product_attention(x, x, self.v(x), attn_mask=mask))

    torch.manual_seed(0)
    net = Masked().double().eval()
    with torch.no_grad():
        net.v.weight[:4], net.v.bias[:2] = 0, 0
    args = torch.randn(2, 5, 4).double(), torch.ones(5, 5).tril(-1).bool()
    slim = demask.demask(net, args, check=False, result="graph")
    assert difference(net(*args), slim(*args)) <= 1e-12
    assert slim.get_parameter("v.weight").shape == (6, 4)  # two zeros are removed, no constant
