"""A report as plain text, 100 columns wide, and the small formats that the web page shares."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from demask.report.speed import returned, speed_parts
from demask.report.values import Decline, ReportValues
from demask.text_table import as_text, number_table

ROWS = 20  # modules and reasons shown in the text; `to_dict` and `to_html` hold them all
PLACES = 3  # places named per reason
PARTS = 12  # parts named that are graphs

# Every op that only keeps a shape, by its effect, and why a network needs it.
EFFECTS = {
    "scatter": "a reader needs the full shape of what was computed smaller",
    "scatter-add": "the two sides of an add keep different positions",
    "gather": "a reader needs fewer positions than others do, or another order",
    "slice": "a reader needs one run of the positions computed",
    "pad": "a reader needs more positions, at one end, than were computed",
    "border map": "constants enter a zero-padded window, so they differ at the border",
}


def render(report: ReportValues) -> str:
    """The report as text: sizes, then what went, the ops that keep shapes, and what stayed."""
    return as_text(*_parts(report))


def sizes_rows(report: ReportValues) -> list[tuple[str, str, str, str]]:
    """One row per size: its name, before, after, and the share kept."""
    before, after = report.before, report.after
    pairs = [
        ("parameters", before.parameters, after.parameters),
        ("MACs", before.macs, after.macs),
        ("bytes", before.bytes, after.bytes),
    ]
    return [(name, f"{old:,}", f"{new:,}", share(new, old)) for name, old, new in pairs]


def share(part: float, whole: float) -> str:
    """`part` of `whole` in percent, or a dash where the whole is nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "–"


def scatters_line(report: ReportValues) -> str:
    """The ops left that only keep shapes, by effect, or `none`."""
    counts = [f"{count} {effect}" for effect, count in report.scatters.items() if count]
    return ", ".join(counts) or "none"


def scatters_reasons(report: ReportValues) -> list[str]:
    """One line per effect that is left: how often, and why a network needs it."""
    left = [(effect, count) for effect, count in report.scatters.items() if count]
    return [f"{count} {effect}: {EFFECTS.get(effect, 'no reason known')}" for effect, count in left]


def form_lines(report: ReportValues) -> list[str]:
    """What came back, and why, where that is known."""
    reasons = list(report.graph_reasons)
    if report.form == "class" and not reasons:
        return ["came back in its own class: only shapes changed"]
    if report.form == "class":
        more = [f"and {len(reasons) - PARTS} more parts"] if len(reasons) > PARTS else []
        head = "came back in its own class, parts of it as graphs:"
        return ["\n".join([head, *(f"  {line}" for line in (*reasons[:PARTS], *more))])]
    return [f"came back as a graph: {'; '.join(reasons[: PLACES + 1])}"] if reasons else []


def decline_line(decline: Decline) -> str:
    """One reason in one line: how many slices, why, and the first places."""
    named = ", ".join(decline.places[:PLACES])
    more = len(decline.places) - PLACES
    places = f"{named} and {more} more" if more > 0 else named
    return f"{decline.slices:,} slices kept: {decline.text} ({places})"


def _parts(report: ReportValues) -> Iterable[RenderableType]:
    if line := returned(report.decisions):
        yield Text(f"{line}\n")
    yield _sizes_table(report)
    if report.nothing_removed:
        yield Text(f"\n{report.summary}")
    if report.removed:
        yield Text("")
        yield _removed_table(report)
    yield from (Text(f"\n{line}") for line in form_lines(report))
    yield Text(f"\nops that only keep shapes: {scatters_line(report)}")
    yield from map(Text, scatters_reasons(report))
    yield from map(Text, _shortened([decline_line(item) for item in report.declined], "reasons"))
    yield from (Text(f"note: {note}") for note in report.notes)
    if report.densities:
        yield Text("")
        yield _sparse_table(report)
    if report.speed is not None:
        yield Text("")
        yield from speed_parts(report.speed, report.decisions)


def _sizes_table(report: ReportValues) -> Table:
    table = number_table("", "before", "after", "kept")
    for row in sizes_rows(report):
        table.add_row(*row)
    return table


def _removed_table(report: ReportValues) -> Table:
    table = number_table("module", "parameters removed")
    for module, count in list(report.removed.items())[:ROWS]:
        table.add_row(Text(module or "(the model itself)"), f"{count:,}")
    if len(report.removed) > ROWS:
        rest = list(report.removed.values())[ROWS:]
        table.add_row(f"{len(rest)} more modules", f"{sum(rest):,}")
    return table


def sparse_rows(report: ReportValues) -> list[tuple[str, str]]:
    """One row per layer that is computed by its nonzeros alone: its name, what is stored of it."""
    return [(name, share(found, 1.0)) for name, found in report.densities.items()]


def _sparse_table(report: ReportValues) -> Table:
    table = number_table("computed by their nonzeros alone", "weights stored")
    rows = sparse_rows(report)
    for name, stored in rows[:ROWS]:
        table.add_row(Text(name), stored)
    if len(rows) > ROWS:
        table.add_row(f"{len(rows) - ROWS} more layers", "")
    return table


def _shortened(lines: list[str], what: str) -> list[str]:
    more = len(lines) - ROWS
    return [*lines[:ROWS], f"... and {more} more {what}"] if more > 0 else lines
