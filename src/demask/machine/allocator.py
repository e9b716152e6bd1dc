"""One allocator state for all timings: whether freed activations go back to the kernel or stay.

By default glibc gives large freed blocks back, so each forward pass faults its activations in
again, or not, depending on which sizes the process happened to free before. The same network was
measured at 178 and at 270 ms for that reason alone. Returning memory flatters the network that
allocates less, so timings are taken with the memory kept.
"""

from __future__ import annotations

import ctypes
import os
import platform

# From glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
# Largest first: glibc before 2.35 refuses an mmap threshold above half a heap, which is 32 MiB.
THRESHOLDS = (2_000_000_000, 32 * 1024 * 1024)
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None


def give_back() -> None:
    """Let glibc give the kernel what is free of its heap, which else holds on to freed blocks of
    some MiB; elsewhere nothing."""
    if _trim is not None:
        _trim(0)


def fix_allocator() -> str:
    """Make glibc keep freed memory for this process's life; returns the state in words.

    Process-wide, so it is for programs that measure (the command line, benchmarks), never for an
    import. On another C library nothing changes and the words say so.

    >>> fix_allocator().startswith("allocator")
    True
    """
    if platform.libc_ver()[0] != "glibc":
        return "allocator as found (mallopt needs glibc)"
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError) as error:
        return f"allocator as found ({error})"
    kept = next((size for size in THRESHOLDS if mallopt(M_MMAP_THRESHOLD, size)), None)
    if kept is None or not mallopt(M_TRIM_THRESHOLD, THRESHOLDS[0]):
        return "allocator as found (mallopt refused)"
    return f"allocator keeps freed memory (glibc, blocks up to {kept // 2**20:,} MiB)"
