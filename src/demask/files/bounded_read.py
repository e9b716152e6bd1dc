"""Files, zip archives, JSON and TOML, read within limits: the first check of untrusted files. What
another format is, where a network is expected."""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from demask.errors import BadInput, RefusedFile

EXPORT = (
    "build its Python module, load the weights into it, and write "
    "torch.export.save(torch.export.export(module, inputs), 'model.pt2')"
)
TORCHSCRIPT = f"TorchScript of torch.jit.save, which torch.export does not take: {EXPORT}"
PICKLE = f"a pickle of torch.save, which has no graph and runs code when it is read: {EXPORT}"
SAFETENSORS = f"safetensors, which have weights and no graph: {EXPORT}"
ONNX = "an ONNX file: rename it to end in .onnx"
MAX_ENTRIES = 50_000  # files in one archive: two per tensor of a very large model
MAX_JSON_BYTES = 256 * 2**20
MAX_JSON_VALUES = 8_000_000  # a value of two bytes becomes an object of about sixty
MAX_JSON_DEPTH = 200
MAX_INT = 2**64
MAX_TOML_BYTES = 2**16
MAX_RATIO, SMALL = 100, 64 * 2**20  # decompressed bytes per compressed byte, on top of SMALL
_NAME = re.compile(r"[\w.+-]+(/[\w.+-]+)*")


def check_exists(path: str | os.PathLike[str]) -> None:
    """Raise BadInput if there is no file, folder or other thing of this name."""
    if not os.path.lexists(path):
        raise _missing_file(str(path))


def _missing_file(what: str) -> BadInput:
    return BadInput(f"{what}: no such file; check the path")


@contextmanager
def open_plain(path: str | os.PathLike[str], what: str | None = None) -> Iterator[FileIO]:
    """An unbuffered reader of a regular file. what: its name in errors, by default its path.

    Raises:
        BadInput: there is no regular file, or it cannot be read.
    """
    what = str(path) if what is None else what
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)  # a pipe would wait for its other end
    try:
        descriptor = os.open(path, flags | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise _missing_file(what) from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{what} cannot be read: {getattr(error, 'strerror', error)}") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            kind = "a folder (`demask slim` takes those of models)" if os.path.isdir(path) else "another kind"
            raise BadInput(f"{what} cannot be read: expected a plain file, got {kind}")
        yield FileIO(descriptor, closefd=False)
    except OSError as error:
        raise BadInput(f"{what} cannot be read: {error.strerror or error}") from error
    finally:
        os.close(descriptor)


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The TOML document at `path`.

    Raises:
        BadInput: no such file, or not TOML.
        RefusedFile: the file is too large or too deeply nested.
    """
    with open_plain(path) as file:
        data = file.read(MAX_TOML_BYTES + 1)
    if len(data) > MAX_TOML_BYTES:
        raise RefusedFile(f"{path}: expected a TOML document of at most {MAX_TOML_BYTES:,} bytes")
    try:
        return tomllib.loads(data.decode())
    except RecursionError as error:
        raise RefusedFile(f"{path}: TOML nested too deeply") from error
    except ValueError as error:  # the text, its encoding, or a number of too many digits
        raise BadInput(f"{path}: expected a TOML document: {error}") from error


@contextmanager
def open_zip(path: str | os.PathLike[str], *, compressed: bool = False) -> Iterator[zipfile.ZipFile]:
    """The zip archive at `path`, its directory checked: plain, stored, distinct entries.

    Errors raised inside the block are prefixed with `path`.

    Args:
        compressed: whether entries may be compressed, by a bounded ratio, and have any name (they
            are read by name, never extracted).

    Raises:
        BadInput: missing, not a zip, or truncated.
        RefusedFile: compressed, encrypted or overlapping entries, links, unsafe names.
    """
    with (
        open_plain(path) as file,
        check_zip(file, os.fstat(file.fileno()).st_size, path, compressed=compressed) as archive,
    ):
        yield archive


@contextmanager
def check_zip(
    file: BinaryIO | FileIO, size: int, what: object, *, compressed: bool = False
) -> Iterator[zipfile.ZipFile]:
    """The zip archive in a file of `size` bytes; `what` prefixes errors, else as `open_zip`."""
    try:
        with zipfile.ZipFile(file) as archive:
            _check_directory(archive, size, compressed)
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise BadInput(
            f"{what}: expected a zip archive, got something else or a truncated one ({error}); "
            "copy or export the file again"
        ) from error
    except BadInput as error:
        raise type(error)(f"{what}: {error}") from None
    except (ValueError, RuntimeError) as error:
        raise BadInput(f"{what}: the zip archive is damaged ({error}); copy it again") from error


def _check_directory(archive: zipfile.ZipFile, file_bytes: int, compressed: bool) -> None:
    entries = archive.infolist()
    if len(entries) > MAX_ENTRIES:
        raise RefusedFile(f"{len(entries)} entries; expected at most {MAX_ENTRIES}")
    seen: set[str] = set()
    for entry in entries:
        _check_entry(entry, compressed)
        if entry.filename in seen:
            raise RefusedFile(f"two entries named {entry.filename!r}; expected distinct names")
        seen.add(entry.filename)
    # Entries that do not overlap cannot have more bytes than the file.
    total = sum(entry.compress_size for entry in entries)
    if total > file_bytes:
        raise RefusedFile(f"entries claim {total} bytes in a file of {file_bytes}: a zip bomb")


def _check_entry(entry: zipfile.ZipInfo, compressed: bool) -> None:
    name = entry.filename
    if compressed:
        _check_compressed(entry)
    elif entry.orig_filename != name or not _NAME.fullmatch(name) or ".." in name.split("/"):
        raise RefusedFile(f"entry {entry.orig_filename!r}: expected a plain relative name")
    elif entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
        raise RefusedFile(f"entry {name!r} is compressed; expected stored entries (zip -0)")
    if entry.flag_bits & 0x1:
        raise RefusedFile(f"entry {name!r} is encrypted; expected plain entries")
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind not in (0, stat.S_IFREG):
        raise RefusedFile(f"entry {name!r} is a link or a device; expected plain files")


def _check_compressed(entry: zipfile.ZipInfo) -> None:
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise RefusedFile(f"entry {entry.filename!r}: expected it stored or deflated")
    if entry.file_size > SMALL + MAX_RATIO * entry.compress_size:
        raise RefusedFile(
            f"entry {entry.filename!r} claims {entry.file_size:,} bytes in {entry.compress_size:,}"
            ": a zip bomb; store it uncompressed"
        )


def read_json(archive: zipfile.ZipFile, name: str, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The JSON document in entry `name`.

    Raises:
        BadInput: the entry is missing or not JSON.
        RefusedFile: size, depth or numbers are out of bounds, or a key appears twice.
    """
    if name not in archive.NameToInfo:
        raise BadInput(f"entry {name!r} is missing; the file is incomplete: export it again")
    size = archive.getinfo(name).file_size
    if size > max_bytes:
        raise RefusedFile(f"entry {name!r} has {size} bytes; expected at most {max_bytes}")
    return parse_json(archive.read(name), name)


def parse_json(data: bytes | str, where: str) -> Any:
    """The value of a JSON text (dict, list, str, int, float, bool, None); errors as `read_json`."""
    comma, bracket, brace = (",", "[", "{") if isinstance(data, str) else (b",", b"[", b"{")
    count = sum(data.count(mark) for mark in (comma, bracket, brace))  # type: ignore[arg-type]
    if count > MAX_JSON_VALUES:
        raise RefusedFile(f"{where}: {count} JSON values; expected at most {MAX_JSON_VALUES}")
    try:
        text = data.decode() if isinstance(data, bytes) else data
        value = json.loads(
            text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant, parse_int=_bounded_int
        )
    except RecursionError as error:
        raise RefusedFile(f"{where}: JSON nested too deeply") from error
    except RefusedFile as error:
        raise RefusedFile(f"{where}: {error}") from error
    except ValueError as error:
        raise BadInput(f"{where}: expected JSON, got something else: {error}") from error
    _check_depth(value, where)
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise RefusedFile("a JSON object has the same key twice")
    return mapping


def _refuse_constant(text: str) -> Any:
    raise RefusedFile(f"got {text}, which is not JSON")


def _bounded_int(text: str) -> int:
    if len(text) > 21 or abs(int(text)) > MAX_INT:
        raise RefusedFile(f"the integer {text[:30]} is out of bounds")
    return int(text)


def _check_depth(value: Any, where: str) -> None:
    level, depth = [value], 0
    while level:
        if depth > MAX_JSON_DEPTH:
            raise RefusedFile(f"{where}: JSON nested deeper than {MAX_JSON_DEPTH} levels")
        containers = [outer for outer in level if isinstance(outer, dict | list)]
        level = [item for outer in containers for item in (outer.values() if isinstance(outer, dict) else outer)]
        depth += 1


def other_kind(path: str | os.PathLike[str]) -> str:
    """Format of a file without a network that demask can read, and advice; "" if unknown."""
    try:
        with open_plain(path) as file:
            head = file.read(64)
            if head.startswith(b"PK"):
                with zipfile.ZipFile(file) as archive:
                    return _zip_kind(archive.namelist())
    except (BadInput, zipfile.BadZipFile, NotImplementedError, ValueError):
        return ""
    if head.startswith(b"\x80"):  # torch.save before 1.6, and pickle itself
        return PICKLE
    if int.from_bytes(head[:8], "little") < 2**27 and head[8:9] == b"{":
        return SAFETENSORS
    return ONNX if _starts_as_onnx(head, Path(path).suffix) else ""


def _zip_kind(names: list[str]) -> str:
    inner = {name.partition("/")[2] for name in names}
    if "data.pkl" not in inner:
        return ""
    return TORCHSCRIPT if "constants.pkl" in inner else PICKLE


def _starts_as_onnx(head: bytes, suffix: str) -> bool:
    """Whether a file begins like ONNX: format version, then producer or opsets."""
    return suffix != ".onnx" and head[:1] == b"\x08" and head[2:3] in (b"\x12", b"\x3a", b"\x42")
