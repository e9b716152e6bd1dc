"""The sections of a report: the same rows in a terminal and on a web page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from demask.graph.provenance import GIVEN, WHOLE, Speed, TuneDecision
from demask.machine.describe import format_threads
from demask.pages import Box, InTerminal, Lines, NetworkPicture, OnPage, Section, TextTable
from demask.report.values import Decline, ModuleRow, ReportValues, share

ALL_TIMED = (
    "Milliseconds are of the network. The page of demask bench MODEL --report bench.html has those of each module."
)
PARTS_TIMED = (
    "Milliseconds of modules are of the chosen form, as measured for this choice, each "
    "alone; those of all are of the network, called in turns."
)

ROWS = 20  # modules and reasons shown in a terminal; `to_dict` and `to_html` hold them all
NAMED = 3  # modules named per row
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
OF_ONE_READER = ("slice", "border map")  # effects for which no two layers have to differ


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
    return [f"returned: a graph: {'; '.join(reasons[: NAMED + 1])}"] if reasons else []


def decline_line(decline: Decline) -> str:
    """One reason as one line: the number of slices, the reason, the first modules."""
    modules = ", ".join(decline.places[:NAMED])
    more = len(decline.places) - NAMED
    modules = f"{modules} and {more} more" if more > 0 else modules
    return f"{decline.slices:,} slices not removed: {decline.text} ({modules})"


def report_sections(report: ReportValues, *, removed: bool = True) -> Iterator[Section]:
    """The sections of a report. removed: whether a terminal lists what was removed by module."""
    returned = returned_lines(report)
    yield InTerminal([Lines(returned)])
    yield sizes_table(report)
    speed = report.speed
    measured = [] if speed is None else [*speed_sections(speed, report.decisions)]
    yield OnPage([Lines(returned, "What was returned"), *measured, *module_sections(report), *_more_sections(report)])
    lines = [report.summary] if report.nothing_removed else []
    lines += _first_rows([decline_line(item) for item in report.declined], "reasons")
    lines += [f"note: {note}" for note in report.notes]
    yield InTerminal([Lines(lines, is_wrapped=True)])
    if removed:
        head = ("module", "parameters removed")
        short = TextTable(head, removed_rows(report, ROWS))
        own = [] if report.modules else [TextTable(head, removed_rows(report), "Removed")]
        yield from (InTerminal([short]), OnPage(own))
    counts = ", ".join(f"{count} {effect}" for effect, count in report.scatters.items() if count) or "none"
    yield Lines(
        [f"ops that only restore shapes: {counts}", *scatters_reasons(report)], "Ops that only restore shapes", True
    )
    if report.densities:
        rows = [(name, share(density, 1.0)) for name, density in report.densities.items()]
        more = [(f"{len(rows) - ROWS} more layers", "")] if len(rows) > ROWS else []
        yield TextTable(("sparse layers", "weights stored"), rows, "Sparse layers", terminal_rows=[*rows[:ROWS], *more])
    yield InTerminal(measured)
    if report.timeline is not None:
        yield OnPage([report.timeline])


def sizes_table(report: ReportValues) -> TextTable:
    """Sizes before and after, and the share that is left."""
    before, after = report.before, report.after
    pairs = [("parameters", before.parameters, after.parameters)]
    if before.buffers or after.buffers:
        pairs.append(("buffers", before.buffers, after.buffers))
    pairs += [report.work, ("bytes", before.bytes, after.bytes)]
    rows = [(name, f"{old:,}", f"{new:,}", share(new, old)) for name, old, new in pairs]
    return TextTable(("", "before", "after", "share"), rows)


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


def _first_rows(lines: list[str], what: str) -> list[str]:
    more = len(lines) - ROWS
    return [*lines[:ROWS], f"... and {more} more {what}"] if more > 0 else lines


def module_sections(report: ReportValues, timed: str = "") -> Iterator[Section]:
    """Every module once as a box and once as a row; nothing for networks without a record. timed:
    how milliseconds were measured, where that was not by optimize()."""
    if not report.modules:
        return
    unit, divisor = module_unit(report)
    words = "A box is the weight of a module: rows across, columns down."
    boxes = [_module_box(row, report) for row in report.modules if any(row.parameters) or any(row.macs)]
    yield NetworkPicture(boxes, words=words)
    rows = [_module_cells(row, divisor) for row in report.modules]
    speed, times = report.speed, [row.seconds for row in report.modules]
    total = tuple(sum(filter(None, of)) or None for of in zip(*times, strict=True))
    total = total if speed is None else (speed.given[0], speed.result[0])
    others = [report.before.parameters, report.after.parameters]
    for row in report.modules:
        others = [n - m for n, m in zip(others, row.parameters, strict=True)]
    if any(others):
        rows.append(("(not read by this call)", *_size_cells(*others), "", "", "", "", "", ""))
    rows.append(
        (
            "all",
            *_size_cells(report.before.parameters, report.after.parameters),
            share(report.after.parameters, report.before.parameters),
            f"{report.before.macs // divisor:,}",
            f"{report.after.macs // divisor:,}",
            share(report.after.macs, report.before.macs),
            *_format_seconds(total),
        )
    )
    head = (
        "module",
        "parameters before",
        "removed",
        "after",
        "share",
        f"{unit} before",
        "after",
        "share",
        "ms before",
        "after",
    )
    if total == (None, None):
        head, rows = head[:-2], [row[:-2] for row in rows]
    yield TextTable(head, rows, "Modules")
    if speed is not None:
        timed = PARTS_TIMED if any(map(any, times)) else ALL_TIMED
    yield Lines([timed] if timed else [])


def module_unit(report: ReportValues) -> tuple[str, int]:
    """The unit of multiply-adds of modules, and what those of a call are divided by."""
    unit, before, _ = report.work
    divisor = max(report.before.macs // before, 1) if before else 1
    if any(n % divisor for row in report.modules for n in row.macs):
        return "MACs per call", 1
    return unit, divisor


def _module_cells(row: ModuleRow, divisor: int) -> tuple[str, ...]:
    parameters, macs = row.parameters, [n // divisor for n in row.macs]
    return (
        row.name or "(the model itself)",
        *_size_cells(*parameters),
        share(parameters[1], parameters[0]),
        *map(_format_count, macs),
        share(macs[1], macs[0]),
        *_format_seconds(row.seconds),
    )


def _size_cells(before: int, after: int) -> tuple[str, ...]:
    """Parameters before, those that were removed, and after."""
    return _format_count(before), _format_count(max(before - after, 0)), _format_count(after)


def _format_seconds(seconds: tuple[float | None, ...]) -> list[str]:
    return ["–" if one is None else f"{1e3 * one:.3f}" for one in seconds]


def _format_count(number: int) -> str:
    return f"{number:,}" if number else "–"


def _module_box(row: ModuleRow, report: ReportValues) -> Box:
    """The box of a module. Without a weight of known shape it is a row of parameters."""
    before, after = list(row.parameters[:1]), list(row.parameters[1:])
    if row.weight is not None:
        before, after = (list(shape) for shape in row.weight)
    elif not any(row.parameters):
        before, after = [1], [min(row.macs[1], 1)]
    words = [f"{row.parameters[0]:,} parameters"]
    if row.parameters[0] != row.parameters[1]:
        words = [f"{row.parameters[0]:,} -> {row.parameters[1]:,} parameters"]
    if row.weight and len(before) > 1:
        sizes = [" × ".join(map(str, shape)) for shape in row.weight]
        words.append(f"weight {' -> '.join(dict.fromkeys(sizes))}")
    if not row.parameters[1] and row.parameters[0]:
        words.append("it computes a constant, or nothing reads it: all of it went")
    elif row.parameters[1] < row.parameters[0]:
        words.append("what went is zero, or nothing reads it")
    if (density := report.densities.get(row.name)) is not None:
        words.append(f"{share(density, 1.0)} of its weights are stored")
    words += [
        f"{item.slices:,} slices stay in {len(item.places)} modules: {item.text}"
        for item in report.declined
        if row.name in item.places
    ]
    words += [line for line in report.graph_reasons if line.startswith(f"{row.name} ")]
    columns = (before[1] if len(before) > 1 else 1, after[1] if len(after) > 1 else 1)
    return Box(row.name or "(the model itself)", (before[0], after[0]), columns, "; ".join(words))


@dataclass(frozen=True, slots=True)
class SpeedChoice:
    """Pieces with the same chosen implementation and the same alternatives: their number, the sum
    of their seconds in the chosen one and in the next best (`instead`, `other`), their modules."""

    form: str
    pieces: int
    seconds: float
    instead: str
    other: float
    modules: tuple[str, ...]


def returned(decisions: Sequence[TuneDecision]) -> str:
    """One line: which network optimize() returned; empty for results of other functions."""
    network = next((decision for decision in decisions if decision.place == WHOLE), None)
    if network is None:
        return ""
    if network.chosen == GIVEN:
        return "returned: the original network"
    return f"returned: {network.chosen}"


def speed_sections(speed: Speed, decisions: Sequence[TuneDecision]) -> Iterator[Section]:
    """The lines and tables of a measurement."""
    original, result = (_format_spread(row) for row in (speed.given, speed.result))
    is_original = any(decision.place == WHOLE and decision.chosen == GIVEN for decision in decisions)
    name = "best other candidate" if is_original else "result"
    yield Lines(
        [
            f"original {original} ms, {name} {result} ms: {speed.ratio:.2f} x",
            f"at least {speed.least:.2f} x, from {speed.pairs} rounds in turns, {format_threads(speed.threads)}",
            speed.machine,
        ],
        "Speed",
        is_wrapped=True,
    )
    for decision in decisions:
        if decision.place == WHOLE:
            yield _candidates_table(decision)
    pieces = choices([decision for decision in decisions if decision.place != WHOLE])
    yield InTerminal([_pieces_table(pieces, NAMED)])
    yield OnPage([_pieces_table(pieces, None)])


def choices(decisions: Sequence[TuneDecision]) -> list[SpeedChoice]:
    """Decisions grouped by choice and alternatives; most seconds first."""
    groups: dict[tuple[str, tuple[str, ...]], list[TuneDecision]] = {}
    for decision in decisions:
        groups.setdefault((decision.chosen, tuple(decision.seconds)), []).append(decision)
    rows = []
    for (form, _), group in groups.items():
        totals = {name: sum(d.seconds[name] for d in group) for name in group[0].seconds}
        others = {name: taken for name, taken in totals.items() if name != form and taken < inf}
        instead = min(others, key=others.__getitem__, default="")
        modules = tuple(decision.place for decision in group)
        rows.append(SpeedChoice(form, len(group), totals[form], instead, others.get(instead, inf), modules))
    return sorted(rows, key=lambda choice: -choice.seconds)


def _candidates_table(decision: TuneDecision) -> TextTable:
    rows = []
    for form, taken in sorted(decision.seconds.items(), key=lambda row: row[1]):
        name = "original" if form == GIVEN else form
        word = f"{name} (returned)" if form == decision.chosen else name
        rows.append((word, f"{1e3 * taken:.2f}"))
    return TextTable(("candidate", "ms"), rows, is_close=True)


def _pieces_table(choices: Sequence[SpeedChoice], named: int | None) -> TextTable:
    """named: modules that are named per row; None for all."""
    rows = []
    for choice in choices:
        modules = choice.modules[:named]
        more = len(choice.modules) - len(modules)
        where = ", ".join(modules) + (f" and {more} more" if more else "")
        other = f"{1e3 * choice.other:.2f} ({choice.instead})" if choice.instead else "–"
        rows.append((choice.form, str(choice.pieces), f"{1e3 * choice.seconds:.2f}", other, where))
    head = ("pieces, chosen one by one", "count", "ms", "ms of the next best", "where")
    return TextTable(head, rows, left=(0, 4), is_close=True)


def _format_spread(row: tuple[float, float, float]) -> str:
    median, low, high = (1e3 * taken for taken in row)
    return f"{median:.2f} ({low:.2f}–{high:.2f})"
