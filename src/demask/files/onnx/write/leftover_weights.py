"""Files of weights that an ONNX file named before it was replaced, and that nothing names now."""

from __future__ import annotations

import itertools
import mmap
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from demask.files.onnx.edit.protos import tensors_in, tensors_of
from demask.files.onnx.read.reader import installed

MOST = 2**32  # bytes of other files in the folder that are searched for the name


def weight_files(path: str | os.PathLike[str]) -> set[str]:
    """The names, relative to its folder, of the files that an ONNX file stores tensors in; none
    where there is no such file."""
    try:
        model = installed().load(os.fspath(path), load_external_data=False)
    except Exception:  # no ONNX file, whose errors share no base class
        return set()
    bodies = (tensors_in(node) for f in model.functions for node in f.node)
    tensors = [*tensors_of(model.graph), *itertools.chain(*bodies)]
    entries = [e for t in tensors if t.data_location == t.EXTERNAL for e in t.external_data]
    return {entry.value for entry in entries if entry.key == "location"}


def remove_unnamed(path: str | os.PathLike[str], before: Iterable[str]) -> list[str]:
    """Remove files of weights that the ONNX file at `path` named before, and does not name now.

    A file stays where anything makes it doubtful that nothing needs it: it is a link, or has
    another; it is in another folder; a file of its folder, or a model in the folder above, has its
    name; or these cannot all be read.

    Returns:
        What was removed, and what stays and why, as sentences.
    """
    folder, now = Path(path).resolve().parent, weight_files(path)
    words = []
    for name in sorted(set(before) - now):
        file = folder / name
        if not os.path.lexists(file):
            continue
        if reason := _reason_to_keep(file, folder, now):
            words.append(f"{name} was left, though this file has no tensors in it now: {reason}")
            continue
        with suppress(OSError):
            file.unlink()
            words.append(f"{name} was removed: nothing has tensors in it now")
    return words


def _reason_to_keep(file: Path, folder: Path, now: set[str]) -> str:
    """Why a file may be needed; empty if it is not."""
    status = file.lstat()
    if file.parent != folder or not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        return "it is in another folder, or a link"
    if any(os.path.samefile(file, folder / name) for name in now if (folder / name).exists()):
        return "the file names it otherwise"
    others = [p for p in folder.iterdir() if p != file] + [*folder.parent.glob("*.onnx")]
    searched = 0
    try:
        for other in others:
            if not other.is_file():
                continue
            searched += (size := other.stat().st_size)
            if searched > MOST:
                return "there are too many files here to see whether one needs it"
            if size and _file_contains(other, os.fsencode(file.name)):
                return f"{other.name} names it"
    except OSError as error:
        return f"{error.filename} cannot be read"
    return ""


def _file_contains(path: Path, words: bytes) -> bool:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(words) >= 0
