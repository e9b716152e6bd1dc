"""Results that print as text and write themselves as web pages."""

from __future__ import annotations

from pathlib import Path

from demask.pages.sections import Page


class PageSource:
    """A result with a page: `print` shows it as text, `to_html` and notebooks as HTML."""

    __slots__ = ()

    def page(self) -> Page:
        """What is shown, as sections."""
        raise NotImplementedError

    def __str__(self) -> str:
        from demask.pages.text import text_of

        return text_of(self.page().sections)

    def to_html(self, path: str | Path) -> None:
        """Write the result as one HTML page, which refers to no other file.

        Args:
            path: name of the file. An existing file is replaced; after an error it is unchanged.

        Raises:
            BadInput: the file cannot be written.
        """
        write_page(self.page(), path)

    def _repr_html_(self) -> str:
        """The page as a part of a notebook."""
        from demask.pages.html import fragment

        return fragment(self.page())


def write_page(page: Page, path: str | Path) -> None:
    """Write a page as HTML, complete or not at all. Raises BadInput where that is impossible."""
    from demask.files import atomic_write as atomic
    from demask.pages.html import document

    with atomic.write(path) as file:
        file.write(document(page).encode())
