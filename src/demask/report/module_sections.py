"""The modules of a network in a report: a picture, and a table with sizes before and after."""

from __future__ import annotations

from collections.abc import Iterator

from demask.pages import Box, NetworkPicture, Section, TextTable
from demask.report.values import ModuleRow, ReportValues, share


def module_sections(report: ReportValues) -> Iterator[Section]:
    """Every module once as a box and once as a row; nothing for networks without a record."""
    if not report.modules:
        return
    unit, divisor = module_unit(report)
    words = "A box is the weight of a module: rows across, columns down."
    yield NetworkPicture([_box(row, report) for row in report.modules], words=words)
    rows = [_cells(row, divisor) for row in report.modules]
    others = [report.before.parameters, report.after.parameters]
    for row in report.modules:
        others = [n - m for n, m in zip(others, row.parameters, strict=True)]
    if any(others):
        rows.append(("(not read by this call)", *_sizes(*others), "", "", "", ""))
    rows.append(("all", *_sizes(report.before.parameters, report.after.parameters),
                 share(report.after.parameters, report.before.parameters),
                 f"{report.before.macs // divisor:,}", f"{report.after.macs // divisor:,}",
                 share(report.after.macs, report.before.macs)))  # fmt: skip
    head = (
        "module",
        "parameters before",
        "removed",
        "after",
        "share",
        f"{unit} before",
        "after",
        "share",
    )
    yield TextTable(head, rows, "Modules")


def module_unit(report: ReportValues) -> tuple[str, int]:
    """The unit of multiply-adds of modules, and what those of a call are divided by."""
    unit, before, _ = report.work
    divisor = max(report.before.macs // before, 1) if before else 1
    if any(n % divisor for row in report.modules for n in row.macs):
        return "MACs per call", 1
    return unit, divisor


def _cells(row: ModuleRow, divisor: int) -> tuple[str, ...]:
    parameters, macs = row.parameters, [n // divisor for n in row.macs]
    return (row.name or "(the model itself)", *_sizes(*parameters),
            share(parameters[1], parameters[0]), *map(_count, macs),
            share(macs[1], macs[0]))  # fmt: skip


def _sizes(before: int, after: int) -> tuple[str, ...]:
    """Parameters before, those that were removed, and after."""
    return _count(before), _count(max(before - after, 0)), _count(after)


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
    words += [f"{item.slices:,} slices stay in {len(item.places)} modules: {item.text}"
              for item in report.declined if row.name in item.places]  # fmt: skip
    words += [line for line in report.graph_reasons if line.startswith(f"{row.name} ")]
    columns = (before[1] if len(before) > 1 else 1, after[1] if len(after) > 1 else 1)
    return Box(row.name or "(the model itself)", (before[0], after[0]), columns, "; ".join(words))
