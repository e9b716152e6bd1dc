"""demask(): a masked network in, a smaller network that computes the same out."""

from demask.shrink.demask import demask
from demask.shrink.pipeline import simplified
from demask.shrink.reading import relations_of

__all__ = ["demask", "relations_of", "simplified"]
