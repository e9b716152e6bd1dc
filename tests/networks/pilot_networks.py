"""Small networks for the tests of the pilot."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """A stem, a block with a shortcut, a head: batch norms with statistics of their own."""

    def __init__(self, width: int = 6):
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width)
        self.a, self.bna = nn.Conv2d(width, width + 2, 3, padding=1), nn.BatchNorm2d(width + 2)
        self.b, self.bnb = nn.Conv2d(width + 2, width, 3, padding=1), nn.BatchNorm2d(width)
        self.head = nn.Linear(width, 5)
        for norm in (self.bn, self.bna, self.bnb):
            nn.init.normal_(norm.running_mean, std=0.3)
            nn.init.uniform_(norm.running_var, 0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stem(x)))
        y = self.bnb(self.b(F.relu(self.bna(self.a(x)))))
        return self.head(F.relu(x + y).mean((2, 3)))


class Tokens(nn.Module):
    """A vision transformer of one layer: patches, a class token, positions."""

    def __init__(self, patches: int = 16, width: int = 12):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.cls = nn.Parameter(torch.randn(1, 1, width))
        self.pos = nn.Parameter(torch.randn(1, patches + 1, width))
        self.layer = nn.TransformerEncoderLayer(width, 3, 20, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.pos
        return self.head(self.layer(x)[:, 0])


class Flat(nn.Module):
    """A perceptron on grey images."""

    def __init__(self, side: int = 12):
        super().__init__()
        self.a, self.b = nn.Linear(side * side, 10), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(x.flatten(1))))


class Depthwise(nn.Module):
    """A depthwise convolution between two dense ones, a pool, a flattened map."""

    def __init__(self):
        super().__init__()
        self.a, self.d = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.b, self.head = nn.Conv2d(8, 6, 1), nn.Linear(6 * 4 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.b(F.relu(self.d(F.relu(self.a(x))))))
        return self.head(F.max_pool2d(x, 4).flatten(1))


class UNet(nn.Module):
    """Down, up by a transposed convolution, and a concatenation; an image comes out."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 8, 3, 2, 1)
        self.up, self.c = nn.ConvTranspose2d(8, 6, 2, 2), nn.Conv2d(12, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.a(x))
        return self.c(torch.cat([a, F.relu(self.up(F.relu(self.b(a))))], 1))


def networks() -> dict[str, tuple[nn.Module, tuple[Tensor, ...]]]:
    """Networks with random weights, in eval mode, and a call of each."""
    torch.manual_seed(0)
    calls = {
        "residual": (Residual(), (torch.randn(3, 3, 16, 16),)),
        "tokens": (Tokens(), (torch.randn(3, 3, 16, 16),)),
        "flat": (Flat(), (torch.rand(3, 1, 12, 12),)),
        "depthwise": (Depthwise(), (torch.randn(3, 3, 16, 16),)),
        "unet": (UNet(), (torch.randn(3, 3, 16, 16),)),
        "recurrent": (nn.GRU(5, 7, batch_first=True), (torch.randn(3, 4, 5),)),
    }
    return {name: (model.eval(), args) for name, (model, args) in calls.items()}
