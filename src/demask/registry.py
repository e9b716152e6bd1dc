"""Values by name, registered where they are defined, in modules that may be imported later."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from demask.errors import BadInput, TableError


class Registry:
    """Values by name. A declared name is known before the module that registers its value is
    imported.

    what: what a value is, for messages. values: those registered so far. modules: of declared
    names.

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
        """Set the value of a name; TableError for a second one."""
        if name in self.values:
            raise TableError(f"the {self.what} {name!r} is registered already: one value per name")
        self.values[name] = value

    def declare(self, name: str, module: str) -> None:
        """Name the module that registers a value; TableError for a second one."""
        if name in self.modules:
            raise TableError(f"the {self.what} {name!r} is declared already: one module per name")
        self.modules[name] = module

    def get(self, name: str) -> Any:
        """The value of a name, its module imported where needed; BadInput lists the names known."""
        if name not in self.values and name in self.modules:
            import_module(self.modules[name])
        if name not in self.values:
            raise BadInput(f"expected a {self.what} of {', '.join(self.names())}; got {name!r:.40}")
        return self.values[name]

    def names(self) -> list[str]:
        """Names that are registered or declared, sorted."""
        return sorted({*self.values, *self.modules})

    def name_of(self, value: Any) -> str | None:
        """The name of a registered value, None for any other."""
        return next((name for name, other in self.values.items() if other is value), None)

    def __contains__(self, name: object) -> bool:
        return name in self.values or name in self.modules


CUSTOM_OPS = Registry("custom op")  # by an op's name ("segment"): `ops.own.Own`
RESULT_KINDS = Registry("kind of network")  # by the name in archives ("tiled"): the class
