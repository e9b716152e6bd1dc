"""Comparing outputs: what counts as a difference, and how large it is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import demask
from demask.numerics import compare
from demask.shrink.check import describe_difference
from demask.tune import race

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("expected", "actual", "relative", "finite", "others"),
    [
        ([1.0, -4.0], [1.0, -3.0], 0.25, True, False),
        ([0.0, 0.0], [0.0, 0.0], 0.0, True, False),
        ([0.0, 0.0], [0.0, 1e-30], INF, True, False),
        ([NAN, 2.0], [NAN, 1.0], 0.5, False, False),
        ([INF, 2.0], [-INF, 2.0], 0.0, False, True),
        ([1.0, 2.0], [1.0, NAN], INF, False, False),
        ([1.0, 2.0], [1.0, INF], INF, False, False),
        ([], [], 0.0, True, False),
    ],
)
def test_numbers(expected: list[float], actual: list[float], relative: float, finite: bool, others: bool) -> None:
    result = compare(torch.tensor(expected), torch.tensor(actual))
    assert not result.text
    assert result.relative == pytest.approx(relative)
    assert (result.is_finite, result.has_other_infinities) == (finite, others)


def test_units_in_the_last_place() -> None:
    one = torch.tensor([1.0, 0.0])
    result = compare(one, one + torch.tensor([0.0, 2.0**-20]))
    assert result.ulps() == 8.0  # of 2 ** -23
    assert result.ulps(torch.finfo(torch.bfloat16).eps) == 2.0**-13
    assert compare(one.bfloat16(), one.bfloat16()).ulps() == 0.0


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([factor], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x


@pytest.mark.parametrize(("error", "same"), [(1e-12, True), (1e-9, False)])
def test_float64_is_compared_alike_everywhere(error: float, same: bool) -> None:
    """A norm of constants rounds by 1e-12 in float64, and not at all in float32."""
    net, other, x = Scale(1.0), Scale(1.0 + error), torch.randn(2, 3, dtype=torch.float64)
    assert demask.verify(net, other, (x,), check=False).ok == same
    assert (describe_difference(other, net, (x,), {}) == "") == same
    assert (race._gap(net(x), other(x), lambda a, b: False) == "") == same


@pytest.mark.parametrize(
    ("expected", "actual", "text"),
    [
        (torch.ones(2), torch.ones(3), "is torch.float32 (3,), expected torch.float32 (2,)"),
        (torch.ones(2), torch.ones(2).half(), "is torch.float16 (2,), expected torch.float32 (2,)"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "(torch.int64) is not equal"),
        (torch.tensor([True]), torch.tensor([True]), ""),
        (torch.tensor([True]), torch.tensor([False]), "(torch.bool) is not equal"),
        (torch.ones(1), None, "is None, expected tensor([1.])"),
        (None, 3, "is 3, expected None"),
        (NAN, NAN, ""),
        (print, repr, ""),
        (torch.float32, torch.float64, "is torch.float64, expected torch.float32"),
        (1j, 2j, "is 2j, expected 1j"),
    ],
)
def test_what_no_number_says(expected: Any, actual: Any, text: str) -> None:
    assert compare(expected, actual).text == text
