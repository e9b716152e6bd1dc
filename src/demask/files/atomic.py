"""Files appear whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from demask.errors import BadInput


def check_writable(path: str | os.PathLike[str]) -> Path:
    """The absolute path that `write` would replace; raises BadInput when it could not.

    Call it before long work: a folder that is missing or closed is found now, not at the end.
    """
    final = Path(path).resolve()
    folder = final.parent
    if not folder.is_dir():
        raise BadInput(f"cannot write {path}: the folder {folder} does not exist; create it first")
    if final.is_dir():
        raise BadInput(f"cannot write {path}: it is a folder; give the name of a file in it")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BadInput(f"cannot write {path}: no permission to create files in {folder}")
    return final


@contextmanager
def write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A binary file, open for writing beside `path`, renamed to `path` when the block ends well.

    When the block raises, nothing is left and what `path` held before is untouched. BadInput when
    the folder cannot be written or the disk refuses the data.
    """
    final = check_writable(path)
    beside = final.with_name(f".{final.name}.{secrets.token_hex(4)}.part")
    try:
        with open(beside, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, final)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        beside.unlink(missing_ok=True)
