"""Norms over the image with the statistics of the image, of windows, or of a calibration."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from demask.errors import BadInput
from demask.traverse import FrozenStatistics, calibrate, stream

NORMS = (nn.InstanceNorm2d, nn.GroupNorm)


@pytest.fixture
def net():
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(3, 8, 3, padding=1),
        nn.InstanceNorm2d(8, affine=True),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, 2, 1),
        nn.GroupNorm(4, 16),
        nn.Upsample(scale_factor=2.0),
        nn.Conv2d(16, 3, 3, padding=1),
    )
    model = nn.Sequential(*layers).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def rand(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


def result(net, x, **options):
    y = torch.empty_like(x)
    stream(net, x, y, memory="16MiB", **options)
    return y


def by_layer(net, x, norm):
    for layer in net:
        x = norm(layer, x) if isinstance(layer, NORMS) else layer(x)
    return x


def test_windows_have_statistics_of_their_own(net):
    x, tile = rand(1, 3, 300, 200), 64
    windows = [round(n / tile) for n in x.shape[2:]]

    def norm(layer, x):
        down, across = (-(-n // k) for n, k in zip(x.shape[2:], windows, strict=True))
        rows = [torch.cat([layer(part) for part in row.split(across, 3)], 3) for row in x.split(down, 2)]
        return torch.cat(rows, 2)

    expected = by_layer(net, x, norm)
    assert (expected - net(x)).abs().max() > 0.1
    torch.testing.assert_close(result(net, x, statistics=f"tile:{tile}"), expected, rtol=1e-4, atol=1e-4)


def test_frozen_statistics_are_constants_of_the_tiles(net):
    tiles, x = rand(4, 3, 64, 64), rand(1, 3, 120, 90)
    frozen = calibrate(net, tiles)
    own = iter(frozen.norms)

    def norm(layer, x):
        moments, channels = next(own), x.shape[1]
        mean, variance = (
            torch.tensor(v).repeat_interleave(channels // len(v)).view(1, -1, 1, 1)
            for v in (moments.mean, moments.variance)
        )
        x = (x - mean) * (variance + layer.eps).rsqrt()
        return x * layer.weight.view(1, -1, 1, 1) + layer.bias.view(1, -1, 1, 1)

    torch.testing.assert_close(result(net, x, statistics=frozen), by_layer(net, x, norm), rtol=1e-4, atol=1e-5)
    again = FrozenStatistics.from_dict(json.loads(json.dumps(frozen.to_dict())))
    assert again == frozen == calibrate(net, [tiles[:1], tiles[1:]])
    one = calibrate(net, tiles[:1])
    torch.testing.assert_close(result(net, tiles[:1], statistics=one), net(tiles[:1]), rtol=1e-4, atol=1e-5)


def test_what_is_no_statistics_is_refused(net):
    x = rand(1, 3, 64, 48)
    for wrong in ("tiles", "tile:0", "tile:-1", 256, None):
        with pytest.raises(BadInput, match="expected statistics="):
            result(net, x, statistics=wrong)
    other = calibrate(net[:2], rand(1, 3, 32, 32))
    with pytest.raises(BadInput, match="calibrate"):
        result(net, x, statistics=other)
    for model, tiles in ((net[:1], rand(1, 3, 32, 32)), (net, []), (net, rand(3, 32))):
        with pytest.raises(BadInput, match="calibrate"):
            calibrate(model, tiles)
    with pytest.raises(BadInput, match="FrozenStatistics"):
        FrozenStatistics.from_dict({"norms": [{}]})
