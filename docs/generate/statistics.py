"""docs/statistics.jpg, what each `statistics` does to a network that was trained on tiles.

A small network with instance norms learns to remove noise from tiles of 64 x 64 pixels of a
photograph, a part of what the latent in shared/data decodes to. Then it runs on the whole
photograph, with other noise and each choice. Where shared/data is not next to the project, the
script says so and leaves the picture as it is. Takes about a minute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from demask.traverse import calibrate, stream
from docs.generate import DOCS
from traverse_networks import latent, named

DPI = 80
PATH = DOCS / "statistics.jpg"
SIZE, GROWS = (96, 256), 8  # of the latent; pixels per position
TILE, BATCH, STEPS, RATE = 64, 8, 600, 2e-3
CHANNELS, NOISE = 16, 0.15
PHOTOGRAPH = slice(72, 568), slice(1480, 1976)  # rows and columns of it
MEMORY = "64MiB"
INK = "#1f2933"


class Denoiser(nn.Module):
    """Five convolutions with instance norms between them; they predict the picture."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, CHANNELS, 3, padding=1)]
        for _ in range(3):
            layers += [nn.InstanceNorm2d(CHANNELS, affine=True), nn.ReLU(), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)]
        self.body = nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(CHANNELS, 3, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@torch.no_grad()
def photograph() -> Tensor:
    """(1, 3, rows, columns), from 0 to 1."""
    model = named(["TAEF2"])["TAEF2"].make().to(memory_format=torch.channels_last)
    picture = model(latent(*SIZE).contiguous(memory_format=torch.channels_last))
    return picture[:, :, *PHOTOGRAPH].clamp(0, 1).contiguous()


def noisy(clean: Tensor, generator: torch.Generator) -> Tensor:
    return clean + NOISE * torch.randn(clean.shape, generator=generator)


def drawn_tiles(clean: Tensor, generator: torch.Generator) -> Tensor:
    """(BATCH, 3, TILE, TILE), at random places."""
    limits = clean.shape[2] - TILE, clean.shape[3] - TILE
    places = [[int(torch.randint(n, (), generator=generator)) for n in limits] for _ in range(BATCH)]
    return torch.cat([clean[:, :, i : i + TILE, j : j + TILE] for i, j in places])


def trained(clean: Tensor, generator: torch.Generator) -> Denoiser:
    """The network after STEPS of Adam on noisy tiles, in eval mode."""
    torch.manual_seed(0)
    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        tiles = drawn_tiles(clean, generator)
        loss = F.mse_loss(model(noisy(tiles, generator)), tiles)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def results(clean: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The photograph, that with noise, and what each choice makes of it."""
    generator = torch.Generator().manual_seed(0)
    model = trained(clean, generator)
    tiles = torch.cat([noisy(drawn_tiles(clean, generator), generator) for _ in range(32)])
    source = noisy(clean, generator)
    choices: Mapping[str, Any] = {
        'statistics="image"': "image",
        f'statistics="tile:{TILE}"': f"tile:{TILE}",
        "statistics=calibrate(model, tiles)": calibrate(model, tiles),
    }
    outputs = {name: torch.empty_like(clean) for name in choices}
    for name, choice in choices.items():
        stream(model, source, outputs[name], memory=MEMORY, statistics=choice)
    return clean, source, outputs


def decibels(image: Tensor, clean: Tensor) -> float:
    """Peak signal-to-noise ratio of values from 0 to 1."""
    return float(-10 * torch.log10(F.mse_loss(image.clamp(0, 1), clean)))


def drawn(clean: Tensor, source: Tensor, outputs: Mapping[str, Tensor]) -> Figure:
    """The noisy picture and each result; below each, its difference from the clean one."""
    columns = {"with noise": source} | dict(outputs)
    figure = Figure(figsize=(20, 10), layout="constrained")
    panels: Any = figure.subplots(2, len(columns))
    for (top, bottom), (name, image) in zip(panels.T, columns.items(), strict=True):
        error = (image - clean)[0].mean(0)
        top.imshow(image[0].permute(1, 2, 0).clamp(0, 1).numpy())
        smooth = F.avg_pool2d(error[None, None], 9, 1, 4)[0, 0]
        colours = bottom.imshow(smooth.numpy(), vmin=-0.1, vmax=0.1, cmap="RdBu_r")
        title = f"{name}\n{decibels(image, clean):.1f} dB"
        top.set_title(title, fontsize=13, color=INK, parse_math=False)
        for axes in (top, bottom):
            axes.set(xticks=[], yticks=[])
    panels[1, 0].set_ylabel("too dark (blue) or bright (red),\nmean of 9 x 9 pixels", color=INK)
    figure.colorbar(colours, ax=panels[1, :], shrink=0.8, pad=0.01, aspect=30)
    return figure


def figure() -> Figure:
    """The picture."""
    return drawn(*results(photograph()))
