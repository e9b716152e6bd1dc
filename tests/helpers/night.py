"""Parameters of one law that only `make nightly` runs, beside those that every run has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def at_night(*cases: Any) -> list:
    """These by night only. A tuple holds the values of several parameters."""
    return [_case(case, pytest.mark.nightly) for case in cases]


def every(step: int, cases: Iterable[Any], start: int = 0) -> list:
    """Each `step`-th by day, from `start` on; the others by night."""
    return [
        _case(case, *([pytest.mark.nightly] if (k - start) % step else []))
        for k, case in enumerate(cases)
    ]


def _case(case: Any, *marks: pytest.MarkDecorator) -> Any:
    if hasattr(case, "values") and hasattr(case, "marks"):  # a pytest.param
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, *marks])
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)
