"""Sources and sinks in stores: files, and any array that can be sliced.

A chunk of a store is decoded and encoded as a whole. A source keeps the chunks of the last two rows
of chunks; a sink collects the positions of a chunk and writes it when it has all of them, so that
no chunk is read back or written twice. Stores without chunks are read and written in small pieces.

`AxisOrder` says how the axes of a stored array are those of images: (N, C, H, W), (N, C, D, H, W),
(N, C, L). Some sinks change what is written: classes instead of scores, a mask, missing values.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, Self

import torch
from torch import Tensor

from demask.errors import BadInput
from demask.exec.axes import Axes, Window, empty, order
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
from demask.traverse.storage.store import Store

# Letters of other conventions: T time and P position (series of images), S samples, Z, Y, X. T next
# to N names the frames of videos, which a network takes together as it does D.
ALIASES = {"T": "N", "P": "N", "S": "C", "Z": "D", "Y": "H", "X": "W"}
KINDS = {len(kind): kind for kind in ("NCHW", "NCDHW", "NCL")}  # by rank


@dataclass(frozen=True, slots=True)
class AxisOrder:
    """The axes of an array of images.

    letters: of the images, one of KINDS. axes: for each letter the axis of the array, None for a
    letter that it lacks (size one). shape: of the images, without what `origin` leaves out. rank:
    of the array; its other axes have size one. origin: first position of the images, per letter.
    """

    letters: str
    axes: tuple[int | None, ...]
    shape: tuple[int, ...]
    rank: int
    origin: tuple[int, ...]

    @classmethod
    def of(cls, text: str, shape: Sequence[int], name: str = "the array") -> AxisOrder:
        """The order of an array of this shape whose axes are named by `text`, such as "HWC" or
        "TCZYX". Axes of size one may have any letter.

        Raises:
            BadInput: the letters do not fit the shape, or name no images.

        >>> AxisOrder.of("HWC", (64, 48, 3)).shape
        (1, 3, 64, 48)
        """
        letters = _our_letters(text.upper())
        if len(letters) != len(shape):
            raise BadInput(
                f"{name} has {len(shape)} axes {tuple(shape)}, layout={text!r} names "
                f"{len(letters)}; give one letter of N, C, D, H, W per axis"
            )
        wide = [letter for letter, size in zip(letters, shape, strict=True) if size != 1]
        kind = "NCL" if "L" in letters else "NCDHW" if "D" in wide else "NCHW"
        unknown = [letter for letter in wide if letter not in kind or wide.count(letter) > 1]
        missing = [letter for letter in kind[2:] if letter not in letters]
        if unknown or missing:
            raise BadInput(
                f"{name}: layout={text!r} of {tuple(shape)} "
                + (f"has the axis {unknown[0]} more than images do" if unknown else f"has no axis {missing[0]}")
                + '; expected letters such as "NCHW", "HWC" or "TCZYX"'
            )
        axes = tuple(_axis_of(letter, letters, shape) for letter in kind)
        sizes = tuple(1 if axis is None else int(shape[axis]) for axis in axes)
        return cls(kind, axes, sizes, len(shape), (0,) * len(kind))

    @classmethod
    def unchanged(cls, letters: str, shape: tuple[int, ...]) -> AxisOrder:
        """The order of an array whose axes are those of the images."""
        return cls(letters, tuple(range(len(shape))), shape, len(shape), (0,) * len(shape))

    @property
    def text(self) -> str:
        """The letters of the array's axes, "." for other axes of size one."""
        named = dict(zip(self.axes, self.letters, strict=True))
        return "".join(named.get(k, ".") for k in range(self.rank))

    def region(self, rows: tuple[int, int], columns: tuple[int, int]) -> AxisOrder:
        """The order of a part of each image: its first and end row, first and end column."""
        shape, origin = list(self.shape), list(self.origin)
        for k, (first, end) in zip((-2, -1), (rows, columns), strict=True):
            shape[k], origin[k] = end - first, origin[k] + first
        return replace(self, shape=tuple(shape), origin=tuple(origin))

    def in_array(self, box: Box) -> Box:
        """A box of the images as a box of the array."""
        result = [(0, 1)] * self.rank
        for axis, (start, end), first in zip(self.axes, box, self.origin, strict=True):
            if axis is not None:
                result[axis] = start + first, end + first
        return tuple(result)

    def in_images(self, box: Box) -> Box:
        """A box of the array as a box of the images."""
        return tuple(
            (0, 1) if axis is None else (box[axis][0] - first, box[axis][1] - first)
            for axis, first in zip(self.axes, self.origin, strict=True)
        )

    def view_images(self, values: Tensor) -> Tensor:
        """Values of a box of the array, viewed as those of images."""
        present = [axis for axis in self.axes if axis is not None]
        for axis in sorted(set(range(self.rank)) - set(present), reverse=True):
            values = values.squeeze(axis)
        ranks = {axis: k for k, axis in enumerate(sorted(present))}
        values = values.permute([ranks[axis] for axis in present])
        for k, axis in enumerate(self.axes):
            if axis is None:
                values = values.unsqueeze(k)
        return values

    def array_shape(self) -> tuple[int, ...]:
        """The shape of an array of these images."""
        sizes = [1] * self.rank
        for axis, size in zip(self.axes, self.shape, strict=True):
            if axis is not None:
                sizes[axis] = size
        return tuple(sizes)


def _our_letters(text: str) -> list[str]:
    """The letters of KINDS that the letters of other conventions stand for."""
    is_video = "N" in text and "T" in text and not {"D", "Z"} & set(text)
    aliases = ALIASES | ({"T": "D"} if is_video else {})
    return [aliases.get(letter, letter) for letter in text]


def _axis_of(letter: str, letters: Sequence[str], shape: Sequence[int]) -> int | None:
    """The axis of a letter: the one that is not of size one if several have it."""
    candidates = [k for k, other in enumerate(letters) if other == letter]
    return max(candidates, key=lambda k: shape[k] != 1) if candidates else None


def usual_order(shape: Sequence[int], name: str = "the array") -> AxisOrder:
    """The order of an array whose axes nobody named: N and C first, as in torch."""
    if len(shape) not in KINDS:
        raise BadInput(
            f"{name}: expected images (N, C, H, W), volumes (N, C, D, H, W) or "
            f"sequences (N, C, L), got {tuple(shape)}; name the axes: layout='HWC'"
        )
    return AxisOrder.unchanged(KINDS[len(shape)], tuple(map(int, shape)))


@dataclass(frozen=True, slots=True)
class _ChangingSink:
    """Base class of sinks that change what is written to another. axes: of rows and columns."""

    sink: Any
    axes: Axes

    def image(self, index: int) -> Self:
        """The sink of one image."""
        return replace(self, sink=self.sink.image(index))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sink.shape

    def workspace(self, window: Window) -> int:
        """Bytes of the other sink; changed bands are small next to what computes them."""
        return self.sink.workspace(window)

    def _write_masked(self, window: Window, part: Tensor, mask: Tensor, value: float) -> None:
        """Write a part, and `value` where the mask is set."""
        if bool(mask.any()):
            part = empty(part.shape, self.axes, part.dtype).copy_(part).masked_fill_(mask, value)
        self.sink.write(window, part)


@dataclass(frozen=True, slots=True)
class ArgmaxSink(_ChangingSink):
    """Writes the number of the channel of the largest score, one channel, int64."""

    def write(self, window: Window, part: Tensor) -> None:
        self.sink.write(window, part.argmax(1, keepdim=True))


@dataclass(frozen=True, slots=True)
class MaskSink(_ChangingSink):
    """Writes `fill` where a mask, bool [height, width] of the result, is False."""

    wanted: Tensor
    fill: float

    def write(self, window: Window, part: Tensor) -> None:
        (top, bottom), (left, right) = window
        self._write_masked(window, part, ~self.wanted[top:bottom, left:right], self.fill)


@dataclass(frozen=True, slots=True)
class NodataSink(_ChangingSink):
    """Writes `value` where all channels of the source, of the same size, have no data."""

    source: Any
    missing: float
    value: float

    def image(self, index: int) -> Self:
        return replace(self, sink=self.sink.image(index), source=self.source.image(index))

    def write(self, window: Window, part: Tensor) -> None:
        shape = tuple(b - a for a, b in box_of(self.source.shape, self.source.axes, window))
        present = empty(shape, self.source.axes, self.source.dtype)
        self.source.read(window, present)
        self._write_masked(window, part, is_missing(present, self.missing).all(1, keepdim=True), self.value)


@dataclass(frozen=True, slots=True)
class FilledSource:
    """A source whose missing values are 0, so that they do not spread through the network."""

    source: Any
    missing: float

    @property
    def axes(self) -> Axes:
        return self.source.axes

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    def image(self, index: int) -> Self:
        """The source of one image."""
        return replace(self, source=self.source.image(index))

    def placed(self, axes: Axes) -> Self:
        """The source with the axes of rows and columns."""
        return replace(self, source=replace(self.source, axes=axes))

    def read(self, window: Window, into: Tensor) -> None:
        """Fill a part with the positions of a window."""
        self.source.read(window, into)
        scale = {torch.uint8: 255.0, torch.uint16: 65535.0}.get(self.dtype, 1.0)
        missing = self.missing / scale if into.is_floating_point() else self.missing
        into.masked_fill_(is_missing(into, missing), 0)

    def workspace(self, window: Window) -> int:
        """Bytes of the source."""
        return self.source.workspace(window)


def is_missing(values: Tensor, missing: float) -> Tensor:
    """Where values are the one that marks missing data."""
    if missing != missing:
        return values.isnan()
    return values == torch.tensor(missing).to(values.dtype)


def nodata_of(metadata: Mapping[str, Any]) -> float | None:
    """The value that marks missing data, if there is one."""
    value = metadata.get("nodata")
    return None if value is None else float(value)


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
        shape = self.images.shape
        return shape if self.index is None else (1, *shape[1:])

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

    def _cut_into_pieces(self, window: Window, each: int):
        """A window in boxes of LIMIT bytes at most, `each` bytes per element."""
        box = box_of(self.shape, self.axes, window)
        ranks: dict[int | None, int] = {axis: k for k, axis in enumerate(self.store.order)}
        by_store = sorted(range(len(box)), key=lambda k: ranks.get(self.images.axes[k], -1))
        first = order(len(box), self.axes)[:1]
        dims = (*first, *(k for k in by_store if k not in first))
        return pieces(box, dims, max(LIMIT // each, 1))

    def _piece_bytes(self, window: Window, each: int) -> int:
        return each * elements(next(self._cut_into_pieces(window, each), ((0, 0),)))

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
            for box in self._cut_into_pieces(window, self.dtype.itemsize):
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
            self._add_to_chunk(chunk, both, values)

    def _write_pieces(self, window: Window, part: Tensor) -> None:
        count = self._piece_bytes(window, self._element_bytes) // self._element_bytes
        buffer, scratch = torch.empty(count, dtype=self.dtype), self._conversion_scratch(count)
        for box in self._cut_into_pieces(window, self._element_bytes):
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

    def _add_to_chunk(self, chunk: Box, both: Box, values: Tensor) -> None:
        """Add positions to a chunk, and write it if none is missing."""
        region = intersect(chunk, self._in_array(tuple((0, n) for n in self.shape)))
        with self.open_chunks.lock:
            stored, done = self.open_chunks.chunks.pop(chunk, (None, 0))
            stored = torch.zeros(extents(chunk), dtype=self.dtype) if stored is None else stored
            target = view(stored, relative(both, chunk))
            scratch = self._conversion_scratch(values.numel())
            convert(values, self.images.view_images(target), self.axes, scratch)
            done += elements(both)
            if done < elements(region):
                self.open_chunks.chunks[chunk] = stored, done
                return
        self.store.write(region, view(stored, relative(region, chunk)))

    def _conversion_scratch(self, count: int) -> Tensor:
        """Memory to convert `count` positions to 8 or 16 bits; empty for other dtypes."""
        size = count if is_quantized(self.values, self.dtype) else 0
        return torch.empty(size, dtype=work_dtype(self.values))

    @property
    def _element_bytes(self) -> int:
        return self.dtype.itemsize + scratch_size(self.values, self.dtype)
