"""What a condition is, and what a conditioned module says about itself.

A condition is a frozen dataclass with a name; its fields are its knobs. It has a text form, by
which the command line, tables and error messages call it: the name, then the knobs that differ from
their defaults, `name:value` for the first one and `name:knob=value` in general.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, get_args, get_type_hints, runtime_checkable

from torch import nn

from demask.errors import BadInput
from demask.ops import Table


@runtime_checkable
class Condition(Protocol):
    """A way to do less than the whole network does. Implementations are frozen dataclasses.

    name: what it is called in text. `applied` never changes the model: it returns a module with the
    same call, which has an attribute `conditioned` (a `Conditioned`). Layers it cannot condition
    stay as they are, and `decisions` says why.
    """

    name: ClassVar[str]

    def applied(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        pilot: Any,
        table: Table,
    ) -> nn.Module:
        """The conditioned module. pilot: a simplifier, an nn.Module, an ExecutionData, or None.
        table: of ops."""
        ...


class Decision(NamedTuple):
    """One line about one layer: what is done there, and why.

    >>> print(Decision("fc1", "dense", "its input has no zeros"))
    fc1: dense (its input has no zeros)
    """

    layer: str
    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.what} ({self.why})"


@dataclass(frozen=True, slots=True)
class Conditioned:
    """What a conditioned module says about itself, as its attribute `conditioned`.

    pilot: its text, "" for none. exact: the outputs are those of the unconditioned run,
    bit for bit. decisions: one line per layer.
    """

    condition: Condition
    pilot: str
    exact: bool
    decisions: tuple[Decision, ...] = ()

    def __str__(self) -> str:
        by = f" by {self.pilot}" if self.pilot else ""
        kind = "exact" if self.exact else "outputs may differ"
        return "\n".join([f"{text(self.condition)}{by}, {kind}", *map(str, self.decisions)])


def text(condition: Condition) -> str:
    """The text of a condition: its name and the knobs that differ from their defaults.

    >>> @dataclass(frozen=True)
    ... class Skip:
    ...     name: ClassVar[str] = "skip"
    ...     keep: float | None = None
    ...     threshold: float | None = None
    >>> text(Skip(keep=0.5)), text(Skip(threshold=0.1)), text(Skip())
    ('skip:0.5', 'skip:threshold=0.1', 'skip')
    """
    parts = [condition.name]
    for k, field in enumerate(dataclasses.fields(condition)):  # type: ignore[arg-type]
        value = getattr(condition, field.name)
        if value == field.default:
            continue
        parts.append(f"{value}" if k == 0 else f"{field.name}={value}")
    return ":".join(parts)


def parsed(text: str, kinds: Iterable[type]) -> Any:
    """The condition (or any dataclass with a `name`) that a text names, of the kinds given.

    Raises BadInput where the name, a knob or a value is unknown.
    """
    name, *values = text.split(":")
    named = {kind.name: kind for kind in kinds}  # type: ignore[attr-defined]
    if name not in named:
        raise BadInput(f"expected one of {', '.join(sorted(named))}, found {name!r} in {text!r}")
    kind = named[name]
    knobs = [field.name for field in dataclasses.fields(kind)]
    found: dict[str, Any] = {}
    for k, value in enumerate(values):
        knob, given, rest = value.partition("=")
        if not given:
            knob, rest = (knobs[k] if k < len(knobs) else value), value
        if knob not in knobs:
            known = ", ".join(knobs) or "none"
            raise BadInput(f"{name} has no knob {knob!r} (in {text!r}); its knobs are: {known}")
        found[knob] = _value(rest, get_type_hints(kind)[knob], f"{knob} in {text!r}")
    return kind(**found)


def _value(text: str, hint: Any, where: str) -> Any:
    """A value of a knob's type: one of int, float, bool, str, None or a union of them."""
    union = isinstance(hint, types.UnionType)
    kinds: Sequence[type] = get_args(hint) if union else (hint,)
    if text == "None" and type(None) in kinds:
        return None
    if bool in kinds and text in ("True", "False"):
        return text == "True"
    for kind in (int, float, str):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                continue
    names = " or ".join(kind.__name__ for kind in kinds)
    raise BadInput(f"expected {names} for {where}, found {text!r}")
