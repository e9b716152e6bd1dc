"""NumPy files (.npy) and other dense files, read and written through small buffers.

They are not mapped: the pages of a mapping are not counted in the budget, and a full disk or a
truncated file kills a process that maps it. The buffer costs some speed. Measured with one thread
of an EPYC (Zen 4), the file in the kernel's cache, float32 images with channels first, in bands of
2 to 64 rows: 2.3-3.2 GB/s with the buffer, 3.1-5.4 with a mapping whose pages are released after
each piece. Networks are far slower than both.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.files.arrays import npy_header
from demask.files.bounded_read import open_plain
from demask.traverse.storage.boxes import Box, box_at, elements, extents, view_flat
from demask.traverse.storage.dtype_conversion import name_of
from demask.traverse.storage.store import ArrayInfo, SliceStore, torch_dtype

FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}  # NumPy has no bfloat16


class Descriptor:
    """An open file, closed with the last reference to it. name: for error messages."""

    __slots__ = ("name", "number")

    def __init__(self, number: int, name: str):
        self.number, self.name = number, name

    @classmethod
    def open(cls, path: Path, flags: int = 0, mode: int = 0o666) -> Descriptor:
        """A file to read and write. Raises BadInput where it cannot be opened."""
        try:
            return cls(os.open(path, os.O_RDWR | flags | getattr(os, "O_BINARY", 0), mode), str(path))
        except OSError as error:
            raise BadInput(f"cannot write {path}: {error.strerror or error}") from error

    def close(self) -> None:
        if self.number >= 0:
            os.close(self.number)
        self.number = -1

    __del__ = close

    def __reduce__(self):
        raise TypeError(f"{self.name} is open: it can be neither copied nor pickled")


@dataclass(frozen=True, slots=True)
class DenseFile:
    """An array in a file, dense from byte `offset` on, dimensions in `order` from outermost to
    innermost. is_swapped: whether its bytes are in the other order than this machine's."""

    file: Descriptor
    offset: int
    shape: tuple[int, ...]
    order: tuple[int, ...]
    kind: torch.dtype
    is_swapped: bool = False

    @property
    def dtype(self) -> np.dtype[Any]:
        return torch.empty(0, dtype=self.kind).numpy().dtype

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one position to the next, of each dimension."""
        steps, step = dict[int, int](), self.kind.itemsize
        for axis in reversed(self.order):
            steps[axis] = step
            step *= self.shape[axis]
        return tuple(steps[axis] for axis in range(len(self.shape)))

    @property
    def end(self) -> int:
        """Bytes of the file."""
        return self.offset + math.prod(self.shape) * self.kind.itemsize

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        box = box_at(index)
        part = view_flat(torch.empty(elements(box), dtype=self.kind), extents(box), self.order)
        self.read(box, part)
        values = part.numpy()
        return values.byteswap(inplace=True) if self.is_swapped else values

    def __setitem__(self, index: tuple[slice, ...], values: np.ndarray) -> None:
        self.write(box_at(index), torch.from_numpy(values))

    def read(self, box: Box, into: Tensor) -> None:
        """Read a box into a part whose memory has the file's order within each contiguous piece."""
        self._transfer(box, into, lambda position, memory: os.preadv(self.file.number, [memory], position))

    def write(self, box: Box, part: Tensor) -> None:
        """Write a box from a part as `read` fills it."""
        self._transfer(box, part, lambda position, memory: os.pwrite(self.file.number, memory, position))

    def _transfer(self, box: Box, part: Tensor, move: Callable[[int, memoryview], int]) -> None:
        outer = max(len(self.order) - 1, 0)  # dimensions to iterate over: along the others, the box is contiguous
        while outer and box[self.order[outer]] == (0, self.shape[self.order[outer]]):
            outer -= 1
        ordered = part.detach().view(RAW[self.kind.itemsize]).numpy().transpose(self.order)
        steps = [self.strides[axis] for axis in self.order]
        first = self.offset + sum(box[axis][0] * step for axis, step in zip(self.order, steps, strict=True))
        try:
            for index in product(*map(range, ordered.shape[:outer])):
                piece = ordered[(*index, ...)]
                if not piece.flags.c_contiguous:
                    raise ValueError(f"expected a part laid out as {self.order}, got strides {part.stride()}")
                memory, position = piece.reshape(-1).view(np.uint8).data, first
                position += sum(k * step for k, step in zip(index, steps, strict=False))
                while memory:
                    count = move(position, memory)
                    if count == 0:
                        raise BadInput(f"{self.file.name} ended at byte {position}: was it changed?")
                    memory, position = memory[count:], position + count
        except OSError as error:
            raise BadInput(self._error_text(Path(self.file.name).parent, error)) from error

    def reserve(self, folder: Path) -> None:
        """Reserve its bytes on the disk, so that it is not full after hours of work."""
        try:
            if self.end and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.file.number, 0, self.end)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise BadInput(self._error_text(folder, error)) from error
        try:
            os.ftruncate(self.file.number, self.end)
        except OSError as error:
            raise BadInput(self._error_text(folder, error)) from error

    def _error_text(self, folder: Path, error: OSError) -> str:
        if error.errno in FULL:
            return (
                f"{folder} has no room for {self.file.name}, which needs {self.end:,} bytes "
                f"({error.strerror}): free some, or name a folder on another disk"
            )
        return f"{self.file.name}: {error.strerror or error}"


def open_store(path: Path) -> SliceStore:
    """A .npy file to read, in C or Fortran order and any byte order. Raises BadInput where it is
    missing, damaged, or not of numbers."""
    with open_plain(path) as opened:
        header = npy_header(opened, os.fstat(opened.fileno()).st_size, str(path))
        file = Descriptor(os.dup(opened.fileno()), str(path))
    dims = range(len(header.shape))
    order = tuple(reversed(dims) if header.fortran else dims)
    dtype = torch_dtype(header.dtype, str(path))
    dense = DenseFile(file, header.offset, header.shape, order, dtype, is_swapped=not header.dtype.isnative)
    return SliceStore.of(dense, str(path))


def create(path: Path, info: ArrayInfo) -> None:
    """Create the file at its full size. Raises BadInput where the disk has no room, or NumPy has no
    such dtype."""
    header = _header(info, path)
    dense = _open_dense(path, info, len(header), os.O_CREAT | os.O_EXCL)
    dense.reserve(path.parent)
    os.pwrite(dense.file.number, header, 0)
    dense.file.close()


def open_again(path: Path, info: ArrayInfo) -> SliceStore:
    """The file, open for writing."""
    return SliceStore.of(_open_dense(path, info, len(_header(info, path))), str(path))


def _open_dense(path: Path, info: ArrayInfo, offset: int, flags: int = 0) -> DenseFile:
    return DenseFile(Descriptor.open(path, flags), offset, info.shape, tuple(range(len(info.shape))), info.dtype)


def _header(info: ArrayInfo, path: Path) -> bytes:
    try:
        descr = np.lib.format.dtype_to_descr(torch.empty(0, dtype=info.dtype).numpy().dtype)
    except TypeError as error:
        raise BadInput(f"{path}: numpy has no {name_of(info.dtype)}; choose another dtype: output='float32'") from error
    header = BytesIO()
    fields = {"descr": descr, "fortran_order": False, "shape": tuple(info.shape)}
    np.lib.format.write_array_header_1_0(header, fields)
    return header.getvalue()
