"""demask(): a smaller network that computes the same outputs as a masked one."""

from demask.shrink.demask import demask
from demask.shrink.pipeline import canonicalize as simplified

__all__ = ["demask", "simplified"]
