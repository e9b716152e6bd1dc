"""The list of planted faults is about the sources as they are: `python tests/planted_faults.py`
plants them, one at a time."""

import pytest

from planted_faults import FAULTS, ROOT, Fault


@pytest.mark.parametrize("each", FAULTS, ids=lambda each: each.name)
def test_the_line_of_a_fault_stands_in_its_file_once(each: Fault) -> None:
    assert (ROOT / "src" / "demask" / each.file).read_text().count(each.line) == 1
    assert all((ROOT / test).exists() for test in each.tests)
