"""Is LLVM there, which compiles the kernels for CPUs?"""

from __future__ import annotations

import functools
import warnings


@functools.cache
def installed() -> bool:
    """Whether llvmlite can be imported; if not, one warning says so.

    What asks goes on by ATen ops, which compute the same and take longer.
    """
    try:
        import llvmlite  # noqa: F401
    except ImportError as error:
        warnings.warn(
            f"demask.sparse runs on torch's own ops on the CPU, which is slower: {error}; "
            "pip install llvmlite",
            stacklevel=2,
        )
        return False
    return True
