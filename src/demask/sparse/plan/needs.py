"""How steps read values."""

from __future__ import annotations

from dataclasses import dataclass

from demask.sparse.plan.tile_layout import Border, TileGrid


@dataclass(frozen=True, slots=True)
class Need:
    """How a step reads a value: grid, border and fill value."""

    value: int
    grid: TileGrid
    border: Border
    fill: float
