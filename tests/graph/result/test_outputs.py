"""Outputs that torch does not compute with: floats of 8 bits, parameters. They are compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import demask
from demask.errors import Mismatch
from demask.judge import Pair
from night import at_night

TYPES = (
    torch.float8_e4m3fn,
    *at_night(torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
)


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.dtype, self.factor = dtype, factor
        with torch.no_grad():
            self.first.weight[:3] = 0

    def forward(self, x: Tensor) -> Tensor:
        return (self.factor * self.last(torch.relu(self.first(x))).abs()).to(self.dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_networks_that_cast_to_them(dtype: torch.dtype) -> None:
    net, x = Cast(dtype).eval(), (torch.randn(3, 6),)
    slim = demask.demask(net, x)
    assert slim.demasked.after.parameters < slim.demasked.before.parameters
    assert demask.verify(net, slim, x).ok
    assert torch.equal(slim(*x).float(), net(*x).float())
    with pytest.raises(Mismatch):
        demask.verify(Cast(dtype, 300.0).eval(), slim, x)


def test_powers_of_two_may_be_the_next_ones() -> None:
    """Their unit in the last place is as large as they are, which would allow any that is smaller than the largest."""
    powers = torch.tensor([2.0**-20, 2.0**-3, 1.0, 64.0])
    for steps, is_same in ((0, True), (1, True), (-1, True), (2, False), (-2, False)):
        for k in range(4):
            moved = powers.clone()
            moved[k] *= 2.0**steps
            pair = Pair("output", *(t.to(torch.float8_e8m0fnu) for t in (powers, moved)))
            pair.settle(powers, powers, powers, 1.0, 0.0)
            assert pair.is_same is is_same, (steps, k)
    assert pair.describe() == "differs by 2 powers of two: 16 at (3,), expected 64; allowed is one"


class Returned(Cast):
    """Returns a parameter as it is, beside what it computes."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.last.weight


@pytest.mark.filterwarnings("error")
def test_an_output_may_be_a_parameter(tmp_path: Path) -> None:
    net, x = Returned(torch.float32).eval(), (torch.randn(3, 6),)
    slim = demask.demask(net, x)
    assert slim.demasked.after.parameters < slim.demasked.before.parameters
    assert demask.verify(net, slim, x).ok
    demask.to_onnx(slim, tmp_path / "slim.onnx", x)


def test_parameters_are_parameters_and_buffers_are_buffers() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).eval()
    slim = demask.demask(model, (torch.randn(3, 4),), result="graph")
    assert dict(slim.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert dict(slim.named_buffers()).keys() <= dict(model.named_buffers()).keys()
