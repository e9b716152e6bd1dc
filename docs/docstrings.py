"""An extension of Griffe: docstrings of this project as its parser of Google's style reads them."""

from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Sections called "Example:" are code that doctest runs, as those called "Examples:"."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rename the section of one object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
