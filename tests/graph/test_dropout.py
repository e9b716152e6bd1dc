"""Dropout that is active in eval mode (`F.dropout(x, p, True)`): it goes on drawing numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import demask
from demask.errors import DemaskError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 32), nn.Linear(32, 4)
        self.a.weight.data[:8] = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.dropout(self.a(x), 0.5, True))


class Attention(Net):
    """Values that are one constant, averaged: with dropout, weights do not add up to one."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Linear(4, 4)
        nn.init.zeros_(self.v.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        weights = (y @ y.transpose(0, 1)).softmax(-1)
        return F.dropout(weights, 0.5, True) @ self.v(x)


class Written(Net):
    """A write into what dropout returned: its input stays as it was."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        dropped = F.dropout(y, 0.5, True)
        dropped.mul_(0)
        return self.b(y + dropped)


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "auto": lambda net: demask.demask(net, (X,)),
    "graph": lambda net: demask.demask(net, (X,), result="graph"),
    "optimized": lambda net: demask.optimize(net, (X,), threads=1, cache=False),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Net, Attention])
def test_draws_numbers(kind: type[Net], way: str) -> None:
    result = WAYS[way](kind().eval()).eval()
    assert not torch.equal(result(X), result(X))


@pytest.mark.parametrize("way", WAYS)
def test_is_no_alias_of_its_input(way: str) -> None:
    net = Written().eval()
    torch.testing.assert_close(WAYS[way](net)(X), net(X))


def test_is_not_left_out_of_onnx(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    try:
        demask.to_onnx(Net().eval(), path, (X,))
    except DemaskError:
        assert not path.exists()
        return
    onnx = pytest.importorskip("onnx")
    assert "Dropout" in {node.op_type for node in onnx.load(path).graph.node}
