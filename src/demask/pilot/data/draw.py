"""The picture of execution data: per layer a heat map over inputs and positions, or bars."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from demask.errors import BadInput
from demask.files import atomic_write as atomic
from demask.files.atomic_write import PICTURE_DOTS, check_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BARS, COLOURS = "#2a78b5", "viridis"
ACROSS, WIDTH, PANEL = 3, 10.0, 1.7  # panels in a row; inches
MOST = 60  # panels


def draw(magnitudes: Mapping[str, Tensor], grids: Mapping[str, tuple[int, int]], title: str, path: Path) -> None:
    """Write the picture to `path`, completely or not at all; its suffix is the format.

    magnitudes: by layer, [positions] or [inputs, positions]. grids: rows and columns of tiles.
    """
    check_picture(path)
    from matplotlib.figure import Figure

    layers = list(magnitudes.items())[:MOST]
    if not layers:
        raise BadInput("there is nothing to draw: no layer has magnitudes")
    across = min(ACROSS, len(layers))
    down = math.ceil(len(layers) / across)
    figure = Figure(figsize=(WIDTH, PANEL * down + 0.8), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).flatten()
    for axes, (name, values) in zip(panels, layers, strict=False):
        _panel(axes, name, values, grids.get(name))
    for axes in panels[len(layers) :]:
        axes.axis("off")
    left = len(magnitudes) - len(layers)
    more = f" ({left} more layers not drawn)" if left else ""
    figure.suptitle(title + more, fontsize=11, parse_math=False)
    with atomic.write(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=PICTURE_DOTS)


def _panel(axes: Axes, name: str, values: Tensor, grid: tuple[int, int] | None) -> None:
    axes.set_title(name, loc="left", fontsize=8, parse_math=False)
    axes.tick_params(labelsize=7)
    inputs = len(values) if values.ndim == 2 else 1
    each = values.reshape(inputs, -1)
    if grid is not None:
        image = axes.imshow(each.mean(0).reshape(grid).numpy(), cmap=COLOURS, aspect="equal")
    elif inputs == 1:
        axes.bar(range(each.shape[1]), each[0].numpy(), color=BARS, width=1.0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0)
        return
    else:
        image = axes.imshow(each.numpy(), cmap=COLOURS, aspect="auto", interpolation="nearest")
        axes.set_ylabel("input", fontsize=7)
    bar = axes.figure.colorbar(image, ax=axes, pad=0.01)
    bar.ax.tick_params(labelsize=6)
