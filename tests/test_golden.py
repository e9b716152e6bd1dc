"""The dump that changes of structure are compared by: equal for equal code, another for another."""

from __future__ import annotations

import filecmp
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from golden import dump

NAME = "micro/misaligned_residual"
CONDITIONS = ("columns", "skip", "constant")
SIMPLIFIERS = ("bits", "exponents", "rank", "channels", "downsample")


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.txt"))


@pytest.fixture
def raised(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is raised while dumps are written, where they hold it as text."""
    errors, attempted = list[str](), dump.attempted

    def watched(make: Callable[[], str]) -> str:
        def noted() -> str:
            try:
                return make()
            except Exception as error:
                errors.append(type(error).__name__)
                raise

        return attempted(noted)

    monkeypatch.setattr(dump, "attempted", watched)
    return errors


@pytest.mark.nightly
def test_a_dump_is_the_same_twice_and_another_for_other_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: list[str]
) -> None:
    first, second, right, wrong = (tmp_path / name for name in ("first", "second", "right", "wrong"))
    for folder in (first, second):
        dump.written((NAME, folder))
    assert dump.hash_of(first) == dump.hash_of(second)
    names = {Path(name).stem for name in files(first)}
    parts = {"graph", "code", "record", "report", "archive", "onnx", "own", "segments", "tape_0",
             "llvm", "candidate_0", "halo", "plan_64MiB", "raised", "instructions",
             "packets", "collected", *(f"conditioned_{how}" for how in CONDITIONS),
             *(f"simplified_{how}" for how in SIMPLIFIERS)}  # fmt: skip
    assert parts <= names and not [name for name in names if name.endswith("_raised")]
    assert raised == ["BudgetTooSmall"] * 2  # of plan_1MiB, in both: the network takes 9 MiB

    adapt = __import__("demask.shrink.emit.adapt", fromlist=["mark_effect"])
    marked = adapt.mark_effect

    def planted(node: Any, effect: str) -> Any:
        return marked(node, "gather" if effect == "slice" else effect)

    monkeypatch.setattr(dump, "PARTS", (dump.graphs,))
    dump.written((NAME, right))
    monkeypatch.setattr(adapt, "mark_effect", planted)
    dump.written((NAME, wrong))
    assert dump.hash_of(right) != dump.hash_of(wrong)
    _, differ, _ = filecmp.cmpfiles(right, wrong, files(right), shallow=False)
    assert {Path(name).stem for name in differ} >= {"graph", "record", "report"}


def test_what_raises_is_in_the_dump() -> None:
    def make() -> str:
        raise ValueError("no such thing")

    assert dump.attempted(make) == "ValueError: no such thing"
