"""Parameters of one law that only `make nightly` runs."""

from __future__ import annotations

from typing import Any

import pytest


def at_night(*cases: Any) -> list:
    """These by night only. A tuple holds the values of several parameters."""
    return [_night(case) for case in cases]


def _night(case: Any) -> Any:
    mark = pytest.mark.nightly
    if hasattr(case, "values") and hasattr(case, "marks"):  # a pytest.param
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, mark])
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
