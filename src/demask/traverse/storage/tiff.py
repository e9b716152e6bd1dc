"""Tiled BigTIFF and OME-TIFF files, through tifffile.

A file is a zarr array to tifffile. A new one is created with all of its tiles, without compression;
each tile is then written at its offset, by any process and in any order. Coordinates (GeoTIFF) are
read by `raster`.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tifffile
import torch
import zarr

from demask.errors import BadInput
from demask.traverse.storage.dtype_conversion import name_of
from demask.traverse.storage.store import EDGE, ArrayInfo, SliceStore, first_line

GEO_KEYS = 34735  # the tag of a GeoTIFF's coordinate system
AXES = {"N": "T", "C": "C", "D": "Z", "H": "Y", "W": "X", "L": "X"}
# Units of OME-XML, in which sizes of pixels are.
MICROMETERS = {"micrometer": 1.0, "nanometer": 1e-3, "millimeter": 1e3, "meter": 1e6}


def open_store(path: Path) -> SliceStore:
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
            return raster.open_store(path)
        axes = file.series[0].axes.replace("Q", "N").replace("I", "N")
        levels: Any = file.series[0].aszarr(level=0)
        array: Any = zarr.open(levels, mode="r")
    except BadInput:
        raise
    except Exception as error:
        file.close()
        raise BadInput(f"{path}: expected a TIFF file: {first_line(error)}") from error
    weakref.finalize(array, file.close)  # the file is open as long as its array
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


def letters(images: str, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Pictures of three or four 8-bit channels have channels last; others one page per channel."""
    size = dict(zip(images, shape, strict=True))
    outer = "".join(k for k in images if k in "ND" and size[k] > 1)
    if size["C"] in (3, 4) and dtype == torch.uint8 and not outer:
        return "HWC"
    return outer + ("C" if size["C"] > 1 else "") + "HW"


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


def open_again(path: Path, info: ArrayInfo) -> SliceStore:
    """The file, open for writing."""
    try:
        tiles: Any = tifffile.imread(path, mode="r+", aszarr=True)
        # Chunks of zeros are written, too: tiles cannot be deleted, and may have other values.
        array: Any = zarr.open(tiles, mode="r+", config={"write_empty_chunks": True})
    except Exception as error:  # of many types, by what is damaged
        raise BadInput(f"{path}: cannot be written: {first_line(error)}") from error
    return replace(SliceStore.of(array, str(path)), chunks=info.chunks, close=tiles.close)
