"""What a result shows: sections as data, printed in a terminal and written as a web page."""

from demask.pages.sections import (
    Box,
    Command,
    Curve,
    InTerminal,
    Lines,
    NetworkPicture,
    OnPage,
    Page,
    Section,
    Span,
    StepCharts,
    TextTable,
    Timeline,
)
from demask.pages.source import PageSource

__all__ = [
    "Box",
    "Command",
    "Curve",
    "InTerminal",
    "Lines",
    "NetworkPicture",
    "OnPage",
    "Page",
    "PageSource",
    "Section",
    "Span",
    "StepCharts",
    "TextTable",
    "Timeline",
]
