"""Slides of microscopes, through OpenSlide: level 0 as (H, W, 3) in 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openslide  # pyright: ignore
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.traverse.storage.boxes import Box
from demask.traverse.storage.store import first_line

EDGE = 512


@dataclass(slots=True)
class SlideStore:
    """An open slide. Positions that were not scanned are white."""

    slide: Any
    name: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.uint8
    layout: str | None = "HWC"
    chunks: tuple[int, ...] | None = (EDGE, EDGE, 3)
    order: tuple[int, ...] = (0, 1, 2)

    @property
    def shape(self) -> tuple[int, ...]:
        width, height = self.slide.dimensions
        return (height, width, 3)

    def read(self, box: Box) -> Tensor:
        """The values of a box."""
        (top, bottom), (left, right), (first, last) = box
        try:
            region = self.slide.read_region((left, top), 0, (right - left, bottom - top))
        except openslide.OpenSlideError as error:
            raise BadInput(f"{self.name}: rows {top}:{bottom} cannot be read: {first_line(error)}") from error
        pixels = np.array(region)
        alpha = pixels[..., 3:].astype(np.uint16)
        # OpenSlide's colors are not multiplied by alpha once they are an image of PIL.
        mixed = (pixels[..., :3] * alpha + 255 * (255 - alpha) + 127) // 255
        return torch.from_numpy(mixed[..., first:last].astype(np.uint8))

    def write(self, box: Box, values: Tensor) -> None:
        """Slides are only read."""
        raise BadInput(f"{self.name}: slides cannot be written")


def open_store(path: Path) -> SlideStore:
    """A slide to read."""
    try:
        slide = openslide.OpenSlide(path)
    except (openslide.OpenSlideError, OSError) as error:
        raise BadInput(f"{path}: OpenSlide cannot read it: {first_line(error)}") from error
    sizes = {"H": openslide.PROPERTY_NAME_MPP_Y, "W": openslide.PROPERTY_NAME_MPP_X}
    scale = {
        letter: (float(slide.properties[key]), "micrometer") for letter, key in sizes.items() if key in slide.properties
    }
    return SlideStore(slide, str(path), {"scale": scale} if scale else {})
