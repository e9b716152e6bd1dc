"""Sections as plain text of 100 columns, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from demask.pages.sections import InTerminal, Lines, Section, TextTable, flatten
from demask.text_table import WIDTH, number_table, render_lines


def text_of(sections: Sequence[Section]) -> str:
    """The sections with an empty line between them, except before those that are close."""
    lines: list[str] = []
    for section in flatten(sections, InTerminal):
        if not (own := _lines_of(section)):
            continue
        if lines and not getattr(section, "is_close", False):
            lines.append("")
        lines += own
    return "\n".join(lines)


def _lines_of(section: Section) -> list[str]:
    """The lines of a section; none for those that only a page shows."""
    match section:
        case Lines(is_wrapped=True):
            return render_lines(*map(Text, section.lines))
        case Lines():
            return [line for text in section.lines for line in text.split("\n")]
        case TextTable():
            return _table_lines(section)
    return []


def _table_lines(table: TextTable) -> list[str]:
    rows = table.rows if table.terminal_rows is None else table.terminal_rows
    if not rows:
        return []
    style = {"title": Text(table.title), "title_style": ""} if table.title else {}
    drawn = number_table(table.head[0], *table.head[1:], pad_edge=table.pad_edge, **style)
    for k, column in enumerate(drawn.columns):
        column.justify = "left" if k in table.left else "right"
        column.no_wrap = k in table.unbroken
    for k, row in enumerate(rows):
        if k in table.rules:
            drawn.add_section()
        drawn.add_row(*(Text(cell, overflow="fold") for cell in row))
    return render_lines(drawn, width=table.width or WIDTH)
