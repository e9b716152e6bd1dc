"""What a result shows: sections as data, printed in a terminal and written as a web page."""

from demask.pages.sections import (
    Box,
    Command,
    Curve,
    Curves,
    InTerminal,
    Lines,
    NetworkPicture,
    OnPage,
    Page,
    Section,
    Span,
    Table,
    Timeline,
)
from demask.pages.source import PageSource

__all__ = [
    "Box",
    "Command",
    "Curve",
    "Curves",
    "InTerminal",
    "Lines",
    "NetworkPicture",
    "OnPage",
    "Page",
    "PageSource",
    "Section",
    "Span",
    "Table",
    "Timeline",
]
