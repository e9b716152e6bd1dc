"""docs/before_after.svg, the network of architecture.md before and after demask: which channels are
left, and in which order, comes from a real run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import demask
from docs.generate import DOCS
from docs.generate.blocks import BLOCK

PATH = DOCS / "before_after.svg"
WIDTH, HEIGHT = 860, 560
SIDE, GAP = 17, 3  # of the square of a channel
INK, MUTED, LINE, PAPER = "#1f2933", "#6b7785", "#9aa5b1", "#ffffff"
LIVE, CONSTANT, MASKED = "#2f6fb5", "#e3b341", "#e4e7eb"
FONT = "font-family='Helvetica, Arial, sans-serif'"


@dataclass(frozen=True, slots=True)
class Side:
    """One half of the picture: the channels at each place, with what each holds ("live",
    "constant", "masked"), by their number in the original."""

    title: str
    totals: str
    strips: dict[str, list[tuple[int, str]]]
    extra: bool  # add at positions, append, border map


def _network() -> tuple[Any, Any]:
    """The network that architecture.md builds in its first block."""
    first = BLOCK.search((DOCS / "architecture.md").read_text())
    assert first is not None
    names: dict[str, Any] = {}
    exec(first["code"], names)
    return names["model"], names["images"]


def _sides() -> tuple[Side, Side]:
    model, images = _network()
    slim = demask.demask(model, (images,), result="graph")
    report = demask.report(slim)
    cuts = slim.demasked.cuts
    rows = {name: list(cuts[f"{name}.weight"].kept[0] or ()) for name in "ab"}
    summed = list(cuts["c.weight"].kept[1] or ())
    before = {name: [(k, "live" if k in rows[name] else "masked") for k in range(8)] for name in "ab"}
    shifted = [(k, "live" if k in rows["a"] else "constant" if model.norm.bias[k] else "masked") for k in range(8)]
    total = [(k, "live" if k in summed else "constant") for k in range(8)]
    after = {name: [(k, "live") for k in live] for name, live in {**rows, "sum": summed}.items()}
    texts = [
        f"{sizes.parameters:,} parameters, {sizes.macs // len(images):,} products per image"
        for sizes in (report.before, report.after)
    ]
    return (
        Side("masked", texts[0], {**before, "norm": shifted, "sum": total}, False),
        Side("demasked", texts[1], {**after, "norm": after["a"]}, True),
    )


def _text(x: float, y: float, words: str, size: int = 13, fill: str = INK, more: str = "") -> str:
    return f"<text x='{x:g}' y='{y:g}' font-size='{size}' fill='{fill}' {more}>{words}</text>"


def _box(x: float, y: float, words: str, width: float = 150) -> str:
    """A call, centred on x."""
    frame = f"<rect x='{x - width / 2:g}' y='{y:g}' width='{width:g}' height='28' rx='5'"
    return f"{frame} fill='{PAPER}' stroke='{INK}'/>" + _text(x, y + 19, words, more="text-anchor='middle'")


def _strip(x: float, y: float, channels: Sequence[tuple[int, str]]) -> str:
    """A tensor's channels, centred on x."""
    start = x - (len(channels) * (SIDE + GAP) - GAP) / 2
    parts = []
    for k, (number, holds) in enumerate(channels):
        left = start + k * (SIDE + GAP)
        fill = {"live": LIVE, "constant": CONSTANT, "masked": MASKED}[holds]
        ink = PAPER if holds == "live" else INK if holds == "constant" else LINE
        parts.append(
            f"<rect x='{left:g}' y='{y:g}' width='{SIDE}' height='{SIDE}' rx='3' fill='{fill}'/>"
            + _text(left + SIDE / 2, y + 13, str(number), 11, ink, "text-anchor='middle'")
        )
    return "".join(parts)


def _arrow(*points: tuple[float, float]) -> str:
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    return f"<polyline points='{path}' fill='none' stroke='{LINE}' marker-end='url(#tip)'/>"


def _half(side: Side, centre: float) -> Iterator[str]:
    left, right = centre - 100, centre + 100
    a, b, norm, summed = (side.strips[name] for name in ("a", "b", "norm", "sum"))
    yield _text(centre, 30, side.title, 18, INK, "text-anchor='middle' font-weight='bold'")
    yield _text(centre, 50, side.totals, 12, MUTED, "text-anchor='middle'")
    yield _box(centre, 70, "images: 3 channels", 170)
    for x, name, strip in ((left, "a", a), (right, "b", b)):
        yield _arrow((centre, 98), (x, 122))
        yield _box(x, 124, f"convolution {name}: 3 → {len(strip)}")
        yield _arrow((x, 152), (x, 166))
        yield _strip(x, 170, strip)
    yield _arrow((left, 191), (left, 208))
    yield _box(left, 210, "batch norm")
    yield _arrow((left, 238), (left, 252))
    yield _strip(left, 256, norm)
    yield _arrow((left, 277), (left, 342), (centre - 50, 356))
    yield _arrow((right, 191), (right, 342), (centre + 50, 356))
    joined = "add where both are, append the rest, ReLU" if side.extra else "add, ReLU"
    yield _box(centre, 358, joined, 290)
    yield _arrow((centre, 386), (centre, 400))
    yield _strip(centre, 404, summed)
    yield _arrow((centre, 425), (centre, 442))
    more = " + border map" if side.extra else ""
    yield _box(centre, 444, f"padded convolution c: {len(summed)} → 4{more}", 290)
    yield _arrow((centre, 472), (centre, 486))
    yield _strip(centre, 490, [(k, "live") for k in range(4)])


def _legend() -> Iterator[str]:
    words = (
        ("live", "channel that is computed"),
        ("masked", "zero: masked away, still computed"),
        ("constant", "constant: masked, but a shift is left"),
    )
    for (holds, text), x in zip(words, (90, 310, 575), strict=True):
        fill = {"live": LIVE, "constant": CONSTANT, "masked": MASKED}[holds]
        yield f"<rect x='{x}' y='530' width='14' height='14' rx='3' fill='{fill}'/>"
        yield _text(x + 20, 542, text, 12, MUTED)


def page() -> str:
    """The picture as SVG text."""
    before, after = _sides()
    tip = (
        "<marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' "
        f"orient='auto'><path d='M0,1 L7,4 L0,7 z' fill='{LINE}'/></marker>"
    )
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' "
        f"width='{WIDTH}' height='{HEIGHT}' {FONT}>",
        "<title>A masked residual block before and after demask</title>",
        f"<defs>{tip}</defs><rect width='{WIDTH}' height='{HEIGHT}' fill='{PAPER}'/>",
        f"<line x1='{WIDTH / 2}' y1='20' x2='{WIDTH / 2}' y2='510' stroke='{MASKED}'/>",
        *_half(before, WIDTH / 4),
        *_half(after, 3 * WIDTH / 4),
        *_legend(),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"
