"""Tensors made in forward (masks of -inf, NaN, positions): the same numbers, whatever is masked."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import demask

INF = math.inf
CREATED: dict[str, Callable[[Tensor], Tensor]] = {
    "full_like": lambda y: torch.softmax(torch.where(y > 0, y, torch.full_like(y, -INF)), -1),
    "full": lambda y: torch.where(y > 0, y, torch.full((8,), -INF)),
    "full of the batch": lambda y: torch.where(y > 0, y, torch.full((y.shape[0], 8), INF)),
    "full, other dtype": lambda y: y + torch.full((8,), -INF, dtype=torch.float64).to(y.dtype),
    "triu": lambda y: y + torch.full((8, 8), -INF).triu(1)[:1],
    "subsequent": lambda y: y + nn.Transformer.generate_square_subsequent_mask(8)[1:2],
    "nan": lambda y: torch.nan_to_num(torch.where(y > 0, y, torch.full_like(y, math.nan))),
    "nan kept": lambda y: torch.where(y > 0, y, y.new_full(y.shape, math.nan)),
    "new_full": lambda y: torch.where(y > 0, y, y.new_full((1, 8), -INF)),
    "zeros divided": lambda y: torch.where(y > 0, y, torch.ones_like(y) / torch.zeros_like(y)),
    "zeros times infinity": lambda y: y + torch.zeros_like(y) * math.inf,
    "masked_fill": lambda y: y.masked_fill(torch.ones(8, 8).tril()[3] == 0, -INF),
    "smallest": lambda y: y + (1 - torch.ones(8).cumsum(0) % 2) * torch.finfo(y.dtype).min,
    "cumsum of a mask": lambda y: y * (y > 0).cumsum(-1),
    "empty_like": lambda y: y + torch.empty_like(y).fill_(-INF),
    "arange": lambda y: y.masked_fill(torch.arange(8) > torch.arange(y.shape[0])[:, None], -INF),
    "eye": lambda y: y + torch.eye(8).masked_fill(~torch.eye(8).bool(), INF)[:1],
    "tril_indices": lambda y: y[:, torch.tril_indices(4, 4)[0] % 8],
    "linspace": lambda y: y + torch.linspace(-1, 1, 8).log(),
    "scalar_tensor": lambda y: torch.where(y > 0, y, torch.scalar_tensor(-INF)),
    "tensor": lambda y: torch.where(y > 0, y, torch.tensor(-INF)),
    "new_zeros": lambda y: y + y.new_zeros(8).log(),
    "new_ones": lambda y: torch.where(y.new_ones(8, dtype=torch.bool).logical_not(), y, -INF),
    "where of numbers": lambda y: y + torch.where(y > 0, 0.0, -INF),
    "assigned by a mask": lambda y: y.index_put((y > 0.5,), torch.tensor(0.25)),
    "rows assigned by a mask": lambda y: y.index_put((y[:, 0] > 0,), torch.tensor(-1.0)),
    "largest": lambda y: y.masked_fill(y == y.max(-1, keepdim=True).values, -INF),
    "logsumexp": lambda y: (y - y.logsumexp(-1, keepdim=True)).log(),
    "pow of a number": lambda y: y * 2.0 ** -torch.arange(8.0),
    "zeros of the batch": lambda y: y + torch.zeros(y.shape[0], 8).masked_fill(y < 0, -INF),
}


class Net(nn.Module):
    def __init__(self, form: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.form, self.b = nn.Linear(8, 8), form, nn.Linear(8, 4)
        with torch.no_grad():
            self.a.weight[:3] = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.form(self.a(x))
        return y[..., :5], self.b(y) if y.shape[-1] == 8 else y


class Nets(nn.Module):
    """Several networks of one input, exported as one."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.nets = nn.ModuleDict()
        for k, name in enumerate(names):
            torch.manual_seed(0)
            self.nets[f"net_{k}"] = Net(CREATED[name])

    def forward(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [net(x) for net in self.nets.values()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("names", list(zip(*[iter(CREATED)] * 5, strict=True)), ids=", ".join)
def test_created_tensors(names):
    nets = Nets(names).eval()
    slim = demask.demask(nets, (torch.randn(3, 8),), result="graph")
    for batch in (3, 1, 5):
        x = torch.randn(batch, 8)
        for name, expected, found in zip(names, nets(x), slim(x), strict=True):
            for a, b in zip(expected, found, strict=True):
                torch.testing.assert_close(a, b, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")
