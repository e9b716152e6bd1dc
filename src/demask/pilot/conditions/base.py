"""What a condition is, and what a conditioned module says about itself.

A condition is a frozen dataclass with a name; its fields are its parameters. Its text, which the
command line, tables and error messages use, is the name and the parameters that differ from their
defaults: `name:value` for the first one and `name:parameter=value` in general.
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
from demask.pages import Box, InTerminal, Lines, NetworkPicture, OnPage, Page, PageSource, TextTable

UNCHANGED = ("dense", "as it was")  # how a layer is run of which nothing is left out


Args = tuple[Any, ...]  # inputs of a network, by position
Kwargs = Mapping[str, Any] | None  # and by name


@runtime_checkable
class Condition(Protocol):
    """The interface of conditions: a policy that derives a network which does a part of the work.

    `Columns`, `Certified`, `Skip`, `Constant`, `Value`, `Precision`, `Order`, `Route` and `Regions`
    are the conditions of the library; `condition` applies them. A condition of your own is a frozen
    dataclass with `name` and `applied`, whose fields are its parameters. `applied` does not change
    the model: the method returns a module that takes the same inputs and has an attribute
    `conditioned` (a `Conditioned`). Layers to which the condition does not apply stay as they are,
    and `conditioned.decisions` says why.

    Attributes:
        name: first word of the condition's text, such as "skip" in "skip:0.5".

    Example:
        >>> import copy, dataclasses, torch
        >>> from demask.pilot import Condition, Conditioned, condition
        >>> @dataclasses.dataclass(frozen=True)
        ... class First:  # a condition of your own: only the first `keep` outputs, others are 0
        ...     keep: int = 1
        ...     name = "first"
        ...     def applied(self, model, args, kwargs, pilot, table):
        ...         result = copy.deepcopy(model)
        ...         result.weight.data[self.keep :], result.bias.data[self.keep :] = 0, 0
        ...         result.conditioned = Conditioned(self, pilot="", exact=False)
        ...         return result
        >>> net, x = torch.nn.Linear(2, 3).eval(), torch.ones(1, 2)
        >>> part = condition(net, (x,), condition=First(2), check=False)
        >>> isinstance(First(), Condition), part.conditioned.condition, part(x)[0, 2].item()
        (True, First(keep=2), 0.0)
    """

    name: ClassVar[str]

    def applied(self, model: nn.Module, args: Args, kwargs: Kwargs, pilot: Any, table: Table) -> nn.Module:
        """The conditioned module: same inputs, outputs of the same shapes, less work.

        Args:
            model: the network, which is not changed.
            args: example inputs by position.
            kwargs: example inputs by name, or None.
            pilot: the cheap first run that selects the work: a simplifier or its text, an
                nn.Module, an ExecutionData, or None.
            table: facts about each ATen op, a `demask.ops.Table`.

        Raises:
            BadInput: the condition does not fit the network or the pilot.
            NotExportable: torch.export cannot capture the model.
        """
        ...


class Decision(NamedTuple):
    """A named tuple: the decision about one layer of a conditioned network; prints as one line.

    Attributes:
        layer: name of the layer, as in `model.named_modules()`.
        what: how the layer is run: "skip", "columns", "dense" (in full), "as it was" (not changed)
            or another word for the mode.
        why: the reason, in words.

    Example:
        >>> import torch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> from demask.pilot import condition
        >>> net = Sequential(Linear(8, 64), ReLU(), Linear(64, 4)).eval()
        >>> x = torch.randn(2, 8)
        >>> half = condition(net, (x,), pilot="bits:8", condition="skip:0.5", check=False)
        >>> print(half.conditioned.decisions[0])
        0: skip (0.5 of 64 positions)
    """

    layer: str
    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.what} ({self.why})"


@dataclass(frozen=True, slots=True)
class Conditioned(PageSource):
    """The record of a condition that was applied to a network, as its attribute `conditioned`.

    Printing a record lists the decisions, one per line; `to_html` and notebooks show a page.

    Attributes:
        condition: the condition, such as `Skip(0.5)`.
        pilot: text of the pilot (the cheap first run that selects the work), such as "bits:8"; ""
            for none.
        exact: whether the outputs are those of the network with nothing left out, bit for bit; for
            `Columns` and `Certified` that network is the result of `unconditioned`.
        decisions: a tuple with a `Decision` per layer; default ().

    Example:
        >>> import torch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> from demask.pilot import condition
        >>> net = Sequential(Linear(8, 64), ReLU(), Linear(64, 4)).eval()
        >>> x = torch.randn(2, 8)
        >>> half = condition(net, (x,), pilot="bits:8", condition="skip:0.5", check=False)
        >>> half.conditioned.exact, half.conditioned.pilot
        (False, 'bits:8')
    """

    condition: Condition
    pilot: str
    exact: bool
    decisions: tuple[Decision, ...] = ()

    def page(self) -> Page:
        """What `print`, `to_html` and notebooks show, as sections."""
        by = f" by {self.pilot}" if self.pilot else ""
        kind = "exact" if self.exact else "outputs may differ"
        head = f"{text(self.condition)}{by}, {kind}"
        size = (1, 1)
        boxes = [
            Box(one.layer, size, size, f"{one.what} ({one.why})", is_changed=one.what not in UNCHANGED)
            for one in self.decisions
        ]
        picture = NetworkPicture(boxes, "The layers", "runs in full", "", "runs conditioned")
        table = TextTable(("layer", "how it runs", "why"), self.decisions, "Decisions", (0, 1, 2))
        lines = [head, *map(str, self.decisions)]
        return Page("demask pilot condition", (InTerminal([Lines(lines)]), OnPage([picture, table])), head)


def text(condition: Condition) -> str:
    """The text of a condition: its name and the parameters that differ from their defaults.

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
    """The condition (or any dataclass with a `name`) of a text, one of `kinds`.

    Raises BadInput where the name, a parameter or a value is unknown.
    """
    name, *values = text.split(":")
    named = {kind.name: kind for kind in kinds}
    if name not in named:
        raise BadInput(f"expected one of {', '.join(sorted(named))}, got {name!r} in {text!r}")
    kind = named[name]
    names = [field.name for field in dataclasses.fields(kind)]
    parameters: dict[str, Any] = {}
    for k, value in enumerate(values):
        parameter, separator, rest = value.partition("=")
        if not separator:
            parameter, rest = (names[k] if k < len(names) else value), value
        if parameter not in names:
            known = ", ".join(names) or "none"
            raise BadInput(f"{name} has no parameter {parameter!r} (in {text!r}); its parameters are: {known}")
        parameters[parameter] = _value(rest, get_type_hints(kind)[parameter], f"{parameter} in {text!r}")
    return kind(**parameters)


def _value(text: str, hint: Any, where: str) -> Any:
    """The value of a text, of type `hint`: int, float, bool, str, None or a union of them."""
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
    raise BadInput(f"expected {names} for {where}, got {text!r}")
