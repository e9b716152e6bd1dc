"""A network on another device comes back there. The meta device stands for one: what it computes
has shapes and a device, and no values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import demask
from demask.shrink.on_device import copy_to_cpu, device_of, move_module


class Positions(nn.Module):
    """A network whose graph names a device: positions are made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.embed = nn.Embedding(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(torch.sigmoid(self.a(x)))
        return y + self.embed(torch.arange(4, device=x.device))[:, :, None].mean(1, keepdim=True)


def masked() -> Positions:
    model = Positions().eval()
    with torch.no_grad():
        model.a.weight[:5] = 0
    return model


def test_all_of_a_result_moves() -> None:
    x = torch.randn(2, 3, 8, 8)
    slim = demask.demask(masked(), (x,))
    assert slim(x).device.type == "cpu"
    there = move_module(slim, torch.device("meta"))
    assert there(x.to("meta")).device.type == "meta"
    assert {t.device.type for t in there.state_dict().values()} == {"meta"}


def test_a_network_and_its_inputs_come_to_the_cpu() -> None:
    x = torch.randn(2, 3, 8, 8)
    model = masked()
    assert device_of(model, (x,), None) == torch.device("cpu")
    assert device_of(model, (x.to("meta"),), None) == torch.device("meta")
    copy, args, kwargs = copy_to_cpu(model, (x,), {"scale": 2})
    assert isinstance(copy, Positions)
    assert copy is not model
    assert torch.equal(args[0], x)
    assert kwargs == {"scale": 2}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    model, x = masked().cuda(), torch.randn(2, 3, 8, 8, device="cuda")
    slim = demask.demask(model, (x,))
    assert {t.device.type for t in slim.state_dict().values()} == {"cuda"}
    assert torch.allclose(slim(x), model(x), atol=1e-5)
    assert demask.verify(model, slim, (x,)).ok


def test_a_model_that_fails_on_its_example_is_refused_before_it_is_captured():
    captured = []

    class Exported(nn.Module):
        """Its captured form computes what it does not have itself: as experts in float64."""

        def forward(self, x):
            captured.append(torch.compiler.is_exporting())
            if not captured[-1]:
                raise RuntimeError("Expected Float32, got Double")
            return x + 1

    with pytest.raises(demask.BadInput, match="fails on the example: RuntimeError: Expected Float"):
        demask.demask(Exported(), (torch.ones(2, 3),))
    assert captured == [False]
