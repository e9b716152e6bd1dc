"""Tensors of a safetensors file, read completely or in blocks of rows.

A safetensors file is eight bytes with the length of a JSON header, the header, the values.
Blocks are read by `pread` into one buffer: the file's pages belong to the kernel's cache, so the
resident memory of the process is the buffer. The next block is announced (POSIX_FADV_WILLNEED)
before the current one is used, so that disk and processor work at the same time.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from demask.errors import BadInput, DemaskError, RefusedFile
from demask.files import atomic_write as atomic
from demask.files.bounded_read import parse_json
from demask.graph.module_copy import structural_copy
from demask.graph.result.resize import assign_tensor, tensors_of

MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file. offset: the byte of the file at which its values begin."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one position along the first axis."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def hollow(self) -> Tensor:
        """Zeros of this shape and dtype, in the memory of one element."""
        return torch.zeros((), dtype=self.dtype).expand(self.shape)


@dataclass(frozen=True, slots=True)
class WeightFile:
    """The tensors of a safetensors file."""

    path: Path
    size: int  # bytes, when its header was read: shows later changes
    modified: int  # nanoseconds, likewise
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str] = field(default_factory=dict)  # the texts in its header
    unread: tuple[str, ...] = ()  # names of tensors of dtypes that are not in `DTYPES`

    @classmethod
    def read(cls, path: str | os.PathLike[str], part: tuple[int, int] | None = None, what: str = "") -> WeightFile:
        """The tensors in the header of a file, of the dtypes in `DTYPES`.

        Args:
            part: first and last byte + 1 of the safetensors data; None is the entire file.
            what: name of the file in errors, by default its path.

        Raises:
            BadInput: no such file, not safetensors, or truncated.
            RefusedFile: a header out of bounds.
        """
        what = what or str(path)
        try:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                start, end = part or (0, status.st_size)
                file.seek(start)
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= min(end - start - 8, MAX_HEADER_BYTES):
                    raise BadInput(
                        f"{what}: expected a safetensors file, got a header of {length} bytes in "
                        f"a file of {end - start}; write it again with safetensors"
                    )
                header = parse_json(file.read(length), f"{what}: header")
        except OSError as error:
            raise BadInput(f"{what}: cannot be read: {error.strerror or error}") from error
        tensors = dict(_parse_header(header, start + 8 + length, end, what))
        metadata = header.get("__metadata__") or {}
        if not isinstance(metadata, dict):
            raise RefusedFile(f"{what}: expected texts as metadata, got {metadata!r:.80}")
        unread = tuple(header.keys() - tensors.keys() - {"__metadata__"})
        path = Path(path).resolve()
        return cls(path, status.st_size, status.st_mtime_ns, tensors, metadata, unread)

    @classmethod
    def write(
        cls,
        path: Path,
        tensors: Mapping[str, Tensor],
        read: Callable[[str], Tensor] | None = None,
        metadata: Mapping[str, str] = MappingProxyType({}),
    ) -> WeightFile:
        """Write a safetensors file of these tensors, complete or not at all, and return it.

        Args:
            read: the values of a tensor, by its name, one at a time; `tensors` then state dtypes
                and shapes alone, and may be on the meta device.
            metadata: texts for the header.
        """
        header, end = dict[str, Any](), 0
        if metadata:
            header["__metadata__"] = dict(metadata)
        for name, tensor in tensors.items():
            start, end = end, end + tensor.numel() * tensor.element_size()
            header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # values begin at a multiple of eight bytes
        with atomic.write(path) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name, tensor in tensors.items():
                values = tensor if read is None else read(name)
                if values.shape != tensor.shape or values.dtype != tensor.dtype:
                    raise DemaskError(
                        f"{name}: expected {tuple(tensor.shape)} of {tensor.dtype}, "
                        f"got {tuple(values.shape)} of {values.dtype}"
                    )
                plain = values.detach().cpu().contiguous().view(-1)
                file.write(plain.view(torch.uint8).numpy().data)
        return cls.read(path)

    @contextmanager
    def open(self) -> Iterator[int]:
        """A file descriptor. Raises BadInput if the file changed since its header was read."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise BadInput(f"{self.path}: cannot be read: {error.strerror or error}") from error
        try:
            status = os.fstat(descriptor)
            if (status.st_size, status.st_mtime_ns) != (self.size, self.modified):
                raise BadInput(f"{self.path}: changed since the network was built; build it again")
            yield descriptor
        finally:
            os.close(descriptor)

    def tensor(self, stored: StoredTensor) -> Tensor:
        """All of a tensor, in new memory."""
        values = torch.empty(stored.shape, dtype=stored.dtype)
        if stored.nbytes:
            with self.open() as descriptor:
                flat = values.view(-1).view(torch.uint8)
                _read_into(descriptor, flat, stored.offset, stored.nbytes, self.path)
        return values

    def blocks(self, stored: StoredTensor, rows: int, buffer: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the first row and the values of each block of `rows` rows (first axis).

        The values are a view of `buffer` (uint8, 1-D), valid until the next block is read.
        """
        count = stored.shape[0]
        with self.open() as descriptor:
            for start in range(0, count, rows):
                size = min(rows, count - start) * stored.row_bytes
                offset = stored.offset + start * stored.row_bytes
                _read_into(descriptor, buffer, offset, size, self.path)
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(descriptor, offset + size, rows * stored.row_bytes, os.POSIX_FADV_WILLNEED)
                yield start, buffer[:size].view(stored.dtype).view(-1, *stored.shape[1:])


def with_weights(
    model: nn.Module, file: WeightFile, read: Callable[[StoredTensor], Tensor]
) -> tuple[nn.Module, dict[str, StoredTensor]]:
    """A copy of the model with weights from a file, and the stored tensors by the model's names.

    Each tensor whose name, or a name tied to it, is in the file becomes `read(stored)`.

    Raises:
        BadInput: shape or dtype differ, or the file lacks a tensor that is on the meta device.
    """
    copy = structural_copy(model, share=True)
    tensors, tied = dict(tensors_of(copy)), {}
    for name, tensor in tensors.items():
        tied.setdefault(id(tensor), []).append(name)
    stored_by_name = {}
    for names in tied.values():
        name, old = next((n for n in names if n in file.tensors), names[0]), tensors[names[0]]
        stored = file.tensors.get(name)
        if stored is None:
            if old.is_meta:
                raise BadInput(
                    f"{file.path}: expected a tensor {name!r}, which the model has on "
                    "the meta device only; write it to the file too"
                )
            continue
        if stored.shape != tuple(old.shape) or stored.dtype != old.dtype:
            raise BadInput(
                f"{file.path}: expected {name!r} to be {tuple(old.shape)} of {old.dtype}, as in "
                f"the model, got {stored.shape} of {stored.dtype}"
            )
        new = read(stored)
        new = nn.Parameter(new, requires_grad=False) if isinstance(old, nn.Parameter) else new
        for alias in names:
            assign_tensor(copy, alias, new)
            stored_by_name[alias] = stored
    return copy, stored_by_name


def _parse_header(header: Any, first: int, end: int, what: str) -> Iterator[tuple[str, StoredTensor]]:
    """Name and location of each tensor in a header. first, end: bytes where the values begin, end."""
    if not isinstance(header, dict):
        raise RefusedFile(f"{what}: expected an object as header")
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        match entry:
            case {"dtype": str(kind), "shape": list(shape), "data_offsets": [int(start), int(stop)]} if (
                all(type(n) is int and 0 <= n < 2**48 for n in shape) and 0 <= start <= stop
            ):
                pass
            case _:
                raise RefusedFile(f"{what}: tensor {name!r:.80} is not valid: {entry!r:.80}")
        if kind not in DTYPES:
            continue
        stored = StoredTensor(name, DTYPES[kind], tuple(shape), first + start)
        if stop - start != stored.nbytes or first + stop > end:
            raise RefusedFile(
                f"{what}: tensor {name!r:.80} needs {stored.nbytes} bytes, the header gives it "
                f"[{start}, {stop}) of a file of {end}; the file is damaged or truncated"
            )
        yield name, stored


def _read_into(descriptor: int, buffer: Tensor, offset: int, size: int, path: Path) -> None:
    """Read `size` bytes at `offset` of the file into the beginning of the buffer."""
    memory = buffer.numpy().data
    done = 0
    while done < size:
        count = os.preadv(descriptor, [memory[done:size]], offset + done)
        if count == 0:
            raise BadInput(f"{path}: ends {size - done} bytes early; write it again")
        done += count
