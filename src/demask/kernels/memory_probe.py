"""Whether memory still holds what it held: a few words of each tensor are compared in one call.

torch counts no writes through `.data`, NumPy or another library. Those that change most of a tensor
are seen here; those that change a few of its elements may not be.
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

WORDS = 16  # of each tensor
LOOKED = 16  # times as many elements are looked at for ones that are not 0, which products change


@dataclass(frozen=True, slots=True)
class Compare:
    """k(addresses, words, count, changed): sets `changed` where a word at an address differs."""

    arguments = 4

    def emit(self, e: Emitter) -> None:
        addresses, words, changed = (e.pointer(e.args[k]) for k in (0, 1, 3))
        difference = e.variable(I32, I32(0))
        with e.loop(I64(0), e.args[2]) as k:
            place = e.pointer(e.load(I64, addresses, k))
            now = e.b.load(place, typ=I32, align=1)
            bits = e.b.xor(now, e.load(I32, words, k))
            difference.set(e.b.or_(difference.get(), bits))
        with e.b.if_then(e.b.icmp_signed("!=", difference.get(), I32(0))):
            e.b.store(I32(1), changed)


@functools.cache
def _compare() -> Any:
    kernel = Compare()
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
    return kind(CODE.addresses([kernel])[kernel])


class MemoryProbe:
    """same(): whether tensors on the CPU hold what they held when it was made. They must live."""

    def __init__(self, tensors: Iterable[Tensor]):
        places = [address for t in tensors for address in _places(t)]
        self.addresses = np.array(places, np.int64)
        self.words = np.array([ctypes.c_int32.from_address(a).value for a in places], np.int32)
        self.changed = np.zeros(1, np.int32)  # never reset: calls may run at the same time
        self.given = (
            self.addresses.ctypes.data, self.words.ctypes.data, len(places),
            self.changed.ctypes.data,
        )  # fmt: skip
        self.compare = _compare()

    def same(self) -> bool:
        self.compare(*self.given)
        return not self.changed[0]


def _places(t: Tensor) -> list[int]:
    """Addresses of words of four bytes, most of them of elements that are not 0."""
    size = t.element_size()
    if not t.numel() or (size < 4 and (not t.is_contiguous() or t.numel() * size < 4)):
        return []
    count = min(t.numel(), WORDS * LOOKED)
    picked = torch.arange(count) * t.numel() // count
    index = np.unravel_index(picked.numpy(), tuple(t.shape)) if t.ndim else ()
    values = t.detach()[tuple(map(torch.from_numpy, index))].reshape(-1)
    offsets = sum((i * s for i, s in zip(index, t.stride(), strict=True)), np.zeros(count, int))
    chosen = torch.argsort((values == 0).int(), stable=True)[:WORDS].numpy()
    end = t.numel() * size - 4 if size < 4 else None
    starts = [size * o if end is None else min(size * o, end) for o in offsets[chosen].tolist()]
    return [t.data_ptr() + o + more for o in starts for more in range(0, size, 4)]
