"""Frozen dataclasses as JSON values and back, driven by the types of their fields.

Types are bool, int, float, str, None, literals, tuples, mappings from text, dataclasses, and unions of these.
`Annotated` adds what a type does not say: a `Limit` of values that are read, or another form (`Stored`).
Data may come from files: nothing is looked up by a name in them, and every value is checked.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Any

from demask.errors import BadInput

SCALARS = {bool: "true or false", int: "an integer", float: "a number", str: "a text", types.NoneType: "null"}
UNIONS = (typing.Union, types.UnionType)


@dataclass(frozen=True, slots=True)
class Limit:
    """What a value that is read has to be, in words, and whether it is."""

    expected: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Stored:
    """Another form in JSON. write: the form of a value; read: the value of a form; raises BadInput,
    TypeError or ValueError for other data."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


OMITTED = "omitted"  # marks a field that is written only where it is not the default


def encode(kind: Any, value: Any) -> Any:
    """The JSON value of a value of a type."""
    kind, marks = _split(kind)
    if stored := _stored(marks):
        return stored.write(value)
    inner = typing.get_args(kind)
    if typing.get_origin(kind) in UNIONS:
        return encode(next(arm for arm in inner if isinstance(value, _class_of(arm))), value)
    if isinstance(value, tuple):
        if inner[-1] is not ...:
            return [encode(one, part) for one, part in zip(inner, value, strict=True)]
        return list(value) if inner[0] in SCALARS else [encode(inner[0], part) for part in value]
    if isinstance(value, Mapping):
        return {key: encode(inner[1], part) for key, part in value.items()}
    if not is_dataclass(kind):
        return value
    parts = ((name, kind, getattr(value, name), default) for name, (kind, default) in fields_of(kind).items())
    return {name: encode(kind, part) for name, kind, part, default in parts if not _is_omitted(kind, part, default)}


def decode(kind: Any, data: Any, where: str, *, exact: bool = False) -> Any:
    """The value of a type that JSON describes, the inverse of `encode`. exact: records have all of
    their fields and no others; else what is missing is the default, and others are for later versions.

    Raises BadInput for other data, which names the part. where: what is read.
    """
    kind, marks = _split(kind)
    if stored := _stored(marks):
        try:
            value = stored.read(data)
        except (BadInput, TypeError, ValueError, KeyError, AttributeError) as error:
            raise BadInput(f"{where}: {error}; got {data!r:.60}") from error
    else:
        value = _decoded(kind, data, where, exact)
    for mark in marks:
        if isinstance(mark, Limit) and not mark.holds(value):
            raise BadInput(f"{where}: expected {mark.expected}, got {data!r:.60}")
    return value


def _decoded(kind: Any, data: Any, where: str, exact: bool) -> Any:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind in SCALARS:
        _need(_is_scalar(kind, data), SCALARS[kind], data, where)
        return data
    if origin is typing.Literal:
        _need(type(data) is type(inner[0]) and data in inner, f"one of {inner}", data, where)
        return data
    if origin in UNIONS:
        if data is None and types.NoneType in inner:
            return None
        *arms, last = (arm for arm in inner if arm is not types.NoneType)
        for arm in arms:
            with suppress(BadInput):
                return decode(arm, data, where, exact=exact)
        return decode(last, data, where, exact=exact)
    if origin is tuple:
        _need(isinstance(data, list | tuple), "a list", data, where)
        if inner[-1] is ...:
            if inner[0] in SCALARS and all(_is_scalar(inner[0], part) for part in data):
                return tuple(data)  # up to millions of positions
            return tuple(decode(inner[0], part, f"{where}[{k}]", exact=exact) for k, part in enumerate(data))
        _need(len(data) == len(inner), f"{len(inner)} values", data, where)
        return tuple(decode(one, part, where, exact=exact) for one, part in zip(inner, data, strict=True))
    _need(isinstance(data, Mapping), "an object", data, where)
    if origin is Mapping:
        keys = (decode(inner[0], key, f"{where} keys") for key in data)
        return {key: decode(inner[1], data[key], f"{where}.{key:.40}", exact=exact) for key in keys}
    known = fields_of(kind)
    for name, (_, default) in known.items():
        _need(name in data or (default is not MISSING and not exact), f"the field {name!r}", sorted(data), where)
    _need(not exact or data.keys() <= known.keys(), f"the fields {[*known]}", sorted(data), where)
    parts = {name: data[name] for name in known if name in data}
    return kind(**{n: decode(known[n][0], part, f"{where}.{n}", exact=exact) for n, part in parts.items()})


@cache
def fields_of(kind: Any) -> dict[str, tuple[Any, Any]]:
    """The type and the default, or MISSING, of each field that a record is built from."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {
        f.name: (hints[f.name], f.default_factory() if f.default_factory is not MISSING else f.default)
        for f in fields(kind)
        if f.init
    }


def _split(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type and what `Annotated` says of it."""
    return (kind.__origin__, kind.__metadata__) if typing.get_origin(kind) is typing.Annotated else (kind, ())


def _stored(marks: tuple[Any, ...]) -> Stored | None:
    return next((mark for mark in marks if isinstance(mark, Stored)), None)


def _is_omitted(kind: Any, value: Any, default: Any) -> bool:
    return OMITTED in _split(kind)[1] and value == default


def _class_of(kind: Any) -> Any:
    kind, _ = _split(kind)
    return (int, float) if kind is float else typing.get_origin(kind) or kind


def _is_scalar(kind: Any, data: Any) -> bool:
    return type(data) is kind or (kind is float and type(data) is int)


def _need(is_valid: bool, expected: str, data: Any, where: str) -> None:
    if not is_valid:
        raise BadInput(f"{where}: expected {expected}, got {data!r:.60}")
