"""Whether tensors have changed in memory: a few words of each are compared in one call.

torch does not count writes through `.data`, NumPy or another library. Writes that change most of a
tensor are detected here; writes that change a few elements may be missed.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demask.kernels.llvm.emitter import I32, I64, Emitter
from demask.kernels.llvm.jit import CODE

WORDS = 16  # compared per tensor
SEARCH = 16  # times as many elements are searched for nonzeros, which products change


@dataclass(frozen=True, slots=True)
class Compare:
    """Kernel k(addresses, words, count, changed): sets `changed` if any word differs."""

    arguments = 4

    def emit(self, e: Emitter) -> None:
        addresses, words, changed = (e.pointer(e.args[k]) for k in (0, 1, 3))
        difference = e.variable(I32, I32(0))
        with e.loop(I64(0), e.args[2]) as k:
            address = e.pointer(e.load(I64, addresses, k))
            word = e.b.load(address, typ=I32, align=1)
            bits = e.b.xor(word, e.load(I32, words, k))
            difference.set(e.b.or_(difference.get(), bits))
        with e.b.if_then(e.b.icmp_signed("!=", difference.get(), I32(0))):
            e.b.store(I32(1), changed)


@functools.cache
def _compare() -> Any:
    kernel = Compare()
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
    return kind(CODE.addresses([kernel])[kernel])


class MemoryProbe:
    """Compares words of CPU tensors with their values when the probe was created.

    The tensors must outlive the probe.
    """

    def __init__(self, tensors: Iterable[Tensor]):
        addresses = [address for t in tensors for address in _word_addresses(t)]
        self.addresses = np.array(addresses, np.int64)
        self.words = np.array([ctypes.c_int32.from_address(a).value for a in addresses], np.int32)
        self.changed = np.zeros(1, np.int32)  # never reset: calls may run at the same time
        self.arguments = (self.addresses.ctypes.data, self.words.ctypes.data, len(addresses), self.changed.ctypes.data)
        self.compare = _compare()

    def same(self) -> bool:
        """Whether the sampled words are unchanged."""
        self.compare(*self.arguments)
        return not self.changed[0]


def _word_addresses(t: Tensor) -> list[int]:
    """Addresses of words of four bytes, mostly of nonzero elements."""
    size = t.element_size()
    if not t.numel() or (size < 4 and (not t.is_contiguous() or t.numel() * size < 4)):
        return []
    count = min(t.numel(), WORDS * SEARCH)
    sampled = torch.arange(count) * t.numel() // count
    index = np.unravel_index(sampled.numpy(), tuple(t.shape)) if t.ndim else ()
    values = t.detach()[tuple(map(torch.from_numpy, index))].reshape(-1)
    offsets = sum((i * s for i, s in zip(index, t.stride(), strict=True)), np.zeros(count, int))
    chosen = torch.argsort((values == 0).int(), stable=True)[:WORDS].numpy()
    end = t.numel() * size - 4 if size < 4 else None
    starts = [size * o if end is None else min(size * o, end) for o in offsets[chosen].tolist()]
    return [t.data_ptr() + o + word for o in starts for word in range(0, size, 4)]
