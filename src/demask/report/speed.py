"""How fast a result of optimize() is, and what was chosen for its pieces, as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from demask.graph.provenance import GIVEN, WHOLE, Speed, TuneDecision
from demask.text_table import number_table

NAMED = 3  # places named per row


@dataclass(frozen=True, slots=True)
class SpeedChoice:
    """Pieces for which one form was chosen among the same others: how many, the seconds of all of
    them in that form, and in the form that is the next best for all; the first places."""

    form: str
    pieces: int
    seconds: float
    instead: str
    other: float
    places: tuple[str, ...]


def returned(decisions: Sequence[TuneDecision]) -> str:
    """Which network optimize() returned, in one line; empty of another function's result."""
    whole = next((decision for decision in decisions if decision.place == WHOLE), None)
    if whole is None:
        return ""
    if whole.chosen == GIVEN:
        return "returned: the network as given"
    return f"returned: {whole.chosen}"


def speed_parts(speed: Speed, decisions: Sequence[TuneDecision]) -> Iterable[RenderableType]:
    """Lines and tables that say what was measured."""
    given, result = (_milliseconds(row) for row in (speed.given, speed.result))
    threads = f"{speed.threads} thread{'s' if speed.threads > 1 else ''}"
    yield Text(f"as given {given} ms, now {result} ms: {speed.ratio:.2f} x")
    yield Text(f"at least {speed.least:.2f} x, by {speed.pairs} rounds in turns, {threads}")
    yield Text(speed.machine)
    for decision in decisions:
        if decision.place == WHOLE:
            yield _whole(decision)
    found = choices([decision for decision in decisions if decision.place != WHOLE])
    if found:
        yield _pieces(found)


def choices(decisions: Sequence[TuneDecision]) -> list[SpeedChoice]:
    """Decisions by what was chosen, and by what could have been; most seconds first."""
    groups: dict[tuple[str, tuple[str, ...]], list[TuneDecision]] = {}
    for decision in decisions:
        groups.setdefault((decision.chosen, tuple(decision.seconds)), []).append(decision)
    found = []
    for (form, _), group in groups.items():
        totals = {name: sum(d.seconds[name] for d in group) for name in group[0].seconds}
        others = {name: taken for name, taken in totals.items() if name != form and taken < inf}
        instead = min(others, key=others.__getitem__, default="")
        places = tuple(decision.place for decision in group)
        found.append(SpeedChoice(form, len(group), totals[form], instead, others.get(instead, inf),
                            places))  # fmt: skip
    return sorted(found, key=lambda choice: -choice.seconds)


def _whole(decision: TuneDecision) -> Table:
    table = number_table("the network in each form", "ms")
    for form, taken in sorted(decision.seconds.items(), key=lambda row: row[1]):
        word = f"{form} (returned)" if form == decision.chosen else form
        table.add_row(word, f"{1e3 * taken:.2f}")
    return table


def _pieces(found: Sequence[SpeedChoice]) -> Table:
    table = number_table("pieces, asked one by one", "how many", "ms", "ms in the next best form")
    table.add_column("where")
    for choice in found:
        more = choice.pieces - NAMED
        where = ", ".join(choice.places[:NAMED]) + (f" and {more} more" if more > 0 else "")
        other = f"{1e3 * choice.other:.2f} ({choice.instead})" if choice.instead else "–"
        row = (str(choice.pieces), f"{1e3 * choice.seconds:.2f}", other, Text(where))
        table.add_row(choice.form, *row)
    return table


def _milliseconds(row: tuple[float, float, float]) -> str:
    median, low, high = (1e3 * taken for taken in row)
    return f"{median:.2f} ({low:.2f}–{high:.2f})"
