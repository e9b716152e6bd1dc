"""demask(): a masked network in, a smaller network that computes the same out."""

from demask.shrink.demask import demask, relations_of, simplified

__all__ = ["demask", "relations_of", "simplified"]
