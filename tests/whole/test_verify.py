"""What `verify` takes for rounding, and what not."""

import math
from copy import deepcopy

import pytest
import torch
from torch import nn

import demask
from demask.errors import Mismatch


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


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_no_rounding(value):
    net, x = nn.Linear(3, 4), torch.randn(2, 3)
    slim = demask.demask(net, (x,))
    with torch.no_grad():
        slim.get_parameter("bias")[1] = value
    found = demask.verify(net, slim, (x,), check=False)
    assert not found.ok and "not finite" in found.failure


class Remembered:
    """What torch knows no parts of: a cache of a language model, say."""

    def __init__(self, keys, steps):
        self.layers, self.steps, self.kind = [{"keys": keys}], steps, Remembered
        self.itself = self


class Remembering(nn.Module):
    def __init__(self, shift=0.0, steps=1):
        super().__init__()
        self.shift, self.steps = shift, steps

    def forward(self, x):
        cache = Remembered(x + self.shift, self.steps)
        both = (cache, cache) if self.shift else (cache, Remembered(x, self.steps))
        return {"y": 2 * x, "cache": cache, "both": both}


def test_objects_are_compared_by_the_tensors_in_them():
    x = torch.randn(2, 3)
    assert demask.verify(Remembering(), Remembering(1e-30), (x,)).ok  # one cache twice, or two
    found = demask.verify(Remembering(), Remembering(1e-3), (x,), check=False)
    assert "['cache'].layers[0]['keys'] differs by" in found.failure
    found = demask.verify(Remembering(), Remembering(steps=2), (x,), check=False)
    assert "['cache'].steps is 2, expected 1" in found.failure


class Rotated(nn.Module):
    """A complex output: the input, and a multiple of it as the imaginary part."""

    def __init__(self, imaginary: float = 1.0) -> None:
        super().__init__()
        self.imaginary, self.weight = imaginary, nn.Parameter(torch.ones(()))

    def forward(self, x):
        return torch.complex(x * self.weight, x * self.imaginary)


def test_complex_outputs_are_compared():
    x = torch.randn(2, 3)
    assert demask.verify(Rotated(), Rotated(), (x,)).ok
    found = demask.verify(Rotated(), Rotated(1.5), (x,), check=False)
    assert not found.ok and "differs by" in found.failure


class Narrow(nn.Module):
    """Casts in its own code, where a copy in float64 cannot see it."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.first(x).half().float())


def test_networks_that_cast_in_their_own_code_are_compared_in_float64():
    net, x = Narrow().eval(), (torch.randn(4, 8),)
    graph = demask.demask(net, x, result="graph")
    for first, second in ((net, net), (graph, net), (net, graph), (graph, graph)):
        assert demask.verify(first, second, x).max_abs == 0
    other = deepcopy(net)
    other.last.weight.data += 1e-4  # less than the rounding of float16
    for first, second in ((net, other), (graph, other)):
        with pytest.raises(Mismatch, match="in float64"):
            demask.verify(first, second, x)


class Rms(nn.Module):
    """An RMS norm without eps, which takes that of its dtype: it matters for small numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(8, 16, bias=False), nn.RMSNorm(16), nn.Linear(16, 4)
        self.a.weight.data[:7] = 0

    def forward(self, x):
        return self.b(self.norm(self.a(x)))


class Called(Rms):
    def forward(self, x):
        return self.b(nn.functional.rms_norm(self.a(x), (16,), self.norm.weight))


@pytest.mark.parametrize("kind", [Rms, Called])
@pytest.mark.parametrize("result", ["auto", "graph"])
def test_an_epsilon_of_the_dtype_is_kept(kind, result):
    net, x = kind().eval(), (1e-4 * torch.randn(3, 8),)
    slim = demask.demask(net, x, result=result)
    if result == "graph":  # a norm reads the complete axis
        assert slim.demasked.after.parameters < slim.demasked.before.parameters
    assert demask.verify(net, slim, x).max_rel < 1e-10
    assert net.norm.eps is None and next(net.parameters()).dtype is torch.float32
