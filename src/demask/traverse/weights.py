"""Weights that stay in a file: read block by block into memory of a fixed size.

The file is safetensors: eight bytes with the length of a JSON header, the header, the values.
Blocks are read by `pread` into one buffer: the file's pages belong to the kernel's cache, never to
the process, so its resident memory is the buffer. The next block is announced (POSIX_FADV_WILLNEED)
before the last one is used, so that a disk works while the processor does.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from demask.errors import BadInput, RefusedFile
from demask.files import atomic
from demask.files.bounded import parse_json

MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file: where it begins, in bytes, and what it is."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Of one position along the first axis."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A safetensors file as it was found: its tensors, and what tells that it is still the same."""

    path: Path
    size: int
    modified: int  # nanoseconds
    tensors: Mapping[str, Stored]

    @classmethod
    def read(cls, path: str | os.PathLike[str], start: int = 0) -> WeightFile:
        """The tensors that a file's header names. start: where it begins, in an archive that holds
        it as it is. BadInput: no such file, no safetensors, truncated; RefusedFile: a header out of
        bounds."""
        try:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                file.seek(start)
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= min(status.st_size - start - 8, MAX_HEADER_BYTES):
                    raise BadInput(
                        f"{path}: expected a safetensors file, found a header of {length} bytes in "
                        f"a file of {status.st_size}; write it again with safetensors"
                    )
                header = parse_json(file.read(length), f"{path}: header")
        except OSError as error:
            raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from error
        tensors = dict(_tensors(header, start + 8 + length, status.st_size, str(path)))
        return cls(Path(path).resolve(), status.st_size, status.st_mtime_ns, tensors)

    @contextmanager
    def open(self) -> Iterator[int]:
        """A file descriptor; BadInput where the file is another one by now."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise BadInput(f"{self.path}: cannot be read: {error.strerror or error}") from error
        try:
            status = os.fstat(descriptor)
            if (status.st_size, status.st_mtime_ns) != (self.size, self.modified):
                raise BadInput(f"{self.path}: changed since the network was made; make it again")
            yield descriptor
        finally:
            os.close(descriptor)

    def tensor(self, stored: Stored) -> Tensor:
        """A tensor as a whole, in memory of its own."""
        made = torch.empty(stored.shape, dtype=stored.dtype)
        if stored.nbytes:
            with self.open() as descriptor:
                flat = made.view(-1).view(torch.uint8)
                _fill(descriptor, flat, stored.offset, stored.nbytes, self.path)
        return made

    def blocks(self, stored: Stored, rows: int, buffer: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Positions `start`.. along the first axis, `rows` at a time: each is read once, into
        `buffer` (bytes), and is gone when the next is asked for."""
        count = stored.shape[0]
        with self.open() as descriptor:
            for start in range(0, count, rows):
                size = min(rows, count - start) * stored.row_bytes
                offset = stored.offset + start * stored.row_bytes
                _fill(descriptor, buffer, offset, size, self.path)
                _announce(descriptor, offset + size, rows * stored.row_bytes)
                yield start, buffer[:size].view(stored.dtype).view(-1, *stored.shape[1:])


def _tensors(header: Any, first: int, size: int, where: str) -> Iterator[tuple[str, Stored]]:
    """The entries of a header; `first`: where the values begin; `size`: of the file."""
    if not isinstance(header, dict):
        raise RefusedFile(f"{where}: expected an object as header")
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        match entry:
            case {
                "dtype": str(kind),
                "shape": list(shape),
                "data_offsets": [int(start), int(end)],
            } if all(type(n) is int and n >= 0 for n in shape) and 0 <= start <= end:
                pass
            case _:
                raise RefusedFile(f"{where}: tensor {name!r:.80} is not understood: {entry!r:.80}")
        if kind not in _DTYPES:
            continue  # A kind of number that torch multiplies no matrices of.
        stored = Stored(name, first + start, tuple(shape), _DTYPES[kind])
        if end - start != stored.nbytes or first + end > size:
            raise RefusedFile(
                f"{where}: tensor {name!r:.80} needs {stored.nbytes} bytes, the header gives it "
                f"[{start}, {end}) of a file of {size}; the file is damaged or truncated"
            )
        yield name, stored


def _fill(descriptor: int, buffer: Tensor, offset: int, size: int, path: Path) -> None:
    """The first `size` bytes of the buffer are those of the file from `offset` on."""
    memory = buffer.numpy().data
    done = 0
    while done < size:
        got = os.preadv(descriptor, [memory[done:size]], offset + done)
        if got == 0:
            raise BadInput(f"{path}: ends {size - done} bytes early; write it again")
        done += got


def _announce(descriptor: int, offset: int, size: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_WILLNEED)


def write(path: Path, tensors: Mapping[str, Tensor]) -> WeightFile:
    """A safetensors file of these tensors, written beside `path` and renamed; read back."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        header[name] = {
            "dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": [start, end],
        }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # values begin at a multiple of eight bytes
    with atomic.write(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            plain = tensor.detach().cpu().contiguous().view(-1)
            file.write(plain.view(torch.uint8).numpy().data)
    return WeightFile.read(path)
