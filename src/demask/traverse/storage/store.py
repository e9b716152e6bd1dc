"""Arrays that are read and written in boxes, in files or wherever slices come from.

Everything here speaks one protocol, that of a zarr array: `shape`, `dtype`, `chunks` (None or
missing where any box is read at the same speed), `array[slices]` and `array[slices] = values`.
Arrays of zarr (and through it of tifffile), h5py and NumPy have it; the modules of `npy`, `raster`
and `slide` adapt the others, and raise what their library raises.

`SliceStore` adds once what all need. Laws: `read(box)` has the values of `array[slices(box)]` in this
machine's byte order and exactly the box's shape, or is a BadInput that names the array and the
positions; after `write(box, values)`, `read(box)` equals `values`; no page of a mapped file stays in
memory. A format says how an array is opened, created under a temporary name, and finished. A new
format is an entry in FORMATS. Packages other than NumPy are imported when a file of their format is
opened.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput, DemaskError
from demask.installation import install_command
from demask.traverse.storage.boxes import Box, extents, slices, view

HERE = __name__.rpartition(".")[0]
EDGE = 512  # rows and columns of a chunk


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
    """One format. module: has `open_store(path) -> SliceStore` and, where it is written,
    `create(path, info)`, which creates an array without values at a path that does not exist;
    `open_again(path, info) -> SliceStore`, by which any process may write to it; and optionally
    `letters(images, shape, dtype) -> str`, the axes in the order of the format, and `finish(part, final,
    info)`, which gives a complete array its name. package: that the module needs. marks: names of files of which a
    folder of this format has one; () where it is a single file, whose chunks are full tiles."""

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

    def chunks(self, shape: tuple[int, ...], letters: str, edge: int) -> tuple[int, ...] | None:
        """Chunks for a new array: all channels, `edge` rows and columns, one image."""
        if self.package is None:
            return None
        return tuple(
            (min(size, edge) if self.marks else edge) if letter in "HWL" else size if letter == "C" else 1
            for size, letter in zip(shape, letters, strict=True)
        )


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


def replace_path(part: Path, final: Path, info: ArrayInfo | None = None) -> None:
    """Rename a file or folder; another of that name is deleted afterwards."""
    old = None
    if part.is_dir() and final.exists():
        old = final.with_name(f"{final.name}.old-{os.getpid()}")
        os.replace(final, old)
    os.replace(part, final)
    if old is not None:
        shutil.rmtree(old) if old.is_dir() else old.unlink()


@dataclass(slots=True)
class SliceStore:
    """An array that can be sliced, of zarr, h5py, numpy or a format's module, or a tensor.

    name: for messages. dtype: in this machine's byte order. chunks: the boxes in which it is stored,
    None where any box is read at the same speed. order: axes from outermost to innermost in memory.
    layout: letters of its axes, None where nothing names them. metadata: what a result of the same
    region should have, too (see `ArrayInfo`). close: writes what a library has not written yet.
    written: boxes and checksums of what was written; None to note nothing.
    """

    array: Any
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[int, ...] | None
    order: tuple[int, ...]
    layout: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    mapping: mmap.mmap | None = None
    close: Callable[[], object] = lambda: None
    written: list[tuple[Box, str]] | None = None

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
        if isinstance(array, Tensor) or (isinstance(array, np.ndarray) and backing_file(array) is None):
            tensor = _as_cpu_tensor(array)
            return cls(tensor, name, tuple(tensor.shape), tensor.dtype, None, tuple(range(tensor.dim())))
        try:
            shape, dtype = tuple(int(n) for n in array.shape), np.dtype(array.dtype)
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:  # closed: h5py
            raise BadInput(
                f"{name}: expected an open array with a shape and a dtype that "
                f"can be sliced, got {type(array).__name__}"
            ) from error
        chunks = getattr(array, "chunks", None)
        is_regular = isinstance(chunks, tuple) and all(isinstance(n, int) for n in chunks)
        shards = getattr(array, "shards", None)  # of zarr: what is written as one file
        return cls(
            array,
            name,
            shape,
            torch_dtype(dtype, name),
            (shards or chunks) if is_regular else None,
            memory_order(array),
            layout,
            metadata or {},
            backing_file(array),
        )

    @property
    def tensor(self) -> Tensor | None:
        """The array if it is in memory, to read and write in place."""
        return self.array if isinstance(self.array, Tensor) else None

    def read(self, box: Box) -> Tensor:
        """The values of a box."""
        if self.tensor is not None:
            return view(self.tensor, box)
        with _refusals(self.name, box, "read"):
            array = np.asarray(self.array[slices(box)])
            array = array.astype(array.dtype.newbyteorder("="), copy=False)
            if not array.flags.writeable or any(step < 0 for step in array.strides):
                array = array.copy()
            values = torch.from_numpy(array)
        if values.dtype != self.dtype or tuple(values.shape) != extents(box):
            raise BadInput(
                f"{self.name}: positions {_text_of(box)} came as {array.dtype} {array.shape}: "
                "was it changed, or does it end early?"
            )
        if self.mapping is None:
            return values
        copy = values.clone()
        release_pages(self.mapping)
        return copy

    def write(self, box: Box, values: Tensor) -> None:
        """Write the values of a box, of the store's dtype."""
        with _refusals(self.name, box, "written"):
            self.array[slices(box)] = values.numpy()
        release_pages(self.mapping)
        if self.written is not None:
            self.written.append((box, checksum(values)))

    def take_written(self) -> tuple[tuple[Box, str], ...]:
        """What was written since the last call."""
        taken = tuple(self.written or ())
        if self.written is not None:
            self.written.clear()
        return taken


@contextmanager
def _refusals(name: str, box: Box, verb: str) -> Iterator[None]:
    """What a library raises in the block, as BadInput with the positions."""
    try:
        yield
    except DemaskError:
        raise
    except Exception as error:  # of any type: codecs and file formats have their own
        raise BadInput(f"{name}: positions {_text_of(box)} cannot be {verb}: {first_line(error)}") from error


def torch_dtype(dtype: np.dtype[Any], name: str) -> torch.dtype:
    """torch's dtype for numbers of any byte order. Raises BadInput for others."""
    try:
        return torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype
    except (TypeError, ValueError) as error:
        raise BadInput(
            f"{name} has elements of {dtype}; expected floating-point or integers: convert "
            "it, for example by array.astype('float32')"
        ) from error


def _as_cpu_tensor(data: Tensor | np.ndarray) -> Tensor:
    if isinstance(data, Tensor):
        if data.device.type != "cpu" or data.layout != torch.strided:
            raise BadInput(
                f"expected a dense tensor on the CPU, got {data.layout} on {data.device}; move it first: tensor.cpu()"
            )
        return data.detach()
    torch_dtype(data.dtype, "the array")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of arrays that are read-only: a source is only read
            return torch.from_numpy(data)
    except (TypeError, ValueError) as error:
        raise BadInput(f"the array's layout is not supported ({error}); copy it first") from error


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


def checksum(values: Tensor) -> str:
    """A checksum of values (BLAKE2b of 128 bits)."""
    data: Any = values.contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def first_line(error: Exception) -> str:
    """The first line of an error's text, or its type."""
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def _text_of(box: Box) -> str:
    return ", ".join(f"{start}:{end}" for start, end in box)
