"""Random networks of a generator from outside of the repository, other ones each day."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import demask

FUZZ = Path(__file__).parents[3] / "shared" / "fuzz" / "fuzz.py"
PARTS, SEEDS = 12, 50
WRONG = ("FAIL", "WRONG", "WRONGHUGE")  # others: rounding, overflow, and the license 0 * x = 0


@pytest.mark.nightly
@pytest.mark.skipif(not FUZZ.exists(), reason="no ../shared/fuzz/fuzz.py next to the repository")
@pytest.mark.parametrize("part", range(PARTS))
def test_networks_of_another_generator(part: int) -> None:
    first = 1_000_000 + (int(time.time() // 86400) * PARTS + part) * SEEDS
    environment = os.environ | {"PYTHONPATH": str(Path(demask.__file__).parents[1])}
    command = [sys.executable, str(FUZZ), str(first), str(SEEDS)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    *found, summary = run.stdout.splitlines() or [""]
    assert run.returncode == 0 and json.loads(summary)["summary"] == [first, SEEDS], run.stderr
    lines = [line for line in found if {kind for kind, _ in json.loads(line)["found"]} & {*WRONG}]
    assert not lines, "\n".join(lines)
