"""The picture of a network: one box per module, drawn as SVG without a package.

A box is the weight of a module: as wide as it has rows, as high as it has columns, on a scale of
square roots. What stays is filled, what went has a dashed border, so that colors are not needed.
"""

from __future__ import annotations

from html import escape
from itertools import groupby
from math import sqrt

from demask.pages.sections import Box, NetworkPicture

WIDEST, HIGHEST, LEAST = 96, 56, 8  # of a box, in pixels
SMALL = 64  # rows or columns of the largest box, at least: small networks have small boxes
LOOKS = ("stays", "went", "changed")


def draw_network(picture: NetworkPicture) -> str:
    """The boxes in order of execution, block by block, below a key."""
    widest = max(SMALL, *(box.rows[0] for box in picture.boxes))
    highest = max(SMALL, *(box.columns[0] for box in picture.boxes))
    blocks = []
    for block, boxes in groupby(picture.boxes, key=_block):
        drawn = "\n".join(_drawn(box, block, widest, highest) for box in boxes)
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


def _block(box: Box) -> str:
    """The name up to its last number, as "layer1.0" of "layer1.0.conv1"."""
    if box.block is not None:
        return box.block
    steps = box.name.split(".")
    numbers = [k for k, step in enumerate(steps[:-1]) if step.isdigit()]
    return ".".join(steps[: numbers[-1] + 1]) if numbers else ""


def _drawn(box: Box, block: str, widest: int, highest: int) -> str:
    """A box with its name, and words that appear where it is pointed at or has the focus."""
    width, height = _scaled(box.rows[0], widest, WIDEST), _scaled(box.columns[0], highest, HIGHEST)
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


def _scaled(size: int, largest: int, pixels: int) -> float:
    return max(LEAST, pixels * sqrt(size / max(largest, 1)))
