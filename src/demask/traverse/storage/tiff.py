"""Tiled BigTIFF and OME-TIFF files, through tifffile.

A new file is created with all of its tiles, without compression; each tile is then written at its
offset, by any process and in any order. Coordinates (GeoTIFF) are read by `raster`.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
import torch
import zarr
from torch import Tensor

from demask.errors import BadInput
from demask.traverse.storage.boxes import Box
from demask.traverse.storage.dtype_conversion import name_of
from demask.traverse.storage.store import ArrayInfo, SliceStore, Store, first_line, usual_chunks

EDGE = 512
GEO_KEYS = 34735  # the tag of a GeoTIFF's coordinate system
AXES = {"N": "T", "C": "C", "D": "Z", "H": "Y", "W": "X", "L": "X"}
# Units of OME-XML, in which sizes of pixels are.
MICROMETERS = {"micrometer": 1.0, "nanometer": 1e-3, "millimeter": 1e3, "meter": 1e6}


def open_store(path: Path) -> Store:
    """The first image of a TIFF file, at full size."""
    try:
        file = tifffile.TiffFile(path)
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file; check the path") from None
    except Exception as error:  # of many types, by what is damaged
        raise BadInput(f"{path}: expected a TIFF file: {first_line(error)}") from error
    try:
        page: Any = file.pages[0]
        if GEO_KEYS in page.tags and find_spec("rasterio") is not None:
            from demask.traverse.storage import raster

            file.close()
            store: Any = raster.open_store(path)
            return store
        series = file.series[0]
        levels: Any = series.aszarr(level=0)
        array: Any = zarr.open(levels, mode="r")
    except BadInput:
        raise
    except Exception as error:
        file.close()
        raise BadInput(f"{path}: expected a TIFF file: {first_line(error)}") from error
    weakref.finalize(array, file.close)  # the file is open as long as its array
    axes = series.axes.replace("Q", "N").replace("I", "N")
    return SliceStore.of(array, str(path), layout=axes, metadata=_pixel_sizes(file))


def _pixel_sizes(file: tifffile.TiffFile) -> dict[str, Any]:
    """The sizes of pixels, if OME-XML has them."""
    if not file.is_ome or not file.ome_metadata:
        return {}
    pixels = tifffile.xml2dict(file.ome_metadata).get("OME", {}).get("Image", {})
    pixels = (pixels[0] if isinstance(pixels, list) else pixels).get("Pixels", {})
    scale = {}
    for letter, axis in (("H", "Y"), ("W", "X"), ("D", "Z")):
        if f"PhysicalSize{axis}" in pixels:
            scale[letter] = (float(pixels[f"PhysicalSize{axis}"]), "micrometer")
    return {"scale": scale} if scale else {}


@dataclass(slots=True)
class TiledFile:
    """A file of tiles of equal size, each at its offset.

    offsets: of tiles, by image or channel (pages), then row and column of tiles. letters: of the
    axes; channels are pages of their own, or the innermost axis.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[int, ...] | None
    letters: str
    offsets: np.ndarray
    number: int
    layout: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(range(len(self.shape)))

    def read(self, box: Box) -> Tensor:
        """Not needed: what is written is not read."""
        raise NotImplementedError

    def write(self, box: Box, values: Tensor) -> None:
        """Write full tiles: the positions of a chunk."""
        rows = self.letters.index("H")
        outer, inner = box[:rows], values.shape[rows + 2 :]
        tile = (EDGE, EDGE, *inner)
        pages = np.ndindex(*(b - a for a, b in outer))
        (top, bottom), (left, right) = box[rows], box[rows + 1]
        for page in pages:
            number = 0
            for (first, _), k, size in zip(outer, page, self.shape[:rows], strict=True):
                number = number * size + first + k
            padded = np.zeros(tile, values.numpy().dtype)
            padded[: bottom - top, : right - left] = values[page].numpy()
            offset = int(self.offsets[number, top // EDGE, left // EDGE])
            _write_all(self.number, padded.tobytes(), offset, self.name)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)
            self.number = -1


def _write_all(number: int, data: bytes, offset: int, name: str) -> None:
    done = 0
    try:
        while done < len(data):
            done += os.pwrite(number, data[done:], offset + done)
    except OSError as error:
        raise BadInput(f"{name}: {error.strerror or error}") from error


def letters(images: str, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Pictures of three or four 8-bit channels have channels last; others one page per channel."""
    size = dict(zip(images, shape, strict=True))
    outer = "".join(k for k in images if k in "ND" and size[k] > 1)
    if size["C"] in (3, 4) and dtype == torch.uint8 and not outer:
        return "HWC"
    return outer + ("C" if size["C"] > 1 else "") + "HW"


def chunks(shape: tuple[int, ...], letters: str) -> tuple[int, ...]:
    """Tiles of 512 x 512, of all channels."""
    return tuple(EDGE if letter in "HW" else n for letter, n in zip(letters, usual_chunks(shape, letters), strict=True))


def create(path: Path, info: ArrayInfo) -> None:
    """Create a file with all tiles."""
    is_picture = info.letters == "HWC"
    metadata: dict[str, Any] = {"axes": "".join(AXES[k] for k in info.letters)}
    if is_picture:
        metadata["axes"] = "YXS"
    for letter, (size, unit) in info.metadata.get("scale", {}).items():
        if letter in "DHW" and unit in MICROMETERS:
            metadata[f"PhysicalSize{AXES[letter]}"] = size * MICROMETERS[unit]
            metadata[f"PhysicalSize{AXES[letter]}Unit"] = "µm"
    try:
        with tifffile.TiffWriter(path, bigtiff=True, ome=".ome." in path.name.lower()) as writer:
            writer.write(
                None,
                shape=info.shape,
                dtype=name_of(info.dtype),
                tile=(EDGE, EDGE),
                photometric="rgb" if is_picture else "minisblack",
                metadata=metadata,
            )
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: {first_line(error)}") from error


def open_again(path: Path, info: ArrayInfo) -> TiledFile:
    """The file, open for writing."""
    rows = info.letters.index("H")
    down, across = (-(-info.shape[rows + k] // EDGE) for k in (0, 1))
    with tifffile.TiffFile(path) as file:
        pages: Any = file.pages
        offsets = [page.dataoffsets for page in pages]
    count = math.prod(info.shape[:rows])
    table = np.array(offsets, np.int64).reshape(count, down, across)
    number = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
    return TiledFile(str(path), info.shape, info.dtype, info.chunks, info.letters, table, number)
