"""GeoTIFF files and windows of cloud-optimized ones, through rasterio: coordinate system, transform
and nodata value go from the source to the result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import rasterio
import rasterio.shutil
import rasterio.windows
import torch
from rasterio.env import get_gdal_config, set_gdal_config
from rasterio.errors import RasterioError
from torch import Tensor

from demask.errors import BadInput
from demask.traverse.storage.boxes import Box
from demask.traverse.storage.dtype_conversion import name_of
from demask.traverse.storage.store import ArrayInfo, first_line, replace_path, to_tensor, torch_dtype

EDGE = 512
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


@dataclass(slots=True)
class RasterStore:
    """An open raster, (C, H, W). GDAL's datasets serve one thread at a time."""

    data: Any
    name: str
    dtype: torch.dtype
    metadata: Mapping[str, Any] = field(default_factory=dict)
    layout: str | None = "CHW"
    lock: Lock = field(default_factory=Lock)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.data.count, self.data.height, self.data.width)

    @property
    def chunks(self) -> tuple[int, ...]:
        rows, columns = self.data.block_shapes[0]
        return (self.data.count, rows, columns)

    @property
    def order(self) -> tuple[int, ...]:
        return (0, 1, 2)

    def read(self, box: Box) -> Tensor:
        """The values of a box."""
        bands, window = _bands(box), _window(box)
        try:
            with self.lock, small_cache():
                values = self.data.read(bands, window=window)
        except RasterioError as error:
            raise BadInput(f"{self.name}: {window} cannot be read: {first_line(error)}") from error
        return to_tensor(values, self.dtype, self.name)

    def write(self, box: Box, values: Tensor) -> None:
        """Write the values of a box."""
        try:
            with self.lock, small_cache():
                self.data.write(values.numpy(), _bands(box), window=_window(box))
        except RasterioError as error:
            raise BadInput(f"{self.name}: cannot be written: {first_line(error)}") from error

    def close(self) -> None:
        """Write what GDAL still holds."""
        self.data.close()

    __del__ = close


def _bands(box: Box) -> list[int]:
    return list(range(box[0][0] + 1, box[0][1] + 1))


def _window(box: Box) -> Any:
    (top, bottom), (left, right) = box[1:]
    return rasterio.windows.Window.from_slices((top, bottom), (left, right))


def open_store(path: Path) -> RasterStore:
    """A raster to read."""
    try:
        data = rasterio.open(path)
    except RasterioError as error:
        raise BadInput(f"{path}: {first_line(error)}") from error
    if len(set(data.dtypes)) > 1:
        raise BadInput(f"{path} has bands of several dtypes {sorted(set(data.dtypes))}; convert them to one")
    import numpy as np

    dtype = torch_dtype(np.dtype(data.dtypes[0]), str(path))
    metadata = {"crs": data.crs, "transform": data.transform, "nodata": data.nodata}
    return RasterStore(data, str(path), dtype, metadata)


def letters(images: str, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Bands, rows, columns of one image."""
    size = dict(zip(images, shape, strict=True))
    if size.get("N", 1) != 1 or size.get("D", 1) != 1:
        raise BadInput(f"a GeoTIFF has one image, the result has the shape {shape}; write .zarr")
    return "CHW"


def chunks(shape: tuple[int, ...], letters: str) -> tuple[int, ...]:
    """Tiles of 512 x 512, of all bands."""
    return (shape[0], EDGE, EDGE)


def create(path: Path, info: ArrayInfo) -> None:
    """Create a tiled GeoTIFF, which grows as tiles are written."""
    bands, height, width = info.shape
    georeference = {k: info.metadata[k] for k in ("crs", "transform", "nodata") if info.metadata.get(k) is not None}
    try:
        with rasterio.open(
            path,
            "w",
            driver="GTiff",
            count=bands,
            height=height,
            width=width,
            dtype=name_of(info.dtype),
            tiled=True,
            blockxsize=EDGE,
            blockysize=EDGE,
            BIGTIFF="YES",
            SPARSE_OK="TRUE",
            **georeference,
        ):
            pass
    except (RasterioError, ValueError) as error:
        raise BadInput(f"{path}: {first_line(error)}") from error


def open_again(path: Path, info: ArrayInfo) -> RasterStore:
    """The file, open for writing."""
    return RasterStore(rasterio.open(path, "r+"), str(path), info.dtype)


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
