"""docs/traverse.jpg, a picture decoded from its latent in two ways, and how far each is off.

Left, padded tiles that are decoded one by one; right, `demask.traverse`.
Both are compared with the untiled network. The weights and the latent are in shared/data next to
the project.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from demask.traverse import tile
from docs.generate import DOCS
from traverse_networks import latent, named

DPI = 100
PATH = DOCS / "traverse.jpg"
SIZE, GROWS = (96, 256), 8  # of the latent; pixels per position
SIDE, PADDING = 64, 11  # of a tile, in positions of the latent
MEMORY = "64MiB"
SHOWN = slice(100, 720), slice(56, 846)  # rows and columns: seams cross in them
SCALE = 0.1  # of the values of the picture, which go from 0 to 1, at the end of the colours
FEW = 8  # marks that are drawn long
INK, SEAM, BANDS = "#1f2933", "#ff3b30", "#2f6fb5"


@dataclass(frozen=True, slots=True)
class Column:
    """One way: its picture (rows, columns, 3), its differences, and the words about both. seams:
    rows and columns at which parts meet."""

    title: str
    words: str
    picture: Tensor
    error: Tensor
    seams: tuple[tuple[int, ...], tuple[int, ...]]


def by_tiles(model: nn.Module, x: Tensor) -> Tensor:
    """Each tile decoded with its padding, which is cut off again."""
    height, width = x.shape[2:]
    canvas = x.new_empty(1, 3, GROWS * height, GROWS * width)
    for rows in spans(height):
        for columns in spans(width):
            above, left = padded(rows, height), padded(columns, width)
            near = model(x[:, :, above, left])
            inner = pixels(rows, above.start), pixels(columns, left.start)
            canvas[:, :, pixels(rows), pixels(columns)] = near[:, :, *inner]
    return canvas


def spans(length: int) -> Iterator[slice]:
    """The positions of each tile along one axis."""
    for start in range(0, length, SIDE):
        yield slice(start, min(start + SIDE, length))


def padded(span: slice, length: int) -> slice:
    """The padded positions of a tile: at the border of the image there are no more."""
    return slice(max(span.start - PADDING, 0), min(span.stop + PADDING, length))


def pixels(span: slice, first: int = 0) -> slice:
    """The pixels of some positions, counted from a position."""
    return slice(GROWS * (span.start - first), GROWS * (span.stop - first))


@torch.no_grad()
def columns() -> tuple[Column, Column]:
    """Both ways, computed."""
    model = named(["TAEF2"])["TAEF2"].make().to(memory_format=torch.channels_last)
    x = latent(*SIZE).contiguous(memory_format=torch.channels_last)
    whole, small = model(x), tile(model, (x,), memory=MEMORY)
    rows, columns = (tuple(GROWS * s.start for s in spans(n) if s.start) for n in SIZE)
    title = f"tiles of {SIDE} x {SIDE} positions of the latent, padding {PADDING}, each by itself"
    tiles = _column(title, by_tiles(model, x), whole, (rows, columns))
    band = small.plan.segments[-1].rows
    title = f"demask.traverse.tile(model, (latent,), memory={MEMORY!r}): bands of {band} rows"
    rows = tuple(range(band, GROWS * SIZE[0], band))
    return tiles, _column(title, small(x), whole, (rows, ()))


def _column(title: str, image: Tensor, whole: Tensor, seams: Any) -> Column:
    error = (image - whole).abs()
    bits = [(y.clamp(0, 1) * 255).round() for y in (image, whole)]
    changed = float((bits[0] != bits[1]).double().mean())
    words = (
        f"difference from the untiled network: at most {float(error.max()):.2g}; "
        f"{100 * changed:.2g} % of the 8-bit values change"
    )
    picture = image[0].permute(1, 2, 0).clamp(0, 1)
    return Column(title, words, picture[SHOWN], error[0].amax(0)[SHOWN], seams)


def drawn(pair: tuple[Column, Column]) -> Figure:
    """A column for each way: its picture, then its differences on one scale of colours."""
    figure = Figure(figsize=(15, 11.6), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.16, h_pad=0.08)
    panels, colours = figure.subplots(2, 2), None
    for (top, bottom), column in zip(panels.T, pair, strict=True):
        top.imshow(column.picture.numpy())
        colours = bottom.imshow(column.error.numpy(), vmin=0, vmax=SCALE, cmap="inferno")
        _marked(top, column.seams)
        top.set_title(column.title, fontsize=11.5, color=INK, parse_math=False, pad=18)
        bottom.set_title(column.words, fontsize=11.5, color=INK, parse_math=False)
        for axes in (top, bottom):
            axes.set(xticks=[], yticks=[])
    figure.colorbar(colours, ax=panels[1, :], shrink=0.8, pad=0.01, aspect=30)
    return figure


def _marked(axes: Any, seams: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Marks next to the picture where parts meet: nothing is drawn over it."""
    rows, columns = (
        [n - span.start for n in places if span.start < n < span.stop]
        for span, places in zip(SHOWN, seams, strict=True)
    )
    high, wide = (span.stop - span.start for span in SHOWN)
    few = len(rows) <= FEW
    style = {"colors": SEAM if few else BANDS, "linewidths": 3 if few else 1, "clip_on": False}
    reach = 22 if few else 12
    axes.hlines(rows, -reach, -2, **style)
    axes.hlines(rows, wide + 1, wide + reach - 1, **style)
    axes.vlines(columns, -reach, -2, **style)
    axes.vlines(columns, high + 1, high + reach - 1, **style)
    axes.set(xlim=(-0.5, wide - 0.5), ylim=(high - 0.5, -0.5))


def figure() -> Figure:
    """The picture."""
    return drawn(columns())
