"""The bytes of an ONNX file, and of external files that store its tensors."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NoReturn

import numpy as np

from demask.errors import BadInput, RefusedFile
from demask.files.bounded_read import open_plain

MAX_NAME = 4096
REPEATS = 4  # how often tensors may read the same bytes of a file, as tied weights do
FREE = 2**26  # bytes that they may read in any case
MAX_EXPANDED = 2**30  # bytes of values that are larger in memory than in the file


def text(value: Any, what: str, most: int = MAX_NAME) -> str:
    """A string of the file; BadInput where it is not UTF-8 (protobuf then returns bytes)."""
    if not isinstance(value, str):
        raise BadInput(f"{what}: expected UTF-8 text, got {value[:40]!r}")
    if len(value) > most:
        raise BadInput(f"{what}: expected at most {most} characters, got {len(value)}")
    return value


def file_bytes(path: str | os.PathLike[str], check: Callable[[int, bytes], None]) -> bytes:
    """All bytes of the file at `path`. check: called first, with its size and first 16 bytes."""
    with open_plain(path, "the file") as file:
        size = os.fstat(file.fileno()).st_size
        check(size, file.read(16))
        file.seek(0)
        data = file.read(size)
        while len(data) < size:  # a call reads less than 2 GiB
            data += file.read(size - len(data)) or _shorter("the file")
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
        part = _slice(entries)
        if part.length not in (None, size):
            raise BadInput(f"its sizes need {size} bytes, its length is {part.length}")
        what, end = f"its file {part.location!r}", part.offset + size
        path = self._path(part.location, what)
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
            _fill(array.data, file, part.offset, what)
            return array

    def _path(self, location: str, what: str) -> Path:
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


def _slice(entries: Any) -> FileSlice:
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
            raise BadInput(f"{what}: expected {key} to be a whole number, got {value!r:.60}")
    length = int(numbers["length"]) if "length" in numbers else None
    return FileSlice(location, int(numbers.get("offset", 0)), length)


def _fill(view: memoryview, file: FileIO, offset: int, what: str) -> None:
    """Read from `offset` until the view is full."""
    file.seek(offset)
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            _shorter(what)
        done += count


def _shorter(what: str) -> NoReturn:
    raise BadInput(f"{what} became shorter while it was read")
