"""The ONNX package's node tests, all of them: what fails is known, and why."""

from collections.abc import Iterable

import numpy as np
import pytest
import torch

pytest.importorskip("onnx")

import conformance
from conformance import EXPECTED, Case, cases, failure

FLOAT32 = {"float32 in and out": ("all",), "float32 among them": ("all", "some")}
PARTS = 4  # for several workers
SHARE = 0.9  # of the cases, counting those listed as failures


def wrong(chosen: Iterable[Case]) -> list[str]:
    """The failures that nobody expects."""
    torch.manual_seed(0)
    return [f"{case.name}: {why}" for case in chosen if (why := failure(case)) and not case.expected]


def test_a_node_test_of_each_op_passes():
    """The first of each op, and the first that is written in other ops."""
    first = {(case.key, "_expanded" in case.name): case for case in reversed(cases())}
    assert len(first) > 200
    found = wrong(first.values())
    assert not found, "\n".join(found)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
def test_every_node_test_passes_that_is_not_listed(part):
    found = wrong(cases()[part::PARTS])
    assert not found, "\n".join(found)


@pytest.mark.parametrize("kind", FLOAT32)
def test_nearly_all_with_float32_are_to_pass(kind):
    chosen = [case for case in cases() if case.float32 in FLOAT32[kind]]
    assert len(chosen) > 700
    assert sum(not case.expected for case in chosen) >= SHARE * len(chosen)


def test_a_wrong_output_is_found(monkeypatch):
    """A Relu that is the identity."""
    from demask.files.onnx import plan
    from demask.files.onnx.op_functions import OnnxEntry

    planted = {**plan.ENTRIES, ("", "Relu"): OnnxEntry("Relu", "", lambda x: x)}
    monkeypatch.setattr(plan, "ENTRIES", planted)
    case = next(case for case in cases() if case.name == "test_relu")
    found = wrong([case])
    assert len(found) == 1 and "Not equal to tolerance" in found[0]


def test_a_failure_that_is_not_listed_is_found(monkeypatch):
    case = next(case for case in cases() if case.name == "test_training_dropout")
    assert not wrong([case])
    monkeypatch.setattr(conformance, "EXPECTED", {})
    assert len(wrong([case])) == 1


def test_every_line_of_the_list_names_cases():
    for names in EXPECTED:
        assert any(conformance.fnmatchcase(case.name, names) for case in cases()), names


def test_cases_compare_types_and_sizes_too():
    """What a case expects is held against dtype, sizes and values."""
    case = Case("one", None, [], 1e-3, 1e-7)
    expected = np.array([[1.0, 2.0]], dtype=np.float32)
    conformance.compare("output", torch.tensor([[1.0, 2.0]]), expected, case)
    for made in ([[1.0, 2.1]], [1.0, 2.0], [[1, 2]], [[1.0, float("nan")]]):
        with pytest.raises(AssertionError):
            conformance.compare("output", torch.tensor(made), expected, case)
