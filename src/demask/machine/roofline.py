"""Seconds of work from its multiply-adds and bytes, where nothing is measured.

These rank plans and promise no time. `traverse` and `pilot` plan by `TWO_CORES`, so that plans are
the same on every machine; `machine.cost`, which measures, falls back to `typical`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Roofline:
    """Rates of a machine. macs: multiply-adds per second, float32. far: bytes per second, from and
    to memory; near: caches; new: pages at their first use; disk: files. cache: bytes that the calls
    of one step may touch and still be near. call: seconds of a call besides its work."""

    macs: float
    far: float
    call: float
    near: float = inf
    new: float = inf
    disk: float = inf
    cache: float = 0

    @classmethod
    def typical(cls, threads: int) -> Roofline:
        """About a server of the last ten years."""
        return cls(macs=2.5e10 * threads, far=1e10, call=3e-6)

    def seconds(self, macs: float, nbytes: float) -> float:
        """Of one call that computes while it moves (Williams, Waterman and Patterson, 2009)."""
        return self.call + max(macs / self.macs, nbytes / self.far)


#: Two cores of a server, in round numbers. call: of a step of a plan, with its Python and threads
#: that wait for one another.
TWO_CORES = Roofline(
    macs=90e9, near=80e9, far=40e9, new=3e9, disk=0.5e9, cache=20 * 2**20, call=120e-6
)
