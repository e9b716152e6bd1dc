"""Zip archives and JSON documents read within limits: the first gate of every file from outside."""

from __future__ import annotations

import json
import os
import re
import stat
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from demask.errors import BadInput, RefusedFile

MAX_ENTRIES = 50_000  # files in one archive: two per tensor of a very large model
MAX_JSON_BYTES = 256 * 2**20
MAX_JSON_VALUES = 8_000_000  # a value of two bytes becomes an object of about sixty
MAX_JSON_DEPTH = 200
MAX_INT = 2**64

_NAME = re.compile(r"[\w.+-]+(/[\w.+-]+)*")


@contextmanager
def open_zip(path: str | os.PathLike[str]) -> Iterator[zipfile.ZipFile]:
    """The archive at `path`, its directory checked: plain files, stored, distinct, within `path`.

    Errors raised inside the block get `path` put before them. BadInput: missing, not a zip,
    truncated. RefusedFile: compressed, encrypted or overlapping entries, links, unsafe names.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            _check_directory(archive, os.path.getsize(path))
            yield archive
    except FileNotFoundError as error:
        raise BadInput(f"{path}: no such file; check the path") from error
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise BadInput(
            f"{path}: expected a zip archive, found something else or a truncated one ({error}); "
            "copy or export the file again"
        ) from error
    except BadInput as error:
        raise type(error)(f"{path}: {error}") from None
    except (ValueError, RuntimeError) as error:
        raise BadInput(f"{path}: the zip archive is damaged ({error}); copy it again") from error


def _check_directory(archive: zipfile.ZipFile, file_bytes: int) -> None:
    entries = archive.infolist()
    if len(entries) > MAX_ENTRIES:
        raise RefusedFile(f"{len(entries)} entries; expected at most {MAX_ENTRIES}")
    seen: set[str] = set()
    for entry in entries:
        _check_entry(entry)
        if entry.filename in seen:
            raise RefusedFile(f"two entries named {entry.filename!r}; expected distinct names")
        seen.add(entry.filename)
    # Stored entries that do not overlap cannot hold more than the file does.
    total = sum(entry.file_size for entry in entries)
    if total > file_bytes:
        raise RefusedFile(f"entries claim {total} bytes in a file of {file_bytes}: a zip bomb")


def _check_entry(entry: zipfile.ZipInfo) -> None:
    name = entry.filename
    if entry.orig_filename != name or not _NAME.fullmatch(name) or ".." in name.split("/"):
        raise RefusedFile(f"entry {entry.orig_filename!r}: expected a plain relative name")
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
        raise RefusedFile(f"entry {name!r} is compressed; expected stored entries (zip -0)")
    if entry.flag_bits & 0x1:
        raise RefusedFile(f"entry {name!r} is encrypted; expected plain entries")
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind not in (0, stat.S_IFREG):
        raise RefusedFile(f"entry {name!r} is a link or a device; expected plain files")


def read_json(archive: zipfile.ZipFile, name: str, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The JSON document in entry `name`; BadInput when missing or not JSON, RefusedFile when its
    size, depth or numbers are out of bounds or a key appears twice."""
    if name not in archive.NameToInfo:
        raise BadInput(f"entry {name!r} is missing; the file is incomplete: export it again")
    size = archive.getinfo(name).file_size
    if size > max_bytes:
        raise RefusedFile(f"entry {name!r} has {size} bytes; expected at most {max_bytes}")
    return parse_json(archive.read(name), name)


def parse_json(data: bytes | str, where: str) -> Any:
    """The value of a JSON text (object, list, str, int, float, bool, None), within the limits."""
    comma, bracket, brace = (",", "[", "{") if isinstance(data, str) else (b",", b"[", b"{")
    values = sum(data.count(mark) for mark in (comma, bracket, brace))  # type: ignore[arg-type]
    if values > MAX_JSON_VALUES:
        raise RefusedFile(f"{where}: {values} JSON values; expected at most {MAX_JSON_VALUES}")
    try:
        text = data.decode() if isinstance(data, bytes) else data
        value = json.loads(
            text, object_pairs_hook=_distinct, parse_constant=_no_constant, parse_int=_bounded_int
        )
    except RecursionError as error:
        raise RefusedFile(f"{where}: JSON nested too deeply") from error
    except RefusedFile as error:
        raise RefusedFile(f"{where}: {error}") from error
    except ValueError as error:
        raise BadInput(f"{where}: expected JSON, found something else: {error}") from error
    _check_depth(value, where)
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise RefusedFile("a JSON object has the same key twice")
    return made


def _no_constant(text: str) -> Any:
    raise RefusedFile(f"found {text}, which is not JSON")


def _bounded_int(text: str) -> int:
    if len(text) > 21 or abs(int(text)) > MAX_INT:
        raise RefusedFile(f"the integer {text[:30]} is out of bounds")
    return int(text)


def _check_depth(value: Any, where: str) -> None:
    level, depth = [value], 0
    while level:
        if depth > MAX_JSON_DEPTH:
            raise RefusedFile(f"{where}: JSON nested deeper than {MAX_JSON_DEPTH} levels")
        boxes = [v for v in level if isinstance(v, dict | list)]
        level = [w for v in boxes for w in (v.values() if isinstance(v, dict) else v)]
        depth += 1
