"""GeoTIFF files and windows of cloud-optimized ones, through rasterio: coordinate system, transform
and nodata value go from the source to the result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import rasterio
import rasterio.shutil
import torch
from rasterio.env import get_gdal_config, set_gdal_config
from rasterio.errors import RasterioError
from rasterio.windows import Window

from demask.errors import BadInput
from demask.traverse.storage.boxes import Box, box_at
from demask.traverse.storage.dtype_conversion import name_of
from demask.traverse.storage.store import EDGE, ArrayInfo, SliceStore, first_line, replace_path

CACHE = 16 << 20  # bytes
CACHE_OPTION = "GDAL_CACHEMAX"


@contextmanager
def small_cache() -> Iterator[None]:
    """GDAL's cache of tiles, of 5 % of the machine's memory by default, has `CACHE` bytes at most
    meanwhile: no budget would count more."""
    before = get_gdal_config(CACHE_OPTION)
    if before > CACHE:  # else another thread has lowered it and raises it again
        set_gdal_config(CACHE_OPTION, CACHE)
    try:
        yield
    finally:
        if before > CACHE:
            set_gdal_config(CACHE_OPTION, before)


class Raster:
    """An open raster, (C, H, W). GDAL's datasets serve one thread at a time."""

    def __init__(self, data: Any):
        self.data, self.lock = data, Lock()
        self.shape = (data.count, data.height, data.width)
        self.dtype = np.dtype(data.dtypes[0])
        self.chunks = (data.count, *data.block_shapes[0])

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        with self.lock, small_cache():
            return self.data.read(_bands(box_at(index)), window=Window.from_slices(index[1], index[2]))

    def __setitem__(self, index: tuple[slice, ...], values: np.ndarray) -> None:
        with self.lock, small_cache():
            self.data.write(values, _bands(box_at(index)), window=Window.from_slices(index[1], index[2]))


def _bands(box: Box) -> list[int]:
    return list(range(box[0][0] + 1, box[0][1] + 1))


def open_store(path: Path) -> SliceStore:
    """A raster to read."""
    try:
        data = rasterio.open(path)
    except RasterioError as error:
        raise BadInput(f"{path}: {first_line(error)}") from error
    if len(set(data.dtypes)) > 1:
        raise BadInput(f"{path} has bands of several dtypes {sorted(set(data.dtypes))}; convert them to one")
    metadata = {"crs": data.crs, "transform": data.transform, "nodata": data.nodata}
    return SliceStore.of(Raster(data), str(path), layout="CHW", metadata=metadata)


def letters(images: str, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Bands, rows, columns of one image."""
    size = dict(zip(images, shape, strict=True))
    if size.get("N", 1) != 1 or size.get("D", 1) != 1:
        raise BadInput(f"a GeoTIFF has one image, the result has the shape {shape}; write .zarr")
    return "CHW"


def create(path: Path, info: ArrayInfo) -> None:
    """Create a GeoTIFF with all tiles: one that grew would lose tiles that several processes write."""
    options = {k: info.metadata[k] for k in ("crs", "transform", "nodata") if info.metadata.get(k) is not None}
    options |= dict(zip(("count", "height", "width"), info.shape, strict=True), dtype=name_of(info.dtype))
    options |= {"tiled": True, "blockxsize": EDGE, "blockysize": EDGE, "BIGTIFF": "YES"}
    try:
        rasterio.open(path, "w", driver="GTiff", **options).close()
    except (RasterioError, ValueError) as error:
        raise BadInput(f"{path}: {first_line(error)}") from error


def open_again(path: Path, info: ArrayInfo) -> SliceStore:
    """The file, open for writing."""
    data = rasterio.open(path, "r+")
    return replace(SliceStore.of(Raster(data), str(path)), close=data.close)


def finish(part: Path, final: Path, info: ArrayInfo) -> None:
    """Name the file; one that is to be cloud-optimized is rewritten with its overviews."""
    if ".cog." not in final.name.lower():
        replace_path(part, final)
        return
    optimized = part.with_name(f"{part.name}.cog")
    resampling = "NEAREST" if info.metadata.get("labels") else "AVERAGE"
    with small_cache():
        rasterio.shutil.copy(
            part, optimized, driver="COG", compress="DEFLATE", bigtiff="IF_SAFER", overview_resampling=resampling
        )
    replace_path(optimized, final)
    part.unlink()
