"""Sources and sinks from what a user gives: paths, arrays, tensors, and their axes."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from demask.errors import BadInput
from demask.exec.axes import NONE
from demask.files.atomic_write import check_writable
from demask.traverse.storage.axis_order import KINDS, AxisOrder, usual_letters, usual_order
from demask.traverse.storage.dtype_conversion import name_of
from demask.traverse.storage.sources_and_sinks import StoredSink, StoredSource, writable_store
from demask.traverse.storage.store import EDGE, ArrayInfo, Format, SliceStore, format_of, replace_path

End = Any  # a path, an array, a tensor, or an object that can be sliced
Region = tuple[int, int, int, int]  # first row, first column, rows, columns


def open_source(source: End, layout: str | None = None, region: Region | None = None) -> StoredSource:
    """The images of a source. layout: letters of its axes; None: those that it names, or torch's
    order. Raises BadInput where it is no array of images."""
    if isinstance(source, str | os.PathLike):
        store: SliceStore = format_of(source).load().open_store(Path(source))
    else:
        store = SliceStore.of(source, "the source")
    images = _read_order(store.shape, layout or store.layout, store.name, region)
    missing = store.metadata.get("nodata")
    return replace(StoredSource.of(store, images, NONE), missing=None if missing is None else float(missing))


def _read_order(shape: tuple[int, ...], layout: str | None, name: str, region: Region | None) -> AxisOrder:
    images = AxisOrder.of(layout, shape, name) if layout else usual_order(shape, name)
    if 0 in images.shape:
        raise BadInput(f"{name}: expected images of at least one position, got {shape}")
    if region is None:
        return images
    top, left, rows, columns = region
    height, width = images.shape[-2:]
    inside = rows > 0 and columns > 0 and top >= 0 and left >= 0
    if len(images.letters) == 3 or not inside or top + rows > height or left + columns > width:
        raise BadInput(
            f"region={region}: expected (first row, first column, rows, columns) inside of {height} x {width}"
        )
    k = len(images.letters)
    return images.part({k - 2: (top, top + rows), k - 1: (left, left + columns)})


# ------------------------------------------------------------------------------------ results


@dataclass(frozen=True, slots=True)
class FileTarget:
    """A file to write: its format, final path and array."""

    format: Format
    final: Path
    info: ArrayInfo

    @property
    def folder(self) -> Path:
        """The folder of the unfinished file, of stored maps and the journal."""
        return self.final.with_name(f".{self.final.name}.partial")

    @property
    def part(self) -> Path:
        """The unfinished file."""
        return self.folder / self.final.name

    def planned_store(self) -> SliceStore:
        """The store of the file, which is not created yet, for what is computed from its sizes."""
        shape, dims = self.info.shape, tuple(range(len(self.info.shape)))
        return SliceStore(None, "the result", shape, self.info.dtype, self.info.chunks, dims)

    def create(self) -> None:
        """Create the unfinished file, or nothing: it gets its name when it is complete but for values."""
        new = self.folder / "new" / self.final.name
        shutil.rmtree(new.parent, ignore_errors=True)
        new.parent.mkdir()
        self.format.load().create(new, self.info)
        os.replace(new, self.part)
        new.parent.rmdir()

    def open(self, planned: StoredSink) -> StoredSink:
        """The unfinished file as a sink that notes what is written. Any process may open it."""
        store: SliceStore = self.format.load().open_again(self.part, self.info)
        return planned.over(replace(store, metadata=self.info.metadata, written=[]))

    def finish(self) -> None:
        """Give the complete file its name, replacing what has it."""
        getattr(self.format.load(), "finish", replace_path)(self.part, self.final, self.info)


def check_target(destination: End, metadata: Mapping[str, Any] | None = None) -> tuple[Format, Path]:
    """The format and absolute path of a file to write. Raises BadInput where it could not be
    written after the work, or would replace a folder that is no array."""
    format_ = format_of(destination, metadata)
    if not format_.is_written:
        raise BadInput(f"{destination}: {format_.name} files are only read; write .ome.zarr")
    final = Path(destination)
    if not final.is_dir() or not format_.marks:
        return format_, check_writable(final)
    if any(final.iterdir()) and not any((final / mark).exists() for mark in format_.marks):
        raise BadInput(
            f"{destination} is a folder that is no {format_.name} array, and would be replaced; give another name"
        )
    check_writable(final / "any")
    return format_, final.resolve()


def target_of(
    destination: End, shape: tuple[int, ...], stored: torch.dtype, metadata: Mapping[str, Any], chunk: int | None = None
) -> tuple[FileTarget, AxisOrder]:
    """The file for a result of this shape (N, C, ...) and dtype, and the order of its axes. chunk: rows
    and columns of its chunks; None: the format's. Raises BadInput where the format cannot hold it."""
    format_, final = check_target(destination, metadata)
    if format_.name != "NumPy" and len(shape) not in KINDS:
        raise BadInput(f"{destination}: the result has the shape {shape}, which is no image; write a .npy file")
    kind = usual_letters(len(shape))
    letters: str = getattr(format_.load(), "letters", lambda images, *_: images)(kind, shape, stored)
    sizes = dict(zip(kind, shape, strict=True))
    if not set(letters) <= set(kind):
        raise BadInput(
            f"{destination}: {format_.name} files have rows and columns, the result has the shape {shape}; "
            "write a .zarr or .npy file"
        )
    if chunk is not None and (not format_.marks or chunk < 1):
        raise BadInput(
            f"chunk={chunk}: expected at least 1, for .zarr; {format_.name} files have no chunks, or tiles of 512 x 512"
        )
    array_shape = tuple(sizes[letter] for letter in letters)
    chunks = format_.chunks(array_shape, letters, EDGE if chunk is None else chunk)
    info = ArrayInfo(array_shape, stored, letters, chunks, metadata)
    axes = tuple(letters.index(k) if k in letters else None for k in kind)
    images = AxisOrder(kind, axes, shape, len(letters), (0,) * len(kind))
    return FileTarget(format_, final, info), images


def open_sink(destination: End, shape: tuple[int, ...], values: torch.dtype, layout: str | None = None) -> StoredSink:
    """A tensor, array or object that can be sliced, to write a result of this shape to."""
    store = writable_store(destination, values)
    return StoredSink(store, _order_of_result(store.shape, shape, layout), NONE, values)


def _order_of_result(own: tuple[int, ...], shape: tuple[int, ...], layout: str | None) -> AxisOrder:
    """The order of a destination of shape `own` for a result of shape `shape`: that of the source's
    layout if it fits, else torch's."""
    if layout is not None and len(layout) == len(own):
        with suppress(BadInput):
            images = AxisOrder.of(layout, own, "the destination")
            if images.shape == shape:
                return images
    if own != shape:
        raise BadInput(f"the destination has the shape {own}, the result {shape}")
    return AxisOrder.unchanged(shape)


def scaled_metadata(
    source: StoredSource, shape: tuple[int, ...], stored: torch.dtype, *, labels: bool
) -> dict[str, Any]:
    """What of a source's metadata is true of a result: sizes of pixels and coordinates, scaled."""
    metadata: dict[str, Any] = {"labels": True} if labels else {}
    if len(shape) < 4:
        return metadata
    known, images = source.store.metadata, source.images
    letters = images.letters
    factors = {letters[k]: images.shape[k] / shape[k] for k in (-2, -1)}
    if known.get("scale"):
        metadata["scale"] = {
            letter: (size * factors.get(letter, 1.0), unit) for letter, (size, unit) in known["scale"].items()
        }
    if known.get("transform") is not None:
        transform = known["transform"]
        top, left = images.origin[-2:]
        moved = transform * type(transform).translation(left, top)
        metadata["transform"] = moved * type(transform).scale(factors["W"], factors["H"])
        metadata["crs"] = known.get("crs")
    nodata = known.get("nodata")
    if nodata is not None and (stored.is_floating_point or _is_exact(nodata, stored)):
        metadata["nodata"] = nodata
    return metadata


def _is_exact(value: float, dtype: torch.dtype) -> bool:
    limits = torch.iinfo(dtype)
    return value == value and limits.min <= value <= limits.max and value == int(value)


def identity_of(source: End, reader: StoredSource) -> str:
    """A text that differs for other inputs: of a file its path, size and time of change, of an
    array in memory its values."""
    parts = [str(reader.shape), name_of(reader.dtype)]
    path = source if isinstance(source, str | os.PathLike) else getattr(source, "filename", None)
    if path is None and reader.tensor is not None:
        digest = hashlib.blake2b(digest_size=16)
        for image in reader.tensor:
            digest.update(image.contiguous().view(torch.uint8).numpy().tobytes())
        parts.append(digest.hexdigest())
    elif path is None:
        parts.append(repr(getattr(source, "store_path", getattr(source, "name", source))))
    else:
        files = sorted(p for p in Path(path).rglob("*") if p.is_file())[:10000]
        for file in files or [Path(path)]:
            status = file.stat()
            parts.append(f"{file}:{status.st_size}:{status.st_mtime_ns}")
    if reader.tensor is None:
        parts.append(f"{reader.images.text} {reader.images.origin}")
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()
