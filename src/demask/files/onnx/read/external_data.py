"""The bytes of an ONNX file, and of the files beside it that its tensors may lie in."""

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
REPEATS = 4  # how often tensors may take the same bytes of a file: tied weights do
FREE = 2**26  # bytes that they may take anyhow
MAX_EXPANDED = 2**30  # bytes of what takes more room in memory than in the file


def text(value: Any, what: str, most: int = MAX_NAME) -> str:
    """A string of the file; BadInput where it is no UTF-8 (protobuf hands such out as bytes)."""
    if not isinstance(value, str):
        raise BadInput(f"{what}: expected UTF-8 text, got {value[:40]!r}")
    if len(value) > most:
        raise BadInput(f"{what}: expected at most {most} characters, got {len(value)}")
    return value


def file_bytes(path: str | os.PathLike[str], check: Callable[[int, bytes], None]) -> bytes:
    """All bytes of the file at `path`, once `check` has passed their number and the first few."""
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
    """Where the bytes of an external tensor lie. length: None where the file does not say."""

    location: str
    offset: int
    length: int | None


class Beside:
    """The files beside an ONNX file, read within its folder, and no more of them than they hold.

    real: the folder of the file itself where `folder` has a link to it (a cache of downloads).
    """

    def __init__(self, folder: Path, real: Path | None = None):
        self.folders = tuple(dict.fromkeys((folder.resolve(), (real or folder).resolve())))
        self.places: dict[str, Path] = {}
        self.taken: dict[Path, int] = {}
        self.expanded = 0

    def expand(self, size: int, what: str) -> None:
        """Raise RefusedFile where what takes more room in memory than in the file (sparse tensors,
        lists) takes too much in all. size: bytes of one such thing."""
        self.expanded += size
        if self.expanded > MAX_EXPANDED:
            raise RefusedFile(f"{what} is too large: with others, more than {MAX_EXPANDED} bytes")

    def tensor_bytes(self, entries: Any, size: int) -> np.ndarray:
        """The `size` bytes that external_data points to."""
        found = _slice(entries)
        if found.length not in (None, size):
            raise BadInput(f"its sizes need {size} bytes, its length is {found.length}")
        what, end = f"its file {found.location!r}", found.offset + size
        place = self._place(found.location, what)
        with open_plain(place, what) as file:
            held = os.fstat(file.fileno()).st_size
            if end > held:
                raise BadInput(f"needs bytes {found.offset} to {end} of {found.location!r}, which "
                               f"has {held}; it is incomplete: copy it again")  # fmt: skip
            self.taken[place] = self.taken.get(place, 0) + size
            if self.taken[place] > REPEATS * held + FREE:
                raise RefusedFile(f"tensors take the {held} bytes of {found.location!r} over and "
                                  "over")  # fmt: skip
            array = np.empty(size, np.uint8)
            _fill(array.data, file, found.offset, what)
            return array

    def _place(self, location: str, what: str) -> Path:
        """The file at a location, which has to lie in the folder, links followed."""
        key = str(PurePosixPath(location))
        if key in self.places:
            return self.places[key]
        for path in (PurePosixPath(location), PureWindowsPath(location)):
            if path.anchor or ".." in path.parts:
                raise RefusedFile(f"{what}: expected a path below the folder of the ONNX file")
        try:
            place = (self.folders[0] / location).resolve()
        except (OSError, RuntimeError, ValueError) as error:
            raise BadInput(f"{what} cannot be found: {error!r:.200}") from None
        if not any(place.is_relative_to(folder) for folder in self.folders):
            raise RefusedFile(f"{what} is a link that leads out of the folder of the ONNX file")
        self.places[key] = place
        return place


def _slice(entries: Any) -> FileSlice:
    what = "external_data"
    pairs = [(text(entry.key, what), text(entry.value, what)) for entry in entries]
    found = dict(pairs)
    if len(found) != len(pairs):
        raise BadInput(f"{what} has the same key twice")
    location = found.get("location", "")
    if not location or "\0" in location:
        raise BadInput(f"{what}: expected a location, got {location!r:.60}")
    numbers = {key: found[key] for key in ("offset", "length") if key in found}
    for key, value in numbers.items():
        if not re.fullmatch(r"[0-9]{1,18}", value):
            raise BadInput(f"{what}: expected {key} to be a whole number, got {value!r:.60}")
    length = int(numbers["length"]) if "length" in numbers else None
    return FileSlice(location, int(numbers.get("offset", 0)), length)


def _fill(view: memoryview, file: FileIO, offset: int, what: str) -> None:
    """Read from `offset` on until the view is full."""
    file.seek(offset)
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            _shorter(what)
        done += count


def _shorter(what: str) -> NoReturn:
    raise BadInput(f"{what} became shorter while it was read")
