"""Sources and sinks of the parts of a value: tensors, and temporary files.

Dense files are read and written in boxes, one contiguous piece at a time. Arrays outside of memory
are `stored_ends`; `dtype_conversion` converts numbers.
"""

from __future__ import annotations

import errno
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.exec.axes import Axes, Window, order, strides
from demask.traverse.storage.boxes import LIMIT, Box, box_of, elements, extents, pieces, view, within
from demask.traverse.storage.dtype_conversion import assign, check_conversion, convert, scratch_size, work_dtype
from demask.traverse.storage.store import torch_dtype

FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


class Descriptor:
    """An open file, closed with the last reference to it. name: for error messages."""

    __slots__ = ("name", "number")

    def __init__(self, number: int, name: str):
        self.number, self.name = number, name

    def close(self) -> None:
        if self.number >= 0:
            os.close(self.number)
        self.number = -1

    __del__ = close

    def __reduce__(self):
        raise TypeError(f"{self.name} is open: it can be neither copied nor pickled")


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The layout of a file: dense from byte `offset` on, dimensions in `order` from outermost to
    innermost."""

    offset: int
    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end(self) -> int:
        """Bytes of the file."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize

    def outer(self, box: Box) -> int:
        """The number of outermost dimensions to iterate over: along the others, the box is
        contiguous."""
        depth = len(self.order)
        while depth > 1 and box[self.order[depth - 1]] == (0, self.shape[self.order[depth - 1]]):
            depth -= 1
        return max(depth - 1, 0)

    def runs(self, box: Box) -> Iterator[tuple[int, int]]:
        """The contiguous pieces of a box, as (byte in the file, bytes), in the file's order.

        >>> list(FileLayout(0, (2, 4, 5), (0, 1, 2), torch.uint8).runs(((0, 2), (1, 3), (0, 5))))
        [(5, 10), (25, 10)]
        """
        outer, steps, step = self.outer(box), {}, self.dtype.itemsize
        for axis in reversed(self.order):
            steps[axis] = step
            step *= self.shape[axis]
        iterated, rest = self.order[:outer], self.order[outer:]
        first = self.offset + sum(box[axis][0] * steps[axis] for axis in self.order)
        size = self.dtype.itemsize * math.prod(box[a][1] - box[a][0] for a in rest)
        strides = [range(0, (box[a][1] - box[a][0]) * steps[a], steps[a]) for a in iterated]
        return ((first + sum(offsets), size) for offsets in product(*strides))

    def view_box(self, buffer: Tensor, box: Box) -> Tensor:
        """A view of a flat buffer in the file's order, as a tensor of the box's shape."""
        in_file_order = buffer.view([box[axis][1] - box[axis][0] for axis in self.order])
        dims = [self.order.index(axis) for axis in range(len(self.order))]
        return in_file_order.permute(dims)


def fetch(file: Descriptor, layout: FileLayout, box: Box, into: Tensor) -> None:
    """Read a box.

    into: a flat buffer, filled in the file's order, or a tensor of the box's shape whose memory has
    the file's order within each contiguous piece.
    """
    _transfer(file, layout, box, into, lambda position, memory: os.preadv(file.number, [memory], position))


def store(file: Descriptor, layout: FileLayout, box: Box, values: Tensor) -> None:
    """Write a box from a tensor as `fetch` fills it."""
    _transfer(file, layout, box, values, lambda position, memory: os.pwrite(file.number, memory, position))


def _transfer(
    file: Descriptor, layout: FileLayout, box: Box, tensor: Tensor, move: Callable[[int, memoryview], int]
) -> None:
    runs = layout.runs(box)
    try:
        for (position, size), memory in zip(runs, _memory_of_pieces(layout, box, tensor), strict=True):
            done = 0
            while done < size:
                count = move(position + done, memory[done:])
                if count == 0:
                    raise BadInput(f"{file.name} ended at byte {position + done}: was it changed?")
                done += count
    except OSError as error:
        message = _error_text(file.name, layout.end, Path(file.name).parent, error)
        raise BadInput(message) from error


def _memory_of_pieces(layout: FileLayout, box: Box, tensor: Tensor) -> Iterator[memoryview]:
    """The memory of each contiguous piece of a box."""
    outer = layout.outer(box)
    if tensor.dim() == 1:  # a buffer in the file's order: consecutive pieces
        data, runs = _bytes(tensor), math.prod(box[a][1] - box[a][0] for a in layout.order[:outer])
        size = len(data) // max(runs, 1)
        yield from (data[start : start + size] for start in range(0, runs * size, max(size, 1)))
        return
    ordered = tensor.detach().permute(layout.order)
    for index in product(*map(range, ordered.shape[:outer])):
        piece = ordered[index]
        if not piece.is_contiguous():
            raise ValueError(f"expected a part laid out as {layout.order}, got strides {tensor.stride()}")
        yield _bytes(piece.reshape(-1))


def _bytes(flat: Tensor) -> memoryview:
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def temporary(folder: str | os.PathLike[str]) -> Descriptor:
    """A new file without a name in a folder."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            return Descriptor(os.dup(file.fileno()), os.path.join(folder, "(temporary file)"))
    except OSError as error:
        raise BadInput(f"cannot write in {folder}: {error.strerror or error}") from error


def named(path: Path) -> Descriptor:
    """A file that several processes read and write."""
    try:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
        return Descriptor(os.open(path, flags, 0o600), str(path))
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror or error}") from error


def reserve(file: Descriptor, size: int, folder: Path) -> None:
    """Reserve `size` bytes on the disk, so that it is not full after hours of work."""
    try:
        if not _allocate(file.number, size):
            os.ftruncate(file.number, size)
    except OSError as error:
        raise BadInput(_error_text(file.name, size, folder, error)) from error


def _allocate(number: int, size: int) -> bool:
    """Whether the file system reserved the bytes."""
    if size == 0 or not hasattr(os, "posix_fallocate"):
        return False
    try:
        os.posix_fallocate(number, 0, size)
    except OSError as error:
        if error.errno in UNSUPPORTED:
            return False
        raise
    return True


def _error_text(name: str, size: int, folder: Path, error: OSError) -> str:
    if error.errno in FULL:
        return (
            f"{folder} has no room for {name}, which needs {size:,} bytes "
            f"({error.strerror}): free some, or name a folder on another disk"
        )
    return f"{name}: {error.strerror or error}"


class Sink(Protocol):
    """A value whose parts can be written: each position once, in any order."""

    def write(self, window: Window, part: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class _TensorEnd:
    """Base class. axes: of the value. index: of an image in a batch, or None.

    `workspace` of a subclass: bytes that it allocates to read or write a window.
    """

    axes: Axes
    index: int | None
    tensor: Tensor

    def image(self, index: int) -> Self:
        """The source or sink of one image of the batch."""
        return replace(self, index=index)

    def placed(self, axes: Axes) -> Self:
        """The source or sink with the axes of rows and columns."""
        return replace(self, axes=axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the image, or of the batch."""
        shape = tuple(self.tensor.shape)
        return shape if self.index is None else (1, *shape[1:])

    def _in_batch(self, box: Box) -> Box:
        return box if self.index is None else ((self.index, self.index + 1), *box[1:])


@dataclass(frozen=True, slots=True)
class TensorSource(_TensorEnd):
    """A tensor to read."""

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, window: Window, into: Tensor) -> None:
        box = box_of(self.shape, self.axes, window)
        assign(into, view(self.tensor, self._in_batch(box)))

    def workspace(self, window: Window) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class TensorSink(_TensorEnd):
    """A tensor to write to; floating-point parts are converted to 8 or 16 bits as images.

    values: dtype of the parts.
    """

    values: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def write(self, window: Window, part: Tensor) -> None:
        each = scratch_size(self.values, self.tensor.dtype)
        scratch = torch.empty(self.workspace(window) // max(each, 1), dtype=work_dtype(self.values))
        for box in self._boxes_to_convert(window):
            values = within(part, box, self.axes, window)
            convert(values, view(self.tensor, self._in_batch(box)), self.axes, scratch)

    def workspace(self, window: Window) -> int:
        each = scratch_size(self.values, self.tensor.dtype)
        return each * elements(next(self._boxes_to_convert(window), ()))

    def _boxes_to_convert(self, window: Window) -> Iterator[Box]:
        box = box_of(self.shape, self.axes, window)
        each = scratch_size(self.values, self.tensor.dtype)
        limit = LIMIT // each if each else elements(box)
        return pieces(box, order(len(box), self.axes), limit)


@dataclass(frozen=True, slots=True)
class Spill:
    """A value in a temporary file, deleted with the last reference to it if it has no name.

    The file has the layout of parts in memory: rows are contiguous and need no copy.
    """

    axes: Axes
    layout: FileLayout
    file: Descriptor
    is_named: bool = False

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
            raise ValueError(
                f"expected a part of {extents(box)} in {self.dtype}, got {tuple(part.shape)} in {part.dtype}"
            )
        return box

    def close(self) -> None:
        """Close the file, which deletes it if it has no name."""
        self.file.close()

    def delete(self) -> None:
        """Close and delete the file."""
        self.close()
        if self.is_named:
            Path(self.file.name).unlink(missing_ok=True)


# ------------------------------------------------------------------------------------- opening


def spill(
    shape: Sequence[int], dtype: torch.dtype, axes: Axes, folder: str | os.PathLike[str], name: str = ""
) -> Spill:
    """A temporary file for a value. Raises BadInput where the disk has no room for it.

    folder: on a disk; on many systems the default folder for temporary files is in memory. name: of
    a file that other processes open, too, and that is created if it does not exist; "": a new file
    without a name.
    """
    sizes = tuple(map(int, shape))
    layout = FileLayout(0, sizes, order(len(sizes), axes), dtype)
    file = named(Path(folder, name)) if name else temporary(folder)
    reserve(file, layout.end, Path(folder))
    return Spill(axes, layout, file, bool(name))


def tensor_source(data: Tensor | np.ndarray, axes: Axes, index: int | None = None) -> TensorSource:
    """A tensor or an array of any layout to read."""
    return TensorSource(axes, index, _as_cpu_tensor(data))


def tensor_sink(data: Tensor | np.ndarray, axes: Axes, values: torch.dtype, index: int | None = None) -> TensorSink:
    """A tensor or an array to write to, in place. values: dtype of the parts."""
    if isinstance(data, np.ndarray) and not data.flags.writeable:
        raise BadInput("the destination is a read-only array; open it with mode='r+'")
    tensor = _as_cpu_tensor(data)
    check_conversion(values, tensor.dtype)
    return TensorSink(axes, index, tensor, values)


def in_place(end: Any) -> Tensor | None:
    """The image of a source or sink as a part; None unless it is a tensor in that layout."""
    if not isinstance(end, TensorSource | TensorSink):
        return None
    values = end.tensor.dtype if isinstance(end, TensorSource) else end.values
    if values != end.tensor.dtype:
        return None
    image = end.tensor if end.index is None else end.tensor[end.index : end.index + 1]
    expected = strides(tuple(image.shape), end.axes)
    triples = zip(image.shape, image.stride(), expected, strict=True)
    fits = all(size == 1 or stride == wanted for size, stride, wanted in triples)
    return image.as_strided(image.shape, expected) if fits else None


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
