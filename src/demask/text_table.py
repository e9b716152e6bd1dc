"""Tables of numbers, and any of rich's renderables, as plain text."""

from __future__ import annotations

from io import StringIO
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table

WIDTH = 100


def number_table(head: str, *numbers: str, **style: Any) -> Table:
    """A table of one column of words, then columns of numbers, aligned right. style: of `Table`."""
    table = Table(head, **{"box": SIMPLE_HEAD, "show_edge": False, **style})
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def as_lines(*parts: RenderableType, width: int = WIDTH) -> list[str]:
    """The lines of tables and texts, without colors or trailing blanks."""
    console = Console(file=StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return [line.rstrip() for line in capture.get().splitlines()]


def as_text(*parts: RenderableType) -> str:
    """The same as one text, without empty lines at its ends."""
    return "\n".join(as_lines(*parts)).strip("\n")
