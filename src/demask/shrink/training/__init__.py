"""Training across demask(): optimizers and averages carried over, and networks expanded again."""

from demask.shrink.training.carry import carry
from demask.shrink.training.expand import expand

__all__ = ["carry", "expand"]
