"""The scripts in examples/, where what they adapt is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_monai_inferer_computes_what_the_network_does():
    pytest.importorskip("monai", reason="needs monai")
    from monai.inferers import SlidingWindowInferer
    from monai.networks.nets import UNet

    torch.manual_seed(0)
    net = UNet(3, 1, 2, channels=(4, 8, 16), strides=(2, 2), num_res_units=1).eval()
    volume = torch.randn(1, 1, 48, 40, 32)
    inferer = example("monai_inferer").DepthFirstInferer(memory="64MiB")
    with torch.no_grad():
        expected = net(volume)
        for _ in range(2):
            torch.testing.assert_close(inferer(volume, net), expected, rtol=1e-4, atol=1e-4)
        windows = SlidingWindowInferer(32, overlap=0.25)(volume, net)
    assert (windows - expected).abs().max() > 0.01
    with pytest.raises(TypeError, match="one input"):
        inferer(volume, lambda x: x)
