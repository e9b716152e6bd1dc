"""Registries: values by name, registered by modules that may be imported later."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from demask.errors import BadInput, TableError


class Registry:
    """Values by name. Names are declared before the module that registers their values is imported.

    Attributes:
        what: what a value is, for messages: "custom op".
        values: the values registered so far, by name.
        modules: the modules that register values, by declared name.

    Example:

        >>> colors = Registry("color")
        >>> colors.register("red", "#f00")
        >>> colors.get("red"), "blue" in colors
        ('#f00', False)
    """

    def __init__(self, what: str):
        self.what = what
        self.values: dict[str, Any] = {}
        self.modules: dict[str, str] = {}

    def register(self, name: str, value: Any) -> None:
        """Set the value of a name. Raises TableError if the name has a value."""
        if name in self.values:
            raise TableError(f"the {self.what} {name!r} is registered already: one value per name")
        self.values[name] = value

    def declare(self, name: str, module: str) -> None:
        """Set the module that registers a name. Raises TableError if the name has a module."""
        if name in self.modules:
            raise TableError(f"the {self.what} {name!r} is declared already: one module per name")
        self.modules[name] = module

    def get(self, name: str) -> Any:
        """The value of a name; imports its module if needed. Raises BadInput if it is unknown."""
        if name not in self.values and name in self.modules:
            import_module(self.modules[name])
        if name not in self.values:
            raise BadInput(f"expected a {self.what} of {', '.join(self.names())}; got {name!r:.40}")
        return self.values[name]

    def names(self) -> list[str]:
        """The registered and declared names, sorted."""
        return sorted({*self.values, *self.modules})

    def name_of(self, value: Any) -> str | None:
        """The name of a registered value; None for other objects."""
        return next((name for name, other in self.values.items() if other is value), None)

    def __contains__(self, name: object) -> bool:
        return name in self.values or name in self.modules


CUSTOM_OPS = Registry("custom op")  # by name ("segment"): `ops.custom.CustomOp`
RESULT_KINDS = Registry("kind of network")  # by name in archives ("tiled"): the class
# What lower parts call of higher ones: "optimize", the function, and "segment", one layer as a
# segment, to measure them; "smaller", for a network of transformers with fewer zeros, and "packed", for
# one whose layers are packed, so that it is saved with them.
RUNNERS = Registry("way to run a network")
