"""Which kernel runs a call on parts: one of ours where it applies, torch's ops elsewhere."""

from __future__ import annotations

from demask.ops.entry import Declined
from demask.traverse.local.call import LocalKind
from demask.traverse.local.depthwise import compiled_windows
from demask.traverse.local.winograd import compiled_winograd

#: Each returns the call with its kernel, or None; the first that applies is taken.
KERNELS = (compiled_windows, compiled_winograd)


def faster_kind(kind: LocalKind | Declined) -> LocalKind | Declined:
    """The call with a compiled kernel, where one applies; else the kind as it is.

    The choice depends on the sizes of the whole image, not on those of parts: results are the same
    for all bands.
    """
    if isinstance(kind, Declined):
        return kind
    return next((faster for rule in KERNELS if (faster := rule(kind)) is not None), kind)


__all__ = ["KERNELS", "faster_kind"]
