"""glibc's allocator in one state for all timings: whether the heap retains freed activations.

By default glibc returns large freed blocks to the kernel, so each forward pass faults its
activations in again, or not, depending on the sizes that the process freed before. The same network
was measured at 178 and at 270 ms for that reason alone. Returning memory favors the network that
allocates less, so timings are measured with a heap that retains it.
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
SMALL = 128 * 1024  # bytes; glibc's threshold before anything was freed
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None


def release_free_memory() -> None:
    """Return the free memory of glibc's heap to the kernel; no effect with other C libraries."""
    if _trim is not None:
        _trim(0)


def return_freed_blocks() -> None:
    """Make glibc return each large block to the kernel when it is freed, until the process ends:
    for a command that reads and writes large files, and times nothing that allocates its own
    memory. No effect with another C library.

    Otherwise glibc retains blocks as large as those that were freed before, up to 32 MiB: ONNX
    Runtime took 3.6 times the size of an 18 MB file to load it, and 2.6 with this setting.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, SMALL)


def fix_allocator() -> str:
    """Make glibc retain freed memory until the process ends; returns its state in words.

    The setting is process-wide: for programs that measure (command line, benchmarks), never for an
    import. With another C library nothing changes, and the returned words say so.

    >>> fix_allocator().startswith("allocator")
    True
    """
    if platform.libc_ver()[0] != "glibc":
        return "allocator as by default (mallopt needs glibc)"
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError) as error:
        return f"allocator as by default ({error})"
    threshold = next((size for size in THRESHOLDS if mallopt(M_MMAP_THRESHOLD, size)), None)
    if threshold is None or not mallopt(M_TRIM_THRESHOLD, THRESHOLDS[0]):
        return "allocator as by default (mallopt refused)"
    return f"allocator retains freed memory (glibc, blocks up to {threshold // 2**20:,} MiB)"
