"""A report as one self-contained web page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from demask.files import atomic_write as atomic
from demask.report.text import (
    removed_rows,
    returned_lines,
    scatters_line,
    scatters_reasons,
    sizes_rows,
    sparse_rows,
)
from demask.report.values import ReportValues

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0; } h2 { margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #8884; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
.places { color: #888; overflow-wrap: anywhere; }
""".strip()


def write_page(report: ReportValues, path: Path) -> None:
    """Write the page to `path`: whole or not at all. Raises BadInput where that is impossible."""
    with atomic.write(path) as file:
        file.write(page(report).encode())


def page(report: ReportValues) -> str:
    """The page's HTML. Names from the network are escaped; nothing is loaded from elsewhere."""
    return document("demask report", _sections(report))


def document(title: str, sections: Iterable[str]) -> str:
    """A web page of these sections of HTML, in this package's style."""
    body = "\n".join(sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{STYLE}\n</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _sections(report: ReportValues) -> Iterable[str]:
    yield f"<h1>demask report</h1>\n<p>{escape(report.summary)}</p>"
    yield from (f"<p>{escape(line.capitalize())}.</p>" for line in returned_lines(report))
    yield html_table(("", "before", "after", "share"), sizes_rows(report), numbers=(1, 2, 3))
    yield f"<p>Ops that only restore shapes: {escape(scatters_line(report))}.</p>"
    yield _list(scatters_reasons(report))
    if removed_rows(report):
        yield "<h2>Removed</h2>"
        yield html_table(("module", "parameters"), removed_rows(report), numbers=(1,))
    if report.densities:
        yield "<h2>Sparse layers</h2>"
        yield html_table(("layer", "weights stored"), sparse_rows(report), numbers=(1,))
    if report.declined:
        reasons = [(f"{d.slices:,}", d.text, ", ".join(d.places)) for d in report.declined]
        yield "<h2>Not removed, and why</h2>"
        yield html_table(("slices", "reason", "where"), reasons, numbers=(0,), quiet=(2,))
    if report.notes:
        yield f"<h2>Notes</h2>\n{_list(report.notes)}"


def _list(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def html_table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Sequence[int] = (),
    quiet: Sequence[int] = (),
) -> str:
    """A table of text. numbers: columns to align right. quiet: columns in gray."""
    kinds = dict.fromkeys(numbers, ' class="number"') | dict.fromkeys(quiet, ' class="places"')

    def cells(tag: str, values: Sequence[str]) -> str:
        marked = enumerate(values)
        return "".join(f"<{tag}{kinds.get(k, '')}>{escape(text)}</{tag}>" for k, text in marked)

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table>\n<tr>{cells('th', header)}</tr>\n{body}\n</table>"
