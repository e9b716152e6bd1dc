"""What `verify` takes for rounding, and what not."""

import torch
from torch import nn

import demask


class Cancelling(nn.Module):
    """Two large numbers, subtracted: float32 knows three digits of the rest."""

    def __init__(self, first: float = 1e4):
        super().__init__()
        self.first = first

    def forward(self, x):
        return (x + self.first) * (1 + x) - (x + 1e4) * (1 + x) + 1e-1 * x


def test_an_ill_conditioned_network_may_round_as_badly_as_before():
    class Ordered(Cancelling):
        def forward(self, x):
            return (x + self.first + self.first * x + x * x) - (x + 1e4) * (1 + x) + 1e-1 * x

    x = torch.randn(4, 5)
    found = demask.verify(Cancelling(), Ordered(), (x,), check=False)
    assert found.ok
    assert found.ulps > 64
    assert not demask.verify(Cancelling(), Ordered(1e4 + 1e-3), (x,), check=False).ok
