"""Entries of the table: facts about the axes and values of an op, each stated once."""

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
    """The reason why something was not done; `text` is a message for users.

    >>> Declined("no rule for my.op.default").text
    'no rule for my.op.default'
    """

    text: str


@dataclass(frozen=True, slots=True)
class SizedLine:
    """A line with sizes of letters that no single axis determines (groups, split axes).

    Attributes:
        line: the line, in the notation of `demask.ops.notation`.
        sizes: sizes by letter, None for dynamic ones.
        mixes: whether the first operand contains weights that sum to one, and the output is the
            average of the second operand by them.

    >>> SizedLine("n (g c) -> n g c", {"g": 2}).sizes["g"]
    2
    """

    line: str
    sizes: Mapping[str, int | None]
    mixes: bool = False


LineOf = Callable[[fx.Node], "str | SizedLine | Declined"]
Sizes = list["int | fx.Node"]


@dataclass(frozen=True, slots=True)
class Case:
    """A call of an op for the law tests, with a `Shape` in the place of each tensor.

    Attributes:
        args, kwargs: the arguments of the call: a `Shape` for a tensor, other values literally.

    >>> from demask.ops.entry import Shape
    >>> Case((Shape((2, 3)), Shape((3,), constant=True)), {"alpha": 2}).kwargs
    {'alpha': 2}
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """A tensor to be drawn for a law test: an activation, or a constant (weight). of: the
    distribution, "normal", "positive", "zero" or "bool", or an int n for indices below n."""

    sizes: tuple[int, ...]
    constant: bool = False
    of: str | int = "normal"


@dataclass(frozen=True, slots=True)
class Entry:
    """The table's facts about one op.

    Attributes:
        line: the notation (see `notation`), or a function of the node that returns a line, a
            `SizedLine`, or `Declined` for calls without a rule.
        zero: operands whose zeros make the output zero: "" none, "any" of them, "first" alone.
        fill: how the value of a known output is computed: "run" the op on the operands' values;
            "same" operand `main`'s value, moved; "sum" of products (contractions); "mix" the
            average of `main` by weights that sum to one and are products of the other operands
            (attention); "recur" a unit that reads only zeros, itself included, stays 0 (recurrent
            calls, `stays`); "none" never known.
        main: the number of the operand, or of the gate of a recurrent call, for `fill`.
        sized: whether the value of a known output depends on the length of an axis (sum, softmax).
        pads: whether the op reads positions outside of its input as zeros, so that constants vary
            at borders; or a function of the node.
        affine: the operands (scale, shift): where the scale is 0, the output is the shift.
        stays: of recurrent calls: (b_ih, b_hh) of gate `main`, per unit -> bool per unit, whether a
            unit whose weights multiply only zeros stays 0.
        neutral: (value, operands): if one of these operands has this value everywhere, the output
            is the other operand (times 1, plus 0).
        args: rebuilds the arguments that are sizes for operands of other sizes: (node, sizes per
            output axis) -> {argument name: value}.
        indices: names of arguments that are positions, not data.
        region: the class of its windows, which determines the input region of an output interval:
            conv, transposed, adaptive, nearest, exact, linear, cubic (see `regions`).
        rest: how known positions of the complete axis enter the result: "sum", "mean", "max", "min"
            of the axis, or the name of the norm ("softmax", "layer", "rms").
        align: the rows of operands and output must be multiples of this many bytes.
        free: whether the output is independent of the values of all inputs (zeros, full_like).
        total: for which computed operands the output is finite wherever they are, and bounded by a
            multiple of them: "all", "one" (if one is computed), "first" (if only the first is),
            "eps" (if the call's eps is positive). Other ops (quotients, powers) are called only
            with values that the original network computes. "": determined by `fill` and `rest`.
        range: the output's bounds, from those of the operands (`facts.ranges`): "ends" for ops that
            are monotonic in each operand on both sides of zero: the op of the bounds and of zero;
            "about" the same, for ops that round; "hull" for values that move; "sign" for averages
            and sums; a number, the least value of an op whose output is between it and zero for
            negative operands, and between zero and the operand for others (silu); a pair, the
            bounds for all operands. "": determined by `fill` and `rest`.
        cases: calls for the law tests.

    >>> Entry("... i, o i, o -> ... o", fill="sum").reads_padding(None)
    False
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
        """Whether a call reads positions outside of its input, as zeros."""
        return self.pads(node) if callable(self.pads) else self.pads


class Table(Mapping[str, Entry]):
    """An immutable mapping from op names, such as "aten.relu.default", to their `Entry`.

    Args:
        entries: pairs (op name, `Entry`), each op once. `extended` returns a new table with more.

    Raises:
        TableError: two entries of one op, or the line of an entry cannot be parsed.

    Example:
        >>> from demask.ops import TABLE, Table
        >>> small = Table([("aten.relu.default", TABLE["aten.relu.default"])])
        >>> "aten.relu.default" in small, "aten.gelu.default" in small
        (True, False)
    """

    def __init__(self, entries: Iterable[tuple[str, Entry]]):
        self._entries: dict[str, Entry] = {}
        for name, entry in entries:
            if name in self._entries:
                raise TableError(f"op {name!r} has two entries: expected one per op")
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
        """This table with more ops: {"my::op": "... -> ..."} or {"my::op": Entry(...)}.

        For a line alone the other columns have their defaults: the value of a known output slice is
        computed by running the op on constants.

        Raises:
            TableError: a line that cannot be parsed, or an op that has an entry.

        >>> from demask.ops import TABLE
        >>> len(TABLE.extended({"my::op": "... -> ..."})) - len(TABLE)
        1
        """
        entries = [(_canonical(k), Entry(v) if isinstance(v, str) else v) for k, v in more.items()]
        return Table([*self._entries.items(), *entries])


def _canonical(name: str) -> str:
    """The name of an op in the table: "my::op" -> "my.op.default"."""
    namespace, _, op = name.replace("::", ".").partition(".")
    return f"{namespace}.{op}" if "." in op else f"{namespace}.{op}.default"


def op_name(target: Any) -> str:
    """The name of a call target in the table: of an op with its overload, of a Python function.

    >>> import torch
    >>> op_name(torch.ops.aten.relu.default)
    'aten.relu.default'
    """
    if isinstance(target, OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}".lstrip(".")
