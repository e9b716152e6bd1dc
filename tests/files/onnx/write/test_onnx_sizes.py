"""Networks that compute with their dynamic sizes, in ONNX files: right at every size."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_onnx_out import run
from torch import Tensor, nn

import demask
from night import at_night

F = nn.functional
STEPS = torch.arange(7) - 3
#: of values (n, 6) and n
CALLS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "a size divided and rounded up": lambda x, n: x[: -(-n // 2)],
    "remainder of integers": lambda x, n: x[0, 0] + torch.remainder(STEPS, 2 * n),
    "clamp of integers": lambda x, n: x[0, 0] + STEPS.clamp(1, n),
    "leaky relu": lambda x, n: F.leaky_relu(x, 1 / n),
    "roll": lambda x, n: x.roll(n // 2 + 1, 0),
    "remainder": torch.remainder,
    "remainder of a size": lambda x, n: x[: 1 + n % 3],
    "fmod": torch.fmod,
    "floor divide": operator.floordiv,
    "quotients rounded down": lambda x, n: x[0, 0] + STEPS // n,
    "quotients rounded to zero": lambda x, n: x[0, 0] + torch.div(STEPS, n, rounding_mode="trunc"),
    "power": lambda x, n: x.abs() ** n,
    "clamp": lambda x, n: (5 * x).clamp(max=n),
    "hardtanh": lambda x, n: F.hardtanh(9 * x, -n, n),
    "elu": lambda x, n: F.elu(x, n),
    "scaled product": lambda x, n: torch.addcmul(x, x, x, value=n),
    "scaled matrix product": lambda x, n: torch.addmm(x, x, x.new_ones(6, 6), alpha=1 / n),
    "bits": lambda x, n: x[0, 0] + (STEPS & n),
    "shifted bits": lambda x, n: x[0, 0] + (torch.arange(6) << n),
    "a shifted size": lambda x, n: x * (n << 1),
    "the larger size": lambda x, n: x[0, 0] + x.new_ones(torch.sym_max(n, 4)),
    "the smaller size": lambda x, n: x[0, 0] + x.new_ones(torch.sym_min(n, 4)),
    "root of a size": lambda x, n: x / torch.sym_sqrt(n),
    "rolled rows": lambda x, n: x.roll(n // 2, 1).roll(n),
    "two rolls": lambda x, n: x.roll((n // 2, -1), (0, 1)),
}


class Net(nn.Module):
    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.call = nn.Linear(6, 6), call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer(x), x.shape[0])


@pytest.mark.parametrize("name", [*list(CALLS)[:5], *at_night(*list(CALLS)[5:])])
def test_calls_with_sizes(name: str, tmp_path: Path) -> None:
    net = Net(CALLS[name]).eval()
    slim = demask.demask(net, (torch.randn(5, 6),))
    assert isinstance(slim.demasked.inputs[0].sizes[0], str)
    demask.to_onnx(slim, tmp_path / "net.onnx")
    for rows in (5, 3, 8):
        x = torch.randn(rows, 6)
        (made,) = run(tmp_path / "net.onnx", x)
        torch.testing.assert_close(made, net(x).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axes", [2, *at_night(1, 3)])
def test_attention_over_fewer_axes(axes: int, tmp_path: Path) -> None:
    net = Net(lambda x, n: F.scaled_dot_product_attention(x, 2 * x, x)).eval()
    sizes = (2, 3, 4)[3 - axes :]
    demask.to_onnx(net, tmp_path / "net.onnx", (torch.randn(*sizes, 6),))
    x = torch.randn(*sizes, 6)
    (made,) = run(tmp_path / "net.onnx", x)
    torch.testing.assert_close(made, net(x).detach(), rtol=1e-5, atol=1e-5)
