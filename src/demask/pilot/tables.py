"""A rich table as plain text."""

from __future__ import annotations

from io import StringIO

from rich.console import Console
from rich.table import Table


def as_lines(table: Table, width: int) -> list[str]:
    """The lines of a table, without colours or trailing blanks."""
    console = Console(file=StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines()]
