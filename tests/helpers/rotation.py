"""Which tests run for a commit, where all would take too long: another share for each commit.

Two kinds of tests take turns: the cases of a test that is marked `sampled(n)`, of which each n-th
runs, and the most expensive tests, named in `expensive.txt` next to this file, of which each 20th
runs. The others of both are marked `nightly`. The number of the turn is the count of commits, or
that of `--rotation`, so 20 commits run each of the expensive ones; `--rotation all` runs all.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

TURNS = 20
LEAST = 0.12  # seconds of processor time of an expensive test
OF_SOURCES = ("tests/architecture/", "tests/test_imports.py")  # any commit may break them: they do not rotate
EXPENSIVE = Path(__file__).with_name("expensive.txt")


def read_expensive() -> dict[str, float]:
    """Seconds of the expensive tests, by name; the most expensive first, so that turns take about as long."""
    lines = EXPENSIVE.read_text().splitlines() if EXPENSIVE.exists() else []
    return {name: float(seconds) for seconds, _, name in (line.partition(" ") for line in lines)}


def git(*words: str) -> str:
    """What git says of the repository; "" outside of one."""
    try:
        run = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True)
    except OSError:
        return ""
    return run.stdout.decode().strip() if run.returncode == 0 else ""


def commit_number() -> int:
    """The count of commits, by which each commit has the turn after its parent's; for a clone that
    lacks the earlier ones, a number from the commit's name; 0 outside of a repository."""
    if git("rev-parse", "--is-shallow-repository") == "true":
        return int(git("rev-parse", "HEAD")[:8], 16)
    return int(git("rev-list", "--count", "HEAD") or 0)


@dataclass(eq=False)
class Rotation:
    """Marks tests that have no turn. turn: its number; None: all have. expensive: their numbers, by
    name."""

    turn: int | None
    expensive: Mapping[str, int]
    lines: dict[tuple[str, int], dict[str, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, config: pytest.Config) -> Rotation:
        """The rotation of a session."""
        text = config.getoption("--rotation")
        single = any("[" in argument for argument in config.args)  # asked for by name
        if text is not None and text != "all" and not text.isdecimal():
            raise pytest.UsageError(f"expected --rotation K or --rotation all, got {text!r}")
        number = None if text == "all" or single else commit_number() if text is None else int(text)
        return cls(number, {name: k for k, name in enumerate(read_expensive())})

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """How to repeat the selection."""
        terminalreporter.write_line(f"--rotation {'all' if self.turn is None else self.turn}")

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        number = self.expensive.get(item.nodeid)
        has_turn = self.turn is None or number is None or (number + self.turn) % TURNS == 0
        if not has_turn or not self._is_sampled(item):
            item.add_marker(pytest.mark.nightly)

    def _is_sampled(self, item: pytest.Item) -> bool:
        """Whether a case of a test that is marked `sampled(n)` runs: its places in the tables of
        parameters sum to the turn's number, modulo n, so each line of a table meets others of the
        next."""
        mark = item.get_closest_marker("sampled")
        if mark is None or self.turn is None:
            return True
        test, place = item.nodeid.partition("[")[0], self.turn
        for k, line in enumerate(item.callspec._idlist):  # type: ignore[attr-defined]
            lines = self.lines.setdefault((test, k), {})
            place += lines.setdefault(line, len(lines))
        return place % mark.args[0] == 0


if __name__ == "__main__":  # python tests/helpers/rotation.py build/cpu.json: writes expensive.txt
    # Those that had no turn keep their seconds.
    seconds: dict[str, float] = read_expensive() | json.loads(Path(sys.argv[1]).read_text())
    cheapest: dict[str, str] = {}  # of each test one case runs for every commit, unless it takes twice as long
    for name in sorted(seconds, key=seconds.__getitem__):
        cheapest.setdefault(name.partition("[")[0], name)
    always = {name for name in cheapest.values() if seconds[name] < 2 * LEAST}
    always |= {name for name in seconds if name.startswith(OF_SOURCES)}
    expensive = [name for name, time in seconds.items() if time >= LEAST and name not in always]
    expensive.sort(key=seconds.__getitem__, reverse=True)
    EXPENSIVE.write_text("".join(f"{seconds[name]:.2f} {name}\n" for name in expensive))
