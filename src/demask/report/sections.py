"""The sections of a report: the same rows in a terminal and on a web page."""

from __future__ import annotations

from collections.abc import Iterator

from demask.pages import InTerminal, Lines, OnPage, Page, Section, TextTable
from demask.report.module_sections import module_sections
from demask.report.speed import returned, speed_sections
from demask.report.values import Decline, ReportValues, share

ROWS = 20  # modules and reasons shown in a terminal; `to_dict` and `to_html` hold them all
PLACES = 3  # places named per reason
PARTS = 12  # parts named that are graphs
ADDED = "(added by the result)"
UNCALLED = "(modules that are not called)"

ALIKE = (
    "Layers whose results meet are not masked alike, so that ops restore shapes between them. "
    "demask.prune.align masks the same channels of such layers; then more can go."
)

# Every op that only restores a shape, by its effect, and why a network needs it.
EFFECTS = {
    "scatter": "a reader needs the full shape of what was computed smaller",
    "scatter-add": "the operands of an add have different positions",
    "gather": "a reader needs fewer positions than others do, or another order",
    "slice": "a reader needs one run of the positions computed",
    "pad": "a reader needs more positions, at one end, than were computed",
    "border map": "constants enter a zero-padded window, so they differ at the border",
}


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


OF_ONE_READER = ("slice", "border map")  # effects for which no two layers have to differ


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


def report_page(report: ReportValues, title: str) -> Page:
    """The report as a page: what was returned, sizes, what was removed, and what was not."""
    return Page(title, tuple(report_sections(report)), report.summary)


def report_sections(report: ReportValues, *, removed: bool = True) -> Iterator[Section]:
    """The sections of a report. removed: whether a terminal lists what was removed by module."""
    returned = returned_lines(report)
    yield InTerminal([Lines(returned)])
    yield sizes_table(report)
    speed = report.speed
    measured = [] if speed is None else [*speed_sections(speed, report.decisions)]
    yield OnPage([Lines(returned, "What was returned"), *measured, *module_sections(report), *_more_sections(report)])
    lines = [report.summary] if report.nothing_removed else []
    lines += _shortened([decline_line(item) for item in report.declined], "reasons")
    lines += [f"note: {note}" for note in report.notes]
    yield InTerminal([Lines(lines, is_wrapped=True)])
    if removed:
        head = ("module", "parameters removed")
        short = TextTable(head, removed_rows(report, ROWS))
        own = [] if report.modules else [TextTable(head, removed_rows(report), "Removed")]
        yield from (InTerminal([short]), OnPage(own))
    scatters = [f"ops that only restore shapes: {scatters_line(report)}"]
    yield Lines([*scatters, *scatters_reasons(report)], "Ops that only restore shapes", True)
    if report.densities:
        rows = sparse_rows(report)
        more = [(f"{len(rows) - ROWS} more layers", "")] if len(rows) > ROWS else []
        yield TextTable(("sparse layers", "weights stored"), rows, "Sparse layers", terminal_rows=[*rows[:ROWS], *more])
    yield InTerminal(measured)
    if report.timeline is not None:
        yield OnPage([report.timeline])


def sizes_table(report: ReportValues) -> TextTable:
    """Sizes before and after, and the share that is left."""
    return TextTable(("", "before", "after", "share"), sizes_rows(report))


def _more_sections(report: ReportValues) -> Iterator[Section]:
    """What would free more: zeros that stay, and why; then the other notes."""
    heading, better = "What would free more", report.better
    if report.declined:
        rows = [(item.text, f"{item.slices:,}", ", ".join(item.places)) for item in report.declined]
        yield TextTable(("slices of zeros that stay, and why", "slices", "where"), rows, heading, left=(0, 2))
        heading = ""
    lines = [f"{better[:1].upper()}{better[1:]}."] if better else []
    joining = sum(n for effect, n in report.scatters.items() if effect not in OF_ONE_READER)
    if (better and any(report.scatters.values())) or (heading and joining):
        lines.append(ALIKE)
    if not lines and heading and report.modules:
        lines = ["Nothing that demask knows of."]
    yield Lines(lines, heading)
    yield Lines([note for note in report.notes if note != better], "Notes")


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


def sparse_rows(report: ReportValues) -> list[tuple[str, str]]:
    """One row per sparse layer: its name, and the share of its weights that is stored."""
    return [(name, share(density, 1.0)) for name, density in report.densities.items()]


def _shortened(lines: list[str], what: str) -> list[str]:
    more = len(lines) - ROWS
    return [*lines[:ROWS], f"... and {more} more {what}"] if more > 0 else lines
