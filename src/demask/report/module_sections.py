"""The modules of a network in a report: a picture, and a table with sizes before and after."""

from __future__ import annotations

from collections.abc import Iterator

from demask.pages import Box, Lines, NetworkPicture, Section, TextTable
from demask.report.values import ModuleRow, ReportValues, share

ALL_TIMED = (
    "Milliseconds are of the network. The page of demask bench MODEL --report bench.html has those of each module."
)
PARTS_TIMED = (
    "Milliseconds of modules are of the chosen form, as measured for this choice, each "
    "alone; those of all are of the network, called in turns."
)


def module_sections(report: ReportValues, timed: str = "") -> Iterator[Section]:
    """Every module once as a box and once as a row; nothing for networks without a record. timed:
    how milliseconds were measured, where that was not by optimize()."""
    if not report.modules:
        return
    unit, divisor = module_unit(report)
    words = "A box is the weight of a module: rows across, columns down."
    boxes = [_box(row, report) for row in report.modules if any(row.parameters) or any(row.macs)]
    yield NetworkPicture(boxes, words=words)
    rows = [_cells(row, divisor) for row in report.modules]
    speed, times = report.speed, [row.seconds for row in report.modules]
    total = tuple(sum(filter(None, of)) or None for of in zip(*times, strict=True))
    total = total if speed is None else (speed.given[0], speed.result[0])
    others = [report.before.parameters, report.after.parameters]
    for row in report.modules:
        others = [n - m for n, m in zip(others, row.parameters, strict=True)]
    if any(others):
        rows.append(("(not read by this call)", *_sizes(*others), "", "", "", "", "", ""))
    rows.append(
        (
            "all",
            *_sizes(report.before.parameters, report.after.parameters),
            share(report.after.parameters, report.before.parameters),
            f"{report.before.macs // divisor:,}",
            f"{report.after.macs // divisor:,}",
            share(report.after.macs, report.before.macs),
            *_milliseconds(total),
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


def _cells(row: ModuleRow, divisor: int) -> tuple[str, ...]:
    parameters, macs = row.parameters, [n // divisor for n in row.macs]
    return (
        row.name or "(the model itself)",
        *_sizes(*parameters),
        share(parameters[1], parameters[0]),
        *map(_count, macs),
        share(macs[1], macs[0]),
        *_milliseconds(row.seconds),
    )


def _sizes(before: int, after: int) -> tuple[str, ...]:
    """Parameters before, those that were removed, and after."""
    return _count(before), _count(max(before - after, 0)), _count(after)


def _milliseconds(seconds: tuple[float | None, ...]) -> list[str]:
    return ["–" if one is None else f"{1e3 * one:.3f}" for one in seconds]


def _count(number: int) -> str:
    return f"{number:,}" if number else "–"


def _box(row: ModuleRow, report: ReportValues) -> Box:
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
