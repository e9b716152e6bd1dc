"""How a command that fails ends: one line on stderr, and a status; never a traceback."""

from __future__ import annotations

import sys
import tempfile
import traceback

from demask.errors import DemaskError, Mismatch

CHECK_FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130  # exit codes; 0 is success
MEMORY = ("can't allocate memory", "out of memory", "not enough memory", "bad allocation")


def status_of(error: BaseException) -> int:
    """The exit code of a command that ended in this error."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return CHECK_FAILED if isinstance(error, Mismatch) else BAD_INPUT


def words_of(error: BaseException) -> str:
    """What to print of an error, in one line. What demask did not expect is written, with its
    traceback, to a temporary file that the line names."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, DemaskError):
        return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    text = str(error) or type(error).__name__
    if isinstance(error, MemoryError) or any(words in text.lower() for words in MEMORY):
        return f"not enough memory ({_first_line(text)}); use a smaller batch, smaller inputs or a part"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror or _first_line(text)}"
    return (
        f"internal error, {type(error).__name__}: {_first_line(text)}; please report it, with the "
        f"traceback in {_store_traceback(error)}"
    )


def _first_line(text: str) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= 200 else f"{line[:200]}…"


def _store_traceback(error: BaseException) -> str:
    """The file that a traceback was written to; or that there is none."""
    try:
        with tempfile.NamedTemporaryFile("w", prefix="demask-", suffix=".log", delete=False) as file:
            file.write(f"demask {' '.join(sys.argv[1:])}\n\n")
            file.write("".join(traceback.format_exception(error)))
            return file.name
    except OSError as failure:
        return f"(no file: {failure.strerror})"
