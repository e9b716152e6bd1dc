"""demask: pruned and masked neural networks, actually smaller and faster, computing the same."""

from demask import ops
from demask.errors import BadInput, DemaskError, Mismatch, NotExportable, RefusedFile
from demask.shrink import demask

__version__ = "0.1.0"
__all__ = [
    "BadInput",
    "DemaskError",
    "Mismatch",
    "NotExportable",
    "RefusedFile",
    "demask",
    "ops",
]
