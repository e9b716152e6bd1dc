"""Train, prune, demask: three times over."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import demask


def rounds(net: nn.Module, args: tuple[Any, ...], layers: Any, steps: int = 2) -> None:
    """Three times: train, prune, demask; every parameter stays one, and moves."""
    torch.manual_seed(0)
    names = {name for name, _ in net.named_parameters()}
    for _ in range(3):
        size = sum(p.numel() for p in net.parameters())
        for layer, *norms in layers(net):
            prune.ln_structured(layer, "weight", amount=0.25, n=2, dim=0)
            with torch.no_grad():
                dead = layer.weight_mask.flatten(1).amax(1) == 0
                for tensor in (layer.bias, *(t for n in norms for t in (n.weight, n.bias))):
                    tensor[dead] = 0
        slim = demask.demask(net.eval(), args)
        assert {name for name, _ in slim.named_parameters()} == names
        assert sum(p.numel() for p in slim.parameters()) < size
        torch.testing.assert_close(_first(slim(*args)), _first(net(*args)), atol=1e-5, rtol=1e-4)
        before = {name: p.detach().clone() for name, p in slim.named_parameters()}
        optimizer = torch.optim.Adam(slim.parameters(), 1e-2)
        slim.train()
        for _ in range(steps):
            optimizer.zero_grad()
            _first(slim(*args)).pow(2).mean().backward()
            optimizer.step()
        still = [n for n, p in slim.named_parameters() if torch.equal(p, before[n])]
        assert not still, still
        net = slim


def _first(made: Any) -> Tensor:
    return made if isinstance(made, Tensor) else next(iter(made.values()))
