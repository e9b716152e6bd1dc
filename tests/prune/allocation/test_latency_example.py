"""examples/latency_budget.py: a short run, and how it compares at equal accuracy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import cifar

ROOT = Path(__file__).parents[3]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(ROOT / "examples")
    import latency_budget

    yield latency_budget
    for name in ("latency_budget", "resnet20_cifar", "cifar_resnet20"):
        sys.modules.pop(name, None)


def test_milliseconds_at_equal_accuracy(example: ModuleType) -> None:
    uniform = [(90.0, 1.0), (85.0, 0.6), (86.0, 0.5), (80.0, 0.2)]  # accuracy, ms
    results = [example.Point(example.DENSE, 1.0, 0, *uniform[0])]
    results += [example.Point(example.UNIFORM, 0.5, 0, *point) for point in uniform[1:]]
    assert example.ms_of_uniform(results, 0, 83.0) == pytest.approx(0.35)
    assert example.ms_of_uniform(results, 0, 88.0) == pytest.approx(0.75)
    assert example.ms_of_uniform(results, 0, 85.0) < 0.5  # not the slower one that is as accurate
    assert example.ms_of_uniform(results, 0, 79.0) is None
    results.append(example.Point(example.LATENCY, 0.4, 0, 88.0, 0.5, 0.5))
    assert example.gains(results, 0.4) == [pytest.approx(1.5)]


@pytest.mark.nightly
@pytest.mark.skipif(
    not (cifar.DATA / "cifar10_train_jpeg.zip").exists(),
    reason="trained weights and images are in shared/data beside the project",
)
def test_a_quick_run_writes_its_page(tmp_path: Path) -> None:
    words = [sys.executable, "examples/latency_budget.py", "--quick", "--output", str(tmp_path)]
    source = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(words, cwd=ROOT, env=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "| 60 % |" in (tmp_path / "latency_budget.md").read_text()
    assert (tmp_path / "latency_budget.svg").exists()
