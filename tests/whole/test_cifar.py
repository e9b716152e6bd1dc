"""Trained CIFAR ResNets on real images: exact, as small as by hand, and nothing scattered."""

from __future__ import annotations

import copy

import pytest
import torch

import cifar
import demask
from night import at_night

pytestmark = pytest.mark.skipif(
    not (cifar.DATA / "cifar_resnet56.safetensors").exists(),
    reason="trained weights are in shared/data beside the project",
)
DEPTHS = (20, *at_night(56))


def made(depth: int, shifts: bool) -> cifar.ResNet:
    generator = torch.Generator().manual_seed(depth)
    return cifar.masked(cifar.trained(depth), generator, shifts=shifts)


@pytest.mark.parametrize("shifts", [True, *at_night(False)], ids=["kept", "zero"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_exact_and_nothing_is_scattered(depth: int, shifts: bool) -> None:
    model = made(depth, shifts)
    pixels, _ = cifar.images(20)
    slim = demask.demask(model, (pixels[:2],), result="graph")
    effects = slim.demasked.effects
    assert effects.get("scatter", 0) == 0
    assert effects.get("scatter-add", 0) <= (depth - 2) // 2
    assert demask.verify(model, slim, (pixels,)).ok
    wide, narrow = copy.deepcopy(model).double(), copy.deepcopy(slim).double()
    assert torch.equal(wide(pixels.double()).argmax(1), narrow(pixels.double()).argmax(1))


@pytest.mark.parametrize("depth", DEPTHS)
def test_as_small_as_built_by_hand(depth: int) -> None:
    model = made(depth, shifts=False).double()
    pixels = cifar.images(10)[0].double()
    hand, slim = cifar.HandResNet(model), demask.demask(model, (pixels[:2],), result="graph")
    assert (hand(pixels) - model(pixels)).abs().max() <= 1e-10 * model(pixels).abs().max()
    counts = [sum(t.numel() for t in m.parameters()) for m in (slim, hand)]
    assert counts[0] == counts[1]
    assert demask.verify(model, slim, (pixels,)).ok


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_trained_network_knows_its_images(depth: int) -> None:
    pixels, labels = cifar.images(200)
    with torch.no_grad():
        right = (cifar.trained(depth)(pixels).argmax(1) == labels).float().mean()
    assert right > 0.7  # about 0.80 and 0.82 of all 10,000 re-encoded images
