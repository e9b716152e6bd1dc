"""Stores: arrays that are read and written in boxes, in files or wherever slices come from.

A format says how an array is opened, created under a temporary name, and finished. A new format is
an entry in FORMATS. Packages other than NumPy are imported when a file of their format is opened.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput, DemaskError
from demask.installation import install_command
from demask.traverse.storage.boxes import Box, extents, slices

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
        """Give a complete array its name, replacing what has it."""
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
    """Rename a file or folder; another of that name is deleted afterwards."""
    old = None
    if part.is_dir() and final.exists():
        old = final.with_name(f"{final.name}.old-{os.getpid()}")
        os.replace(final, old)
    os.replace(part, final)
    if old is not None:
        shutil.rmtree(old) if old.is_dir() else old.unlink()


class Store(Protocol):
    """An array of numbers that is read and written in boxes.

    name: for messages. shape, dtype: of the array, in this machine's byte order. chunks: the boxes
    in which it is stored, None where any box is read at the same speed. order: axes from outermost
    to innermost in memory. layout: letters of its axes, None where nothing names them. metadata:
    what a result of the same region should keep (see `ArrayInfo`).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[int, ...] | None
    order: tuple[int, ...]
    layout: str | None
    metadata: Mapping[str, Any]

    def read(self, box: Box) -> Tensor:
        """The values of a box."""
        ...

    def write(self, box: Box, values: Tensor) -> None:
        """Write the values of a box, of the store's dtype."""
        ...


@dataclass(slots=True)
class SliceStore:
    """Any object that can be sliced and has a shape and a dtype: arrays of zarr, h5py, numpy."""

    array: Any
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[int, ...] | None
    order: tuple[int, ...]
    layout: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    mapping: mmap.mmap | None = None

    @classmethod
    def of(
        cls,
        array: Any,
        name: str = "the array",
        *,
        layout: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> SliceStore:
        """The store of an object. Raises BadInput unless it has a shape and numbers."""
        try:
            shape, dtype = tuple(int(n) for n in array.shape), np.dtype(array.dtype)
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:  # closed: h5py
            raise BadInput(
                f"{name}: expected an open array with a shape and a dtype that "
                f"can be sliced, got {type(array).__name__}"
            ) from error
        chunks = getattr(array, "chunks", None)
        known = isinstance(chunks, tuple) and all(isinstance(n, int) for n in chunks)
        shards = getattr(array, "shards", None)  # of zarr: what is written as one file
        return cls(
            array,
            name,
            shape,
            torch_dtype(dtype, name),
            (shards or chunks) if known else None,
            memory_order(array),
            layout,
            metadata or {},
            backing_file(array),
        )

    def read(self, box: Box) -> Tensor:
        try:
            values = to_tensor(self.array[slices(box)], self.dtype, self.name)
        except DemaskError:
            raise
        except Exception as error:  # of any type: codecs and file formats have their own
            raise BadInput(f"{self.name}: positions {_text_of(box)} cannot be read: {first_line(error)}") from error
        if tuple(values.shape) != extents(box):
            raise BadInput(
                f"{self.name}: positions {_text_of(box)} came as {tuple(values.shape)}: "
                "was it changed, or does it end early?"
            )
        if self.mapping is None:
            return values
        copy = values.clone()
        release_pages(self.mapping)
        return copy

    def write(self, box: Box, values: Tensor) -> None:
        try:
            self.array[slices(box)] = values.numpy()
        except Exception as error:
            raise BadInput(f"{self.name}: positions {_text_of(box)} cannot be written: {first_line(error)}") from error
        release_pages(self.mapping)


def torch_dtype(dtype: np.dtype[Any], name: str) -> torch.dtype:
    """torch's dtype for numbers of any byte order. Raises BadInput for others."""
    try:
        return torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype
    except (TypeError, ValueError) as error:
        raise BadInput(
            f"{name} has elements of {dtype}; expected floating-point or integers: convert "
            "it, for example by array.astype('float32')"
        ) from error


def to_tensor(values: Any, dtype: torch.dtype, name: str) -> Tensor:
    """The values of a slice as a tensor in this machine's byte order, of any strides."""
    array = np.asarray(values)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if any(step < 0 for step in array.strides):
        array = array.copy()
    if not array.flags.writeable:
        array = array.copy() if array.size else np.empty(array.shape, array.dtype)
    tensor = torch.from_numpy(array)
    if tensor.dtype != dtype:
        raise BadInput(f"{name}: a slice has the dtype {array.dtype}, the array another")
    return tensor


def memory_order(array: Any) -> tuple[int, ...]:
    """The axes of an array from outermost to innermost in memory, as far as it says."""
    strides = getattr(array, "strides", None)
    dims = range(len(array.shape))
    if not isinstance(strides, tuple) or len(strides) != len(array.shape):
        return tuple(dims)
    return tuple(sorted(dims, key=lambda k: (-abs(strides[k]), k)))


def backing_file(array: Any) -> mmap.mmap | None:
    """The mapping of an array, if its pages may be released because a file backs them; a private
    copy (mode "c") is not backed."""
    shared = False
    while array is not None and not isinstance(array, mmap.mmap):
        shared = shared or (isinstance(array, np.memmap) and array.mode in ("r", "r+", "w+"))
        array = getattr(array, "base", None)
    return array if shared else None


def release_pages(mapping: mmap.mmap | None) -> None:
    """Release the pages of a mapping: they would count as memory of the process."""
    if mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED)


def usual_chunks(shape: Sequence[int], letters: str, edge: int = 512) -> tuple[int, ...]:
    """Chunks for a new array: all channels, `edge` rows and columns, one image."""
    return tuple(
        min(size, edge) if letter in "HWL" else size if letter == "C" else 1
        for size, letter in zip(shape, letters, strict=True)
    )


def first_line(error: Exception) -> str:
    """The first line of an error's text, or its type."""
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def _text_of(box: Box) -> str:
    return ", ".join(f"{start}:{end}" for start, end in box)
