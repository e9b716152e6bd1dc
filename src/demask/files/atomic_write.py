"""Atomic writes: a file appears complete or not at all. Temporary folders that a killed process does not
leave for ever."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from demask.errors import BadInput
from demask.installation import install_command

PICTURE_SUFFIXES = (".svg", ".png", ".pdf")
PICTURE_DOTS = 160  # per inch, where the format has dots
PREFIX, SUFFIX = ".demask-", ".part"  # of the names of files being written, and temporary folders


try:
    import fcntl
except ImportError:  # Windows, where an open file cannot be removed either
    fcntl = None


def check_writable(path: str | os.PathLike[str]) -> Path:
    """The absolute path that `write` would replace, with links resolved.

    Call it before long work, so that a path that cannot be written fails early.

    Raises:
        BadInput: the folder is missing or not writable, or `path` exists and is not a writable
            regular file.
    """
    try:
        final = Path(path).resolve()
        folder, status = final.parent, _stat_or_none(final)
        if not folder.is_dir():
            words = f"the folder {folder} does not exist; create it first"
        elif status is not None and stat.S_ISDIR(status.st_mode):
            words = "it is a folder; give the name of a file in it"
        elif status is not None and not stat.S_ISREG(status.st_mode):
            words = "it is a device, a pipe or a socket; give the name of a regular file"
        elif not os.access(folder, os.W_OK | os.X_OK):
            words = f"no permission to create files in {folder}"
        elif status is not None and not os.access(final, os.W_OK):
            words = "it is protected from writing; give another name, or change its permissions"
        else:
            return final
    except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, a zero byte
        words = f"{getattr(error, 'strerror', None) or error}; give another name"
    raise BadInput(f"cannot write {path}: {words}")


@contextmanager
def write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A binary file open for writing, renamed to `path` when the block ends without an error.

    The new file takes the owner and permissions of the file that it replaces. When the block
    raises, the new file is removed and `path` is unchanged. Files that a killed process left are
    removed by the next write in that folder.

    Raises:
        BadInput: the folder cannot be written or the disk refuses the data.
    """
    final = check_writable(path)
    try:
        _remove_stale(final.parent)
        before = _stat_or_none(final)
        with _locked_part_file(final.parent, 0o666 if before is None else 0o600) as (part, file):
            yield file
            file.flush()
            if before is not None:
                _copy_owner_and_mode(before, file.fileno())
            os.fsync(file.fileno())
            if os.name == "nt":
                file.close()  # Windows renames no open file
            os.replace(part, final)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def _locked_part_file(folder: Path, mode: int) -> Iterator[tuple[Path, BinaryIO]]:
    """A new file with a unique name, locked while its process writes it; removed at the end if it
    was not renamed."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    while True:
        path = folder / f"{PREFIX}{secrets.token_hex(6)}{SUFFIX}"
        file = open(os.open(path, flags, mode), "w+b")  # noqa: SIM115
        # Before the lock was taken, another process may have removed the file as stale.
        if not _lock(file.fileno(), wait=True) or os.fstat(file.fileno()).st_nlink:
            break
        file.close()
    try:
        with file:
            yield path, file
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A new folder in the system's folder for temporary files, removed when the block ends. Those
    that a killed process left are removed by the next call."""
    _remove_stale(Path(tempfile.gettempdir()))
    with ExitStack() as stack:
        while True:
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, suffix=SUFFIX))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            if fcntl is None:
                break
            with suppress(FileNotFoundError):  # another process removed it as stale, before it was locked
                descriptor = os.open(folder, os.O_RDONLY)
                stack.callback(os.close, descriptor)
                if not _lock(descriptor, wait=True) or folder.exists():
                    break
        yield folder


@contextmanager
def locked_folder(path: Path) -> Iterator[None]:
    """A folder, new or not, that no other process has locked so until the block ends. It may be
    renamed in the block.

    Raises:
        BadInput: another process has locked it, or it is no folder.
    """
    with ExitStack() as stack:
        while True:
            if path.is_symlink() or (path.exists() and not path.is_dir()):
                raise BadInput(f"{path}: expected no file and no link there; remove it")
            path.mkdir(exist_ok=True)
            if fcntl is None:
                break
            descriptor = os.open(path, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BadInput(
                    f"{path}: another process is writing it; wait until it ends, or give another name"
                ) from None
            except OSError:  # a file system without locks
                break
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                    break  # else another process renamed it before the lock was taken
        yield


def _remove_stale(folder: Path) -> None:
    """Remove files that a killed process was writing, and its temporary folders: those that no
    process has locked."""
    with suppress(OSError), os.scandir(folder) as entries:
        parts = [e for e in entries if e.name.startswith(PREFIX) and e.name.endswith(SUFFIX)]
        for entry in parts:
            is_folder = entry.is_dir(follow_symlinks=False)
            if is_folder or entry.is_file(follow_symlinks=False):  # a pipe would wait for a writer
                with suppress(OSError):
                    descriptor = os.open(entry.path, os.O_RDONLY)
                    try:
                        if _lock(descriptor, wait=False):
                            (shutil.rmtree if is_folder else os.unlink)(entry.path)
                    finally:
                        os.close(descriptor)


def _lock(descriptor: int, *, wait: bool) -> bool:
    """Lock a file until it is closed or the process ends. False where it cannot be locked."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # locked by another process, or a file system without locks
        return False
    return True


def _copy_owner_and_mode(before: os.stat_result, descriptor: int) -> None:
    """Copy owner, group and permissions of the replaced file. If the group cannot be set, group
    permissions are removed, because they were meant for another group."""
    if not hasattr(os, "fchown"):
        return
    mode = stat.S_IMODE(before.st_mode) & 0o777
    own = os.fstat(descriptor)
    if (own.st_uid, own.st_gid) != (before.st_uid, before.st_gid):
        try:
            os.fchown(descriptor, before.st_uid, before.st_gid)
        except OSError:
            mode &= 0o777 if own.st_gid == before.st_gid else 0o707
    os.fchmod(descriptor, mode)


def _stat_or_none(path: Path) -> os.stat_result | None:
    with suppress(FileNotFoundError):
        return os.stat(path)
    return None


def check_picture(path: Path, what: str = "a picture") -> None:
    """Raise BadInput where no picture can be drawn to `path`: another suffix than PICTURE_SUFFIXES, or no
    matplotlib, which is an extra. what: the output it is for."""
    if path.suffix not in PICTURE_SUFFIXES:
        raise BadInput(f"expected a picture that ends in {', '.join(PICTURE_SUFFIXES)}, got {path}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise BadInput(f"{what} needs matplotlib ({error}): {install_command('plot')}, or leave it out") from error
