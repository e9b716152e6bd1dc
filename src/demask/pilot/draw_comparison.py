"""The picture of a comparison: agreement, recall of zeros and weights per simplifier, as bars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from demask.files import atomic_write as atomic
from demask.files.atomic_write import PICTURE_DOTS, check_picture
from demask.pilot.compare import Comparison, ComparisonRow
from demask.pilot.data.draw import BARS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, BAR = 10.0, 0.34  # inches


def draw(comparison: Comparison, path: Path) -> None:
    """Write the picture to `path`, completely or not at all; its suffix is the format.
    Refused simplifiers have the word instead of bars."""
    check_picture(path)
    from matplotlib.figure import Figure

    rows = comparison.rows
    figure = Figure(figsize=(WIDTH, BAR * len(rows) + 1.1), layout="constrained")
    panels = figure.subplots(1, 4, sharey=True, squeeze=False)[0]
    columns = (
        ("same class, %", [_percent(row.agreement) for row in rows]),
        ("correlation", [row.correlation for row in rows]),
        ("recall of zeros, %", [_percent(row.recall) for row in rows]),
        ("weights, % of full", [100 * row.weight_bytes / comparison.weight_bytes for row in rows]),
    )
    for axes, (title, values) in zip(panels, columns, strict=True):
        _panel(axes, title, values, rows)
    panels[0].set_yticks(range(len(rows)), [row.by for row in rows], fontsize=8)
    panels[0].set_ylim(len(rows) - 0.4, -0.6)
    figure.suptitle(f"{comparison.inputs} inputs", fontsize=10)
    with atomic.write(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=PICTURE_DOTS)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _panel(axes: Axes, title: str, values: Sequence[float | None], rows: tuple[ComparisonRow, ...]) -> None:
    axes.set_title(title, loc="left", fontsize=9)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    for place, (value, row) in enumerate(zip(values, rows, strict=True)):
        words = "refused" if row.refused else "–" if value is None else f"{value:.3g}"
        length = 0.0 if row.refused or value is None else max(value, 0.0)
        axes.barh(place, length, height=0.65, color=BARS)
        axes.annotate(words, (length, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7)
    axes.margins(x=0.2)
