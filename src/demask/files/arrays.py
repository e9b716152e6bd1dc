"""Arrays read from untrusted files (.npy, .npz, .safetensors), no larger than the file allows."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from demask.errors import BadInput
from demask.files.bounded_read import open_plain, open_zip

PIECE = 2**24  # bytes per read
ARRAYS = (".npy", ".npz", ".safetensors")


@dataclass(frozen=True, slots=True)
class ArrayHeader:
    """Header of a .npy file. fortran: whether the first axis is innermost in memory. offset: the
    byte at which the values begin."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def npy_header(file: Any, size: int, where: str) -> ArrayHeader:
    """The header of a .npy file.

    Args:
        file: open for reading, at its beginning.
        size: bytes of the file.
        where: name of the file in errors.

    Raises:
        BadInput: the file is damaged, its array is larger than the file, or has elements that are
            Python objects or records.
    """
    try:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"version {version} of the format")
        read_header = getattr(np.lib.format, f"read_array_header_{version[0]}_0")
        shape, fortran, dtype = read_header(file)
        offset = file.tell()
        is_numeric = dtype.fields is None and dtype.subdtype is None and dtype.kind in "biufc"
        if not is_numeric or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"{dtype} {shape}")
    except BadInput:
        raise
    except Exception as error:  # numpy's parser may raise anything on a hostile header
        raise BadInput(
            f"{where}: expected an array of numbers that numpy.save wrote: "
            f"{str(error).splitlines()[0] if str(error) else error!r:.80}"
        ) from error
    header = ArrayHeader(tuple(shape), dtype, bool(fortran), offset)
    if offset + header.nbytes > size:
        raise BadInput(
            f"{where}: the array {list(shape)} of {dtype} has {header.nbytes:,} bytes, "
            f"the file has {size - offset:,} of them; write it again"
        )
    return header


def read_arrays(path: Path) -> dict[str, Tensor]:
    """The arrays in a file, by name; the one in a .npy file has the name "".

    Raises:
        BadInput: no such file, damaged, or elements that torch has no dtype for.
    """
    match path.suffix:
        case ".npy":
            with open_plain(path) as file:
                return {"": _read_array(file, os.fstat(file.fileno()).st_size, str(path))}
        case ".npz":
            return _read_archive(path)
        case ".safetensors":
            with open_plain(path):
                pass
            try:
                return load_file(path)
            except (SafetensorError, OSError, ValueError) as error:
                raise BadInput(f"{path}: cannot be read: {error}") from error
    raise BadInput(f"expected a file {', '.join(ARRAYS)}, got {path}")


def _read_archive(path: Path) -> dict[str, Tensor]:
    arrays = {}
    with open_zip(path, compressed=True) as archive:
        for entry in archive.infolist():
            name = entry.filename.removesuffix(".npy")
            if name == entry.filename:
                raise BadInput(f"entry {name!r}: expected arrays that numpy.savez wrote")
            with archive.open(entry) as file:
                arrays[name] = _read_array(file, entry.file_size, repr(entry.filename))
    return arrays


def _read_array(file: Any, size: int, where: str) -> Tensor:
    header = npy_header(file, size, where)
    order = "F" if header.fortran else "C"
    flat = np.empty(math.prod(header.shape), header.dtype)
    memory = flat.view(np.uint8).data
    done = 0
    while done < len(memory):
        count = file.readinto(memory[done : done + PIECE])
        if not count:
            raise BadInput(f"{where}: ends {len(memory) - done:,} bytes early; copy it again")
        done += count
    native = flat.astype(header.dtype.newbyteorder("="), copy=False)
    try:
        return torch.from_numpy(native.reshape(header.shape, order=order))
    except TypeError as error:
        raise BadInput(f"{where}: {error}") from error


__all__ = ["ARRAYS", "ArrayHeader", "npy_header", "read_arrays"]
