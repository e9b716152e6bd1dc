"""What tests measured is written once, sorted, and merged with what an earlier run measured."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from recorded_results import Results, shard_of


def report(network: str, *, outcome: str = "passed", when: str = "call", **more: object) -> SimpleNamespace:
    given = {"suite": "some", "network": network, "mask": "unit", **more}
    return SimpleNamespace(user_properties=[("result", given)], when=when, outcome=outcome)


def write(path: Path, *reports: SimpleNamespace) -> list[dict[str, object]]:
    results = Results(path)
    for one in reports:
        results.pytest_runtest_logreport(one)
    results.pytest_sessionfinish()
    return json.loads(path.read_text())


def test_results_are_sorted_and_merged(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write(path, report("b", after=3), report("a", after=2))
    found = write(path, report("c", after=4), report("b", after=1))
    assert [(line["network"], line["after"]) for line in found] == [("a", 2), ("b", 1), ("c", 4)]


def test_a_failure_takes_the_place_of_an_earlier_result(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write(path, report("a", after=2))
    (found,) = write(path, report("a", after=2, outcome="failed"))
    assert found["failed"] is True
    assert "after" not in found


def test_setup_and_tests_without_a_result_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    plain = SimpleNamespace(user_properties=[], when="call", outcome="passed")
    skipped = report("b", outcome="skipped")
    assert write(path, report("a", when="setup"), plain, skipped) == []


def test_the_fixture_records_what_it_is_called_with(result, request) -> None:
    result(suite="some", network="a", mask="unit")
    result(after=2)
    (given,) = [value for name, value in request.node.user_properties if name == "result"]
    assert given == {"suite": "some", "network": "a", "mask": "unit", "after": 2}


def test_every_test_is_in_one_shard() -> None:
    """The shards of a suite are its tests, each once, in their order."""
    tests = list(range(20))
    shards = []
    for k in (1, 2, 3):
        first, count = shard_of(f"{k}/3")
        shards.append(tests[first::count])
    assert sorted(test for shard in shards for test in shard) == tests
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@pytest.mark.parametrize("text", ["", "2", "0/3", "4/3", "1/0", "a/b", "-1/2", "1/2/3"])
def test_a_shard_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match="--shard K/N"):
        shard_of(text)
