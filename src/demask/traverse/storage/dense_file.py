"""Read and write boxes of dense files, one contiguous piece at a time."""

from __future__ import annotations

import errno
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from demask.errors import BadInput
from demask.traverse.storage.boxes import Box

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
        for (position, size), memory in zip(runs, _memory(layout, box, tensor), strict=True):
            done = 0
            while done < size:
                count = move(position + done, memory[done:])
                if count == 0:
                    raise BadInput(f"{file.name} ended at byte {position + done}: was it changed?")
                done += count
    except OSError as error:
        message = _error_text(file.name, layout.end, Path(file.name).parent, error)
        raise BadInput(message) from error


def _memory(layout: FileLayout, box: Box, tensor: Tensor) -> Iterator[memoryview]:
    """The memory of each contiguous piece of a box."""
    outer = layout.outer(box)
    if tensor.dim() == 1:  # a buffer in the file's order: consecutive pieces
        whole, runs = _bytes(tensor), math.prod(box[a][1] - box[a][0] for a in layout.order[:outer])
        size = len(whole) // max(runs, 1)
        yield from (whole[start : start + size] for start in range(0, runs * size, max(size, 1)))
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
        if not _allocated(file.number, size):
            os.ftruncate(file.number, size)
    except OSError as error:
        raise BadInput(_error_text(file.name, size, folder, error)) from error


def _allocated(number: int, size: int) -> bool:
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
