"""Tensors that end where memory ends: a read or write beside them stops the process."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE


def guarded(x: Tensor, end: bool = True) -> Tensor:
    """A copy of a tensor between two pages that cannot be read or written, at the end of the room
    between them, or at its beginning."""
    size = x.numel() * x.element_size()
    room = -(-max(size, 1) // PAGE) * PAGE
    memory = mmap.mmap(-1, room + 2 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for page in (address, address + PAGE + room):
        if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 0) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
    if not size:
        return x.clone()
    offset = PAGE + (room - size if end else 0)
    made = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=offset)
    return made.reshape(x.shape).copy_(x)
