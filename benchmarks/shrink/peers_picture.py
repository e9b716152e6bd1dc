"""The picture of peers.py: speed against error, a point per network and setting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 400, 70, 46, 20, 50
COLOURS = ("#0b6e4f", "#d1495b", "#6a4c93", "#e09f3e", "#30638e")
FLOOR, CEILING = -8, 1  # powers of ten of the error
EXACT = 1e-4


@dataclass(frozen=True, slots=True)
class Point:
    """One contender on one network: how many times as fast as masked, the error, what it is."""

    who: str
    speed: float
    error: float
    label: str


def picture(points: Sequence[Point]) -> str:
    """An SVG: to the right is faster than the masked network, down is closer to its outputs."""
    names = list(dict.fromkeys(point.who for point in points))
    last = max(2.0, math.ceil(2 * max((p.speed for p in points), default=2.0)) / 2)

    def x(speed: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * speed / last

    def y(error: float) -> float:
        power = min(max(math.log10(error), FLOOR), CEILING) if error > 0 else FLOOR
        power = CEILING if math.isnan(error) else power
        return TOP + (HEIGHT - TOP - BOTTOM) * (CEILING - power) / (CEILING - FLOOR)

    body = [*axes(x, y, last), *legend(names)]
    for point in points:
        colour = COLOURS[names.index(point.who) % len(COLOURS)]
        words = f"{point.who}, {point.label}: {point.speed:.2f} x, error {point.error:.0e}"
        body.append(
            f'<circle cx="{x(point.speed):.1f}" cy="{y(point.error):.1f}" r="5" fill="{colour}" '
            f'fill-opacity="0.75"><title>{escape(words)}</title></circle>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="12" fill="#222">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def axes(x, y, last: float) -> list[str]:
    """Both axes, the line of equal speed, and the band in which results are the same."""
    low, high = y(10.0**FLOOR), y(10.0**CEILING)
    parts = [
        f'<rect x="{LEFT}" y="{y(EXACT):.1f}" width="{WIDTH - LEFT - RIGHT}" '
        f'height="{low - y(EXACT):.1f}" fill="#e6f4ea"/>',
        f'<text x="{WIDTH - RIGHT - 6}" y="{low - 6:.1f}" text-anchor="end" fill="#0b6e4f">'
        "computes the same</text>",
        f'<text x="{WIDTH - RIGHT - 6}" y="{high + 14:.1f}" text-anchor="end" fill="#a33">'
        "another function</text>",
        f'<path d="M{x(1):.1f} {high:.1f}V{low:.1f}" stroke="#999" stroke-dasharray="4 3"/>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">'
        "times as fast as the masked network</text>",
        f'<text transform="translate(16 {(low + high) / 2:.1f}) rotate(-90)" '
        'text-anchor="middle">error, relative to the largest output</text>',
    ]
    for power in range(FLOOR, CEILING + 1):
        at = y(10.0**power)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">1e{power}</text>')
    for speed in (half / 2 for half in range(int(2 * last) + 1)):
        place = f'x="{x(speed):.1f}" y="{low + 18:.1f}" text-anchor="middle"'
        parts.append(f"<text {place}>{speed:g}</text>")
    return parts


def legend(names: Sequence[str]) -> list[str]:
    """The contenders and their colours, in one line."""
    parts, at = [], float(LEFT)
    for k, name in enumerate(names):
        colour = COLOURS[k % len(COLOURS)]
        parts.append(f'<circle cx="{at + 6:.0f}" cy="22" r="5" fill="{colour}"/>')
        parts.append(f'<text x="{at + 16:.0f}" y="26">{escape(name)}</text>')
        at += 40 + 6.6 * len(name)
    return parts
