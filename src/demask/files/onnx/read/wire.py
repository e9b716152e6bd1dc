"""A look over protobuf bytes within limits, before the protobuf library makes objects of them.

A message costs at least two bytes in a file and about two hundred in memory, so a small file can
ask for all of it. Strings and raw tensors are passed over at once, whatever their size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from demask.errors import BadInput, RefusedFile

MAX_BYTES = 2**31 - 1  # what protobuf reads
MAX_MESSAGES = 2_000_000  # a graph of 100,000 nodes with all their types is half of it
MAX_FIELDS = 2**24  # fields, and ends of messages
MAX_DEPTH = 64  # messages inside messages: a graph inside a graph is three
MAX_PACKED = 2**28  # bytes of numbers of variable length, each of which becomes 8

_DELIMITED = 2
_PACKED = object()
_WIDTHS = {1: 8, 5: 4}

#: what stands behind a tag, where that is a message (its own table) or packed numbers (_PACKED)
Fields = Mapping[int, Any]


def check(data: bytes, message: Any) -> None:
    """Return when `data` is a message of that kind (a protobuf descriptor) within the limits.

    BadInput: other bytes, or truncated ones. RefusedFile: more than the machine should be asked.
    """
    try:
        _walk(data, _fields(message, {}))
    except IndexError:
        raise BadInput(_damaged(len(data))) from None


def starts(head: bytes, message: Any) -> bool:
    """Could these be the first bytes of a message of that kind?"""
    known = {_tag(f, _wire_type(f)) for f in message.fields} & set(range(128))
    return bool(head) and head[0] in known


def _walk(data: bytes, table: Fields) -> None:
    """One step for each field and for each end of a message; IndexError past the end of data."""
    pos, end = 0, len(data)
    left, packed = MAX_MESSAGES, MAX_PACKED
    stack: list[tuple[int, Fields]] = []
    for _ in range(MAX_FIELDS):
        if pos >= end:
            if pos > end:
                raise BadInput(_damaged(pos))
            if not stack:
                return
            end, table = stack.pop()
            continue
        tag = data[pos]
        pos += 1
        if tag > 127:
            tag, pos = _varint(data, pos - 1)
        kind = tag & 7
        if kind != _DELIMITED:
            quick = kind == 0 and data[pos] < 128
            pos = pos + 1 if quick else _after_number(data, pos, kind)
            continue
        size = data[pos]
        pos += 1
        if size > 127:
            size, pos = _varint(data, pos - 1)
        if pos + size > end:
            raise BadInput(_damaged(pos))
        inner = table.get(tag)
        if inner is None or inner is _PACKED:
            packed -= size if inner else 0
            pos += size
        else:
            left -= 1
            stack.append((end, table))
            end, table = pos + size, inner
        if left < 0 or packed < 0 or len(stack) > MAX_DEPTH:
            raise RefusedFile(_excess(left, packed))
    raise RefusedFile(f"more than {MAX_FIELDS} fields: too large a graph")


def _excess(left: int, packed: int) -> str:
    if packed < 0:
        return f"more than {MAX_PACKED} bytes of packed numbers; weights belong into raw_data"
    if left < 0:
        return f"more than {MAX_MESSAGES} messages: too large a graph"
    return f"nested deeper than {MAX_DEPTH} levels"


def _after_number(data: bytes, pos: int, kind: int) -> int:
    """The position behind a number (0: of variable length)."""
    if kind == 0:
        while data[pos] > 127:
            pos += 1
        return pos + 1
    if kind not in _WIDTHS:
        raise BadInput(_damaged(pos))
    return pos + _WIDTHS[kind]


def _varint(data: bytes, pos: int) -> tuple[int, int]:
    """A number of variable length, and the position behind it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[pos]
        pos += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, pos
    raise BadInput(_damaged(pos))


def _damaged(pos: int) -> str:
    return (
        f"expected an ONNX file, found something else or a damaged or truncated one (byte {pos}); "
        "copy or export the file again"
    )


def _fields(message: Any, made: dict[str, dict[int, Any]]) -> Fields:
    """The table of a message, with those of the messages in it."""
    if message.full_name in made:
        return made[message.full_name]
    table = made[message.full_name] = {}
    for field in message.fields:
        if field.message_type is not None:
            table[_tag(field, _DELIMITED)] = _fields(field.message_type, made)
        elif field.is_repeated and _wire_type(field) == 0:
            table[_tag(field, _DELIMITED)] = _PACKED
    return table


def _tag(field: Any, wire_type: int) -> int:
    return field.number << 3 | wire_type


def _wire_type(field: Any) -> int:
    if field.message_type is not None or field.type in (field.TYPE_STRING, field.TYPE_BYTES):
        return _DELIMITED
    fixed = {field.TYPE_FLOAT: 5, field.TYPE_DOUBLE: 1}
    return fixed.get(field.type, 0)
