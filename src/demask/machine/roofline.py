"""Seconds predicted from multiply-adds and bytes, without measurement.

They rank plans; actual times differ. `traverse` and `pilot` use `TWO_CORES`, so that plans are the
same on every machine; `machine.cost` uses `typical` if it may not measure.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Roofline:
    """Rates of a machine.

    Attributes:
        macs: float32 multiply-adds per second.
        far, near: bytes per second from and to memory; from and to caches.
        call: overhead of a call in seconds.
        new, disk: bytes per second of pages at their first use; of files.
        cache: the most bytes of one step for which the rate `near` applies.
    """

    macs: float
    far: float
    call: float
    near: float = inf
    new: float = inf
    disk: float = inf
    cache: float = 0

    @classmethod
    def typical(cls, threads: int) -> Roofline:
        """Rates of a typical server of the last ten years, with this number of threads."""
        return cls(macs=2.5e10 * threads, far=1e10, call=3e-6)

    def seconds(self, macs: float, nbytes: float) -> float:
        """Predicted seconds of one call: computation and memory traffic overlap (the roofline model
        of Williams, Waterman and Patterson, 2009)."""
        return self.call + max(macs / self.macs, nbytes / self.far)


#: Two cores of a server, in round numbers. `call` is the overhead of one step of a plan: Python
#: code and synchronization of threads.
TWO_CORES = Roofline(macs=90e9, near=80e9, far=40e9, new=3e9, disk=0.5e9, cache=20 * 2**20, call=120e-6)
