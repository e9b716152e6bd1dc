"""Pictures of a sensitivity and of a search, with matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demask.files import atomic_write as atomic
from demask.files.atomic_write import PICTURE_DOTS, check_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = "viridis"  # from the first group to the last
DENSE, CHOSEN, OTHERS = "#8c8c8c", "#d1661f", "#2a78b5"
NAMED = 14  # groups: more have a color bar instead of a legend
COSTS = {"macs": "MACs", "ms": "predicted milliseconds", "parameters": "parameters"}
WORST = 4  # groups that then are named at their lines


def draw_sensitivity(sensitivity: Any, path: Path) -> None:
    """Write the picture of a `Sensitivity` to `path`, completely or not at all: accuracy, MACs and
    milliseconds by the share of each group that is removed."""
    check_picture(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    panels = figure.subplots(1, 3)
    dense, lines = sensitivity.dense, sensitivity.by_group
    columns: Sequence[tuple[str, Callable[[Any], float]]] = (
        ("accuracy", lambda row: row.accuracy),
        ("MACs of the network, % of all", lambda row: 100 * row.macs / max(dense.macs, 1)),
        ("predicted milliseconds", lambda row: row.milliseconds),
    )
    for axes, (title, value) in zip(panels, columns, strict=True):
        axes.set_title(title, loc="left", fontsize=10)
        axes.axhline(value(dense), color=DENSE, linewidth=0.8, linestyle=":")
        for color, (name, rows) in zip(_line_colors(len(lines)), lines.items(), strict=True):
            x = [0.0, *(100 * row.amount for row in rows)]
            y = [value(dense), *map(value, rows)]
            axes.plot(x, y, color=color, linewidth=1.4, marker="o", markersize=3, label=name)
        _plain_axes(axes, "slices of the group removed, %")
    _name_lines(figure, panels[0], lines)
    _write_figure(figure, path)


def _line_colors(count: int) -> list[Any]:
    from matplotlib import colormaps

    scale = colormaps[COLORS]
    return [scale(0.92 * k / max(count - 1, 1)) for k in range(count)]


def _name_lines(figure: Figure, axes: Axes, lines: dict[str, list[Any]]) -> None:
    """A legend of the groups; of many, the names of those that lose most, and a color bar."""
    if len(lines) <= NAMED:
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", fontsize=7, frameon=False)
        return
    worst = sorted(lines, key=lambda name: lines[name][-1].accuracy)[:WORST]
    for name in worst:
        last = lines[name][-1]
        axes.annotate(
            name, (100 * last.amount, last.accuracy), fontsize=7, ha="right", xytext=(-4, 4), textcoords="offset points"
        )
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    bar = figure.colorbar(ScalarMappable(Normalize(1, len(lines)), COLORS), ax=axes.figure.axes)
    bar.set_label(f"group, from the first to the last of {len(lines)}", fontsize=8)


def draw_search(search: Any, path: Path) -> None:
    """Write the picture of a `Search` to `path`, completely or not at all: the accuracy of every trial
    by its cost, those that no other beats, and the network as it is."""
    check_picture(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.subplots()
    done = [trial for trial in search.trials if trial.accuracy is not None]
    cost = search.cost_of
    axes.plot(
        [cost(t) for t in done], [t.accuracy for t in done], "o", color=OTHERS, markersize=4, alpha=0.6, label="trials"
    )
    front = sorted(search.front, key=cost)
    axes.plot(
        [cost(t) for t in front],
        [t.accuracy for t in front],
        "o-",
        color=CHOSEN,
        markersize=5,
        linewidth=1.2,
        label="no other is better and cheaper",
    )
    axes.plot([cost(search.dense)], [search.dense.accuracy], "s", color=DENSE, label="as it is")
    if search.budget is not None:
        axes.axvline(search.budget, color=DENSE, linestyle=":", label="budget")
    axes.set_ylabel("accuracy")
    _plain_axes(axes, COSTS[search.cost])
    axes.legend(fontsize=8, frameon=False)
    _write_figure(figure, path)


def _plain_axes(axes: Axes, label: str) -> None:
    axes.set_xlabel(label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _write_figure(figure: Figure, path: Path) -> None:
    with atomic.write(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=PICTURE_DOTS)
