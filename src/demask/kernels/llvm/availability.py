"""Whether kernels for CPUs can be compiled and run here."""

from __future__ import annotations

import functools
import sys
import warnings


class NoPlan(Exception):
    """The kernels cannot do this, or not now; its text says why."""


@functools.cache
def installed() -> bool:
    """Whether llvmlite can be imported and the system is a POSIX one; if not, one warning says so.

    Callers continue with ATen ops, which compute the same and take longer.
    """
    reason = ""
    if sys.platform == "win32":
        reason = "the kernels need Linux or macOS"
    else:
        try:
            import llvmlite  # noqa: F401
        except ImportError as error:
            reason = f"{error}; pip install llvmlite"
    if reason:
        words = f"demask runs on torch's own ops on the CPU, which is slower: {reason}"
        warnings.warn(words, stacklevel=2)
    return not reason
