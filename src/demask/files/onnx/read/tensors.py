"""TensorProto -> tensor: of exactly the bytes that its sizes ask for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.files.onnx.read.external_data import Beside, text
from demask.files.onnx.values import Host

MAX_RANK = 64
MAX_ELEMENTS = 2**44  # as if sizes of 0 were 1

#: torch's dtype of an ONNX element type, by its number in onnx.TensorProto; types that torch has
#: no room for (strings, less than 8 bits) are missing
DTYPES: dict[int, torch.dtype] = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 4: torch.uint16, 5: torch.int16,
    6: torch.int32, 7: torch.int64, 9: torch.bool, 10: torch.float16, 11: torch.float64,
    12: torch.uint32, 13: torch.uint64, 14: torch.complex64, 15: torch.complex128,
    16: torch.bfloat16, 17: torch.float8_e4m3fn, 18: torch.float8_e4m3fnuz,
    19: torch.float8_e5m2, 20: torch.float8_e5m2fnuz, 24: torch.float8_e8m0fnu,
}  # fmt: skip

#: element types of 2, 4 and 6 bits, and the dtype that holds them here, a value in each element
NARROW: dict[int, torch.dtype] = {
    21: torch.uint8, 22: torch.int8, 23: torch.float32, 25: torch.uint8, 26: torch.int8,
    27: torch.float32, 28: torch.float32,
}  # fmt: skip
_BITS = {21: 4, 22: 4, 23: 4, 25: 2, 26: 2, 27: 6, 28: 6}
_MANTISSA = {23: 1, 27: 3, 28: 2}
STRING, EXTERNAL = 8, 1

#: by element type: the field that holds its numbers one by one, and their dtype there
_FIELDS: dict[int, tuple[str, str]] = {
    1: ("float_data", "f4"), 14: ("float_data", "f4"),
    11: ("double_data", "f8"), 15: ("double_data", "f8"),
    7: ("int64_data", "i8"), 12: ("uint64_data", "u8"), 13: ("uint64_data", "u8"),
}  # fmt: skip


def tensor(proto: Any, folder: Path | Beside) -> Tensor | Host:
    """The tensor of a TensorProto, in torch's dtype, which owns its memory; text as host values.

    External bytes come from `folder`. BadInput: not what it says it is. RefusedFile: an attack.
    """
    name = text(proto.name, "a tensor's name")
    try:
        beside = folder if isinstance(folder, Beside) else Beside(folder)
        return _tensor(proto, beside)
    except BadInput as error:
        raise type(error)(f"tensor {name!r}: {error}") from None
    except MemoryError as error:
        raise BadInput(f"tensor {name!r} does not fit into memory") from error


def _tensor(proto: Any, beside: Beside) -> Tensor | Host:
    sizes = _sizes(proto)
    count, kind = math.prod(sizes), proto.data_type
    if proto.HasField("segment"):
        raise BadInput("stored in segments, which nobody writes; expected the whole tensor")
    if kind == STRING:
        return _words(proto, sizes)
    if kind in NARROW:
        return torch.from_numpy(_narrow(proto, count, beside)).reshape(sizes)
    if kind not in DTYPES:
        raise BadInput(f"element type {kind} is none that demask reads")
    dtype = DTYPES[kind]
    array = _stored(proto, count, _plain(dtype), beside)
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
    """A dtype of numpy's that holds the same bits (of bfloat16: 16-bit whole numbers)."""
    name = str(dtype).removeprefix("torch.")
    if dtype == torch.bool or (dtype.is_floating_point and name[:7] not in ("float32", "float64")):
        return np.dtype(f"u{dtype.itemsize}")
    return np.dtype(name)


def _stored(proto: Any, count: int, dtype: np.dtype, beside: Beside) -> np.ndarray:
    """`count` numbers as the tensor's element type stores them."""
    size = count * dtype.itemsize
    little = dtype.newbyteorder("<")
    field, wide = _FIELDS.get(proto.data_type, ("int32_data", "i4"))
    numbers = getattr(proto, field)
    if proto.data_location == EXTERNAL:
        if proto.raw_data or numbers:
            raise BadInput("has bytes both in the file and beside it; expected one of them")
        return beside.tensor_bytes(proto.external_data, size).view(little).astype(dtype, copy=False)
    if not numbers:
        raw = proto.raw_data
        if len(raw) != size:
            raise BadInput(f"its sizes {list(proto.dims)} need {size} bytes, it has {len(raw)}")
        return np.frombuffer(raw, little).astype(dtype)
    if proto.raw_data:
        raise BadInput(f"has bytes both in raw_data and in {field}; expected one of them")
    return _typed(np.fromiter(numbers, wide, len(numbers)), count, dtype, field)


def _typed(numbers: np.ndarray, count: int, dtype: np.dtype, field: str) -> np.ndarray:
    """Numbers given one by one, in their own dtype."""
    if dtype.kind == "c" and len(numbers) % 2 == 0:
        numbers = numbers.view(dtype)
    if len(numbers) != count:
        raise BadInput(f"its sizes need {count} numbers, {field} has {len(numbers)}")
    made = numbers.astype(dtype)
    if dtype.kind in "iu" and not np.array_equal(made, numbers):
        raise BadInput(f"numbers in {field} do not fit into {dtype.itemsize * 8} bits")
    return made


def _narrow(proto: Any, count: int, beside: Beside) -> np.ndarray:
    """Numbers of less than 8 bits, several to a byte, the lowest bits first."""
    kind, bits, bytes_ = proto.data_type, _BITS[proto.data_type], np.dtype(np.uint8)
    if bits == 6 and proto.int32_data:
        numbers = _stored(proto, count, bytes_, beside)
    elif bits == 6:
        whole = np.unpackbits(_stored(proto, -(-count * 6 // 8), bytes_, beside), bitorder="little")
        numbers = np.packbits(whole[: count * 6].reshape(-1, 6), axis=1, bitorder="little")[:, 0]
    else:
        whole = _stored(proto, -(-count * bits // 8), bytes_, beside)
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        numbers = (whole[:, None] >> shifts & np.uint8(2**bits - 1)).reshape(-1)[:count]
    if kind in _MANTISSA:
        return _small_floats(bits, _MANTISSA[kind])[numbers & np.uint8(2**bits - 1)]
    if NARROW[kind] == torch.uint8:
        return np.ascontiguousarray(numbers)
    sign = np.int8(1 << (bits - 1))
    return (numbers.astype(np.int8) ^ sign) - sign


def _small_floats(bits: int, mantissa: int) -> np.ndarray:
    """The value of each pattern of a sign, an exponent and a mantissa; none is infinite or NaN."""
    patterns = np.arange(2**bits)
    exponent = patterns >> mantissa & (2 ** (bits - 1 - mantissa) - 1)
    part = (patterns & (2**mantissa - 1)) / 2**mantissa
    scale = 2.0 ** (np.maximum(exponent, 1) - (2 ** (bits - 2 - mantissa) - 1))
    sign = np.where(patterns >> (bits - 1), -1.0, 1.0)
    return (sign * (part + (exponent > 0)) * scale).astype(np.float32)


def _words(proto: Any, sizes: tuple[int, ...]) -> Host:
    """The texts of a tensor of strings."""
    if proto.data_location == EXTERNAL or proto.raw_data:
        raise BadInput("text outside string_data; expected it there")
    words = [decoded(word, "a text in it") for word in proto.string_data]
    if len(words) != math.prod(sizes):
        raise BadInput(f"its sizes need {math.prod(sizes)} texts, it has {len(words)}")
    return Host.of(np.array(words, dtype=object).reshape(sizes))


def decoded(value: bytes, what: str) -> str:
    """The text of UTF-8 bytes; BadInput where they are something else."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise BadInput(f"{what}: expected UTF-8 text, got {value[:40]!r}") from None


def dense(proto: Any, beside: Beside) -> Tensor:
    """The tensor of a SparseTensorProto, with its zeros; `beside` bounds how much is made so."""
    values, places = tensor(proto.values, beside), tensor(proto.indices, beside)
    name, sizes = proto.values.name, _sizes(proto)
    if not isinstance(values, Tensor) or not isinstance(places, Tensor):
        raise BadInput(f"sparse tensor {name!r}: expected numbers, got text")
    beside.expand(math.prod(sizes) * values.dtype.itemsize, f"sparse tensor {name!r}")
    wide = places.dtype == torch.int64 and values.ndim == 1 and 1 <= places.ndim <= 2
    if not wide or places.shape != (len(values), len(sizes))[: places.ndim]:
        raise BadInput(f"sparse tensor {name!r}: its values and indices do not belong together")
    bounds = torch.tensor(sizes if places.ndim == 2 else math.prod(sizes))
    if bool(((places < 0) | (places >= bounds)).any()):
        raise BadInput(f"sparse tensor {name!r}: an index outside the sizes {list(sizes)}")
    found = torch.zeros(sizes, dtype=values.dtype)
    if places.ndim == 2:
        found[places.unbind(-1)] = values
    else:
        found.view(-1)[places] = values
    return found
