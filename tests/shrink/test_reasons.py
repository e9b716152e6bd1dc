"""A reason counts the slices it is about, not all positions of their axis."""

import pytest
import torch
from torch import nn

import demask
from demask.report import Decline

MASKED, UNITS = 6, 16


class Between(nn.Module):
    """A function of sixteen units of which six are masked."""

    def __init__(self, function, last):
        super().__init__()
        self.first, self.function, self.last = nn.Linear(4, UNITS), function, last
        with torch.no_grad():
            self.first.weight[:MASKED], self.first.bias[:MASKED] = 0, 0

    def forward(self, x):
        return self.last(self.function(self.first(x)))


class Layered(nn.Module):
    """Masked units between others, on an axis before the last one."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(3, UNITS, 1)
        with torch.no_grad():
            self.conv.weight[2 : 2 + MASKED], self.conv.bias[2 : 2 + MASKED] = 0, 0

    def forward(self, x):
        return self.conv(x).unfold(2, 2, 1)


def declined(model, *shape) -> list[Decline]:
    return list(demask.report(demask.demask(model.eval(), (torch.randn(shape),), result="graph")).declined)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (nn.Identity(), "the model's output keeps its shape"),
        (lambda x: x.renorm(2, 0, 1.0), "no rule for aten.renorm"),
        (lambda x: x.unfold(1, 2, 2), "no rule for aten.unfold"),
    ],
    ids=["output", "op of equal shapes", "op of other shapes"],
)
def test_slices_that_are_restored(function, text):
    (decline,) = declined(Between(function, nn.Identity()), 5, 4)
    assert text in decline.text and decline.slices == MASKED


def test_slices_of_an_inner_axis():
    (decline,) = declined(Layered(), 2, 3, 7)
    assert "aten.unfold" in decline.text and decline.slices == MASKED


def test_slices_of_every_operand_are_counted():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, UNITS), nn.Linear(4, UNITS)
            with torch.no_grad():
                for layer, masked in ((self.a, MASKED), (self.b, 3)):
                    layer.weight[:masked], layer.bias[:masked] = 0, 0

        def forward(self, x):
            return torch.heaviside(self.a(x), self.b(x))

    slices = {d.text: d.slices for d in declined(Two(), 5, 4)}
    assert [count for text, count in slices.items() if "aten.heaviside" in text] == [MASKED + 3]


def test_slices_that_nobody_reads():
    last = nn.Linear(UNITS, 3)
    with torch.no_grad():
        last.weight[:, MASKED:12] = 0
    model = Between(lambda x: x.renorm(2, 0, 1.0), last)
    with torch.no_grad():
        nn.init.ones_(model.first.weight), nn.init.ones_(model.first.bias)
    (decline,) = declined(model, 5, 4)
    assert "aten.renorm" in decline.text and decline.slices == 12 - MASKED
