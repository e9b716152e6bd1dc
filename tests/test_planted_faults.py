"""The list of planted faults is about the sources as they are: `make mutants` plants them."""

import pytest

from mutants.faults import FAULTS, ROOT, Fault, wrong_of


def test_the_line_of_each_fault_stands_in_its_file_once() -> None:
    texts = {each.file: (ROOT / "src" / "demask" / each.file).read_text() for each in FAULTS}
    assert [f.name for f in FAULTS if texts[f.file].count(f.line) != 1 or f.line == f.wrong] == []


@pytest.mark.parametrize("each", FAULTS, ids=lambda each: each.name)
def test_a_fault_names_tests_and_a_line_that_compiles(each: Fault) -> None:
    assert each.tests and all((ROOT / test).exists() for test in each.tests)
    text = (ROOT / "src" / "demask" / each.file).read_text()
    compile(text.replace(each.line, each.wrong), each.file, "exec")


@pytest.mark.parametrize(
    ("kind", "line", "wrong"),
    [
        ("guard", "if a[1:] and b:", "if False:"),
        ("off by one", "if a < b or c >= d:", "if a <= b or c >= d:"),
        ("off by one", "while a >= b:", "while a > b:"),
        ("sign", "x = a - b + c", "x = a + b + c"),
        ("extreme", "x = max(a, min(b, c))", "x = min(a, min(b, c))"),
        ("connective", "return a and b", "return a or b"),
        ("rounding", "n = -(-f(a) // (b + 1)) * b", "n = (f(a) // (b + 1)) * b"),
        ("incomplete", '"n (!g c) -> n (!g c)"', '"n (g c) -> n (g c)"'),
    ],
)
def test_what_each_kind_of_fault_does(kind: str, line: str, wrong: str) -> None:
    assert wrong_of(kind, line) == wrong
