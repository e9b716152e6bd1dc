"""Whether CPU kernels can be compiled and run on this system."""

from __future__ import annotations

import functools
import sys
import warnings


class NoPlan(Exception):
    """The kernels cannot run this call; the message is the reason."""


@functools.cache
def is_installed() -> bool:
    """Whether llvmlite can be imported and the system is POSIX; if not, warns once.

    Callers fall back to ATen ops, which return the same result but are slower.
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
        message = f"demask runs on torch's own ops on the CPU, which is slower: {reason}"
        warnings.warn(message, stacklevel=2)
    return not reason
