"""Checks of protobuf bytes against limits, before the protobuf library creates objects from them.

A message has at least two bytes in a file and about two hundred in memory, so a small file can
exhaust memory. Strings and raw tensors are skipped in one step, whatever their size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from demask.errors import BadInput, RefusedFile

MAX_BYTES = 2**31 - 1  # limit of protobuf
MAX_MESSAGES = 2_000_000  # twice a graph of 100,000 nodes with types
MAX_FIELDS = 2**24  # fields, and ends of messages
MAX_DEPTH = 64  # nested messages; a nested graph adds three
MAX_PACKED = 2**28  # bytes of variable-length numbers, each of which becomes 8

_DELIMITED = 2
_PACKED = object()
_WIDTHS = {1: 8, 5: 4}

#: by tag: the table of a nested message, or _PACKED for packed numbers
Fields = Mapping[int, Any]


def check(data: bytes, message: Any) -> None:
    """Check that `data` is a message within the limits. message: its protobuf descriptor.

    Raises:
        BadInput: other or truncated bytes.
        RefusedFile: beyond the limits.
    """
    try:
        _scan(data, _fields(message, {}))
    except IndexError:
        raise BadInput(_damaged(len(data))) from None


def starts(head: bytes, message: Any) -> bool:
    """Whether these can be the first bytes of a message of that kind."""
    known = {_tag(f, _wire_type(f)) for f in message.fields} & set(range(128))
    return bool(head) and head[0] in known


def _scan(data: bytes, table: Fields) -> None:
    """Check a message in one step per field and end of message; IndexError past the data."""
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
    """The position after a number. kind: wire type, 0 for variable length."""
    if kind == 0:
        while data[pos] > 127:
            pos += 1
        return pos + 1
    if kind not in _WIDTHS:
        raise BadInput(_damaged(pos))
    return pos + _WIDTHS[kind]


def _varint(data: bytes, pos: int) -> tuple[int, int]:
    """A number of variable length, and the position after it."""
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
        f"expected an ONNX file, got something else or a damaged or truncated one (byte {pos}); "
        "copy or export the file again"
    )


def _fields(message: Any, tables: dict[str, dict[int, Any]]) -> Fields:
    """The table of a message, with tables of nested messages. tables: by name, filled here."""
    if message.full_name in tables:
        return tables[message.full_name]
    table = tables[message.full_name] = {}
    for field in message.fields:
        if field.message_type is not None:
            table[_tag(field, _DELIMITED)] = _fields(field.message_type, tables)
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
