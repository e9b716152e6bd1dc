"""NumPy files (.npy), read and written through small buffers.

They are not mapped: the pages of a mapping are not counted in the budget, and a full disk or a
truncated file kills a process that maps it. The buffer costs some speed. Measured with one thread
of an EPYC (Zen 4), the file in the kernel's cache, float32 images with channels first, in bands of
2 to 64 rows: 2.3-3.2 GB/s with the buffer, 3.1-5.4 with a mapping whose pages are released after
each piece. Networks are far slower than both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.files.arrays import npy_header
from demask.files.bounded_read import open_plain
from demask.traverse.storage.boxes import Box, elements
from demask.traverse.storage.dtype_conversion import name_of
from demask.traverse.storage.sources_and_sinks import Descriptor, FileLayout, fetch, reserve, store
from demask.traverse.storage.store import ArrayInfo, torch_dtype


@dataclass(slots=True)
class NpyStore:
    """An open .npy file, in C or Fortran order and any byte order."""

    name: str
    file: Descriptor
    stored: FileLayout
    is_swapped: bool = False
    chunks: tuple[int, ...] | None = None
    layout: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    @property
    def order(self) -> tuple[int, ...]:
        return self.stored.order

    def read(self, box: Box) -> Tensor:
        """The values of a box."""
        values = torch.empty(elements(box), dtype=self.dtype)
        fetch(self.file, self.stored, box, values)
        if self.is_swapped:
            values.numpy().byteswap(inplace=True)
        return self.stored.view_box(values, box)

    def write(self, box: Box, values: Tensor) -> None:
        """Write the values of a box."""
        store(self.file, self.stored, box, values.reshape(-1))


def open_store(path: Path) -> NpyStore:
    """A .npy file to read. Raises BadInput where it is missing, damaged, or not of numbers."""
    with open_plain(path) as opened:
        header = npy_header(opened, os.fstat(opened.fileno()).st_size, str(path))
        file = Descriptor(os.dup(opened.fileno()), str(path))
    dims = range(len(header.shape))
    order = tuple(reversed(dims) if header.fortran else dims)
    stored = FileLayout(header.offset, header.shape, order, torch_dtype(header.dtype, str(path)))
    return NpyStore(str(path), file, stored, is_swapped=not header.dtype.isnative)


def letters(images: str, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """The axes of the file: all axes of the images."""
    return images


def chunks(shape: tuple[int, ...], letters: str) -> None:
    """NumPy files have no chunks."""


def create(path: Path, info: ArrayInfo) -> None:
    """Create the file at its full size. Raises BadInput where the disk has no room, or NumPy has no
    such dtype."""
    header = _header(info, path)
    file = _descriptor(path, os.O_CREAT | os.O_EXCL)
    reserve(file, _layout(info, header).end, path.parent)
    os.pwrite(file.number, header, 0)
    file.close()


def open_again(path: Path, info: ArrayInfo) -> NpyStore:
    """The file, open for writing."""
    stored = _layout(info, _header(info, path))
    return NpyStore(str(path), _descriptor(path, 0), stored)


def _descriptor(path: Path, flags: int) -> Descriptor:
    try:
        binary = getattr(os, "O_BINARY", 0)
        return Descriptor(os.open(path, os.O_RDWR | flags | binary, 0o666), str(path))
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from error


def _layout(info: ArrayInfo, header: bytes) -> FileLayout:
    return FileLayout(len(header), info.shape, tuple(range(len(info.shape))), info.dtype)


def _header(info: ArrayInfo, path: Path) -> bytes:
    try:
        descr = np.lib.format.dtype_to_descr(torch.empty(0, dtype=info.dtype).numpy().dtype)
    except TypeError as error:
        raise BadInput(f"{path}: numpy has no {name_of(info.dtype)}; choose another dtype: output='float32'") from error
    header = BytesIO()
    fields = {"descr": descr, "fortran_order": False, "shape": tuple(info.shape)}
    np.lib.format.write_array_header_1_0(header, fields)
    return header.getvalue()
