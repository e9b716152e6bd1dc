"""Squeezes of axes whose size only run time tells: as in the model, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import demask
from test_micro import difference

# Each of [batch, channels, length], where a length of 24 to 31 leaves one position of a window.
SQUEEZES: dict[str, Callable[[Tensor], Tensor]] = {
    "dim": lambda y: y.squeeze(-1)[None],
    "dim of many": lambda y: y.squeeze(0),
    "dims": lambda y: y.squeeze((0, 2)).sin(),
    "all": lambda y: y.squeeze() * 2,
    "static": lambda y: y[:, :1].squeeze(1),
    "static and dynamic": lambda y: y[:, None].squeeze((1, 3)),
    "written": lambda y: y.clone().squeeze(-1).zero_() + y[..., 0],
    "expanded": lambda y: y.expand(-1, -1, 3).sum(-1),
}


class Net(nn.Module):
    def __init__(self, form: Callable[[Tensor], Tensor], stride: int) -> None:
        super().__init__()
        self.layer, self.form = nn.Conv1d(1, 4, 17, stride=stride), form
        self.layer.weight.data[:2] = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self.layer(x[:, None]))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("stride", [8, 1])
@pytest.mark.parametrize("name", SQUEEZES)
def test_squeezes_of_dynamic_axes(name, stride):
    if name in ("expanded", "written") and stride == 1:
        pytest.skip("takes one position alone")
    net, same = Net(SQUEEZES[name], stride).double().eval(), 0
    slim = demask.demask(net, (torch.randn(3, 24).double(),), dynamic_shapes="all")
    for batch, length in ((3, 24), (2, 24), (1, 24), (3, 17), (3, 31), (3, 32), (3, 60)):
        x = torch.randn(batch, length).double()
        try:
            expected = net(x)
        except RuntimeError:
            continue
        try:
            made = slim(x)
        except ValueError:
            continue
        same += 1
        assert difference(expected, made) <= 1e-10
    assert same
