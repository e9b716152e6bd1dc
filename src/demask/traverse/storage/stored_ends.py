"""Sources and sinks in stores: files, and any array that can be sliced.

A chunk of a store is decoded and encoded as a whole. A source keeps the chunks of the last two rows
of chunks; a sink collects the positions of a chunk and writes it when it has all of them, so that
no chunk is read back or written twice. Stores without chunks are read and written in small pieces.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Self

import torch
from torch import Tensor

from demask.traverse.axes import Axes, Window, order
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
    within,
)
from demask.traverse.storage.dtype_conversion import assign, convert, is_quantized, scratch_size, work_dtype
from demask.traverse.storage.stores.store import Store


@dataclass(slots=True)
class _ChunkCache:
    """The chunks that were read last. Shared by the images of a batch and by threads."""

    most: int  # bytes
    chunks: OrderedDict[Box, Tensor] = field(default_factory=OrderedDict)
    lock: Lock = field(default_factory=Lock)

    def read(self, store: Store, chunk: Box) -> Tensor:
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


@dataclass(slots=True)
class _OpenChunks:
    """Chunks of which some positions are still missing."""

    chunks: dict[Box, tuple[Tensor, int]] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)


@dataclass(frozen=True, slots=True)
class _StoredEnd:
    """Base class. axes: of the value. index: of an image, or None for all."""

    store: Store
    images: AxisOrder
    axes: Axes
    index: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the image, or of all images."""
        whole = self.images.shape
        return whole if self.index is None else (1, *whole[1:])

    def image(self, index: int) -> Self:
        """The source or sink of one image of the batch."""
        return replace(self, index=index)

    def placed(self, axes: Axes) -> Self:
        """The source or sink with the axes of rows and columns."""
        return replace(self, axes=axes)

    def _in_array(self, box: Box) -> Box:
        first = 0 if self.index is None else self.index
        batch = [(a + first, b + first) for a, b in box[:1]]
        return self.images.in_array((*batch, *box[1:]))

    def _in_image(self, box: Box) -> Box:
        images = self.images.in_images(box)
        first = 0 if self.index is None else self.index
        return (*((a - first, b - first) for a, b in images[:1]), *images[1:])

    def _pieces(self, window: Window, each: int):
        """A window in boxes of LIMIT bytes at most, `each` bytes per element."""
        box = box_of(self.shape, self.axes, window)
        ranks: dict[int | None, int] = {axis: k for k, axis in enumerate(self.store.order)}
        by_store = sorted(range(len(box)), key=lambda k: ranks.get(self.images.axes[k], -1))
        first = order(len(box), self.axes)[:1]
        dims = (*first, *(k for k in by_store if k not in first))
        return pieces(box, dims, max(LIMIT // each, 1))

    def _piece_bytes(self, window: Window, each: int) -> int:
        return each * elements(next(self._pieces(window, each), ((0, 0),)))

    def _chunk_rows_bytes(self, each: int) -> int:
        """Bytes of two rows of chunks: of those that a band begins and ends in."""
        assert self.store.chunks is not None
        sizes = list(self.store.chunks)
        for k in (-1,) if len(self.images.letters) > 3 else ():  # the full width
            axis = self.images.axes[k]
            if axis is not None:
                sizes[axis] = -(-self.store.shape[axis] // sizes[axis]) * sizes[axis]
        return 2 * each * math.prod(sizes)


@dataclass(frozen=True, slots=True)
class StoredSource(_StoredEnd):
    """Images in a store."""

    cache: _ChunkCache | None = None

    @classmethod
    def of(cls, store: Store, images: AxisOrder, axes: Axes, index: int | None = None) -> Self:
        """The source of a store."""
        source = cls(store, images, axes, index)
        if store.chunks is None:
            return source
        return replace(source, cache=_ChunkCache(source._chunk_rows_bytes(store.dtype.itemsize)))

    @property
    def dtype(self) -> torch.dtype:
        return self.store.dtype

    def read(self, window: Window, into: Tensor) -> None:
        """Fill a part with the positions of a window."""
        if self.cache is None:
            for box in self._pieces(window, self.dtype.itemsize):
                values = self.images.view_images(self.store.read(self._in_array(box)))
                assign(within(into, box, self.axes, window), values)
            return
        assert self.store.chunks is not None
        box = box_of(self.shape, self.axes, window)
        wanted = self._in_array(box)
        for chunk in chunks_in(wanted, self.store.shape, self.store.chunks):
            values = self.cache.read(self.store, chunk)
            both = intersect(chunk, wanted)
            part = within(into, self._in_image(both), self.axes, window)
            assign(part, self.images.view_images(view(values, relative(both, chunk))))

    def workspace(self, window: Window) -> int:
        """Bytes of the cache, or of the largest piece."""
        if self.cache is not None:
            return self.cache.most
        return self._piece_bytes(window, self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class StoredSink(_StoredEnd):
    """Images written to a store, of its dtype. values: dtype of the parts."""

    values: torch.dtype
    open_chunks: _OpenChunks = field(default_factory=_OpenChunks)

    @property
    def dtype(self) -> torch.dtype:
        return self.store.dtype

    def write(self, window: Window, part: Tensor) -> None:
        """Write the positions of a window, each position once."""
        if self.store.chunks is None:
            self._write_pieces(window, part)
            return
        wanted = self._in_array(box_of(self.shape, self.axes, window))
        for chunk in chunks_in(wanted, self.store.shape, self.store.chunks):
            both = intersect(chunk, wanted)
            values = within(part, self._in_image(both), self.axes, window)
            self._collect(chunk, both, values)

    def _write_pieces(self, window: Window, part: Tensor) -> None:
        count = self._piece_bytes(window, self._element_bytes) // self._element_bytes
        buffer, scratch = torch.empty(count, dtype=self.dtype), self._scratch(count)
        for box in self._pieces(window, self._element_bytes):
            in_array = self._in_array(box)
            stored = buffer[: elements(box)].view(extents(in_array))
            values = within(part, box, self.axes, window)
            convert(values, self.images.view_images(stored), self.axes, scratch)
            self.store.write(in_array, stored)

    def workspace(self, window: Window) -> int:
        """Bytes of open chunks, or of the largest piece."""
        if self.store.chunks is None:
            return self._piece_bytes(window, self._element_bytes)
        scratch = scratch_size(self.values, self.dtype) * math.prod(self.store.chunks)
        return self._chunk_rows_bytes(self.dtype.itemsize) + scratch

    def _collect(self, chunk: Box, both: Box, values: Tensor) -> None:
        """Add positions to a chunk, and write it if none is missing."""
        region = intersect(chunk, self._in_array(tuple((0, n) for n in self.shape)))
        with self.open_chunks.lock:
            stored, done = self.open_chunks.chunks.pop(chunk, (None, 0))
            stored = self._empty(chunk).zero_() if stored is None else stored
            target = view(stored, relative(both, chunk))
            scratch = self._scratch(values.numel())
            convert(values, self.images.view_images(target), self.axes, scratch)
            done += elements(both)
            if done < elements(region):
                self.open_chunks.chunks[chunk] = stored, done
                return
        self.store.write(region, view(stored, relative(region, chunk)))

    def _empty(self, box: Box) -> Tensor:
        return torch.empty(extents(box), dtype=self.dtype)

    def _scratch(self, count: int) -> Tensor:
        """Memory to convert `count` positions to 8 or 16 bits; empty for other dtypes."""
        size = count if is_quantized(self.values, self.dtype) else 0
        return torch.empty(size, dtype=work_dtype(self.values))

    @property
    def _element_bytes(self) -> int:
        return self.dtype.itemsize + scratch_size(self.values, self.dtype)
