"""The measured speed of a result of optimize(), and the choices for its pieces, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from demask.graph.provenance import GIVEN, WHOLE, Speed, TuneDecision
from demask.machine.describe import format_threads
from demask.pages import InTerminal, Lines, OnPage, Section, TextTable

NAMED = 3  # places named per row


@dataclass(frozen=True, slots=True)
class SpeedChoice:
    """Pieces with the same chosen implementation and the same alternatives: their number, the sum
    of their seconds in the chosen one and in the next best (`instead`, `other`), their places."""

    form: str
    pieces: int
    seconds: float
    instead: str
    other: float
    places: tuple[str, ...]


def returned(decisions: Sequence[TuneDecision]) -> str:
    """One line: which network optimize() returned; empty for results of other functions."""
    whole = next((decision for decision in decisions if decision.place == WHOLE), None)
    if whole is None:
        return ""
    if whole.chosen == GIVEN:
        return "returned: the original network"
    return f"returned: {whole.chosen}"


def speed_sections(speed: Speed, decisions: Sequence[TuneDecision]) -> Iterator[Section]:
    """The lines and tables of a measurement."""
    original, result = (_milliseconds(row) for row in (speed.given, speed.result))
    yield Lines(
        [
            f"original {original} ms, result {result} ms: {speed.ratio:.2f} x",
            f"at least {speed.least:.2f} x, from {speed.pairs} rounds in turns, {format_threads(speed.threads)}",
            speed.machine,
        ],
        "Speed",
        is_wrapped=True,
    )
    for decision in decisions:
        if decision.place == WHOLE:
            yield _candidates(decision)
    pieces = choices([decision for decision in decisions if decision.place != WHOLE])
    yield InTerminal([_pieces(pieces, NAMED)])
    yield OnPage([_pieces(pieces, None)])


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
        places = tuple(decision.place for decision in group)
        rows.append(SpeedChoice(form, len(group), totals[form], instead, others.get(instead, inf), places))
    return sorted(rows, key=lambda choice: -choice.seconds)


def _candidates(decision: TuneDecision) -> TextTable:
    rows = []
    for form, taken in sorted(decision.seconds.items(), key=lambda row: row[1]):
        name = "original" if form == GIVEN else form
        word = f"{name} (returned)" if form == decision.chosen else name
        rows.append((word, f"{1e3 * taken:.2f}"))
    return TextTable(("candidate", "ms"), rows, is_close=True)


def _pieces(choices: Sequence[SpeedChoice], named: int | None) -> TextTable:
    """named: places that are named per row; None for all."""
    rows = []
    for choice in choices:
        places = choice.places[:named]
        more = len(choice.places) - len(places)
        where = ", ".join(places) + (f" and {more} more" if more else "")
        other = f"{1e3 * choice.other:.2f} ({choice.instead})" if choice.instead else "–"
        rows.append((choice.form, str(choice.pieces), f"{1e3 * choice.seconds:.2f}", other, where))
    head = ("pieces, chosen one by one", "count", "ms", "ms of the next best", "where")
    return TextTable(head, rows, left=(0, 4), is_close=True)


def _milliseconds(row: tuple[float, float, float]) -> str:
    median, low, high = (1e3 * taken for taken in row)
    return f"{median:.2f} ({low:.2f}–{high:.2f})"
