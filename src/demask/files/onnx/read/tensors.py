"""Conversion of TensorProto messages to tensors, with exactly the bytes that their sizes need, of the
ONNX file or of external files."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput, RefusedFile
from demask.files.bounded_read import open_plain
from demask.files.onnx.values import Host
from demask.installation import install_command

MAX_NAME = 4096
REPEATS = 4  # how often tensors may read the same bytes of a file, as tied weights do
FREE = 2**26  # bytes that they may read in any case
MAX_EXPANDED = 2**30  # bytes of values that are larger in memory than in the file
MAX_RANK = 64
MAX_ELEMENTS = 2**44  # counting sizes of 0 as 1
#: torch's dtype of an ONNX element type, by its number in onnx.TensorProto, without types that
#: torch does not have (strings, less than 8 bits)
DTYPES: dict[int, torch.dtype] = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 4: torch.uint16, 5: torch.int16,
    6: torch.int32, 7: torch.int64, 9: torch.bool, 10: torch.float16, 11: torch.float64,
    12: torch.uint32, 13: torch.uint64, 14: torch.complex64, 15: torch.complex128,
    16: torch.bfloat16, 17: torch.float8_e4m3fn, 18: torch.float8_e4m3fnuz,
    19: torch.float8_e5m2, 20: torch.float8_e5m2fnuz, 24: torch.float8_e8m0fnu,
}  # fmt: skip
#: element types of 2, 4 and 6 bits, and the dtype that stores one value per element here
NARROW: dict[int, torch.dtype] = {
    21: torch.uint8,
    22: torch.int8,
    23: torch.float32,
    25: torch.uint8,
    26: torch.int8,
    27: torch.float32,
    28: torch.float32,
}
STRING, EXTERNAL = 8, 1
#: by element type: the field that lists its numbers, and their dtype there
_FIELDS: dict[int, tuple[str, str]] = {
    1: ("float_data", "f4"),
    14: ("float_data", "f4"),
    11: ("double_data", "f8"),
    15: ("double_data", "f8"),
    7: ("int64_data", "i8"),
    12: ("uint64_data", "u8"),
    13: ("uint64_data", "u8"),
}


def text(value: Any, what: str, most: int = MAX_NAME) -> str:
    """A string of the file; BadInput where it is not UTF-8 (protobuf then returns bytes)."""
    if not isinstance(value, str):
        raise BadInput(f"{what}: expected UTF-8 text, got {value[:40]!r}")
    if len(value) > most:
        raise BadInput(f"{what}: expected at most {most} characters, got {len(value)}")
    return value


def tensor(proto: Any, folder: Path | ExternalData) -> Tensor | Host:
    """The tensor of a TensorProto, which owns its memory; text as host values.

    Args:
        folder: of external data.

    Raises:
        BadInput: the data does not match sizes or element type.
        RefusedFile: external data out of bounds.
    """
    name = text(proto.name, "a tensor's name")
    try:
        external = folder if isinstance(folder, ExternalData) else ExternalData(folder)
        return _read_tensor(proto, external)
    except BadInput as error:
        raise type(error)(f"tensor {name!r}: {error}") from None
    except MemoryError as error:
        raise BadInput(f"tensor {name!r} does not fit into memory") from error


def _read_tensor(proto: Any, external: ExternalData) -> Tensor | Host:
    sizes = _checked_sizes(proto)
    count, kind = math.prod(sizes), proto.data_type
    if proto.HasField("segment"):
        raise BadInput("stored in segments, which are not supported; expected the complete tensor")
    if kind == STRING:
        return _read_words(proto, sizes)
    if kind in NARROW:
        return torch.from_numpy(_unpack_narrow(proto, count, external)).reshape(sizes)
    if kind not in DTYPES:
        raise BadInput(f"element type {kind} is not one that demask reads")
    dtype = DTYPES[kind]
    array = _stored_numbers(proto, count, _numpy_dtype(dtype), external)
    if dtype == torch.bool:
        array = array != 0
    return torch.from_numpy(array).view(dtype).reshape(sizes)


def _checked_sizes(proto: Any) -> tuple[int, ...]:
    if len(proto.dims) > MAX_RANK:
        raise BadInput(f"expected at most {MAX_RANK} dimensions, got {len(proto.dims)}")
    sizes = tuple(proto.dims)
    if min(sizes, default=0) < 0:
        raise BadInput(f"expected sizes of at least 0, got {list(sizes)}")
    if math.prod(max(n, 1) for n in sizes) > MAX_ELEMENTS:
        raise BadInput(f"the sizes {list(sizes)} are more than any tensor has")
    return sizes


def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """A dtype of numpy's with the same bits (for bfloat16: unsigned 16-bit integers)."""
    name = str(dtype).removeprefix("torch.")
    if dtype == torch.bool or (dtype.is_floating_point and name[:7] not in ("float32", "float64")):
        return np.dtype(f"u{dtype.itemsize}")
    return np.dtype(name)


def _stored_numbers(proto: Any, count: int, dtype: np.dtype, external: ExternalData) -> np.ndarray:
    """`count` numbers as the tensor's element type stores them."""
    size = count * dtype.itemsize
    little = dtype.newbyteorder("<")
    field, wide = _FIELDS.get(proto.data_type, ("int32_data", "i4"))
    numbers = getattr(proto, field)
    if proto.data_location == EXTERNAL:
        if proto.raw_data or numbers:
            raise BadInput("has bytes both in the file and in external data; expected one of them")
        return external.tensor_bytes(proto.external_data, size).view(little).astype(dtype, copy=False)
    if not numbers:
        raw = proto.raw_data
        if len(raw) != size:
            raise BadInput(f"its sizes {list(proto.dims)} need {size} bytes, it has {len(raw)}")
        return np.frombuffer(raw, little).astype(dtype)
    if proto.raw_data:
        raise BadInput(f"has bytes both in raw_data and in {field}; expected one of them")
    return _convert_numbers(np.array(numbers, wide), count, dtype, field)


def _convert_numbers(numbers: np.ndarray, count: int, dtype: np.dtype, field: str) -> np.ndarray:
    """Numbers of a listing field, converted to the tensor's dtype."""
    if dtype.kind == "c" and len(numbers) % 2 == 0:
        numbers = numbers.view(dtype)
    if len(numbers) != count:
        raise BadInput(f"its sizes need {count} numbers, {field} has {len(numbers)}")
    typed = numbers.astype(dtype)
    if dtype.kind in "iu" and not np.array_equal(typed, numbers):
        raise BadInput(f"numbers in {field} do not fit into {dtype.itemsize * 8} bits")
    return typed


def _unpack_narrow(proto: Any, count: int, external: ExternalData) -> np.ndarray:
    """Numbers of less than 8 bits, in the dtype that stores them here."""
    try:
        import onnx_ir as ir
    except ImportError as error:
        raise BadInput(f"numbers of less than 8 bits need onnx-ir: {install_command('onnx')}") from error
    kind, byte = ir.DataType(proto.data_type), np.dtype(np.uint8)
    if kind.bitwidth == 6 and proto.int32_data:  # not packed
        numbers = (_stored_numbers(proto, count, byte, external) & np.uint8(63)).view(kind.numpy())
    else:
        packed = _stored_numbers(proto, -(-count * kind.bitwidth // 8), byte, external)
        try:
            numbers = ir.PackedTensor(packed, kind, shape=(count,)).numpy()
        except ValueError as error:
            raise BadInput(f"packed numbers that are damaged: {error}") from None
    return numbers.astype(_numpy_dtype(NARROW[proto.data_type]))


def _read_words(proto: Any, sizes: tuple[int, ...]) -> Host:
    """The strings of a string tensor."""
    if proto.data_location == EXTERNAL or proto.raw_data:
        raise BadInput("text outside string_data; expected it there")
    words = [decode_text(word, "a text in it") for word in proto.string_data]
    if len(words) != math.prod(sizes):
        raise BadInput(f"its sizes need {math.prod(sizes)} texts, it has {len(words)}")
    return Host.of(np.array(words, dtype=object).reshape(sizes))


def decode_text(value: bytes, what: str) -> str:
    """The text of UTF-8 bytes; BadInput where they are something else."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise BadInput(f"{what}: expected UTF-8 text, got {value[:40]!r}") from None


def dense(proto: Any, external: ExternalData) -> Tensor:
    """The dense tensor of a SparseTensorProto. external: bounds the memory of such tensors."""
    values, indices = tensor(proto.values, external), tensor(proto.indices, external)
    name, sizes = proto.values.name, _checked_sizes(proto)
    if not isinstance(values, Tensor) or not isinstance(indices, Tensor):
        raise BadInput(f"sparse tensor {name!r}: expected numbers, got text")
    external.expand(math.prod(sizes) * values.dtype.itemsize, f"sparse tensor {name!r}")
    is_valid = indices.dtype == torch.int64 and values.ndim == 1 and 1 <= indices.ndim <= 2
    if not is_valid or indices.shape != (len(values), len(sizes))[: indices.ndim]:
        raise BadInput(f"sparse tensor {name!r}: its values and indices do not match")
    bounds = torch.tensor(sizes if indices.ndim == 2 else math.prod(sizes))
    if bool(((indices < 0) | (indices >= bounds)).any()):
        raise BadInput(f"sparse tensor {name!r}: an index outside the sizes {list(sizes)}")
    result = torch.zeros(sizes, dtype=values.dtype)
    if indices.ndim == 2:
        result[indices.unbind(-1)] = values
    else:
        result.view(-1)[indices] = values
    return result


def file_bytes(path: str | os.PathLike[str], check: Callable[[int, bytes], None]) -> bytes:
    """All bytes of the file at `path`. check: called first, with its size and first 16 bytes."""
    with open_plain(path, "the file") as file:
        size = os.fstat(file.fileno()).st_size
        check(size, file.read(16))
        file.seek(0)
        data = file.read(size)
        while len(data) < size:  # a call reads less than 2 GiB
            data += file.read(size - len(data)) or _refuse_shorter("the file")
        return data


@dataclass(frozen=True, slots=True)
class FileSlice:
    """Location of an external tensor's bytes. length: None where the file does not state it."""

    location: str
    offset: int
    length: int | None


class ExternalData:
    """Reader of files in the folder of an ONNX file, with bounds on the bytes that tensors take.

    real: the folder of the file itself where `folder` has a link to it (a cache of downloads).
    """

    def __init__(self, folder: Path, real: Path | None = None):
        self.folders = tuple(dict.fromkeys((folder.resolve(), (real or folder).resolve())))
        self.paths: dict[str, Path] = {}
        self.taken: dict[Path, int] = {}
        self.expanded = 0

    def expand(self, size: int, what: str) -> None:
        """Count `size` bytes of a value that is larger in memory than in the file (a sparse tensor
        or a list). Raises RefusedFile where all of them exceed MAX_EXPANDED."""
        self.expanded += size
        if self.expanded > MAX_EXPANDED:
            raise RefusedFile(f"{what} is too large: with others, more than {MAX_EXPANDED} bytes")

    def tensor_bytes(self, entries: Any, size: int) -> np.ndarray:
        """The `size` bytes that external_data locates (uint8, 1-D)."""
        part = _file_slice(entries)
        if part.length not in (None, size):
            raise BadInput(f"its sizes need {size} bytes, its length is {part.length}")
        what, end = f"its file {part.location!r}", part.offset + size
        path = self._resolve(part.location, what)
        with open_plain(path, what) as file:
            file_size = os.fstat(file.fileno()).st_size
            if end > file_size:
                raise BadInput(
                    f"needs bytes {part.offset} to {end} of {part.location!r}, which "
                    f"has {file_size}; it is incomplete: copy it again"
                )
            self.taken[path] = self.taken.get(path, 0) + size
            if self.taken[path] > REPEATS * file_size + FREE:
                raise RefusedFile(f"tensors read the {file_size} bytes of {part.location!r} too often")
            array = np.empty(size, np.uint8)
            _read_into(array.data, file, part.offset, what)
            return array

    def _resolve(self, location: str, what: str) -> Path:
        """The file at a location, links resolved; RefusedFile where it is outside of the folder."""
        key = str(PurePosixPath(location))
        if key in self.paths:
            return self.paths[key]
        for path in (PurePosixPath(location), PureWindowsPath(location)):
            if path.anchor or ".." in path.parts:
                raise RefusedFile(f"{what}: expected a path below the folder of the ONNX file")
        try:
            resolved = (self.folders[0] / location).resolve()
        except (OSError, RuntimeError, ValueError) as error:
            raise BadInput(f"{what} cannot be resolved: {error!r:.200}") from None
        if not any(resolved.is_relative_to(folder) for folder in self.folders):
            raise RefusedFile(f"{what} is a link that leads out of the folder of the ONNX file")
        self.paths[key] = resolved
        return resolved


def _file_slice(entries: Any) -> FileSlice:
    what = "external_data"
    pairs = [(text(entry.key, what), text(entry.value, what)) for entry in entries]
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise BadInput(f"{what} has the same key twice")
    location = fields.get("location", "")
    if not location or "\0" in location:
        raise BadInput(f"{what}: expected a location, got {location!r:.60}")
    numbers = {key: fields[key] for key in ("offset", "length") if key in fields}
    for key, value in numbers.items():
        if not re.fullmatch(r"[0-9]{1,18}", value):
            raise BadInput(f"{what}: expected {key} to be an integer, got {value!r:.60}")
    length = int(numbers["length"]) if "length" in numbers else None
    return FileSlice(location, int(numbers.get("offset", 0)), length)


def _read_into(view: memoryview, file: FileIO, offset: int, what: str) -> None:
    """Read from `offset` until the view is full."""
    file.seek(offset)
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            _refuse_shorter(what)
        done += count


def _refuse_shorter(what: str) -> NoReturn:
    raise BadInput(f"{what} became shorter while it was read")
