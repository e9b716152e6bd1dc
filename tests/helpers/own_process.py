"""Processes of their own for tests, with torch imported: forks of a server that did nothing else.

Importing torch takes as long as what most of these processes are for. demask is not imported: which
of its modules is, and when, is each process's own.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import ModuleType
from typing import IO, Any

IMPORTED = ["numpy", "torch.export", "torch.fx.experimental.symbolic_shapes"]


@functools.cache
def context() -> ForkServerContext:
    """Of such processes, for what takes a context of `multiprocessing`."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(IMPORTED)
    return server


def spawn(work: Callable[..., None], arguments: tuple[Any, ...], count: int) -> None:
    """`torch.multiprocessing.spawn`: runs work(rank, *arguments) in so many processes."""
    from torch.multiprocessing import start_processes

    context()  # the first to import
    start_processes(work, arguments, nprocs=count, start_method="forkserver")


@contextmanager
def workers() -> Iterator[None]:
    """What clusters of dask start are such processes."""
    from dask import config
    from distributed.utils import get_mp_context

    with config.set({"distributed.worker.multiprocessing-method": "forkserver"}):
        get_mp_context()  # says once what its own would import
        context().set_forkserver_preload([*IMPORTED, "distributed"])
        yield


class Running:
    """A running process: what tests use of `subprocess.Popen`."""

    def __init__(self, process: Any, out: IO[str], err: IO[str]) -> None:
        self.process, self.stdout, self.err = process, out, err

    @property
    def returncode(self) -> int | None:
        """How it ended, if it has."""
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """What it wrote to stdout and was not read yet, and to stderr, once it has ended."""
        timer = threading.Timer(timeout, self.kill)
        timer.start()
        with self.stdout as out, self.err as err:
            rest = out.read()
            self.process.join()
            timer.cancel()
            err.seek(0)
            return rest, err.read()


def start(code: str, *words: object, folder: Path | None = None, environment: Mapping[str, str] = {}) -> Running:
    """Runs code in a process of its own.

    words: its arguments. folder: where it runs. environment: what differs from that of the tests.
    """
    err = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by communicate)
    out, end = os.pipe()
    arguments = (code, [*map(str, words)], str(folder or Path.cwd()), {**os.environ, **environment})
    ends = _End(end), _End(err.fileno())
    process = context().Process(target=_begin, args=(*arguments, *ends), daemon=True)
    process.start()
    os.close(end)
    return Running(process, os.fdopen(out), err)


class _End:
    """A file's number here, and in a process that it is sent to as the process begins."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self.number),)


def _received(sent: Any) -> _End:
    return _End(sent.detach())


def _begin(code: str, words: list[str], folder: str, environment: dict[str, str], out: _End, err: _End) -> None:
    for end, usual in ((out, 1), (err, 2)):
        os.dup2(end.number, usual)
        os.close(end.number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = ["-c", *words]
    module = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), vars(module))


def run(code: str, *words: object, **options: Any) -> tuple[int | None, str, str]:
    """How a process of its own ended, and what it wrote: to stdout, to stderr.

    options: of `start`.
    """
    process = start(code, *words, **options)
    out, err = process.communicate()
    return process.returncode, out, err
