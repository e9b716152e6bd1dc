"""Where the time of a test run went: seconds of processor time of each test, with its fixtures and
the processes that it starts, by folder. Other programs on the machine do not change them much."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MOST = 15  # tests that are printed


def used() -> float:
    """Processor time of this process so far, and of those that it started and that ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class CpuTimes:
    """Collects the seconds of tests from all workers and prints them. path: a file for all of them,
    as JSON, by name of the test."""

    def __init__(self, config: pytest.Config, path: str) -> None:
        self.config, self.path = config, path
        self.seconds: Counter[str] = Counter()
        self.whole = 0.0  # of workers

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.start = used()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[Any]:
        report = yield
        report.cpu_seconds, self.start = used() - self.start, used()
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += getattr(report, "cpu_seconds", 0.0)

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["cpu_seconds"] = used()  # type: ignore[attr-defined]
        elif self.path:
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            Path(self.path).write_text(json.dumps(self.seconds, indent=0))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.whole += getattr(node, "workeroutput", {}).get("cpu_seconds", 0.0)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        tests, folders = Counter[str](), Counter[str]()
        for name, seconds in self.seconds.items():
            folder = os.path.dirname(name.partition("::")[0]).removeprefix("tests/") or "tests"
            folders[folder] += seconds
            tests[folder] += 1
        total, whole = sum(folders.values()), self.whole or used()
        write = terminalreporter.write_line
        write(
            f"where the time went: {total:.0f} s of processor time in {len(self.seconds)} tests, "
            f"{whole - total:.0f} s in imports and collection"
        )
        for folder, seconds in folders.most_common():
            write(f"{seconds:7.1f} s {100 * seconds / max(total, 1e-9):5.1f} % {tests[folder]:6} {folder}")
        for name, seconds in self.seconds.most_common(MOST):
            write(f"{seconds:7.1f} s  {name}")
