"""demask(): a smaller network that computes the same outputs as a masked one."""

from demask.shrink.demask import Trace, demask, explain
from demask.shrink.pipeline import canonicalize as simplified

__all__ = ["Trace", "demask", "explain", "simplified"]
