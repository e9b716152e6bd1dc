"""Comparing outputs: what counts as a difference, and how large it is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from demask.judge import Verdict, compare, pair_up, tolerance

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("expected", "actual", "relative", "not_finite"),
    [
        ([1.0, -4.0], [1.0, -3.0], 0.25, 0),
        ([0.0, 0.0], [0.0, 0.0], 0.0, 0),
        ([0.0, 0.0], [0.0, 1e-30], INF, 0),
        ([NAN, 2.0], [NAN, 1.0], 0.5, 1),
        ([INF, 2.0], [INF, 2.0], 0.0, 1),
        ([INF, 2.0], [-INF, 2.0], INF, 0),
        ([NAN, 2.0], [0.0, 2.0], INF, 0),
        ([NAN, 2.0], [INF, 2.0], INF, 0),
        ([1.0, 2.0], [1.0, NAN], INF, 0),
        ([1.0, 2.0], [1.0, INF], INF, 0),
        ([], [], 0.0, 0),
    ],
)
def test_numbers(expected: list[float], actual: list[float], relative: float, not_finite: int) -> None:
    result = compare(torch.tensor(expected), torch.tensor(actual))
    assert result.relative == pytest.approx(relative)
    assert ("not finite" in result.text) == (relative == INF and expected != [0.0, 0.0])
    assert (result.not_finite, result.is_nan) == (not_finite, False)


def test_outputs_that_are_all_nan_prove_nothing() -> None:
    pairs = pair_up(torch.tensor([NAN, NAN]), torch.tensor([NAN, NAN]))
    verdict = Verdict.of(pairs, "here")
    assert not verdict.difference and "proves nothing" in verdict.failure
    verdict += Verdict.of(pair_up(torch.tensor([NAN, 1.0]), torch.tensor([NAN, 1.0])), "there")
    assert not verdict.failure and verdict.remark == (
        "3 numbers of the outputs are NaN or infinite in both, all of them in 1 of 2 runs"
    )


@pytest.mark.parametrize(
    ("dtype", "size", "largest"),
    [
        (torch.float64, 3.0, 3e-10),
        (torch.float32, 1.0, 64 * 2.0**-23),
        (torch.float32, 3.0, 128 * 2.0**-23),
        (torch.float16, 3.0, 0.03),
        (torch.bfloat16, 3.0, 0.03),
        (torch.float8_e5m2, 3.0, 0.5),
        (torch.float32, 0.0, 0.0),
        (torch.float32, 1e-44, 2.0**-149),
        (torch.float16, 1e-6, 2.0**-24),
        (torch.float16, 1e-4, 1e-6),
    ],
)
def test_a_tolerance_of_each_dtype(dtype: torch.dtype, size: float, largest: float) -> None:
    assert tolerance(size, torch.finfo(dtype).eps) == pytest.approx(largest)


def test_units_in_the_last_place() -> None:
    one = torch.tensor([1.0, 0.0])
    result = compare(one, one + torch.tensor([0.0, 2.0**-20]))
    assert result.ulps() == 8.0  # of 2 ** -23
    assert result.ulps(torch.finfo(torch.bfloat16).eps) == 2.0**-13
    assert compare(one.bfloat16(), one.bfloat16()).ulps() == 0.0


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
