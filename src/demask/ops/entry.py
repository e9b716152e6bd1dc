"""One entry of the table: what an op states, once, about its axes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from demask.compat.dispatch import OpOverload
from demask.errors import TableError
from demask.ops.notation import parse


@dataclass(frozen=True, slots=True)
class Declined:
    """Why something was not done; `text` is the reason in the user's words."""

    text: str


@dataclass(frozen=True, slots=True)
class SizedLine:
    """A line with the sizes of the letters that no operand shows alone (groups, refinements).

    mixes: the call's first operand holds weights that sum to one; the second is averaged by them.
    """

    line: str
    sizes: Mapping[str, int | None]
    mixes: bool = False


LineOf = Callable[[fx.Node], "str | SizedLine | Declined"]
Sizes = list["int | fx.Node"]


@dataclass(frozen=True, slots=True)
class Case:
    """One way to call an op in its law test: tensor shapes stand where tensors go.

    `args` and `kwargs` hold `S(...)` for an activation of that shape, `W(...)` for a constant, and
    anything else as it is.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """A tensor to be drawn for a law test: an activation, or a constant (weight); `of` says from
    which distribution: "normal", "positive", "zero", "bool" or an int n for indices below n."""

    sizes: tuple[int, ...]
    constant: bool = False
    of: str | int = "normal"


@dataclass(frozen=True, slots=True)
class Entry:
    """What the table says of one op.

    line: the notation (see `notation`), or a function of the node that gives it, `SizedLine` with
        sizes, or `Declined` where the node is of a form that has no rule.
    zero: operands whose zero makes the output zero: "" none, "any" of them, "first" alone.
    fill: how the value of a known output is found: "run" the op on the operands' values, "same"
        the value of operand `main` moves along unchanged, "sum" products are summed (contractions),
        "mix" values of `main` are averaged by weights, which come from products of the others, and
        sum to one (attention), "recur" a unit that reads only zeros, itself included, stays 0
        (recurrent calls, `stays`), "none" never.
    sized: the value of a known output depends on how long an axis is (sum, softmax).
    pads: does the op read positions outside its input, as zeros? Constants then vary at borders.
    affine: operands (scale, shift): where the scale is 0 the output is the shift, whatever comes.
    stays: of recurrent calls, whose gate `main` makes what is new: (b_ih, b_hh) of that gate, each
        over units -> bool over units: does one whose weights meet only zeros stay 0?
    neutral: (value, operands): an operand among these that is this value everywhere leaves the
        other as it is (times 1, plus 0).
    args: arguments that hold sizes, rebuilt for cut operands: (node, sizes per output axis) ->
        {argument name: value}.
    region: the class of its windows, which tells the input interval an output interval needs:
        conv, transposed, adaptive, nearest, exact, linear, cubic (see `regions`).
    rest: how positions of the complete axis that are known beforehand enter the result: "sum",
        "mean", "max", "min" of the axis, or the norm it is ("softmax", "layer", "rms").
    align: bytes that rows of its operands and output must be a multiple of, or the op refuses them.
    free: the output does not depend on any input's values (zeros, full_like).
    total: with which operands computed the op is finite wherever they are, and no larger than some
        multiple of them: "all", "one" (no two of them), "first" (alone), "eps" (if the call's eps
        is positive). Others (quotients, powers) are made only of values that the network itself
        has. "": what `fill` and
        `rest` tell, else none.
    range: how the bounds of the output follow from those of the operands (`facts.ranges`): "ends"
        of an op that rises or falls in each operand, below zero and above it: it is run on the ends
        of their bounds and on zero; "about" the same, for ops that round; "hull" of values that
        move; "sign" of averages and sums; a number, the least value of an op that stays between it
        and zero below zero, and between zero and its operand above (silu); a pair, whatever comes
        in. "": what `fill` and `rest` tell, else nothing.
    cases: calls for the law tests.
    """

    line: str | LineOf
    zero: str = ""
    fill: str = "run"
    main: int = 0
    sized: bool = False
    pads: Callable[[fx.Node], bool] | bool = False
    affine: tuple[int, int] | None = None
    stays: Callable[[Tensor, Tensor], Tensor] | None = None
    neutral: tuple[float, tuple[int, ...]] | None = None
    args: Callable[[fx.Node, Sizes], Mapping[str, Any]] | None = None
    indices: tuple[str, ...] = ()
    region: str = ""
    rest: str = ""
    align: int = 1
    free: bool = False
    total: str = ""
    range: str | float | tuple[float, float] = ""
    cases: tuple[Case, ...] = ()

    def reads_padding(self, node: fx.Node) -> bool:
        return self.pads(node) if callable(self.pads) else self.pads


class Table(Mapping[str, Entry]):
    """Entries by op name ("aten.relu.default"); frozen, extended into a new one.

    >>> from demask.ops import TABLE
    >>> "aten.relu.default" in TABLE
    True
    """

    def __init__(self, entries: Iterable[tuple[str, Entry]]):
        self._entries: dict[str, Entry] = {}
        for name, entry in entries:
            if name in self._entries:
                raise TableError(f"op {name!r} has two entries; the table holds one per op")
            if isinstance(entry.line, str):
                parse(entry.line)
            self._entries[name] = entry

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def extended(self, more: Mapping[str, str | Entry]) -> Table:
        """A table with your own ops too: {"my::op": "... -> ..."} or {"my::op": Entry(...)}.

        A line alone means: positions depend as the line says, and nothing is known of values, so a
        known slice is kept unless the op, run on constants, tells what becomes of it. Raises
        TableError for a line that cannot be read or an op that has an entry already.

        >>> from demask.ops import TABLE
        >>> len(TABLE.extended({"my::op": "... -> ..."})) - len(TABLE)
        1
        """
        own = [(_canonical(k), Entry(v) if isinstance(v, str) else v) for k, v in more.items()]
        return Table([*self._entries.items(), *own])


def _canonical(name: str) -> str:
    namespace, _, op = name.replace("::", ".").partition(".")
    return f"{namespace}.{op}" if "." in op else f"{namespace}.{op}.default"


def op_name(target: Any) -> str:
    """The name under which a call target stands in the table.

    >>> import torch
    >>> op_name(torch.ops.aten.relu.default)
    'aten.relu.default'
    """
    if isinstance(target, OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}".lstrip(".")
