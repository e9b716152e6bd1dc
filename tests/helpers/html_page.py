"""Reads a page of HTML, and checks what holds for every page of the package."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = ("meta", "br", "wbr")
ELSEWHERE = ("src", "href", "srcset", "data", "action")  # attributes that refer to other files


class HtmlPage(HTMLParser):
    """A page: its tags, its visible text, and what it refers to. Tags must be closed in order,
    heads of tables have a scope, and pictures a title."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.pieces: list[str] = []
        self.loads: list[str] = []
        self.untitled = 0
        self.feed(html.replace("<wbr>", ""))
        self.close()
        assert self.open == []
        assert self.loads == []
        assert self.untitled == 0
        assert "http" not in html and "url(" not in html and "@import" not in html

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        assert len(named) == len(attrs), attrs
        if self.tags[-1:] == ["svg"] and tag == "title":
            self.untitled -= 1
        self.untitled += tag == "svg" and named.get("role") == "img"
        assert tag != "svg" or named.get("role") == "img" or named.get("aria-hidden") == "true"
        assert tag != "th" or named.get("scope") in ("col", "row", "rowgroup")
        self.tags.append(tag)
        self.loads += [value for key, value in attrs if key in ELSEWHERE]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.pieces.append(data)

    @property
    def text(self) -> str:
        """The visible text and the titles of pictures, with single spaces."""
        return re.sub(r"\s+", " ", " ".join(self.pieces))


def numbers(text: str) -> set[str]:
    """The numbers in a text, as written."""
    return {number.rstrip(".,") for number in re.findall(r"\d[\d,.]*", text)}
