"""Conversion of TensorProto messages to tensors, with exactly the bytes that their sizes need."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.files.onnx.read.external_data import ExternalData, text
from demask.files.onnx.values import Host

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
_BITS = {21: 4, 22: 4, 23: 4, 25: 2, 26: 2, 27: 6, 28: 6}
_MANTISSA = {23: 1, 27: 3, 28: 2}
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
        return _tensor(proto, external)
    except BadInput as error:
        raise type(error)(f"tensor {name!r}: {error}") from None
    except MemoryError as error:
        raise BadInput(f"tensor {name!r} does not fit into memory") from error


def _tensor(proto: Any, external: ExternalData) -> Tensor | Host:
    sizes = _sizes(proto)
    count, kind = math.prod(sizes), proto.data_type
    if proto.HasField("segment"):
        raise BadInput("stored in segments, which are not supported; expected the whole tensor")
    if kind == STRING:
        return _words(proto, sizes)
    if kind in NARROW:
        return torch.from_numpy(_narrow(proto, count, external)).reshape(sizes)
    if kind not in DTYPES:
        raise BadInput(f"element type {kind} is not one that demask reads")
    dtype = DTYPES[kind]
    array = _stored(proto, count, _plain(dtype), external)
    if dtype == torch.bool:
        array = array != 0
    return torch.from_numpy(array).view(dtype).reshape(sizes)


def _sizes(proto: Any) -> tuple[int, ...]:
    if len(proto.dims) > MAX_RANK:
        raise BadInput(f"expected at most {MAX_RANK} dimensions, got {len(proto.dims)}")
    sizes = tuple(proto.dims)
    if min(sizes, default=0) < 0:
        raise BadInput(f"expected sizes of at least 0, got {list(sizes)}")
    if math.prod(max(n, 1) for n in sizes) > MAX_ELEMENTS:
        raise BadInput(f"the sizes {list(sizes)} are more than any tensor has")
    return sizes


def _plain(dtype: torch.dtype) -> np.dtype:
    """A dtype of numpy's with the same bits (for bfloat16: unsigned 16-bit integers)."""
    name = str(dtype).removeprefix("torch.")
    if dtype == torch.bool or (dtype.is_floating_point and name[:7] not in ("float32", "float64")):
        return np.dtype(f"u{dtype.itemsize}")
    return np.dtype(name)


def _stored(proto: Any, count: int, dtype: np.dtype, external: ExternalData) -> np.ndarray:
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
    return _typed(np.fromiter(numbers, wide, len(numbers)), count, dtype, field)


def _typed(numbers: np.ndarray, count: int, dtype: np.dtype, field: str) -> np.ndarray:
    """Numbers of a listing field, converted to the tensor's dtype."""
    if dtype.kind == "c" and len(numbers) % 2 == 0:
        numbers = numbers.view(dtype)
    if len(numbers) != count:
        raise BadInput(f"its sizes need {count} numbers, {field} has {len(numbers)}")
    typed = numbers.astype(dtype)
    if dtype.kind in "iu" and not np.array_equal(typed, numbers):
        raise BadInput(f"numbers in {field} do not fit into {dtype.itemsize * 8} bits")
    return typed


def _narrow(proto: Any, count: int, external: ExternalData) -> np.ndarray:
    """Numbers of less than 8 bits, unpacked from bytes, the lowest bits first."""
    kind, bits, byte = proto.data_type, _BITS[proto.data_type], np.dtype(np.uint8)
    if bits == 6 and proto.int32_data:
        numbers = _stored(proto, count, byte, external)
    elif bits == 6:
        packed = np.unpackbits(_stored(proto, -(-count * 6 // 8), byte, external), bitorder="little")
        numbers = np.packbits(packed[: count * 6].reshape(-1, 6), axis=1, bitorder="little")[:, 0]
    else:
        packed = _stored(proto, -(-count * bits // 8), byte, external)
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        numbers = (packed[:, None] >> shifts & np.uint8(2**bits - 1)).reshape(-1)[:count]
    if kind in _MANTISSA:
        return _small_floats(bits, _MANTISSA[kind])[numbers & np.uint8(2**bits - 1)]
    if NARROW[kind] == torch.uint8:
        return np.ascontiguousarray(numbers)
    sign = np.int8(1 << (bits - 1))
    return (numbers.astype(np.int8) ^ sign) - sign


def _small_floats(bits: int, mantissa: int) -> np.ndarray:
    """The value of each bit pattern of a finite-only float: sign, exponent, mantissa (float32)."""
    patterns = np.arange(2**bits)
    exponent = patterns >> mantissa & (2 ** (bits - 1 - mantissa) - 1)
    part = (patterns & (2**mantissa - 1)) / 2**mantissa
    scale = 2.0 ** (np.maximum(exponent, 1) - (2 ** (bits - 2 - mantissa) - 1))
    sign = np.where(patterns >> (bits - 1), -1.0, 1.0)
    return (sign * (part + (exponent > 0)) * scale).astype(np.float32)


def _words(proto: Any, sizes: tuple[int, ...]) -> Host:
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
    name, sizes = proto.values.name, _sizes(proto)
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
