"""Pretrained networks that ship in packages: every step from the file to the one written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import demask
from night import at_night

try:
    import onnx

    from benchmarks.shrink.real_models import (
        FACES,
        FILES,
        FIXED,
        VARIANTS,
        example,
        face_net,
        masked_file,
        run,
        sources,
        without_channels,
        without_small,
    )
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

SOURCES = sources()
ERROR = 1e-4  # of the largest output: sums in another order, in float32
PAIRS = [(name, variant) for name in SOURCES for variant in VARIANTS]


@pytest.mark.nightly
@pytest.mark.parametrize("package", list(FILES))
def test_the_package_is_installed(package: str) -> None:
    if package not in {source.package for source in SOURCES.values()}:
        pytest.skip(f"{package} is not installed: make nightly installs it")


@pytest.mark.filterwarnings("ignore:the ONNX file is written, but outputs differ")  # of scores near 1e-7
@pytest.mark.parametrize(("name", "variant"), at_night(*PAIRS))
def test_every_step_of_a_pretrained_network(name: str, variant: str, tmp_path: Path) -> None:
    row = run(SOURCES[name], variant, tmp_path)
    assert not row.failure
    assert row.verified.startswith("equal")
    assert row.error <= ERROR
    before, after = row.parameters
    assert after <= before
    if SOURCES[name].is_onnx:
        given = masked_file(SOURCES[name].path, variant, tmp_path)
        assert (tmp_path / "written.onnx").stat().st_size <= given.stat().st_size
    if variant == VARIANTS[1]:
        assert after < 0.75 * before


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in FIXED if name in SOURCES])
def test_a_branch_that_an_input_decides_is_refused(name: str) -> None:
    model = demask.from_onnx(SOURCES[name].path)
    with pytest.raises(demask.errors.NotExportable, match=r"\(If\).*condition.*inputs="):
        demask.demask(model, example(SOURCES[name], model))


def test_masks() -> None:
    values = np.arange(1.0, 1 + 24 * 16).reshape(24, 16)
    assert np.flatnonzero(~without_channels(values, 0).any(1)).tolist() == list(range(1, 24, 2))
    assert np.flatnonzero(~without_channels(values, 1).any(0)).tolist() == list(range(1, 16, 2))
    assert (without_small(values) == 0).mean() == pytest.approx(0.9, abs=0.01)
    assert without_small(values[:2]) is not None and (without_small(values[:2]) != 0).all()


def test_masked_files_have_masked_channels(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ConvTranspose2d(8, 6, 3)).eval()
    demask.to_onnx(net, tmp_path / "net.onnx", (torch.randn(1, 3, 8, 8),))
    masked = masked_file(tmp_path / "net.onnx", VARIANTS[1], tmp_path)
    model = onnx.load(masked)
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    kernels = [w for w in weights.values() if w.ndim == 4]
    live = [w.any((1, 2, 3)).sum() if w.shape[1] == 3 else w.any((0, 2, 3)).sum() for w in kernels]
    assert sorted(live) == [3, 4]


@pytest.mark.parametrize("name", list(FACES))
def test_face_networks_call(name: str) -> None:
    size = FACES[name]
    scores, boxes, *_ = face_net(name).eval()(torch.randn(2, 3, size, size))
    assert scores.shape[:2] == (2, 2) and boxes.shape[:2] == (2, 4)
    assert torch.allclose(scores.sum(1), torch.ones(()))
