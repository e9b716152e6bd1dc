"""What the plan of a segment does, as a table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from demask.exec.tape.tile_layout import TileGrid
from demask.text_table import number_table, render_text


class PlanRow(NamedTuple):
    """How a plan computes a value.

    reads: the values that its step reads. size: (batch, channels, height, width) of the canonical image.
    grid: of tiles, one per lane. kernels: (phase, kernel, calls). together: the value in whose phase it is
    computed. owner: the value in whose memory it is.
    """

    value: int
    op: str
    reads: tuple[int, ...]
    name: str
    size: tuple[int, int, int, int]
    grid: TileGrid
    kernels: tuple[tuple[int, str, int], ...]
    together: int | None
    owner: int

    @property
    def where(self) -> str:
        """The phases of its calls."""
        if self.together is not None:
            return f"with {self.together}"
        phases = sorted({phase + 1 for phase, _, _ in self.kernels})
        ends = phases[:1] if phases[:1] == phases[-1:] else [phases[0], phases[-1]]
        return "-".join(map(str, ends))

    @property
    def what(self) -> str:
        """Its kernels, in words, with the calls of each, and the value that has its memory."""
        counts: dict[str, int] = {}
        for _, kernel, count in self.kernels if self.together is None else ():
            words = re.sub(r"(?<!^)(?=[A-Z])", " ", kernel.removesuffix("Kernel")).lower()
            counts[words] = counts.get(words, 0) + count
        parts = [words if count == 1 else f"{count} {words}" for words, count in counts.items()]
        parts += [] if self.owner == self.value else [f"in {self.owner}"]
        return ", ".join(parts or ["in place"] * (self.together is None))


def plan_text(rows: Sequence[PlanRow], heading: str) -> str:
    """The rows as a table below a heading. Sizes are channels x height x width, of one image unless it says more."""
    table = number_table("value", header_style="", pad_edge=False)
    table.columns[0].justify = "right"
    for column in ("op", "reads", "size", "tiles", "phases", "kernels", "layer"):
        table.add_column(column)
    for row in rows:
        batch, channels, height, width = row.size
        size = f"{channels} x {height} x {width}" if batch == 1 else f"{batch} x {channels} x {height} x {width}"
        grid = row.grid
        tiles = f"{grid.images * grid.rows * grid.columns} of {grid.height} x {grid.width}"
        reads = ", ".join(map(str, row.reads))
        table.add_row(str(row.value), row.op, reads, size, tiles, row.where, row.what, row.name)
    return f"{heading}\n{render_text(table)}"
