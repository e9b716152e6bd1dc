"""The formats of files: how an array is opened, created under a temporary name, and finished.

A new format is an entry in FORMATS. Packages other than NumPy are imported when a file of their
format is opened.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from demask.errors import BadInput
from demask.installation import install_command
from demask.traverse.storage.stores.store import Store

HERE = __name__.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """An array to write.

    letters: of its axes, "NCHW" or fewer, in the order of the format. chunks: None where the format
    has none. metadata: of the source, as far as it is true of the result: "scale" {letter: (size of
    a position, unit)}, "crs", "transform" (of rasterio), "nodata", "labels" (True where values are
    numbers of classes).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    letters: str
    chunks: tuple[int, ...] | None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Format:
    """One format. module: has `open_store(path) -> Store` and, where it is written,
    `letters(channels, images, dtype) -> str`, `chunks(shape, letters) -> tuple or None`,
    `create(path, info) -> None`, `open_again(path, info) -> Store`, and optionally
    `finish(part, final, info)`. package: that the module needs. marks: names of files of which a
    folder of this format has one; () where it is a single file."""

    name: str
    suffixes: tuple[str, ...]
    module: str
    package: str | None = None
    is_written: bool = True
    marks: tuple[str, ...] = ()

    def load(self) -> Any:
        """The module of the format. Raises BadInput where its package is missing."""
        try:
            return import_module(f"{HERE}.{self.module}")
        except ModuleNotFoundError as error:
            if self.package is None or (error.name or "").startswith("demask"):
                raise
            raise BadInput(
                f"{self.name} files need {error.name}, which is not installed: {install_command('stream')}"
            ) from error

    def create(self, path: Path, info: ArrayInfo) -> None:
        """Create the array, without values, at a path that does not exist."""
        self.load().create(path, info)

    def open_again(self, path: Path, info: ArrayInfo) -> Store:
        """The array after `create`, to write to it. Any process may open it."""
        return self.load().open_again(path, info)

    def finish(self, part: Path, final: Path, info: ArrayInfo) -> None:
        """Give a complete array its name, in the place of what has it."""
        finish: Callable[[Path, Path, ArrayInfo], None] | None = getattr(self.load(), "finish", None)
        (finish or replace_path)(part, final, info)


FORMATS = (
    Format("NumPy", (".npy",), "npy"),
    Format("OME-Zarr", (".ome.zarr", ".zarr"), "zarr_store", "zarr", marks=("zarr.json", ".zgroup", ".zarray")),
    Format("OME-TIFF", (".ome.tif", ".ome.tiff"), "tiff", "tifffile"),
    Format("cloud-optimized GeoTIFF", (".cog.tif", ".cog.tiff"), "raster", "rasterio"),
    Format("TIFF", (".tif", ".tiff", ".btf", ".tf8"), "tiff", "tifffile"),
    Format(
        "slide",
        (".svs", ".ndpi", ".mrxs", ".scn", ".vms", ".bif", ".vsi", ".svslide"),
        "slide",
        "openslide",
        is_written=False,
    ),
)
RASTER = Format("GeoTIFF", (), "raster", "rasterio")


def format_of(path: str | os.PathLike[str], metadata: Mapping[str, Any] | None = None) -> Format:
    """The format of a file by its name: the longest suffix that fits. A TIFF with coordinates in
    its metadata is a GeoTIFF. Raises BadInput for other names."""
    name = str(path).rstrip("/").lower()
    fitting = [(len(s), f) for f in FORMATS for s in f.suffixes if name.endswith(s)]
    if not fitting:
        suffixes = " ".join(s for f in FORMATS for s in f.suffixes)
        raise BadInput(f"{path}: expected a name that ends in one of {suffixes}")
    best = max(fitting, key=lambda pair: pair[0])[1]
    if best.name == "TIFF" and (metadata or {}).get("crs") is not None:
        return RASTER
    return best


def open_path(path: str | os.PathLike[str]) -> Store:
    """The array in a file. Raises BadInput where it is missing, damaged or of another kind."""
    return format_of(path).load().open_store(Path(path))


def replace_path(part: Path, final: Path, info: ArrayInfo | None = None) -> None:
    """Rename a file or folder, in the place of another, which is deleted afterwards."""
    old = None
    if part.is_dir() and final.exists():
        old = final.with_name(f"{final.name}.old-{os.getpid()}")
        os.replace(final, old)
    os.replace(part, final)
    if old is not None:
        shutil.rmtree(old) if old.is_dir() else old.unlink()
