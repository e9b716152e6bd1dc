"""Sections as one self-contained web page, or as a part of a notebook. Nothing is loaded from elsewhere
and no script runs; names are escaped. Pictures and charts are SVG, drawn without a package."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import groupby
from math import sqrt

from demask.machine.byte_sizes import format_bytes
from demask.pages.sections import (
    Box,
    Command,
    Curve,
    Lines,
    NetworkPicture,
    OnPage,
    Page,
    Section,
    Span,
    StepCharts,
    TextTable,
    Timeline,
    flatten,
)

WIDTH, HEIGHT = 420, 190  # of a chart, in pixels: letters can be read on a phone
LEFT, RIGHT, TOP, BOTTOM = 58, 10, 24, 34  # of its axes
ACROSS, DOWN = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
POINTS = 400  # of a chart: more are joined
WIDEST, HIGHEST, LEAST = 96, 56, 8  # of a box, in pixels
SMALL = 64  # rows or columns of the largest box, at least: small networks have small boxes
LOOKS = ("stays", "went", "changed")
STYLE = """
.demask-page { --ink: #1c2024; --paper: #fff; --quiet: #57616b; --line: #cfd6dd; --panel: #f3f5f7;
  --stays: #2b6cb0; --went: #b3500a; --changed: #1f7a4d;
  color-scheme: light dark; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; padding: 1rem; margin: 0; }
@media (prefers-color-scheme: dark) {
  .demask-page { --ink: #e6e9ec; --paper: #14181c; --quiet: #9faab5; --line: #3a444e;
    --panel: #1d2329; --stays: #63a4e8; --went: #f0965a; --changed: #5cc48f; } }
.demask-page main { max-width: 60rem; margin: 0 auto; }
.demask-page h1, .demask-page h3 { line-height: 1.2; margin: .5rem 0; }
.demask-page h2, .demask-page h4 { line-height: 1.2; margin: 2rem 0 .5rem; font-size: 1.25rem; }
.demask-page .summary { font-size: 1.15rem; margin: .5rem 0 1.5rem; }
.demask-page p, .demask-page ul { margin: .5rem 0; }
.demask-page .quiet, .demask-page footer { color: var(--quiet); font-size: .9rem; }
.demask-page footer { margin-top: 2rem; border-top: 1px solid var(--line); padding-top: .5rem; }
.demask-page .scroll { overflow-x: auto; }
.demask-page table { border-collapse: collapse; font-size: .95rem; color: inherit; margin: 0; }
.demask-page caption { text-align: left; font-weight: 600; padding: .3rem 0; }
.demask-page th, .demask-page td { text-align: left; vertical-align: top; font-weight: 400;
  padding: .3rem 1rem .3rem 0; border: 0; border-bottom: 1px solid var(--line); background: none;
  overflow-wrap: break-word; max-width: 28rem; }
.demask-page thead th { font-weight: 600; vertical-align: bottom; }
.demask-page th[scope=row] { position: sticky; left: 0; background: var(--paper); }
.demask-page .number { text-align: right; font-variant-numeric: tabular-nums; }
.demask-page td.number { white-space: nowrap; }
.demask-page pre { background: var(--panel); color: inherit; padding: .6rem .8rem; margin: .5rem 0;
  white-space: pre-wrap; }
.demask-page ul.key, .demask-page ol.network, .demask-page ol.network ul { list-style: none;
  margin: 0; padding: 0; display: flex; flex-wrap: wrap; gap: .3rem 1rem; }
.demask-page ol.network { gap: .75rem 2rem; margin: .75rem 0; align-items: flex-end; }
.demask-page ol.network > li { position: relative; display: block; max-width: 100%; }
.demask-page ol.network ul { gap: .4rem .5rem; align-items: flex-end; }
.demask-page ol.network ul > li { display: block; }
.demask-page ol.network svg { display: block; }
.demask-page .block { display: block; font-size: .8rem; font-weight: 600; }
.demask-page .name { display: block; font-size: .75rem; line-height: 1.2; color: var(--quiet);
  max-width: 8rem; overflow-wrap: break-word; }
.demask-page .why { display: none; position: absolute; left: 0; z-index: 1;
  width: max-content; max-width: min(22rem, 85vw); padding: .3rem .5rem; font-size: .85rem;
  background: var(--panel); border: 1px solid var(--line); }
.demask-page svg:focus-visible ~ .why,
.demask-page ol.network ul > li:hover .why { display: block; }
.demask-page :focus-visible { outline: 2px solid var(--stays); outline-offset: 2px; }
.demask-page .stays { fill: var(--stays); }
.demask-page .changed { fill: var(--changed); }
.demask-page .went { fill: var(--went); fill-opacity: .18; stroke: var(--went);
  stroke-dasharray: 3 2; }
.demask-page svg.chart { display: block; width: 100%; max-width: 40rem; height: auto;
  font: 11px system-ui, sans-serif; fill: currentColor; }
.demask-page .strong { font-weight: 600; }
.demask-page .grid { stroke: var(--line); }
.demask-page .mark { stroke: var(--went); stroke-dasharray: 4 3; }
.demask-page .curve { fill: none; stroke: var(--stays); stroke-width: 1.6; }
@media (max-width: 40rem) {
  .demask-page table { font-size: .85rem; }
  .demask-page th, .demask-page td { padding-right: .6rem; }
  .demask-page th[scope=row] { max-width: 9rem; } }
@media print {
  .demask-page { --ink: #000; --paper: #fff; --quiet: #444; --line: #bbb; --panel: #f3f5f7;
    --stays: #2b6cb0; --went: #b3500a; --changed: #1f7a4d; font-size: 11pt; padding: 0;
    print-color-adjust: exact; }
  .demask-page .scroll { overflow: visible; }
  .demask-page table { font-size: 8.5pt; }
  .demask-page tr, .demask-page svg, .demask-page ol.network > li { break-inside: avoid; }
  .demask-page h2 { break-after: avoid; }
  .demask-page .why { display: none !important; }
}
""".strip()


def draw_curves(curves: StepCharts) -> str:
    """One chart per curve."""
    return "\n".join(_draw_curve(curve, curves) for curve in curves.curves)


def draw_timeline(timeline: Timeline) -> str:
    """Bytes alive over steps, with a line at each limit."""
    peak, total = timeline.peak, sum(span.length for span in timeline.spans) or 1.0
    most = max([peak.bytes, *timeline.limits.values(), 1])
    title = f"{len(timeline.spans):,} steps; at most {format_bytes(peak.bytes)} alive, at {peak.name}"
    parts, start = [_svg_text(LEFT, 14, "bytes alive", 'class="strong"')], 0.0
    for k in range(3):
        parts.append(_grid_line(TOP + DOWN * (1 - k / 2), format_bytes(int(most * k / 2))))
    for span in _join_spans(timeline.spans, total):
        x, width = LEFT + ACROSS * start / total, ACROSS * span.length / total
        height = DOWN * span.bytes / most
        words = f"{span.name}: {format_bytes(span.bytes)}{f', {span.words}' * bool(span.words)}"
        parts.append(
            f'<rect class="stays" x="{x:.2f}" y="{TOP + DOWN - height:.2f}" '
            f'width="{max(width, 0.3):.2f}" height="{height:.2f}">'
            f"<title>{escape(words)}</title></rect>"
        )
        start += span.length
    for name, size in timeline.limits.items():
        y = TOP + DOWN * (1 - size / most)
        words = f"{name} {format_bytes(size)}"
        parts.append(_horizontal_line("mark", y))
        below = y - 4 if y > TOP else y + 12
        parts.append(_svg_text(WIDTH - RIGHT, below, words, 'text-anchor="end"'))
    parts.append(_svg_text(LEFT + ACROSS / 2, HEIGHT - 8, timeline.across, 'text-anchor="middle"'))
    return f"{_svg_chart(title, parts)}\n<p>{escape(title)}.</p>"


def _join_spans(spans: Sequence[Span], total: float) -> list[Span]:
    """At most about POINTS spans: neighbors are joined, with the most bytes of any of them."""
    if len(spans) <= POINTS:
        return [*spans]
    joined: list[Span] = []
    for span in spans:
        last = joined[-1] if joined else None
        if last is not None and last.length + span.length <= total / POINTS:
            larger = max(last, span, key=lambda one: one.bytes)
            joined[-1] = Span(larger.name, last.length + span.length, larger.bytes, larger.words)
        else:
            joined.append(span)
    return joined


def _draw_curve(curve: Curve, curves: StepCharts) -> str:
    points = [(x, y) for x, y in _average_points(curve.points) if math.isfinite(y)]
    low, high, step = _ticks([y for _, y in points])

    def at(x: float, y: float) -> tuple[float, float]:
        return (LEFT + ACROSS * x / (curves.last or 1), TOP + DOWN * (high - y) / (high - low))

    parts = [_svg_text(LEFT, 14, curve.title, 'class="strong"')]
    for k in range(round((high - low) / step) + 1):
        value = low + k * step
        parts.append(_grid_line(at(0, value)[1], f"{value:.4g}"))
    for x, words in curves.events:
        across = at(x, low)[0]
        title = f"<title>step {x:g}: {escape(words)}</title>"
        parts.append(
            f'<line class="mark" x1="{across:.1f}" x2="{across:.1f}" y1="{TOP}" y2="{TOP + DOWN}">{title}</line>'
        )
    drawn = [at(x, y) for x, y in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
    parts.append(f'<polyline class="curve" points="{path}"/>')
    if curve.has_dots:
        parts += [f'<circle class="stays" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in drawn]
    for x in (0, curves.last / 2, curves.last):
        anchor = "end" if x == curves.last else "middle"
        words = f"{x:,.0f}" if curves.last >= 10 else f"{x:.3g}"
        parts.append(_svg_text(at(x, low)[0], TOP + DOWN + 14, words, f'text-anchor="{anchor}"'))
    parts.append(_svg_text(LEFT + ACROSS / 2, HEIGHT - 4, curves.across, 'text-anchor="middle"'))
    ends = f": {points[0][1]:.4g} to {points[-1][1]:.4g}" if points else ""
    return _svg_chart(f"{curve.title}{ends}, over {curves.last:,g} {curves.across}", parts)


def _average_points(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most POINTS points: means of equally many."""
    size = math.ceil(len(points) / POINTS) or 1
    groups = [points[k : k + size] for k in range(0, len(points), size)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def _ticks(values: Sequence[float]) -> tuple[float, float, float]:
    """The lowest tick, the highest, and their distance, of about five round ones."""
    least, most = min(values, default=0.0), max(values, default=1.0)
    span = (most - least) or abs(most) or 1.0
    power = 10 ** math.floor(math.log10(span / 4))
    step = next(power * k for k in (1, 2, 2.5, 5, 10) if span / (power * k) <= 5)
    return math.floor(least / step) * step, (math.floor(most / step) + 1) * step, step


def _svg_chart(title: str, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg class="chart" role="img" viewBox="0 0 {WIDTH} {HEIGHT}">\n<title>{escape(title)}</title>\n{body}\n</svg>'
    )


def _grid_line(y: float, words: str) -> str:
    return _horizontal_line("grid", y) + _svg_text(LEFT - 6, y + 4, words, 'text-anchor="end"')


def _horizontal_line(kind: str, y: float) -> str:
    """A line across a chart."""
    return f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _svg_text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(words)}</text>'


def draw_network(picture: NetworkPicture) -> str:
    """The boxes in order of execution, block by block, below a key."""
    widest = max(SMALL, *(box.rows[0] for box in picture.boxes))
    highest = max(SMALL, *(box.columns[0] for box in picture.boxes))
    blocks = []
    for block, boxes in groupby(picture.boxes, key=_block_name):
        drawn = "\n".join(_draw_box(box, block, widest, highest) for box in boxes)
        label = f'<span class="block">{escape(block)}</span>' if block else ""
        blocks.append(f"<li>{label}\n<ul>\n{drawn}\n</ul></li>")
    key = "".join(
        f'<li><svg width="16" height="12" aria-hidden="true"><rect class="{look}" x="1" y="1" '
        f'width="14" height="10"/></svg> {escape(words)}</li>'
        for look in LOOKS
        if (words := getattr(picture, look))
    )
    body = "\n".join(blocks)
    return (
        f'<ul class="key">{key}</ul>\n<ol class="network">\n{body}\n</ol>\n<p class="quiet">'
        f"{escape(picture.words)} Point at a box, or move to it with the tab key, to read "
        "more.</p>"
    )


def _block_name(box: Box) -> str:
    """The name up to its last number, as "layer1.0" of "layer1.0.conv1"."""
    if box.block is not None:
        return box.block
    steps = box.name.split(".")
    numbers = [k for k, step in enumerate(steps[:-1]) if step.isdigit()]
    return ".".join(steps[: numbers[-1] + 1]) if numbers else ""


def _draw_box(box: Box, block: str, widest: int, highest: int) -> str:
    """A box with its name, and words that appear where it is pointed at or has the focus."""
    width, height = _box_pixels(box.rows[0], widest, WIDEST), _box_pixels(box.columns[0], highest, HIGHEST)
    left = width * min(box.rows[1] / max(box.rows[0], 1), 1)
    top = height * min(box.columns[1] / max(box.columns[0], 1), 1)
    stays = "changed" if box.is_changed else "stays"
    is_cut = (left, top) != (width, height)
    rects = [f'<rect class="went" x="1" y="1" width="{width:.1f}" height="{height:.1f}"/>'] * is_cut
    if left and top:
        rects.append(f'<rect class="{stays}" x="1" y="1" width="{left:.1f}" height="{top:.1f}"/>')
    words = escape(f"{box.name}: {box.words}" if box.words else box.name)
    name = escape(box.name.removeprefix(f"{block}.") if box.block is None else box.name)
    name = name.replace(".", ".<wbr>").replace("_", "_<wbr>")  # where it may wrap
    return (
        f'<li><svg role="img" tabindex="0" width="{width + 2:.0f}" height="{height + 2:.0f}">'
        f"<title>{words}</title>{''.join(rects)}</svg>"
        f'<span class="name">{name}</span><span class="why" aria-hidden="true">{words}</span></li>'
    )


def _box_pixels(size: int, largest: int, pixels: int) -> float:
    return max(LEAST, pixels * sqrt(size / max(largest, 1)))


def document(page: Page) -> str:
    """The page as an HTML document."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(page.title)}</title>\n<style>\n{STYLE}\n</style>\n</head>\n"
        f'<body class="demask-page">\n<main>\n{_page_body(page, level=1)}\n</main>\n</body>\n</html>\n'
    )


def fragment(page: Page) -> str:
    """The page as one element with its own style, which changes nothing around it."""
    body = _page_body(page, level=3)
    return f'<div class="demask-page">\n<style>\n{STYLE}\n</style>\n{body}\n</div>\n'


def _page_body(page: Page, level: int) -> str:
    """level: of the title's heading."""
    parts = [f"<h{level}>{escape(page.title)}</h{level}>"]
    if page.summary:
        parts.append(f'<p class="summary">{escape(page.summary)}</p>')
    for section in flatten(page.sections, OnPage):
        if written := _section_html(section):
            heading = getattr(section, "heading", "")
            title = f"<h{level + 1}>{escape(heading)}</h{level + 1}>\n" if heading else ""
            parts.append(f"<section>\n{title}{written}\n</section>")
    if page.note:
        parts.append(f"<footer>{escape(page.note)}</footer>")
    return "\n".join(parts)


def _section_html(section: Section) -> str:
    """The HTML of a section without its heading; "" for one that is empty or only a terminal's."""
    match section:
        case Lines():
            return _lines_html(section.lines)
        case TextTable():
            return _table_html(section) if section.rows else ""
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


def _lines_html(lines: Sequence[str]) -> str:
    """One line as a paragraph, several as a list; line breaks in a line stay."""
    written = [escape(line).replace("\n", "<br>") for line in lines if line.strip()]
    if len(written) == 1:
        return f"<p>{written[0]}</p>"
    items = "\n".join(f"<li>{line}</li>" for line in written)
    return f"<ul>\n{items}\n</ul>" if items else ""


def _table_html(table: TextTable) -> str:
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
