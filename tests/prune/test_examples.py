"""The scripts of examples/, a few steps each: their pages and pictures are written."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data" / "cifar_resnet20.safetensors"


def written(script, output):
    """The text of the page that a script writes in a short run."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    words = [
        sys.executable,
        str(ROOT / "examples" / f"{script}.py"),
        "--quick",
        "--threads",
        "1",
        "--output",
        str(output),
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (output / f"{script}.svg").stat().st_size > 1000
    return (output / f"{script}.md").read_text()


@pytest.mark.nightly
def test_resnet20_has_half_of_its_macs(tmp_path):
    if not DATA.exists():
        pytest.skip("shared/data is not next to the project")
    pytest.importorskip("PIL", reason="Pillow is not installed")
    rows = [line.split(" | ") for line in written("resnet20_cifar", tmp_path).splitlines() if line.startswith("| ")]
    shares = {row[0].strip("| "): float(row[3].rstrip(" %")) for row in rows[2:]}
    assert shares["dense"] == 100
    assert 45 < shares["demask.prune, channels"] <= 50
    assert 49 < shares["demask.prune, 2 of 4 weights"] < 51


@pytest.mark.nightly
def test_the_loss_of_the_encoder_is_continuous_with_carry(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    rows = [line.split(" | ") for line in written("encoder_trainer", tmp_path).splitlines() if line.startswith("| ")]
    changes = {row[0].strip("| "): row[3].strip(" |") for row in rows[2:]}
    assert float(changes["demasked, carried"]) < 1e-3
    assert float(changes["demasked, new optimizer"]) > 5e-3


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
def test_a_quick_run_with_a_budget_of_latency_writes_its_page(tmp_path: Path) -> None:
    if not DATA.with_name("cifar10_train_jpeg.zip").exists():
        pytest.skip("shared/data is not next to the project")
    assert "| 60 % |" in written("latency_budget", tmp_path)
