"""A MONAI inferer that computes what the network computes on the full image, within a budget.

`SlidingWindowInferer` blends overlapping windows: near the borders of windows, and with instance
norm everywhere, its result is not that of the network. `DepthFirstInferer` takes its place:

    inferer = DepthFirstInferer(memory="2GB")
    with torch.no_grad():
        prediction = inferer(volume, network)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from monai.inferers import Inferer
from torch import Tensor, nn

from demask.traverse import tile


class DepthFirstInferer(Inferer):
    """Runs a network of one input in bands of the image. memory: bytes beyond input and result."""

    def __init__(self, memory: str | int = "512MiB"):
        self.memory = memory
        self._last: tuple[Any, nn.Module] | None = None

    def __call__(self, inputs: Tensor, network: Callable[..., Any], *args: Any, **kwargs: Any):
        if not isinstance(network, nn.Module) or args or kwargs:
            raise TypeError("expected a torch.nn.Module of one input")
        image = inputs.as_subclass(torch.Tensor)  # of monai.data.MetaTensor
        key = network, tuple(image.shape), image.dtype
        if self._last is None or self._last[0] != key:
            self._last = key, tile(network, (image,), memory=self.memory)
        return self._last[1](image)
