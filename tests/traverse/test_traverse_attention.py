"""Attention over the image: keys and values in memory, and on disk."""

import pytest
import torch
from torch import Tensor, nn

from demask.errors import BudgetTooSmall
from demask.exec.planning.plan import BANDS, FRUSTUMS, LAYERWISE
from demask.traverse import plan, tile
from fuzz.traversed import difference, executed


class Attended(nn.Module):
    """A convolution, attention over all positions by two heads, a convolution."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.qkv = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        q, k, v = (layer(x).unflatten(1, (2, -1)).flatten(3).transpose(2, 3) for layer in self.qkv)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.last(x + y.transpose(2, 3).flatten(1, 2).view_as(x))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Attended().double().eval()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("spills", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_queries_go_band_by_band(model, rows, spills):
    x = torch.randn(1, 3, 19, 14, dtype=torch.float64)
    module = executed(model, x, BANDS, rows, spills=spills)
    assert difference(model, x, module) <= 1e-12
    assert any(segment.spills for segment in module.plan.segments) is spills


@pytest.mark.nightly
def test_the_least_budget_and_plenty_give_the_same():
    torch.manual_seed(0)
    model, x = Attended(64).eval(), torch.randn(1, 3, 64, 72)
    plenty = tile(model, (x,), memory="256MiB")
    with pytest.raises(BudgetTooSmall) as refused:
        plan(model, (x,), memory=1)
    little = tile(model, (x,), memory=refused.value.least)
    with torch.no_grad():
        expected = model(x)
    scale = expected.abs().max().item()
    assert (plenty(x) - expected).abs().max().item() <= 2e-6 * scale  # other orders of summation
    assert (little(x) - expected).abs().max().item() <= 2e-6 * scale


class Calls(nn.Module):
    """A function as a network."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


MASK = torch.randn(24, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
scaled = nn.functional.scaled_dot_product_attention
WHOLE = {
    "itself": lambda x: scaled(x, x, x),
    "masked": lambda x: scaled(x, x, x, attn_mask=MASK),
    "causal": lambda x: scaled(x, x, x, is_causal=True),
    "keys made, values given": lambda x: scaled(x.relu(), x.relu(), x),
    "keys given, values made": lambda x: scaled(x.relu(), x, x.relu()),
    "narrow values": lambda x: scaled(x, x.relu(), x.relu()[..., :1]),
    "products": lambda x: (x @ x.transpose(-1, -2)).softmax(-1) @ x,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["plan", BANDS, FRUSTUMS, LAYERWISE, "disk"])
@pytest.mark.parametrize("name", WHOLE)
def test_inputs_that_are_read_whole(name, mode):
    model, x = Calls(WHOLE[name]), torch.randn(1, 2, 24, 16, dtype=torch.float64)
    if mode == "plan":
        module = tile(model, (x,), memory="64MiB")
    else:
        way = BANDS if mode == "disk" else mode
        module = executed(model, x, way, 5, 5, spills=mode == "disk")
    assert difference(model, x, module) <= 1e-12
