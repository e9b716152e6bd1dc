"""The sections of a page, as values: `text` prints them and `html` writes them, so that both have the
same numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Lines:
    """Sentences, one per line. is_wrapped: whether long lines are wrapped in a terminal. is_close:
    whether no empty line precedes them there."""

    lines: Sequence[str]
    heading: str = ""
    is_wrapped: bool = False
    is_close: bool = False


@dataclass(frozen=True, slots=True)
class TextTable:
    """Rows of text below a head. A row of one cell is a heading of those that follow."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    heading: str = ""
    left: Sequence[int] = (0,)  # columns that are text, all others are numbers
    title: str = ""
    terminal_rows: Sequence[Sequence[str]] | None = None  # if a terminal shows others
    unbroken: Sequence[int] = ()  # columns that a terminal does not wrap
    rules: Sequence[int] = ()  # numbers of rows with a line above them
    is_close: bool = False
    pad_edge: bool = True
    width: int | None = None  # in a terminal; None for 100 columns


@dataclass(frozen=True, slots=True)
class Box:
    """A module of a picture, by its weight."""

    name: str
    rows: tuple[int, int]  # of the weight, before and after; after is 0 where nothing is left
    columns: tuple[int, int]  # likewise
    words: str  # why
    block: str | None = None  # the group that it is drawn in; None: what its name begins with
    is_changed: bool = False


@dataclass(frozen=True, slots=True)
class NetworkPicture:
    """A network as one box per module, in order of execution. stays, went, changed: what the looks
    of boxes mean; those without words are left out. words: what boxes are."""

    boxes: Sequence[Box]
    heading: str = "The network"
    stays: str = "stays"
    went: str = "went"
    changed: str = ""
    words: str = ""


@dataclass(frozen=True, slots=True)
class Span:
    """A step of a timeline: its length, and the bytes that are alive in it."""

    name: str
    length: float
    bytes: int
    words: str = ""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Steps against bytes alive. across: what lengths are. limits: bytes by name, such as a
    budget."""

    spans: Sequence[Span]
    across: str
    heading: str = "Over time and memory"
    limits: Mapping[str, int] = field(default_factory=dict)

    @property
    def peak(self) -> Span:
        """The span with the most bytes."""
        return max(self.spans, key=lambda span: span.bytes)


@dataclass(frozen=True, slots=True)
class Curve:
    """Values over steps, as points (step, value). has_dots: whether points are marked."""

    title: str
    points: Sequence[tuple[float, float]]
    has_dots: bool = False


@dataclass(frozen=True, slots=True)
class StepCharts:
    """Charts over the same steps, 0 to `last`. events: vertical lines, as (step, words). across:
    what steps are."""

    curves: Sequence[Curve]
    last: float
    events: Sequence[tuple[float, str]] = ()
    heading: str = ""
    words: str = ""
    across: str = "steps"


@dataclass(frozen=True, slots=True)
class Command:
    """A command to run next, and what it does."""

    command: str
    words: str = ""
    heading: str = "Next"


@dataclass(frozen=True, slots=True)
class InTerminal:
    """Sections that a terminal shows, and a page does not."""

    sections: Sequence[Section]


@dataclass(frozen=True, slots=True)
class OnPage:
    """Sections that a page shows, and a terminal does not."""

    sections: Sequence[Section]


Section = Lines | TextTable | NetworkPicture | Timeline | StepCharts | Command | InTerminal | OnPage


@dataclass(frozen=True, slots=True)
class Page:
    """What a result shows. summary: one sentence at the top of the page. note: the last line of the
    page."""

    title: str
    sections: Sequence[Section]
    summary: str = ""
    note: str = ""

    def followed_by(self, *sections: Section) -> Page:
        """The page with more sections at its end."""
        return replace(self, sections=(*self.sections, *sections))


def flatten(sections: Sequence[Section], shown: type[InTerminal | OnPage]) -> Iterator[Section]:
    """Sections with those that one of the two shows alone in place of what holds them."""
    for section in sections:
        if isinstance(section, InTerminal | OnPage):
            yield from flatten(section.sections, shown) if isinstance(section, shown) else ()
        else:
            yield section
