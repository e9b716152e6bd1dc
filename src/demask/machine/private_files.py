"""Files in the user's cache folder that only save time, named by content: the machine code of
kernels, networks that optimize() has chosen.

What is read is run, or returned to the caller. The folder must therefore belong to the user of the
process and be closed to all others (mode 0700), and so must each file; otherwise nothing is read or
written. Files that are damaged, missing or not readable are as if they had never been written.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path


def cache_folder() -> Path | None:
    """demask's folder in the user's cache folder; None if there is no such folder. Reads the
    environment, creates nothing."""
    home, system = Path(os.path.expanduser("~")), sys.platform
    usual = home / {"darwin": "Library/Caches", "win32": "AppData/Local"}.get(system, ".cache")
    variable = {"darwin": "", "win32": "LOCALAPPDATA"}.get(system, "XDG_CACHE_HOME")
    variable_path = Path(os.environ.get(variable, ""))
    folder = variable_path if variable_path.is_absolute() else usual  # the XDG standard: ignore relative ones
    return folder / "demask" if folder.is_absolute() else None


IMPORTED = time.time()
OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(slots=True, eq=False)
class PrivateFiles:
    """The files in a folder, which is created when the first is written.

    kind: word in the first line of each file, for what it has. limit: most bytes of all files; the
    ones not used for longest are removed first. most: bytes of a file.
    """

    folder: Path
    kind: str
    limit: int
    most: int
    size: int | None = None  # bytes of all files as far as known; None: not counted

    @classmethod
    def of(cls, folder: Path | None, kind: str, limit: int, most: int) -> PrivateFiles | None:
        """The files in a folder; None for none, or where the system does not tell whose files
        are."""
        return cls(folder, kind, limit, most) if folder and hasattr(os, "geteuid") else None

    def read(self, name: str) -> bytes | None:
        """The content written under a name; None if there is none or it is damaged."""
        with suppress(OSError), self._opened() as folder:
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
            with os.fdopen(file, "rb") as stream:
                if not _is_private(os.fstat(file), stat.S_ISREG):
                    return None
                data = stream.read(self.most + 1)
                with suppress(OSError):  # a file system that is only read
                    os.utime(file)  # marks it as used
            size = len(self._file_head("", b""))
            content = memoryview(data)[size:]
            return bytes(content) if data[:size] == self._file_head(name, content) else None
        return None

    def has(self, name: str) -> bool:
        """Whether there is a file of a name, damaged or not."""
        return (self.folder / name).exists()

    def write(self, name: str, content: bytes) -> None:
        """Write a file at once or not at all; does nothing where the folder must not be used."""
        head = self._file_head(name, content)
        if len(head) + len(content) > self.most:
            return
        with suppress(OSError), self._opened(create=True) as folder:
            new = f".new-{secrets.token_hex(16)}"
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                with os.fdopen(os.open(new, flags, 0o600, dir_fd=folder), "wb") as stream:
                    stream.write(head)
                    stream.write(content)
                os.replace(new, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(new, dir_fd=folder)
                raise
            self._remove_oldest(folder, len(head) + len(content))

    def _file_head(self, name: str, content: bytes | memoryview) -> bytes:
        """The start of a file: its kind, and the hash of name and content."""
        digest = hashlib.sha256(name.encode())
        digest.update(content)
        return f"demask {self.kind} 1\n".encode() + digest.digest()

    @contextmanager
    def _opened(self, create: bool = False) -> Iterator[int]:
        """The folder's descriptor. Raises OSError if it is missing or not closed to others."""
        if create and not self.folder.exists():
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if not _is_private(os.fstat(folder), stat.S_ISDIR):
                raise OSError(f"{self.folder} is open to others")
            yield folder
        finally:
            os.close(folder)

    def _remove_oldest(self, folder: int, written: int) -> None:
        """Remove the oldest files if there are too many bytes, down to three quarters."""
        if self.size is not None and self.size + written <= self.limit:
            self.size += written
            return
        files = []
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(OSError):  # another process removed it
                    status = entry.stat(follow_symlinks=False)
                    files.append((status.st_mtime_ns, status.st_size, entry.name))
        total = sum(size for _, size, _ in files)
        removes = total > self.limit
        for _, size, name in sorted(files) if removes else ():
            if total <= self.limit * 3 // 4:
                break
            total -= size
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)
        self.size = total


def _is_private(status: os.stat_result, is_kind: Callable[[int], bool]) -> bool:
    """Whether a file of this kind belongs to the user of the process and is closed to others."""
    own = status.st_uid == os.geteuid() and not status.st_mode & OTHERS
    return own and is_kind(status.st_mode)


def files_digest(paths: Iterable[Path]) -> str | None:
    """Hash of the files of code that this process has imported; None where one is missing, or newer
    than the process, which has then imported something else."""
    digest = hashlib.sha256()
    for path in paths:
        try:
            is_newer = path.stat().st_mtime >= IMPORTED
            content = path.read_bytes()
        except OSError:
            return None
        if is_newer:
            return None
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()
