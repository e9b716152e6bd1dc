"""demask(): a masked network in, a smaller network that computes the same out."""

from demask.shrink.demask import demask
from demask.shrink.pipeline import simplified

__all__ = ["demask", "simplified"]
