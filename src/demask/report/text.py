"""A report as plain text of 100 columns, and the formats that the web page shares."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from demask.report.speed import returned, speed_parts
from demask.report.values import Decline, ReportValues
from demask.text_table import number_table, render_text

ROWS = 20  # modules and reasons shown in the text; `to_dict` and `to_html` hold them all
PLACES = 3  # places named per reason
PARTS = 12  # parts named that are graphs
ADDED = "(added by the result)"
UNCALLED = "(modules that are not called)"

# Every op that only restores a shape, by its effect, and why a network needs it.
EFFECTS = {
    "scatter": "a reader needs the full shape of what was computed smaller",
    "scatter-add": "the operands of an add have different positions",
    "gather": "a reader needs fewer positions than others do, or another order",
    "slice": "a reader needs one run of the positions computed",
    "pad": "a reader needs more positions, at one end, than were computed",
    "border map": "constants enter a zero-padded window, so they differ at the border",
}


def render(report: ReportValues) -> str:
    """The report as text: what was returned, sizes, what was removed, and what was not."""
    return render_text(*_parts(report))


def sizes_rows(report: ReportValues) -> list[tuple[str, str, str, str]]:
    """One row per size: its name, before, after, and the share that is left."""
    before, after = report.before, report.after
    pairs = [
        ("parameters", before.parameters, after.parameters),
        ("buffers", before.buffers, after.buffers),
        report.work,
        ("bytes", before.bytes, after.bytes),
    ]
    pairs = [row for row in pairs if row[0] != "buffers" or row[1] or row[2]]
    return [(name, f"{old:,}", f"{new:,}", share(new, old)) for name, old, new in pairs]


def share(part: float, whole: float) -> str:
    """`part` of `whole` in percent, or a dash where the whole is nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "–"


def scatters_line(report: ReportValues) -> str:
    """The ops that only restore shapes, by effect, or `none`."""
    counts = [f"{count} {effect}" for effect, count in report.scatters.items() if count]
    return ", ".join(counts) or "none"


def scatters_reasons(report: ReportValues) -> list[str]:
    """One line per effect of the result: its count, and why the network needs it."""
    left = [(effect, count) for effect, count in report.scatters.items() if count]
    return [f"{count} {effect}: {EFFECTS.get(effect, 'no reason known')}" for effect, count in left]


def returned_lines(report: ReportValues) -> list[str]:
    """Which network was returned, and why, where that is known."""
    if line := returned(report.decisions):
        return [line]
    reasons = list(report.graph_reasons)
    if report.form == "class" and not reasons:
        return ["returned: the network's own class; only shapes changed"]
    if report.form == "class":
        more = [f"and {len(reasons) - PARTS} more parts"] if len(reasons) > PARTS else []
        head = "returned: the network's own class, with parts of it as graphs:"
        return ["\n".join([head, *(f"  {line}" for line in (*reasons[:PARTS], *more))])]
    return [f"returned: a graph: {'; '.join(reasons[: PLACES + 1])}"] if reasons else []


def decline_line(decline: Decline) -> str:
    """One reason as one line: the number of slices, the reason, the first places."""
    named = ", ".join(decline.places[:PLACES])
    more = len(decline.places) - PLACES
    places = f"{named} and {more} more" if more > 0 else named
    return f"{decline.slices:,} slices not removed: {decline.text} ({places})"


def _parts(report: ReportValues) -> Iterable[RenderableType]:
    yield from (Text(f"{line}\n") for line in returned_lines(report))
    yield _sizes_table(report)
    yield Text("")
    if report.nothing_removed:
        yield Text(report.summary)
    yield from map(Text, _shortened([decline_line(item) for item in report.declined], "reasons"))
    yield from (Text(f"note: {note}") for note in report.notes)
    if removed_rows(report):
        yield Text("")
        yield _removed_table(report)
    yield Text(f"\nops that only restore shapes: {scatters_line(report)}")
    yield from map(Text, scatters_reasons(report))
    if report.densities:
        yield Text("")
        yield _sparse_table(report)
    if report.speed is not None:
        yield Text("")
        yield from speed_parts(report.speed, report.decisions)


def _sizes_table(report: ReportValues) -> Table:
    table = number_table("", "before", "after", "share")
    for row in sizes_rows(report):
        table.add_row(*row)
    return table


def removed_rows(report: ReportValues, most: int | None = None) -> list[tuple[str, str]]:
    """One row per module with the parameters removed there, at most `most` modules one by one; the
    rows add up to `before.parameters` - `after.parameters`."""
    counts = list(report.removed.items())
    rows = [(module or "(the model itself)", f"{count:,}") for module, count in counts[:most]]
    if rest := [count for _, count in counts[len(rows) :]]:
        rows.append((f"{len(rest)} more modules", f"{sum(rest):,}"))
    if report.uncalled:
        rows.append((UNCALLED, f"{report.uncalled:,}"))
    if report.added:
        rows.append((ADDED, f"-{report.added:,}"))
    return rows


def _removed_table(report: ReportValues) -> Table:
    table = number_table("module", "parameters removed")
    for module, count in removed_rows(report, ROWS):
        table.add_row(Text(module), count)
    return table


def sparse_rows(report: ReportValues) -> list[tuple[str, str]]:
    """One row per sparse layer: its name, and the share of its weights that is stored."""
    return [(name, share(density, 1.0)) for name, density in report.densities.items()]


def _sparse_table(report: ReportValues) -> Table:
    table = number_table("sparse layers", "weights stored")
    rows = sparse_rows(report)
    for name, stored in rows[:ROWS]:
        table.add_row(Text(name), stored)
    if len(rows) > ROWS:
        table.add_row(f"{len(rows) - ROWS} more layers", "")
    return table


def _shortened(lines: list[str], what: str) -> list[str]:
    more = len(lines) - ROWS
    return [*lines[:ROWS], f"... and {more} more {what}"] if more > 0 else lines
