"""What an edit cannot do, and positions of axes."""

from __future__ import annotations

from demask.shrink.layout.cells import Positions


class Unsupported(Exception):
    """A node that no handler can cut: its operands and outputs are complete."""


def require(condition: object, reason: str) -> None:
    """Raise Unsupported with the reason unless the condition is true."""
    if not condition:
        raise Unsupported(reason)


def all_positions(positions: Positions, size: int) -> list[int]:
    """Positions as a list, those of a complete axis included.

    >>> all_positions(None, 3), all_positions((2, 0), 3)
    ([0, 1, 2], [2, 0])
    """
    return list(range(size)) if positions is None else list(positions)
