"""Curves over training steps as SVG, drawn without a package, for the page of `demask prune`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 760, 260  # of a panel, in pixels
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 28, 40  # of its axes
COLOR, MARK = "#2a78b5", "#d1661f"
POINTS = 400  # of a line: longer ones are averaged


@dataclass(slots=True)
class Curves:
    """What happened in training, by step.

    losses, accuracies: (step, value). events: (step, what was done).
    """

    losses: list[tuple[int, float]] = field(default_factory=list)
    accuracies: list[tuple[int, float]] = field(default_factory=list)
    events: list[tuple[int, str]] = field(default_factory=list)

    @property
    def step(self) -> int:
        """The number of training steps so far."""
        return self.losses[-1][0] if self.losses else 0

    def to_dict(self) -> dict[str, list[list[object]]]:
        """The curves in JSON types."""
        return {
            "losses": [[step, value] for step, value in self.losses],
            "accuracies": [[step, value] for step, value in self.accuracies],
            "events": [[step, what] for step, what in self.events],
        }

    def svg(self) -> str:
        """The loss, smoothed, and the accuracy, over steps; events are vertical lines."""
        last = max(self.step, 1)
        losses = _panel("training loss", _averaged(self.losses), self.events, last)
        percent = [(step, 100 * value) for step, value in self.accuracies]
        accuracy = _panel("test accuracy, %", percent, self.events, last, dots=True)
        return f"{losses}\n{accuracy}"


def _averaged(points: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """At most POINTS points: means of equally many."""
    size = math.ceil(len(points) / POINTS) or 1
    groups = [points[k : k + size] for k in range(0, len(points), size)]
    return [
        (sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group))
        for group in groups
    ]


def _panel(
    title: str,
    points: Iterable[tuple[float, float]],
    events: Iterable[tuple[int, str]],
    last: int,
    *,
    dots: bool = False,
) -> str:
    line = [(x, y) for x, y in points if math.isfinite(y)]
    low, high, step = _ticks([y for _, y in line])

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - RIGHT) * x / last
        return across, TOP + (HEIGHT - TOP - BOTTOM) * (high - y) / (high - low)

    parts = [f'<text x="{LEFT}" y="16" font-weight="bold">{escape(title)}</text>']
    for k in range(round((high - low) / step) + 1):
        value = low + k * step
        y = place(0, value)[1]
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
                     f'stroke="currentColor" stroke-opacity=".15"/><text x="{LEFT - 6}" '
                     f'y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>')  # fmt: skip
    for x, what in events:
        across = place(x, low)[0]
        parts.append(f'<line x1="{across:.1f}" x2="{across:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" '
                     f'stroke="{MARK}" stroke-dasharray="4 3"><title>step {x}: {escape(what)}'
                     '</title></line>')  # fmt: skip
    placed = [place(x, y) for x, y in line]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    parts.append(f'<polyline points="{path}" fill="none" stroke="{COLOR}" stroke-width="1.6"/>')
    if dots:
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{COLOR}"/>' for x, y in placed]
    for x in (0, last / 2, last):
        anchor = "end" if x == last else "middle"
        parts.append(f'<text x="{place(x, low)[0]:.1f}" y="{HEIGHT - BOTTOM + 16}" '
                     f'text-anchor="{anchor}">{x:.0f}</text>')  # fmt: skip
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">steps</text>')
    return (f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" '
            'font-family="system-ui, sans-serif" font-size="12" fill="currentColor">\n'
            + "\n".join(parts) + "\n</svg>")  # fmt: skip


def _ticks(values: Sequence[float]) -> tuple[float, float, float]:
    """The lowest tick, the highest, and their distance, of about five round ones."""
    least, most = min(values, default=0.0), max(values, default=1.0)
    span = (most - least) or abs(most) or 1.0
    power = 10 ** math.floor(math.log10(span / 4))
    step = next(power * k for k in (1, 2, 2.5, 5, 10) if span / (power * k) <= 5)
    return math.floor(least / step) * step, (math.floor(most / step) + 1) * step, step
