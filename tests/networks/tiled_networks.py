"""Networks that tests run in tiles, and how the results are compared."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import traverse_networks as networks
from demask.errors import BudgetTooSmall
from demask.traverse import plan

MIB = 2**20
ULPS = 64  # of the largest value: sums over space and kernels of other sizes
EPS = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def decoder(width: int = 8) -> nn.Module:
    """Laid out as TAEF2, with its pooled blocks, narrower."""
    torch.manual_seed(0)
    conv, block = networks.conv, networks.Block
    return nn.Sequential(
        networks.Clamp(),
        conv(4, width),
        nn.ReLU(),
        block(width, pooled=True),
        block(width, pooled=True),
        nn.Upsample(scale_factor=2),
        conv(width, width, bias=False),
        block(width, pooled=False),
        nn.Upsample(scale_factor=2),
        conv(width, width, bias=False),
        block(width, pooled=False),
        conv(width, 3),
    ).eval()


def autoencoder() -> nn.Module:
    """Norms and attention over the image, strides, resizes."""
    torch.manual_seed(0)
    return nn.Sequential(
        networks.conv(3, 32),
        networks.Residual(32, 32),
        networks.Half(32),
        networks.Residual(32, 32),
        networks.Attention(32),
        nn.Upsample(scale_factor=2),
        *networks._ending(32, 3),
    ).eval()


def seeded(make):
    def maker() -> nn.Module:
        torch.manual_seed(0)
        return make().eval()

    return maker


NETWORKS = {
    "decoder": (decoder, (1, 4, 24, 20)),
    "autoencoder": (autoencoder, (1, 3, 48, 36)),
    "U-Net": (seeded(lambda: networks.UNet((4, 8, 16))), (1, 3, 52, 44)),
    "squeeze-excite": (seeded(lambda: networks.squeeze_excite(4, 8)), (1, 3, 45, 39)),
    "SRVGG": (seeded(lambda: networks.SRVGG(3, 8)), (1, 3, 21, 33)),
    "RRDB": (seeded(lambda: networks.DenseTriple().blocks[0]), (1, 64, 25, 17)),
    "dense": (
        seeded(lambda: nn.Sequential(networks.conv(3, 8), networks.Grown(8, 4), networks.Grown(12, 4))),
        (1, 3, 41, 30),
    ),
    "gated": (seeded(lambda: nn.Sequential(*(networks.Gated() for _ in range(2)))), (1, 16, 40, 9)),
}


def build(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    make, shape = NETWORKS[name]
    generator = torch.Generator().manual_seed(1)
    return make().to(dtype), torch.randn(shape, generator=generator).to(dtype)


_LEAST: dict[Any, int] = {}


def least(model: nn.Module, *args) -> int:
    """The least budget of a network, looked for once: it depends on code and shapes alone."""
    kinds = tuple((x.shape, x.dtype, x.is_contiguous()) for x in args)
    key = (type(model), repr(model), model.training, kinds)
    if key not in _LEAST:
        with pytest.raises(BudgetTooSmall) as refused:
            plan(model, args, memory=1)
        _LEAST[key] = refused.value.least
    return _LEAST[key]


@torch.no_grad()
def same(model: nn.Module, module: nn.Module, *args, ulps: float = ULPS) -> None:
    """The results are equal but for so many ulps of the largest value."""
    expected, result = copy.deepcopy(model).eval()(*args), module(*args)
    assert pytree.tree_structure(expected) == pytree.tree_structure(result)
    for a, b in zip(pytree.tree_leaves(expected), pytree.tree_leaves(result), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and not b.requires_grad
        scale = float(a.abs().max()) * 2 * EPS.get(a.dtype, 0.0)
        worst = float((a.double() - b.double()).abs().max())
        assert worst <= ulps * scale, f"{worst / scale:.0f} ulps"
