"""Tables of numbers and other renderables of rich, as plain text."""

from __future__ import annotations

from io import StringIO
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table

WIDTH = 100


def number_table(head: str, *numbers: str, **style: Any) -> Table:
    """A table with a text column `head` and right-aligned columns `numbers`. style: arguments of
    rich's `Table`."""
    table = Table(head, **{"box": SIMPLE_HEAD, "show_edge": False, **style})
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def render_lines(*parts: RenderableType, width: int = WIDTH) -> list[str]:
    """Renderables as lines of plain text, without colors and trailing blanks."""
    console = Console(file=StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return [line.rstrip() for line in capture.get().splitlines()]


def render_text(*parts: RenderableType) -> str:
    """Renderables as one plain text, without empty lines at its start and end."""
    return "\n".join(render_lines(*parts)).strip("\n")
