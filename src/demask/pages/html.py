"""Sections as one self-contained web page, or as a part of a notebook. Nothing is loaded from
elsewhere and no script runs; names are escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from demask.pages.charts import draw_curves, draw_timeline
from demask.pages.picture import draw_network
from demask.pages.sections import (
    Command,
    Lines,
    NetworkPicture,
    OnPage,
    Page,
    Section,
    StepCharts,
    TextTable,
    Timeline,
    flatten,
)
from demask.pages.style import STYLE


def document(page: Page) -> str:
    """The page as an HTML document."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(page.title)}</title>\n<style>\n{STYLE}\n</style>\n</head>\n"
        f'<body class="demask-page">\n<main>\n{_body(page, level=1)}\n</main>\n</body>\n</html>\n'
    )


def fragment(page: Page) -> str:
    """The page as one element with its own style, which changes nothing around it."""
    body = _body(page, level=3)
    return f'<div class="demask-page">\n<style>\n{STYLE}\n</style>\n{body}\n</div>\n'


def _body(page: Page, level: int) -> str:
    """level: of the title's heading."""
    parts = [f"<h{level}>{escape(page.title)}</h{level}>"]
    if page.summary:
        parts.append(f'<p class="summary">{escape(page.summary)}</p>')
    for section in flatten(page.sections, OnPage):
        if written := _written(section):
            heading = getattr(section, "heading", "")
            title = f"<h{level + 1}>{escape(heading)}</h{level + 1}>\n" if heading else ""
            parts.append(f"<section>\n{title}{written}\n</section>")
    if page.note:
        parts.append(f"<footer>{escape(page.note)}</footer>")
    return "\n".join(parts)


def _written(section: Section) -> str:
    """The HTML of a section without its heading; "" for one that is empty or only a terminal's."""
    match section:
        case Lines():
            return _lines(section.lines)
        case TextTable():
            return _table(section) if section.rows else ""
        case NetworkPicture():
            return draw_network(section) if section.boxes else ""
        case Timeline():
            return draw_timeline(section) if section.spans else ""
        case StepCharts():
            words = f"\n<p>{escape(section.words)}</p>" if section.words else ""
            return draw_curves(section) + words
        case Command():
            words = f"\n<p>{escape(section.words)}</p>" if section.words else ""
            return f"<pre>{escape(section.command)}</pre>{words}"
    return ""


def _lines(lines: Sequence[str]) -> str:
    """One line as a paragraph, several as a list; line breaks in a line stay."""
    written = [escape(line).replace("\n", "<br>") for line in lines if line.strip()]
    if len(written) == 1:
        return f"<p>{written[0]}</p>"
    items = "\n".join(f"<li>{line}</li>" for line in written)
    return f"<ul>\n{items}\n</ul>" if items else ""


def _table(table: TextTable) -> str:
    """A table whose first column is a head, too, in a box that scrolls where it is too wide."""

    def cell(tag: str, k: int, text: str, scope: str = "") -> str:
        kind = "" if k in table.left else ' class="number"'
        return f"<{tag}{scope}{kind}>{escape(text)}</{tag}>"

    head = "".join(cell("th", k, text, ' scope="col"') if text else "<td></td>" for k, text in enumerate(table.head))

    def cells(row: Sequence[str]) -> str:
        if len(row) == 1 < len(table.head):
            return cell("th", 0, row[0], f' scope="rowgroup" colspan="{len(table.head)}"')
        first = cell("th", 0, row[0], ' scope="row"')
        first = first if " " in row[0] else first.replace(".", ".<wbr>")  # a name may wrap there
        return first + "".join(cell("td", k, text) for k, text in enumerate(row) if k)

    rows = "\n".join(f"<tr>{cells(row)}</tr>" for row in table.rows)
    name = escape(table.title or table.heading or table.head[0] or "sizes", quote=True)
    caption = f"<caption>{escape(table.title)}</caption>\n" if table.title else ""
    return (
        f'<div class="scroll" role="region" aria-label="{name}" tabindex="0">\n<table>\n{caption}'
        f"<thead>\n<tr>{head}</tr>\n</thead>\n<tbody>\n{rows}\n</tbody>\n</table>\n</div>"
    )
