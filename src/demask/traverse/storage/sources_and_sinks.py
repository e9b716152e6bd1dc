"""Sources and sinks of the parts of a value: tensors, .npy files, temporary files.

Files are read and written through a small buffer, not mapped: the pages of a mapping are not
counted in the budget, and a full disk or a truncated file kills a process that maps it. The buffer
costs some speed. Measured with one thread of an EPYC (Zen 4), the file in the kernel's cache,
float32 images with channels first, in bands of 2 to 64 rows: 2.3-3.2 GB/s with the buffer, 3.1-5.4
with a mapping whose pages are released after each piece; writing 8 bits takes 2.3 GB/s of float32,
a spill reads and writes 5-7. Networks are far slower than all of these.

`dtype_conversion` converts numbers.
"""

from __future__ import annotations

import math
import mmap
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.files import atomic_write as atomic
from demask.files.arrays import npy_header
from demask.files.bounded_read import open_plain
from demask.ops.regions import Interval
from demask.traverse.axes import Axes, Window, order, strides
from demask.traverse.storage.dense_file import (
    Box,
    Descriptor,
    FileLayout,
    fetch,
    reserve,
    store,
    temporary,
)
from demask.traverse.storage.dtype_conversion import (
    assign,
    check_conversion,
    convert,
    is_quantized,
    name_of,
    scratch_size,
    work_dtype,
)

LIMIT = 1 << 20  # bytes of buffers; 256 KiB read 10 % slower, 4 MiB no faster


class RowSource(Protocol):
    """A value whose parts can be read."""

    def read(self, window: Window, into: Tensor) -> None:
        """Fill `into`, in the layout of parts, with the positions of a window."""
        ...


class Sink(Protocol):
    """A value whose parts can be written: each position once, in any order."""

    def write(self, window: Window, part: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class _SourceOrSink:
    """Base class of sources and sinks. axes: of the value. index: of an image in a batch, or None.

    `workspace` of a subclass: bytes that it allocates to read or write a window.
    """

    axes: Axes
    index: int | None

    def image(self, index: int) -> Self:
        """The source or sink of one image of the batch."""
        return replace(self, index=index)

    def _shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        return whole if self.index is None else (1, *whole[1:])

    def _pieces(self, whole: tuple[int, ...], window: Window, each: int) -> Iterator[Box]:
        """A window in boxes whose buffers have LIMIT bytes at most, `each` bytes per element."""
        box = box_of(self._shape(whole), self.axes, window)
        return pieces(box, order(len(whole), self.axes), LIMIT // each)

    def _buffered(self, whole: tuple[int, ...], window: Window, each: int) -> int:
        """Bytes of the buffer of the first box, which is the largest."""
        return each * elements(next(self._pieces(whole, window, each), ((0, 0),)))

    def _in_batch(self, box: Box) -> Box:
        """A box of the image as a box of the batch."""
        return box if self.index is None else ((self.index, self.index + 1), *box[1:])


@dataclass(frozen=True, slots=True)
class TensorSource(_SourceOrSink):
    """A tensor of any layout. mapping: of its memory, if that is a file; its pages are released."""

    tensor: Tensor
    mapping: mmap.mmap | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape(tuple(self.tensor.shape))

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, window: Window, into: Tensor) -> None:
        for box in self._boxes(window):
            assign(within(into, box, self.axes, window), view(self.tensor, self._in_batch(box)))
            _release_pages(self.mapping)

    def workspace(self, window: Window) -> int:
        """Bytes of a mapping's pages that are loaded at once; 0 for a tensor."""
        if self.mapping is None:
            return 0
        return self._buffered(tuple(self.tensor.shape), window, self.dtype.itemsize)

    def _boxes(self, window: Window) -> Iterator[Box]:
        if self.mapping is None:
            return iter([box_of(self.shape, self.axes, window)])
        return self._pieces(tuple(self.tensor.shape), window, self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class TensorSink(_SourceOrSink):
    """A tensor of any layout; floating-point parts are converted to uint8 as 8-bit images.

    values: dtype of the parts. mapping: as in TensorSource.
    """

    tensor: Tensor
    values: torch.dtype
    mapping: mmap.mmap | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape(tuple(self.tensor.shape))

    def write(self, window: Window, part: Tensor) -> None:
        scratch = _scratch(self, window)
        for box in self._boxes(window):
            values = within(part, box, self.axes, window)
            convert(values, view(self.tensor, self._in_batch(box)), self.axes, scratch)
            _release_pages(self.mapping)

    def workspace(self, window: Window) -> int:
        if self._is_direct:
            return 0
        return self._buffered(tuple(self.tensor.shape), window, self._element_bytes)

    @property
    def _is_direct(self) -> bool:
        return self.mapping is None and not is_quantized(self.values, self.tensor.dtype)

    @property
    def _element_bytes(self) -> int:
        mapped = 0 if self.mapping is None else self.tensor.dtype.itemsize
        return mapped + scratch_size(self.values, self.tensor.dtype)

    def _boxes(self, window: Window) -> Iterator[Box]:
        if self._is_direct:
            return iter([box_of(self.shape, self.axes, window)])
        return self._pieces(tuple(self.tensor.shape), window, self._element_bytes)


@dataclass(frozen=True, slots=True)
class ArraySource(_SourceOrSink):
    """A .npy file, in C or Fortran order."""

    layout: FileLayout
    file: Descriptor

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape(self.layout.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.dtype

    def read(self, window: Window, into: Tensor) -> None:
        size = self.workspace(window) // self.dtype.itemsize
        buffer = torch.empty(size, dtype=self.dtype)
        for box in self._pieces(self.layout.shape, window, self.dtype.itemsize):
            values = buffer[: elements(box)]
            fetch(self.file, self.layout, self._in_batch(box), values)
            assign(within(into, box, self.axes, window), self.layout.view_box(values, box))

    def workspace(self, window: Window) -> int:
        return self._buffered(self.layout.shape, window, self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class ArraySink(_SourceOrSink):
    """A new .npy file in C order, of the dtype of `layout`. values: dtype of the parts.

    It is written inside the block of `opened`, to a file next to `path`, which is then renamed.
    """

    path: Path
    layout: FileLayout
    header: bytes
    values: torch.dtype
    file: Descriptor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape(self.layout.shape)

    @contextmanager
    def opened(self) -> Iterator[ArraySink]:
        """The sink with its file open. The file appears when the block ends without an error.

        Raises:
            BadInput: if the disk has no room for the file.
        """
        with atomic.write(self.path) as temporary_file:
            file = Descriptor(os.dup(temporary_file.fileno()), str(self.path))
            reserve(file, self.layout.end, self.path.parent)
            temporary_file.write(self.header)
            yield replace(self, file=file)

    def write(self, window: Window, part: Tensor) -> None:
        if self.file is None:
            raise ValueError("the sink is not open: write inside `with sink.opened() as sink:`")
        count = self.workspace(window) // self._element_bytes
        buffer = torch.empty(count, dtype=self.layout.dtype)
        scratch = _scratch(self, window)
        for box in self._pieces(self.layout.shape, window, self._element_bytes):
            stored = buffer[: elements(box)]
            values = within(part, box, self.axes, window)
            convert(values, self.layout.view_box(stored, box), self.axes, scratch)
            store(self.file, self.layout, self._in_batch(box), stored)

    def workspace(self, window: Window) -> int:
        return self._buffered(self.layout.shape, window, self._element_bytes)

    @property
    def _element_bytes(self) -> int:
        dtype = self.layout.dtype
        return dtype.itemsize + scratch_size(self.values, dtype)


@dataclass(frozen=True, slots=True)
class Spill:
    """A value in a temporary file without a name, deleted with the last reference to it.

    The file has the layout of parts in memory: rows are contiguous and need no copy.
    """

    axes: Axes
    layout: FileLayout
    file: Descriptor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.dtype

    def read(self, window: Window, into: Tensor) -> None:
        box = self._checked_box(window, into)
        fetch(self.file, self.layout, box, into)

    def write(self, window: Window, part: Tensor) -> None:
        box = self._checked_box(window, part)
        store(self.file, self.layout, box, part)

    def workspace(self, window: Window) -> int:
        return 0

    def _checked_box(self, window: Window, part: Tensor) -> Box:
        box = box_of(self.shape, self.axes, window)
        if part.dtype != self.dtype or tuple(part.shape) != extents(box):
            raise ValueError(f"expected a part of {extents(box)} in {self.dtype}, "
                             f"got {tuple(part.shape)} in {part.dtype}")  # fmt: skip
        return box

    def close(self) -> None:
        """Close the file, which deletes it."""
        self.file.close()


# ------------------------------------------------------------------------------------- opening


def spill(
    shape: Sequence[int], dtype: torch.dtype, axes: Axes, folder: str | os.PathLike[str]
) -> Spill:
    """A new temporary file for a value. Raises BadInput where the disk has no room for it.

    folder: on a disk; on many systems the default folder for temporary files is in memory.
    """
    sizes = tuple(map(int, shape))
    layout = FileLayout(0, sizes, order(len(sizes), axes), dtype)
    file = temporary(folder)
    reserve(file, layout.end, Path(folder))
    return Spill(axes, layout, file)


def array_source(path: str | os.PathLike[str], axes: Axes, index: int | None = None) -> ArraySource:
    """A .npy file to read. Raises BadInput where it is missing, damaged, or of another dtype."""
    with open_plain(path) as opened:
        header = npy_header(opened, os.fstat(opened.fileno()).st_size, str(path))
        file = Descriptor(os.dup(opened.fileno()), str(path))
    dims = range(len(header.shape))
    layout = FileLayout(
        header.offset, header.shape, tuple(reversed(dims) if header.fortran else dims),
        _dtype(header.dtype, str(path)),
    )  # fmt: skip
    return ArraySource(axes, index, layout, file)


def array_sink(
    path: str | os.PathLike[str],
    shape: tuple[int, ...],
    axes: Axes,
    values: torch.dtype,
    stored: torch.dtype | None = None,
    index: int | None = None,
) -> ArraySink:
    """A .npy file to write, not opened yet. values: dtype of the parts; stored: of the file, None
    for the same. Raises BadInput where it cannot be created, or numpy has no such dtype."""
    target = atomic.check_writable(path)
    dtype = stored or values
    check_conversion(values, dtype)
    try:
        descr = np.lib.format.dtype_to_descr(torch.empty(0, dtype=dtype).numpy().dtype)
    except TypeError as error:
        raise BadInput(
            f"{path}: numpy has no {name_of(dtype)}; choose another dtype: output='float32'"
        ) from error
    header = BytesIO()
    header_fields = {"descr": descr, "fortran_order": False, "shape": tuple(shape)}
    np.lib.format.write_array_header_1_0(header, header_fields)
    text = header.getvalue()
    layout = FileLayout(len(text), tuple(shape), tuple(range(len(shape))), dtype)
    return ArraySink(axes, index, target, layout, text, values)


def tensor_source(data: Tensor | np.ndarray, axes: Axes, index: int | None = None) -> TensorSource:
    """A tensor or an array of any layout to read; pages of a memory-mapped one are released."""
    tensor, mapping = _tensor(data)
    return TensorSource(axes, index, tensor, mapping)


def tensor_sink(
    data: Tensor | np.ndarray, axes: Axes, values: torch.dtype, index: int | None = None
) -> TensorSink:
    """A tensor or an array to write to, in place. values: dtype of the parts."""
    if isinstance(data, np.ndarray) and not data.flags.writeable:
        raise BadInput("the destination is a read-only array; open it with mode='r+'")
    tensor, mapping = _tensor(data)
    check_conversion(values, tensor.dtype)
    return TensorSink(axes, index, tensor, values, mapping)


def in_place(end: Any) -> Tensor | None:
    """The image of a source or sink as a part; None unless it is a tensor in that layout."""
    if not isinstance(end, TensorSource | TensorSink) or end.mapping is not None:
        return None
    values = end.tensor.dtype if isinstance(end, TensorSource) else end.values
    if values != end.tensor.dtype:
        return None
    image = end.tensor if end.index is None else end.tensor[end.index : end.index + 1]
    expected = strides(tuple(image.shape), end.axes)
    triples = zip(image.shape, image.stride(), expected, strict=True)
    fits = all(size == 1 or stride == wanted for size, stride, wanted in triples)
    return image.as_strided(image.shape, expected) if fits else None


def _tensor(data: Tensor | np.ndarray) -> tuple[Tensor, mmap.mmap | None]:
    if isinstance(data, Tensor):
        if data.device.type != "cpu" or data.layout != torch.strided:
            raise BadInput(f"expected a dense tensor on the CPU, got {data.layout} on "
                           f"{data.device}; move it first: tensor.cpu()")  # fmt: skip
        return data.detach(), None
    _dtype(data.dtype, "the array")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of arrays that are read-only: a source is only read
            return torch.from_numpy(data), _mapping(data)
    except ValueError as error:
        raise BadInput(f"the array's layout is not supported ({error}); copy it first") from error


def _dtype(dtype: np.dtype[Any], name: str) -> torch.dtype:
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except (TypeError, ValueError) as error:
        raise BadInput(
            f"{name} holds {dtype.str}; expected floating or whole numbers in this machine's "
            "byte order: convert it, as by array.astype('float32')"
        ) from error


def _mapping(array: Any) -> mmap.mmap | None:
    """The mapping of an array, if its pages may be released because a file backs them; a private
    copy (mode "c") is not backed."""
    shared = False
    while array is not None and not isinstance(array, mmap.mmap):
        shared = shared or (isinstance(array, np.memmap) and array.mode in ("r", "r+", "w+"))
        array = getattr(array, "base", None)
    return array if shared else None


def _release_pages(mapping: mmap.mmap | None) -> None:
    if mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED)


# --------------------------------------------------------------------------------------- boxes


def box_of(shape: tuple[int, ...], axes: Axes, window: Window) -> Box:
    """A window as one interval per dimension.

    >>> box_of((1, 3, 8, 9), (2, 3), ((2, 4), (0, 9)))
    ((0, 1), (0, 3), (2, 4), (0, 9))
    """
    box: list[Interval] = [(0, size) for size in shape]
    for axis, interval in zip(axes, window, strict=True):
        if axis is not None:
            box[axis] = interval
    return tuple(box)


def extents(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(end - start for start, end in box)


def elements(box: Box) -> int:
    """The number of positions of a box."""
    return math.prod(extents(box))


def pieces(box: Box, dims: tuple[int, ...], limit: int) -> Iterator[Box]:
    """A box cut into boxes of at most `limit` elements, first along the first of `dims`.

    Law: they cover each position of the box once, and none is larger than the first.

    >>> list(pieces(((0, 2), (0, 3)), (1, 0), 4))
    [((0, 2), (0, 2)), ((0, 2), (2, 3))]
    """
    if elements(box) == 0:
        return
    if elements(box) <= limit or not dims:
        yield box
        return
    axis, rest = dims[0], dims[1:]
    start, end = box[axis]
    step = max(1, limit * (end - start) // elements(box))
    for first in range(start, end, step):
        cut = (first, min(first + step, end))
        yield from pieces((*box[:axis], cut, *box[axis + 1 :]), rest, limit)


def view(tensor: Tensor, box: Box) -> Tensor:
    """The positions of a box."""
    for axis, (start, end) in enumerate(box):
        tensor = tensor.narrow(axis, start, end - start)
    return tensor


def within(part: Tensor, box: Box, axes: Axes, window: Window) -> Tensor:
    """The positions of a box in the part of a window."""
    starts = {
        axis: first for axis, (first, _) in zip(axes, window, strict=True) if axis is not None
    }
    return view(part, tuple((a - starts.get(k, 0), b - starts.get(k, 0))
                            for k, (a, b) in enumerate(box)))  # fmt: skip


def _scratch(sink: TensorSink | ArraySink, window: Window) -> Tensor:
    """Memory to convert the largest piece of a window to 8 bits; empty for other dtypes."""
    stored = sink.tensor.dtype if isinstance(sink, TensorSink) else sink.layout.dtype
    dtype = work_dtype(sink.values)
    if not is_quantized(sink.values, stored):
        return torch.empty(0, dtype=dtype)
    return torch.empty(sink.workspace(window) // sink._element_bytes, dtype=dtype)


__all__ = [
    "ArraySink", "ArraySource", "RowSource", "Sink", "Spill", "TensorSink", "TensorSource",
    "array_sink", "array_source", "spill", "tensor_sink", "tensor_source",
]  # fmt: skip
