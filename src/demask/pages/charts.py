"""Charts over steps as SVG, drawn without a package: curves of training, bytes alive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from demask.machine.byte_sizes import format_bytes
from demask.pages.sections import Curve, Span, StepCharts, Timeline

WIDTH, HEIGHT = 420, 190  # of a chart, in pixels: letters can be read on a phone
LEFT, RIGHT, TOP, BOTTOM = 58, 10, 24, 34  # of its axes
ACROSS, DOWN = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
POINTS = 400  # of a chart: more are joined


def draw_curves(curves: StepCharts) -> str:
    """One chart per curve."""
    return "\n".join(_curve(curve, curves) for curve in curves.curves)


def draw_timeline(timeline: Timeline) -> str:
    """Bytes alive over steps, with a line at each limit."""
    peak, total = timeline.peak, sum(span.length for span in timeline.spans) or 1.0
    most = max([peak.bytes, *timeline.limits.values(), 1])
    title = f"{len(timeline.spans):,} steps; at most {format_bytes(peak.bytes)} alive, at {peak.name}"
    parts, start = [_text(LEFT, 14, "bytes alive", 'class="strong"')], 0.0
    for k in range(3):
        parts.append(_grid_line(TOP + DOWN * (1 - k / 2), format_bytes(int(most * k / 2))))
    for span in _joined(timeline.spans, total):
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
        parts.append(_level("mark", y))
        below = y - 4 if y > TOP else y + 12
        parts.append(_text(WIDTH - RIGHT, below, words, 'text-anchor="end"'))
    parts.append(_text(LEFT + ACROSS / 2, HEIGHT - 8, timeline.across, 'text-anchor="middle"'))
    return f"{_svg(title, parts)}\n<p>{escape(title)}.</p>"


def _joined(spans: Sequence[Span], total: float) -> list[Span]:
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


def _curve(curve: Curve, curves: StepCharts) -> str:
    points = [(x, y) for x, y in _averaged(curve.points) if math.isfinite(y)]
    low, high, step = _ticks([y for _, y in points])

    def at(x: float, y: float) -> tuple[float, float]:
        return (LEFT + ACROSS * x / (curves.last or 1), TOP + DOWN * (high - y) / (high - low))

    parts = [_text(LEFT, 14, curve.title, 'class="strong"')]
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
        parts.append(_text(at(x, low)[0], TOP + DOWN + 14, words, f'text-anchor="{anchor}"'))
    parts.append(_text(LEFT + ACROSS / 2, HEIGHT - 4, curves.across, 'text-anchor="middle"'))
    ends = f": {points[0][1]:.4g} to {points[-1][1]:.4g}" if points else ""
    return _svg(f"{curve.title}{ends}, over {curves.last:,g} {curves.across}", parts)


def _averaged(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
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


def _svg(title: str, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg class="chart" role="img" viewBox="0 0 {WIDTH} {HEIGHT}">\n<title>{escape(title)}</title>\n{body}\n</svg>'
    )


def _grid_line(y: float, words: str) -> str:
    return _level("grid", y) + _text(LEFT - 6, y + 4, words, 'text-anchor="end"')


def _level(kind: str, y: float) -> str:
    """A line across a chart."""
    return f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(words)}</text>'
