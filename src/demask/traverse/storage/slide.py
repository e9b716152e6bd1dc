"""Slides of microscopes, through OpenSlide: level 0 as (H, W, 3) in 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openslide  # pyright: ignore

from demask.errors import BadInput
from demask.traverse.storage.store import EDGE, SliceStore, first_line


class Slide:
    """An open slide. Positions that were not scanned are white."""

    dtype, chunks = np.dtype(np.uint8), (EDGE, EDGE, 3)

    def __init__(self, slide: Any):
        self.slide, self.shape = slide, (*slide.dimensions[::-1], 3)

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        rows, columns, channels = index
        size = columns.stop - columns.start, rows.stop - rows.start
        pixels = np.array(self.slide.read_region((columns.start, rows.start), 0, size))
        alpha = pixels[..., 3:].astype(np.uint16)
        # OpenSlide's colors are not multiplied by alpha once they are an image of PIL.
        mixed = (pixels[..., :3] * alpha + 255 * (255 - alpha) + 127) // 255
        return mixed[..., channels].astype(np.uint8)


def open_store(path: Path) -> SliceStore:
    """A slide to read."""
    try:
        slide = openslide.OpenSlide(path)
    except (openslide.OpenSlideError, OSError) as error:
        raise BadInput(f"{path}: OpenSlide cannot read it: {first_line(error)}") from error
    sizes = {"H": openslide.PROPERTY_NAME_MPP_Y, "W": openslide.PROPERTY_NAME_MPP_X}
    scale = {
        letter: (float(slide.properties[key]), "micrometer") for letter, key in sizes.items() if key in slide.properties
    }
    return SliceStore.of(Slide(slide), str(path), layout="HWC", metadata={"scale": scale} if scale else {})
