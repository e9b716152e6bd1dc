"""The picture of a bench: one bar with whiskers per contender and setting; losses are hatched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from demask.cli.bench.bench import Bench, BenchRow
from demask.cli.bench.contenders import ORIGINAL
from demask.files import atomic_write as atomic
from demask.machine.describe import BUSY, format_counts, format_milliseconds, has_wide_spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ORIGINAL_COLOR, FASTER, SLOWER = "#8c8c8c", "#2a78b5", "#d1661f"  # differ for the color-blind, too
WORDS = "#444444"
WIDTH, BAR, REST = 8.5, 0.3, 0.75  # inches: the picture, each row, a panel's title and axis
LABEL = 0.38  # of a panel's width, left free for the words after the longest bar
REACH = 1.6  # times the largest median: a longer whisker is cut, or one outlier hides all bars
DOTS = 200  # per inch, where the format has dots


def draw(bench: Bench, path: Path) -> None:
    """Write the picture to `path`, whole or not at all; its suffix says the format.

    One panel per setting, each with an axis of its own that starts at zero.
    """
    from matplotlib.figure import Figure

    settings = bench.settings
    heights = [BAR * len(rows) + REST for rows in settings.values()]
    figure = Figure(figsize=(WIDTH, sum(heights) + 1.0), layout="constrained")
    panels = figure.subplots(len(settings), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (setting, rows) in zip(panels, settings.items(), strict=True):
        _panel(axes, setting, rows)
    panels[-1].set_xlabel("milliseconds per call", fontsize=9)
    figure.suptitle(bench.model, fontsize=12, parse_math=False)
    figure.supxlabel(_caption(bench), x=0.01, ha="left", fontsize=7, color=WORDS, parse_math=False)
    with atomic.write(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=DOTS)


def _panel(axes: Axes, setting: str, rows: Sequence[BenchRow]) -> None:
    """One setting: its bars from the top down, and a line at the median of the original."""
    axes.set_title(setting, loc="left", fontsize=10)
    timings = [row.timing for row in rows if row.timing]
    reach = min(max(t.high for t in timings), REACH * max(t.median for t in timings))
    for place, row in enumerate(rows):
        _bar(axes, place, row, 1e3 * reach)
    axes.set_xlim(0, 1e3 * reach / (1 - LABEL))
    axes.set_yticks(range(len(rows)), [row.contender for row in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)


def _bar(axes: Axes, place: int, row: BenchRow, reach: float) -> None:
    """One contender: bar, whiskers and words; where it failed, the reason alone.

    reach: milliseconds at which a whisker ends in an arrow, and the words say where it would end.
    """
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # over the dotted line
    style: dict[str, Any] = {"va": "center", "fontsize": 8, "parse_math": False, "bbox": box}
    style |= {"xytext": (7, 0), "textcoords": "offset points"}
    if row.timing is None:
        words = f"fails: {row.failure}"
        axes.annotate(words, (0, place), **style, style="italic", color=WORDS)
        return
    low, median, high = (1e3 * t for t in (row.timing.low, row.timing.median, row.timing.high))
    color = SLOWER if row.is_loss else ORIGINAL_COLOR if row.contender == ORIGINAL else FASTER
    axes.barh(
        place, median, height=0.62, color=color, hatch="///" if row.is_loss else None, edgecolor="white", linewidth=0
    )
    end = min(high, reach)
    axes.errorbar(
        median, place, xerr=[[median - low], [end - median]], fmt="none", ecolor="black", elinewidth=1, capsize=3
    )
    words = f"{format_milliseconds(row.timing.median)} ms"
    if row.contender == ORIGINAL:
        axes.axvline(median, color=ORIGINAL_COLOR, linestyle=":", linewidth=1, zorder=0)
    else:
        words += f", {row.ratio:.2f} ×{' (slower)' if row.is_loss else ''}"
    if high > reach:
        axes.plot(end, place, marker=">", color="black", markersize=5)
        words += f"; 90 %: {format_milliseconds(row.timing.high)}"
    style |= {"weight": "bold" if row.is_loss else "normal"}
    axes.annotate(words, (end, place), **style)


def _caption(bench: Bench) -> str:
    busy = f" {BUSY}" if has_wide_spread(bench.timings) else ""
    words = (
        f"Median, whiskers 10 %–90 %, of {format_counts(bench.timings)} calls in turns; × is the "
        f"speed relative to the original.{busy} {bench.machine}"
    )
    return fill(words, 165)
