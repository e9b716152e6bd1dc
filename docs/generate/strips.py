"""docs/strips/*.svg, a picture for each engine: rows of squares, one for each channel, position or
weight, with what becomes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from docs.generate import DOCS
from docs.generate.before_after import CONSTANT, FONT, INK, LIVE, MASKED, MUTED, PAPER

SIDE, GAP, LEFT, TOP, LINE, WIDTH = 18, 3, 150, 30, 34, 700
FILLS = {"#": LIVE, "o": CONSTANT, ".": MASKED, " ": PAPER}
# By name: title; what the colors mean; rows (label, squares, remark).
PICTURES = {
    "prune": (
        "Channels that go together are masked together",
        {"#": "stays", ".": "masked"},
        [
            ("first convolution", "##..#.##", "their sum has the same channels,"),
            ("second convolution", "##..#.##", "so both are masked alike:"),
            ("what reads the sum", "##..#.##", "as columns of its weights"),
            ("after demask", "#####", "three layers of 5 channels"),
        ],
    ),
    "checkpoints": (
        "A config has one size for all layers",
        {"#": "live unit", ".": "zero, removed", "o": "zero, stays for the size"},
        [
            ("layer 0", "####oo......", "4 of 12 units live"),
            ("layer 1", "######......", "6 live: the size of all"),
            ("layer 2", "##oooo......", "2 live; 4 zeros stay"),
            ("with sizes by layer", "####", "llama.cpp, vLLM, mlx: no zeros"),
        ],
    ),
    "sparse": (
        "Zeros in no pattern: products with nonzeros alone",
        {"#": "nonzero, multiplied", ".": "zero, not stored"},
        [
            ("row 0 of the weight", ".#...#..#...", "3 products"),
            ("row 1", "#...#.......", "2 products"),
            ("row 2", "...#..##...#", "4 products"),
            ("stored", "#########", "values, and where they are"),
        ],
    ),
    "pilot": (
        "A cheap run says what the full run computes",
        {"#": "large, computed", "o": "small", ".": "zero"},
        [
            ("pilot, 8 bits", "#oo#o##o..#o", "magnitude of each unit"),
            ("full run, skip:0.5", "#  # ##   # ", "half of the units; outputs may differ"),
            ("full run, certified", "########  ##", "all but those proved to be zero; the same"),
        ],
    ),
    "stride": (
        "A stride keeps every second position of a convolution",
        {"#": "stays", ".": "computed for nothing", "o": "set to zero by the mask"},
        [
            ("stride 2", "######", "what the network means"),
            ("lowered: stride 1", "#.#.#.#.#.#.", "what the hardware has"),
            ("times a mask", "#o#o#o#o#o#o", "values are never negative:"),
            ("max pool of 2", "######", "the same values"),
        ],
    ),
}


def rows(lines: list[tuple[str, str, str]]) -> Iterator[str]:
    """The squares of a picture, with their labels and remarks."""
    for k, (label, squares, remark) in enumerate(lines):
        y = TOP + 34 + k * LINE
        yield text(LEFT - 14, y + 15, label, "text-anchor='end'")
        for i, kind in enumerate(squares):
            x = LEFT + i * (SIDE + GAP)
            box = f"<rect x='{x}' y='{y}' width='{SIDE}' height='{SIDE}' rx='3'"
            yield f"{box} fill='{FILLS[kind]}' stroke='{MASKED}'/>"
        yield text(LEFT + 12 * (SIDE + GAP) + 14, y + 15, remark, f"fill='{MUTED}'")


def text(x: float, y: float, words: str, more: str = f"fill='{INK}'") -> str:
    return f"<text x='{x:g}' y='{y:g}' font-size='13' {more}>{words}</text>"


def pages() -> dict[Path, str]:
    """The pictures as SVG texts, by path."""
    result = {}
    for name, (title, legend, lines) in PICTURES.items():
        height = TOP + 34 + len(lines) * LINE + 34
        parts = [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' {FONT}>",
            f"<title>{title}</title><rect width='{WIDTH}' height='{height}' fill='{PAPER}'/>",
            text(WIDTH / 2, TOP, title, f"fill='{INK}' text-anchor='middle' font-weight='bold'"),
            *rows(lines),
        ]
        for k, (kind, meaning) in enumerate(legend.items()):
            x, y = LEFT + k * 170, height - 26
            parts.append(f"<rect x='{x}' y='{y}' width='14' height='14' rx='3' fill='{FILLS[kind]}'/>")
            parts.append(text(x + 20, y + 12, meaning, f"fill='{MUTED}'"))
        result[DOCS / "strips" / f"{name}.svg"] = "\n".join([*parts, "</svg>"]) + "\n"
    return result
