"""What `verify` takes for rounding, and what not."""

import torch
from torch import nn

import demask


class Cancelling(nn.Module):
    """Two large numbers, subtracted: float32 knows a few digits of the rest."""

    def __init__(self, terms, large=1e4):
        super().__init__()
        self.terms, self.large = terms, large

    def forward(self, x):
        return self.terms(x, self.large) - (x + 1e4) * (1 + x) + x


def test_an_ill_conditioned_network_may_round_as_badly_as_before():
    def one(x, large):
        return x + large + large * x + x * x

    def other(x, large):
        return x * x + large * x + large + x

    x = torch.randn(4, 5)
    found = demask.verify(Cancelling(one), Cancelling(other), (x,), check=False)
    assert found.ok
    assert found.ulps > 64
    assert not demask.verify(Cancelling(one), Cancelling(other, 1e4 + 1e-3), (x,), check=False).ok
