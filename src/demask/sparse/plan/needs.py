"""How steps read values."""

from __future__ import annotations

from dataclasses import dataclass, replace

from demask.sparse.plan.tile_layout import Border, TileGrid
from demask.sparse.segment_steps import ConvStep, PoolStep, SelectStep


@dataclass(frozen=True, slots=True)
class Need:
    """How a step reads a value: grid, border and fill value."""

    value: int
    grid: TileGrid
    border: Border
    fill: float


def grid_of_input(step: ConvStep | PoolStep | SelectStep, grid: TileGrid) -> TileGrid:
    """The grid of the input of a window step, for an output in `grid`."""
    if isinstance(step, ConvStep) and step.transposed:
        stride = step.stride
        return replace(grid, height=grid.height // stride[0], width=grid.width // stride[1])
    return grid.scaled(step.stride)
