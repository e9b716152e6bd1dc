"""Sources and sinks of the parts of a value: arrays in memory and in stores, and temporary files.

A chunk of a store is decoded, and encoded, at once. A source keeps the chunks of the last two rows
of chunks; a sink collects the positions of a chunk and writes it when it has all of them, so that
no chunk is read back or written twice. Stores without chunks are read and written in small pieces,
arrays in memory in place. `workspace` is what each allocates to read or write a window, in bytes.
Boxes are of the stored array; parts are viewed in the order of its axes.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.exec.axes import Axes, Window, cut_shape, empty, order, strides
from demask.traverse.storage.axis_order import AxisOrder
from demask.traverse.storage.boxes import (
    LIMIT,
    Box,
    box_of,
    chunks_in,
    elements,
    extents,
    intersect,
    pieces,
    relative,
    view,
)
from demask.traverse.storage.dtype_conversion import (
    LARGEST,
    assign,
    check_conversion,
    convert,
    is_quantized,
    scratch_size,
    work_dtype,
)
from demask.traverse.storage.npy import DenseFile, Descriptor
from demask.traverse.storage.store import SliceStore


class Sink(Protocol):
    """A value whose parts can be written: each position once, in any order."""

    def write(self, window: Window, part: Tensor) -> None: ...


@dataclass(slots=True)
class _ChunkCache:
    """The chunks that were read last. Shared by the images of a batch and by threads."""

    most: int  # bytes
    chunks: OrderedDict[Box, Tensor] = field(default_factory=OrderedDict)
    lock: Lock = field(default_factory=Lock)

    def read(self, store: SliceStore, chunk: Box) -> Tensor:
        """The values of a chunk."""
        with self.lock:
            if chunk in self.chunks:
                self.chunks.move_to_end(chunk)
                return self.chunks[chunk]
            size = elements(chunk) * store.dtype.itemsize
            taken = sum(values.nbytes for values in self.chunks.values())
            while self.chunks and taken + size > self.most:
                taken -= self.chunks.popitem(last=False)[1].nbytes
            self.chunks[chunk] = store.read(chunk)
            return self.chunks[chunk]


@dataclass(frozen=True, slots=True)
class _StoredEnd:
    """Base class. images: the order of the store's axes. axes: of the value."""

    store: SliceStore
    images: AxisOrder
    axes: Axes

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the image, or of all images."""
        return self.images.shape

    @property
    def window(self) -> Window:
        """The window of all rows and columns."""
        rows, columns = ((0, 1 if axis is None else self.shape[axis]) for axis in self.axes)
        return rows, columns

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in the store."""
        return self.store.dtype

    @property
    def tensor(self) -> Tensor | None:
        """The images, to read and write in place; None if they are not in memory."""
        if self.store.tensor is None:
            return None
        return self.images.view_images(view(self.store.tensor, self.images.box))

    def image(self, index: int) -> Self:
        """The source or sink of one image of the batch."""
        return replace(self, images=self.images.image(index))

    def placed(self, axes: Axes) -> Self:
        """The source or sink with the axes of rows and columns."""
        return replace(self, axes=axes)

    def _in_array(self, window: Window) -> Box:
        return self.images.in_array(box_of(self.shape, self.axes, window))

    @property
    def _scratch_bytes(self) -> int:
        """Bytes that the conversion of an element needs."""
        return 0

    @property
    def _element_bytes(self) -> int:
        """Bytes that an element of a piece needs; 0 for arrays in memory that are not converted."""
        return self._scratch_bytes + (self.dtype.itemsize if self.store.tensor is None else 0)

    def _cut_into_pieces(self, box: Box) -> Iterator[Box]:
        """A box in boxes that need LIMIT bytes at most."""
        each = self._element_bytes
        dims = [axis for k in order(len(self.shape), self.axes) if (axis := self.images.axes[k]) is not None]
        if self.store.tensor is None:  # after the part's rows, in the order of the store
            dims = [*dims[:1], *(axis for axis in self.store.order if axis not in dims[:1])]
        return pieces(box, tuple(dims), max(LIMIT // each, 1) if each else elements(box))

    def _piece_bytes(self, window: Window) -> int:
        return self._element_bytes * elements(next(self._cut_into_pieces(self._in_array(window)), ((0, 0),)))

    def _chunk_rows_bytes(self) -> int:
        """Bytes of two rows of chunks: of those that a band begins and ends in, in all channels."""
        assert self.store.chunks is not None
        sizes = list(self.store.chunks)
        for letter, axis in zip(self.images.letters, self.images.axes, strict=True):
            if axis is not None and letter not in ("N", self.images.letters[2]):
                sizes[axis] = -(-self.store.shape[axis] // sizes[axis]) * sizes[axis]
        return 2 * self.dtype.itemsize * math.prod(sizes)


@dataclass(frozen=True, slots=True)
class StoredSource(_StoredEnd):
    """Images to read. missing: value that marks missing data, which is read as 0, so that it does not
    spread through the network; None if there is none."""

    cache: _ChunkCache | None = None
    missing: float | None = None

    @classmethod
    def of(cls, store: SliceStore, images: AxisOrder, axes: Axes) -> Self:
        """The source of a store."""
        source = cls(store, images, axes)
        return source if store.chunks is None else replace(source, cache=_ChunkCache(source._chunk_rows_bytes()))

    def read(self, window: Window, into: Tensor) -> None:
        """Fill a part with the positions of a window."""
        wanted, part = self._in_array(window), self.images.view_array(into)
        for box, values in self._read_boxes(wanted):
            assign(view(part, relative(box, wanted)), values)
        if self.missing is not None:
            missing = self.missing / LARGEST.get(self.dtype, 1.0) if into.is_floating_point() else self.missing
            into.masked_fill_(is_missing(into, missing), 0)

    def lacks(self, window: Window) -> Tensor:
        """Where all channels of a window are missing, with one channel."""
        assert self.missing is not None
        values = empty(cut_shape(self.shape, self.axes, window), self.axes, self.dtype)
        replace(self, missing=None).read(window, values)
        return is_missing(values, self.missing).all(1, keepdim=True)

    def _read_boxes(self, wanted: Box) -> Iterator[tuple[Box, Tensor]]:
        if self.cache is None:
            for box in self._cut_into_pieces(wanted):
                yield box, self.store.read(box)
            return
        assert self.store.chunks is not None
        for chunk in chunks_in(wanted, self.store.shape, self.store.chunks):
            both = intersect(chunk, wanted)
            yield both, view(self.cache.read(self.store, chunk), relative(both, chunk))

    def workspace(self, window: Window) -> int:
        """Bytes of the cache, or of the largest piece."""
        return self._piece_bytes(window) if self.cache is None else self.cache.most


@dataclass(frozen=True, slots=True)
class StoredSink(_StoredEnd):
    """Images to write, in the store's dtype; floating-point parts are converted to 8 or 16 bits as
    images. values: dtype of the parts. open_chunks: those of which some positions are still missing,
    with the number of positions that are there."""

    values: torch.dtype
    open_chunks: dict[Box, tuple[Tensor, int]] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    def over(self, store: SliceStore) -> Self:
        """The sink of the same images in another store, with no open chunks."""
        return replace(self, store=store, open_chunks={})

    @property
    def chunk_rows(self) -> int:
        """Rows that are written together."""
        axis = self.images.axes[-2] if len(self.images.letters) > 3 else None
        return 1 if axis is None or self.store.chunks is None else self.store.chunks[axis]

    def write(self, window: Window, part: Tensor) -> None:
        """Write the positions of a window, each position once."""
        wanted, values = self._in_array(window), self.images.view_array(part)
        if self.store.chunks is not None:
            for chunk in chunks_in(wanted, self.store.shape, self.store.chunks):
                both = intersect(chunk, wanted)
                self._add_to_chunk(chunk, both, view(values, relative(both, wanted)))
            return
        count = self.workspace(window) // max(self._element_bytes, 1)
        tensor, scratch = self.store.tensor, self._conversion_scratch(count)
        buffer = torch.empty(count if tensor is None else 0, dtype=self.dtype)
        for box in self._cut_into_pieces(wanted):
            stored = buffer[: elements(box)].view(extents(box)) if tensor is None else view(tensor, box)
            convert(view(values, relative(box, wanted)), stored, scratch)
            if tensor is None:
                self.store.write(box, stored)

    def workspace(self, window: Window) -> int:
        """Bytes of open chunks, or of the largest piece."""
        if self.store.chunks is None:
            return self._piece_bytes(window)
        return self._chunk_rows_bytes() + self._scratch_bytes * math.prod(self.store.chunks)

    def _add_to_chunk(self, chunk: Box, both: Box, values: Tensor) -> None:
        """Add positions to a chunk, and write it if none is missing."""
        region = intersect(chunk, self.images.box)
        with self.lock:
            stored, done = self.open_chunks.pop(chunk, (None, 0))
            stored = torch.zeros(extents(chunk), dtype=self.dtype) if stored is None else stored
            convert(values, view(stored, relative(both, chunk)), self._conversion_scratch(values.numel()))
            done += elements(both)
            if done < elements(region):
                self.open_chunks[chunk] = stored, done
                return
        self.store.write(region, view(stored, relative(region, chunk)))

    def _conversion_scratch(self, count: int) -> Tensor:
        """Memory to convert `count` positions to 8 or 16 bits; empty for other dtypes."""
        size = count if is_quantized(self.values, self.dtype) else 0
        return torch.empty(size, dtype=work_dtype(self.values))

    @property
    def _scratch_bytes(self) -> int:
        return scratch_size(self.values, self.dtype)


@dataclass(frozen=True, slots=True)
class ArgmaxSink:
    """Writes the number of the channel of the largest score to another sink: one channel, int64."""

    sink: Sink

    def write(self, window: Window, part: Tensor) -> None:
        self.sink.write(window, part.argmax(1, keepdim=True))


@dataclass(frozen=True, slots=True)
class FilledSink:
    """Writes `value` to another sink where a mask of the window, which a part broadcasts, is True."""

    sink: Sink
    axes: Axes
    mask: Callable[[Window], Tensor]
    value: float

    def write(self, window: Window, part: Tensor) -> None:
        mask = self.mask(window)
        if bool(mask.any()):
            part = empty(part.shape, self.axes, part.dtype).copy_(part).masked_fill_(mask, self.value)
        self.sink.write(window, part)


def is_missing(values: Tensor, missing: float) -> Tensor:
    """Where values are the one that marks missing data."""
    if missing != missing:
        return values.isnan()
    return values == torch.tensor(missing).to(values.dtype)


def writable_store(data: Any, values: torch.dtype) -> SliceStore:
    """The store of an object to write values of a dtype to. Raises BadInput where it cannot be written,
    or numbers would be lost."""
    if isinstance(data, np.ndarray) and not data.flags.writeable:
        raise BadInput("the destination is a read-only array; open it with mode='r+'")
    if not hasattr(data, "__setitem__"):
        raise BadInput(
            f"destination: expected a path, an array, a tensor or an object to which "
            f"slices can be assigned, got {type(data).__name__}"
        )
    store = SliceStore.of(data, "the destination")
    check_conversion(values, store.dtype)
    return store


def tensor_source(data: Tensor | np.ndarray, axes: Axes, index: int | None = None) -> StoredSource:
    """A tensor or an array of any layout to read."""
    store = SliceStore.of(data)
    return StoredSource.of(store, AxisOrder.unchanged(store.shape).image(index), axes)


def tensor_sink(data: Tensor | np.ndarray, axes: Axes, values: torch.dtype, index: int | None = None) -> StoredSink:
    """A tensor or an array to write to, in place. values: dtype of the parts."""
    store = writable_store(data, values)
    return StoredSink(store, AxisOrder.unchanged(store.shape).image(index), axes, values)


def in_place(end: Any) -> Tensor | None:
    """The image of a source or sink as a part; None unless it is a tensor in that layout."""
    image = end.tensor if isinstance(end, _StoredEnd) else None
    if image is None or getattr(end, "values", image.dtype) != image.dtype:
        return None
    expected = strides(tuple(image.shape), end.axes)
    triples = zip(image.shape, image.stride(), expected, strict=True)
    fits = all(size == 1 or stride == wanted for size, stride, wanted in triples)
    return image.as_strided(image.shape, expected) if fits else None


# ------------------------------------------------------------------------------ temporary files


@dataclass(frozen=True, slots=True)
class Spill:
    """A value in a temporary file, deleted with the last reference to it if it has no name.

    The file has the layout of parts in memory: rows are contiguous and need no copy.
    """

    axes: Axes
    file: DenseFile
    is_named: bool = False

    def read(self, window: Window, into: Tensor) -> None:
        self.file.read(self._checked_box(window, into), into)

    def write(self, window: Window, part: Tensor) -> None:
        self.file.write(self._checked_box(window, part), part)

    def workspace(self, window: Window) -> int:
        return 0

    def _checked_box(self, window: Window, part: Tensor) -> Box:
        box, dtype = box_of(self.file.shape, self.axes, window), self.file.kind
        if part.dtype != dtype or tuple(part.shape) != extents(box):
            raise ValueError(f"expected a part of {extents(box)} in {dtype}, got {tuple(part.shape)} in {part.dtype}")
        return box

    def close(self) -> None:
        """Close the file, which deletes it if it has no name."""
        self.file.file.close()

    def delete(self) -> None:
        """Close and delete the file."""
        self.close()
        if self.is_named:
            Path(self.file.file.name).unlink(missing_ok=True)


def spill(
    shape: Sequence[int], dtype: torch.dtype, axes: Axes, folder: str | os.PathLike[str], name: str = ""
) -> Spill:
    """A temporary file for a value. Raises BadInput where the disk has no room for it.

    folder: on a disk; on many systems the default folder for temporary files is in memory. name: of
    a file that other processes open, too, and that is created if it does not exist; "": a new file
    without a name.
    """
    if name:
        file = Descriptor.open(Path(folder, name), os.O_CREAT, 0o600)
    else:
        try:
            with tempfile.TemporaryFile(dir=folder, buffering=0) as unnamed:
                file = Descriptor(os.dup(unnamed.fileno()), os.path.join(folder, "(temporary file)"))
        except OSError as error:
            raise BadInput(f"cannot write in {folder}: {error.strerror or error}") from error
    sizes = tuple(map(int, shape))
    dense = DenseFile(file, 0, sizes, order(len(sizes), axes), dtype)
    dense.reserve(Path(folder))
    return Spill(axes, dense, bool(name))
