"""The index of a packet file: where its packets are stored; written, parsed and checked.

A file begins as a safetensors file does: eight bytes, little-endian, with the length of a JSON
document, and the document. Its data begins at the next page. Sections come first (biases,
statistics: small, always needed, read at once); then an optional plane of int8 weights; then the
packets, each at the start of a page, highest priority first. Packets may be in several files
(shards) in one folder: an address is a file and a page of it.

A packet is a header of 32 bytes directly before its weights:

| bytes | | |
|---|---|---|
| 0 | float32 | priority: the highest of its rows |
| 4 | float32 | L2 norm of its weights |
| 8 | int32 | exponent e: every weight is at most 2^e in magnitude; 0 where all are zero |
| 12 | float32 | scale: the largest magnitude / 127, the step of 8-bit weights |
| 16 | 3 uint32 | the number of the tensor in the index, first position, how many positions |
| 28 | uint32 | CRC-32 of the 28 bytes before and of the weights after |

Positions are rows of a matrix (filters of a convolution: first axis) in the tensor's `order`, most
important first, so that the rows of one packet are about equally important. Priority and weights
are read together, from one address.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from demask.errors import BadInput, RefusedFile
from demask.files.bounded_read import parse_json
from demask.files.weight_file import DTYPES, MAX_HEADER_BYTES, NAMES, StoredTensor

FORMAT, VERSION, PAGE = "demask.packets", 1, 4096
HEADER = struct.Struct("<ffifIII")  # and the CRC
HEADER_BYTES = HEADER.size + 4
COLUMNS = np.dtype(
    [
        ("tensor", "i8"),
        ("first", "i8"),
        ("count", "i8"),
        ("file", "i8"),
        ("page", "i8"),
        ("priority", "f4"),
        ("crc", "u4"),
    ]
)
_SHARD = re.compile(r"\w[\w.+-]{0,254}")

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Marker:
    """The header of a packet, without its CRC."""

    priority: float
    norm: float
    exponent: int
    scale: float
    tensor: int
    first: int
    count: int

    def packed(self) -> bytes:
        """The 28 bytes of the header."""
        return HEADER.pack(self.priority, self.norm, self.exponent, self.scale, self.tensor, self.first, self.count)


@dataclass(frozen=True, slots=True)
class Blocked:
    """A tensor in packets.

    order: its rows (positions along the first axis), most important first. plane: the offset of its
    8-bit form in the data of the first file, with its CRC; None where there is none. The 8-bit form
    is a float32 scale per row, then an int8 per weight, rows in the model's order.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    order: Array
    plane: tuple[int, int] | None = None

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def plane_bytes(self) -> int:
        return self.rows * (4 + math.prod(self.shape[1:]))


@dataclass(frozen=True, slots=True)
class PacketIndex:
    """The contents of a packet file (weights, most important rows first) and their addresses.

    Attributes:
        tensors: tensors in packets, a tuple of records with `name`, `dtype`, `shape`, `order` (row
            numbers, most important first) and `plane` (address of the 8-bit form, or None).
        sections: tensors outside of packets, with offsets in bytes from the start of the data of
            the first file.
        rest: bytes and CRC-32 of all sections together.
        packets: a structured array with one entry per packet, highest priority first: `tensor`,
            `first`, `count`, `file`, `page` (in pages of 4,096 bytes from the start of the data of
            its file), `priority` and `crc`.
        shards: names of further files, number 1 and on; default ().
        aliases: pairs (further name, name) of tied weights; default ().
        plane_bytes: bytes of the 8-bit form of all tensors; 0 for a file without it.
    """

    tensors: tuple[Blocked, ...]
    sections: tuple[StoredTensor, ...]
    rest: tuple[int, int]
    packets: Array
    shards: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()

    def sizes(self) -> Array:
        """Bytes of each packet, header and weights, int64 [packets]."""
        row_bytes = np.array([t.row_bytes for t in self.tensors], dtype=np.int64)
        return HEADER_BYTES + self.packets["count"] * row_bytes[self.packets["tensor"]]

    def pages(self) -> Array:
        """Number of pages of each packet (4,096 bytes each), int64 [packets]."""
        return -(-self.sizes() // PAGE)

    @property
    def plane_bytes(self) -> int:
        """Bytes of the 8-bit form of all tensors; 0 for a file without it."""
        return sum(t.plane_bytes for t in self.tensors if t.plane is not None)

    def __str__(self) -> str:
        weights = sum(t.rows * t.row_bytes for t in self.tensors)
        pages = int(self.pages().sum()) * PAGE
        return (
            f"{len(self.packets)} packets of {len(self.tensors)} tensors in "
            f"{1 + len(self.shards)} files: {weights} bytes of weights in {pages} of pages, "
            f"{self.rest[0]} of other tensors, {self.plane_bytes} of 8-bit weights"
        )

    def encoded(self) -> bytes:
        """The first file up to its data. Its length does not depend on the CRCs."""
        tensors = {}
        for t in self.tensors:
            entry = {"dtype": NAMES[t.dtype], "shape": list(t.shape), "order": t.order.tolist()}
            if t.plane is not None:
                entry["plane"] = [t.plane[0], f"{t.plane[1]:08x}"]
            tensors[t.name] = entry
        sections = {
            s.name: {"dtype": NAMES[s.dtype], "shape": list(s.shape), "offset": s.offset} for s in self.sections
        }
        columns: dict[str, Any] = {name: self.packets[name].tolist() for name in COLUMNS.names or () if name != "crc"}
        columns["crc"] = self.packets["crc"].astype(">u4").tobytes().hex()
        return framed(
            {
                "format": FORMAT,
                "version": VERSION,
                "shards": list(self.shards),
                "tensors": tensors,
                "sections": sections,
                "rest": [self.rest[0], f"{self.rest[1]:08x}"],
                "aliases": dict(self.aliases),
                "packets": columns,
            }
        )


def framed(document: Any) -> bytes:
    """Length, JSON, and spaces up to the next page."""
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    if len(text) > MAX_HEADER_BYTES:
        raise BadInput(
            f"the index would have {len(text)} bytes, more than {MAX_HEADER_BYTES}: write with larger blocks"
        )
    return len(text).to_bytes(8, "little") + text


def header_length(first: bytes, size: int, where: str) -> int:
    """The offset of the data of a file, from its first eight bytes; `size`: of the file."""
    length = int.from_bytes(first, "little")
    if len(first) < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES) or (8 + length) % PAGE:
        raise BadInput(
            f"{where}: expected a packet file, got a header of {length} bytes in a file of "
            f"{size}; write it again with demask.pilot.packet_writer.write"
        )
    return 8 + length


def parse(text: bytes, where: str) -> PacketIndex:
    """The index in a header, its structure checked; its addresses are checked by `check_addresses`.

    Raises RefusedFile for entries that do not fit together, BadInput where it is no JSON.
    """
    document = parse_json(text, f"{where}: index")
    try:
        return _index(document)
    except _Wrong as error:
        raise RefusedFile(f"{where}: {error}; the index is damaged or was edited by hand") from None


def check_addresses(index: PacketIndex, sizes: Mapping[int, int], where: str) -> None:
    """Raise RefusedFile unless every address is inside its file and nothing overlaps."""
    try:
        _check(index, sizes)
    except _Wrong as error:
        raise RefusedFile(f"{where}: {error}; the file is damaged or truncated") from None


def is_plain(name: str) -> bool:
    """Whether a shard may have this name: a plain one, in the folder of the file that names it."""
    return _SHARD.fullmatch(name) is not None


class _Wrong(Exception):
    """What is wrong with an index."""


def _index(document: Any) -> PacketIndex:
    match document:
        case {
            "format": str(kind),
            "version": int(version),
            "shards": list(shards),
            "tensors": dict(tensors),
            "sections": dict(sections),
            "rest": [int(rest), str(crc)],
            "aliases": dict(aliases),
            "packets": dict(columns),
        } if kind == FORMAT and len(document) == 8:
            pass
        case {"format": str(kind)} if kind != FORMAT:
            raise _Wrong(f"its format is {kind!r:.60}, expected {FORMAT!r}")
        case _:
            raise _Wrong("it lacks an entry, has one too many, or one of another type")
    if version != VERSION:
        raise _Wrong(f"its version is {version}, this demask reads {VERSION}")
    if len(shards) > 1024 or len(set(map(str, shards))) != len(shards):
        raise _Wrong("its shards are too many or not distinct")
    for shard in shards:
        if not isinstance(shard, str) or not is_plain(shard):
            raise _Wrong(f"shard {shard!r:.80} is no plain file name")
    blocked = tuple(_blocked(name, entry) for name, entry in tensors.items())
    plain = tuple(_section(name, entry) for name, entry in sections.items())
    names = {t.name for t in blocked} | {s.name for s in plain}
    if len(names) != len(blocked) + len(plain):
        raise _Wrong("a tensor is both in packets and outside of them")
    for name, other in aliases.items():
        if name in names or other not in names:
            raise _Wrong(f"{name!r:.80} cannot be another name of {other!r:.80}")
    packets = _packets(columns, blocked)
    pairs = tuple((str(name), str(other)) for name, other in aliases.items())
    return PacketIndex(blocked, plain, (_natural(rest), _crc(crc)), packets, tuple(shards), pairs)


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise _Wrong(f"expected a size, got {value!r:.40}")
    return value


def _crc(text: Any) -> int:
    if not isinstance(text, str) or not re.fullmatch(r"[0-9a-f]{8}", text):
        raise _Wrong(f"expected a CRC, got {text!r:.40}")
    return int(text, 16)


def _shape(name: str, kind: Any, shape: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    if not isinstance(kind, str) or kind not in DTYPES or not isinstance(shape, list):
        raise _Wrong(f"tensor {name!r:.80} has dtype {kind!r:.40} and shape {shape!r:.40}")
    if len(shape) > 16 or math.prod(_natural(n) for n in shape) >= 2**58:
        raise _Wrong(f"tensor {name!r:.80} has shape {shape!r:.80}")
    return DTYPES[kind], tuple(shape)


def _section(name: str, entry: Any) -> StoredTensor:
    match entry:
        case {"dtype": kind, "shape": shape, "offset": offset} if len(entry) == 3:
            return StoredTensor(name, *_shape(name, kind, shape), _natural(offset))
        case _:
            raise _Wrong(f"tensor {name!r:.80} is not understood: {entry!r:.80}")


def _blocked(name: str, entry: Any) -> Blocked:
    match entry:
        case {"dtype": kind, "shape": shape, "order": list(order), **more} if not (more.keys() - {"plane"}):
            dtype, size = _shape(name, kind, shape)
        case _:
            raise _Wrong(f"tensor {name!r:.80} is not understood: {entry!r:.80}")
    rows = _integers(order, f"the order of {name!r:.80}")
    if len(size) < 2 or 0 in size or not dtype.is_floating_point:
        raise _Wrong(f"tensor {name!r:.80} of shape {size} and {dtype} cannot be in packets")
    if len(rows) != size[0] or not np.array_equal(np.sort(rows), np.arange(size[0])):
        raise _Wrong(f"the order of {name!r:.80} is no order of its {size[0]} rows")
    plane = None
    if more:
        match more["plane"]:
            case [offset, crc]:
                plane = _natural(offset), _crc(crc)
            case other:
                raise _Wrong(f"the 8-bit form of {name!r:.80} is not understood: {other!r:.80}")
    return Blocked(name, dtype, size, rows, plane)


def _integers(values: Any, what: str) -> Array:
    if not isinstance(values, list) or not all(type(v) is int and 0 <= v < 2**50 for v in values):
        raise _Wrong(f"{what} is no list of sizes")
    return np.array(values, dtype=np.int64)


def _packets(columns: Any, tensors: tuple[Blocked, ...]) -> Array:
    if set(columns) != set(COLUMNS.names or ()):
        raise _Wrong(f"packets have {sorted(columns)!r:.200}, expected {COLUMNS.names}")
    crc, priority = columns["crc"], columns["priority"]
    if not isinstance(crc, str) or not re.fullmatch(r"([0-9a-f]{8})*", crc):
        raise _Wrong("the CRCs of packets are no text of hexadecimal digits")
    if not isinstance(priority, list) or not all(type(v) in (int, float) for v in priority):
        raise _Wrong("the priorities of packets are no list of numbers")
    values = {
        name: _integers(columns[name], f"{name} of packets") for name in ("tensor", "first", "count", "file", "page")
    }
    values["crc"] = np.frombuffer(bytes.fromhex(crc), dtype=">u4")
    with np.errstate(over="ignore"):
        values["priority"] = np.array(priority, dtype=np.float64).astype(np.float32)
    count = len(values["tensor"])
    if any(len(column) != count for column in values.values()):
        raise _Wrong("the columns of packets differ in length")
    packets = np.empty(count, dtype=COLUMNS)
    for name, column in values.items():
        packets[name] = column
    ordered = np.isfinite(packets["priority"]).all() and (np.diff(packets["priority"]) <= 0).all()
    if not ordered:
        raise _Wrong("packets are not in order of falling, finite priority")
    if count and packets["tensor"].max() >= len(tensors):
        raise _Wrong("a packet belongs to no tensor")
    _check_cover(packets, tensors)
    return packets


def _check_cover(packets: Array, tensors: tuple[Blocked, ...]) -> None:
    """Raise _Wrong unless every row of every tensor is in exactly one packet."""
    for number, tensor in enumerate(tensors):
        mine = packets[packets["tensor"] == number]
        mine = mine[np.argsort(mine["first"], kind="stable")]
        ends = mine["first"] + mine["count"]
        if (
            not len(mine)
            or (mine["count"] < 1).any()
            or mine["first"][0] != 0
            or ends[-1] != tensor.rows
            or (ends[:-1] != mine["first"][1:]).any()
        ):
            raise _Wrong(f"the packets of {tensor.name!r:.80} do not hold each row once")


def _check(index: PacketIndex, sizes: Mapping[int, int]) -> None:
    """Raise _Wrong unless every address is inside its file, aligned, and no two overlap, so that
    the index never promises more than the files have."""
    if len(sizes) != 1 + len(index.shards):
        raise _Wrong(f"expected {1 + len(index.shards)} files, got {len(sizes)}")
    if len(index.packets) and index.packets["file"].max() > len(index.shards):
        raise _Wrong("a packet is in a file that is not named")
    starts, ends = index.packets["page"] * PAGE, index.packets["page"] * PAGE + index.sizes()
    for number, size in sizes.items():
        mine = index.packets["file"] == number
        pieces = [*zip(starts[mine].tolist(), ends[mine].tolist(), strict=True)]
        if number == 0:
            pieces += _front(index)
        pieces.sort()
        if any(end > size for _, end in pieces):
            raise _Wrong(f"file {number} has {size} bytes of data, a packet ends after it")
        if any(a[1] > b[0] for a, b in pairwise(pieces)):
            raise _Wrong(f"two packets overlap in file {number}")


def _front(index: PacketIndex) -> Iterator[tuple[int, int]]:
    """The pieces before the packets: the sections, stored one after the other, and the plane."""
    end = 0
    for section in index.sections:
        if section.offset % 8 or not 0 <= section.offset - end < 8:
            raise _Wrong(f"tensor {section.name!r:.80} is at byte {section.offset}, not {end}")
        end = section.offset + section.nbytes
    if end != index.rest[0]:
        raise _Wrong(f"the tensors outside of packets have {end} bytes, not {index.rest[0]}")
    yield 0, end
    for tensor in index.tensors:
        if tensor.plane is not None:
            yield tensor.plane[0], tensor.plane[0] + tensor.plane_bytes
