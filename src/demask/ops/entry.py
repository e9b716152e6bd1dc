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
    """The reason why a rule does not apply to a call, as a value that functions return.

    Attributes:
        text: the reason, a message for users.

    Example:
        >>> import torch
        >>> from demask.ops import TABLE, Declined, bind
        >>> from demask.ops.laws import call_node
        >>> outcome = bind(call_node(torch.ops.aten.trace.default, torch.ones(3, 3)), TABLE)
        >>> isinstance(outcome, Declined), outcome.text
        (True, 'no rule for aten.trace.default')
    """

    text: str


@dataclass(frozen=True, slots=True)
class SizedLine:
    """A line of the op table with the sizes of letters that the shapes of a call do not determine.

    A letter names an axis. In `(g c)` two letters share one axis, of size g * c (groups, split
    axes): shapes alone do not determine g.

    Attributes:
        line: the line, in the notation of `demask.ops.notation`.
        sizes: number of positions by letter; None for a dynamic size.
        mixes: whether each output is an average of the second operand, whose weights sum to one and
            are in the first operand (attention). Default: False.

    Example:
        >>> import torch
        >>> from demask.ops import Entry, SizedLine, Table, bind
        >>> from demask.ops.laws import call_node
        >>> def line(node):  # of aten.channel_shuffle(input, groups)
        ...     return SizedLine("n (g c) h w -> n (c g) h w", {"g": node.args[1]})
        >>> table = Table([("aten.channel_shuffle.default", Entry(line))])
        >>> call = call_node(torch.ops.aten.channel_shuffle.default, torch.ones(1, 6, 2, 2), 3)
        >>> bind(call, table).size["g"], bind(call, table).size["c"]
        (3, 2)
    """

    line: str
    sizes: Mapping[str, int | None]
    mixes: bool = False


LineOf = Callable[[fx.Node], "str | SizedLine | Declined"]
Sizes = list["int | fx.Node"]


@dataclass(frozen=True, slots=True)
class Case:
    """An example call of an op, with which tests check its `Entry`.

    Attributes:
        args, kwargs: the arguments of the call, by position (a tuple) and by name (a mapping). Each
            `demask.ops.entry.Shape` is replaced by a random tensor; all other values are passed
            unchanged. `Shape(sizes)` is an activation, and `Shape(sizes, constant=True)` a weight.
            Its argument `of` is the distribution: "normal" (default), "positive", "zero" or "bool",
            or an int n for integers from 0 to n - 1.

    Example:
        >>> from demask import demask
        >>> from demask.ops import Case, Entry, Table
        >>> from demask.ops.entry import Shape
        >>> from demask.ops.laws import check
        >>> case = Case((Shape((2, 3)), Shape((3,), constant=True)), {"alpha": 2})
        >>> table = Table([("aten.add.Tensor", Entry("..., ... -> ...", cases=(case,)))])
        >>> check("aten.add.Tensor", table, demask)  # raises Mismatch where a law is violated
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
    """The rules for one op: how its output depends on the axes and values of its operands.

    An operand is a tensor argument; operands are numbered from 0 in the order of the op's schema. A
    position is an index along an axis. An output is known if it does not depend on the model's
    inputs.

    Attributes:
        line: the axes of operands and outputs in the notation of `demask.ops.notation`, or a
            function of the `fx.Node` of a call that returns a line, a `SizedLine`, or `Declined`
            for calls without a rule.
        zero: which operands make the output zero where they are zero: "any" of them, "first" alone,
            or "" for none (default).
        fill: how the value of a known output is computed. "run" (default): by running the op on the
            operands' values. "same": it is the value of operand `main`, moved. "sum": as a sum of
            products (contractions). "mix": as an average of operand `main`, by weights that sum to
            one and are products of the other operands (attention). "recur": a unit of a recurrent
            layer that reads only zeros stays 0. "scatter": by running the op with several
            numbers of values at one position, whose results are the same. "none": it is never
            known.
        main: number of the operand, or of the gate of a recurrent layer, for `fill`. Default: 0.
        sized: whether a known output depends on the length of an axis (sum, softmax), or on the
            position along it (cumsum). Of an axis of any length, what several lengths have in
            common is known. Default: False.
        pads: whether the op reads zeros outside of its input (padding), so that constants have
            other effects at borders; or a function of the node that returns it. Default: False.
        affine: numbers of the operands (scale, shift): where the scale is 0, the output is the
            shift. Default: None.
        stays: of recurrent layers: a function of the two biases of gate `main`, float [units] each,
            that returns bool [units]: whether a unit with zero weights stays 0. Default: None.
        neutral: (value, operand numbers): where one of these operands has this value everywhere,
            the output is the other operand, as in x * 1 and x + 0. Default: None.
        args: a function (node, sizes of the output axes) -> {argument name: value}, which rebuilds
            the arguments that are sizes after axes became smaller. Default: None.
        indices: names of the arguments that are positions, not data. Default: ().
        region: class of the op's window, which determines the input interval of an output interval:
            "conv", "transposed", "adaptive", "nearest", "exact", "linear" or "cubic"; see
            `demask.ops.regions`. Default: "" (no window).
        rest: how the known positions of an axis enter a reduction over it: "sum", "mean", "max" or
            "min", or the name of the norm: "softmax", "layer" or "rms". Default: "".
        align: number of bytes of which each row of operands and output must be a multiple. Default:
            1.
        free: whether the output is independent of the values of all inputs (zeros, full_like).
            Default: False.
        total: when finite operands result in a finite output. "all": always; "one": if at most one
            operand depends on the model's inputs; "first": if only the first one does; "eps": if
            the call's argument eps is positive. Default: "", derived from `fill` and `rest`.
        range: how bounds of the output follow from those of the operands. "ends": they are the
            values of the op at these bounds and at 0 (monotonic ops); "about": the same, for ops
            that round; "hull": they are the bounds of all operands together; "sign": only the sign
            follows, from that of operand `main` (averages, sums). A number: the output is between
            it and 0 for negative operands, and between 0 and the operand for others (silu). A pair:
            (least, largest) output. Default: "", derived from `fill` and `rest`.
        cases: a tuple of `Case`: example calls for tests. Default: ().

    Raises:
        TableError: when `TABLE.extended` is called with the entry: `line` cannot be parsed. Other
            attributes are not checked.

    Example:
        >>> from demask.ops import TABLE, Entry
        >>> table = TABLE.extended({"my::scale": Entry("... i, i -> ... i", zero="any")})
        >>> table["my.scale.default"].zero, table["my.scale.default"].fill
        ('any', 'run')
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
        """Whether a call reads zeros outside of its input (padding), a bool.

        Args:
            node: the call, an `fx.Node` of the op; it is read only if `pads` is a function.
        """
        return self.pads(node) if callable(self.pads) else self.pads


class Table(Mapping[str, Entry]):
    """An immutable mapping from names of ops, such as "aten.relu.default", to their `Entry`.

    `table[name]` raises KeyError for an op without an entry; `name in table` and `table.get(name)`
    test for it.

    Args:
        entries: pairs (name of the op with its overload, `Entry`), one per op.

    Attributes:
        added: the names of the ops that `extended` added, a frozenset of str.

    Raises:
        TableError: two entries have the same op, or the line of an entry cannot be parsed.

    Example:
        >>> from demask.ops import TABLE, Table
        >>> small = Table([("aten.relu.default", TABLE["aten.relu.default"])])
        >>> "aten.relu.default" in small, "aten.gelu.default" in small
        (True, False)
    """

    def __init__(self, entries: Iterable[tuple[str, Entry]]):
        self._entries: dict[str, Entry] = {}
        self.added: frozenset[str] = frozenset()
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
        """A new table with the ops of this one and more.

        Args:
            more: by name of the op, such as "my::op" (overload "default") or "my::op.out": an
                `Entry`, or only its line. With a line alone, the other attributes of `Entry` have
                their defaults: the value of an output that no input determines is computed by
                running the op.

        Raises:
            TableError: a line cannot be parsed, or the table has an entry of the op.

        Example:
            >>> from demask.ops import TABLE
            >>> len(TABLE.extended({"my::op": "... -> ..."})) - len(TABLE)
            1
        """
        entries = [(_canonical(k), Entry(v) if isinstance(v, str) else v) for k, v in more.items()]
        table = Table([*self._entries.items(), *entries])
        table.added = self.added.union(name for name, _ in entries)
        return table


def _canonical(name: str) -> str:
    """The name of an op in the table: "my::op" -> "my.op.default"."""
    namespace, _, op = name.replace("::", ".").partition(".")
    return f"{namespace}.{op}" if "." in op else f"{namespace}.{op}.default"


def op_name(target: Any) -> str:
    """The name of a call's target as in the table, a str such as "aten.relu.default".

    Args:
        target: the `target` of an `fx.Node`: an op with its overload, or a Python function, whose
            name is "module.function".

    Example:
        >>> import operator, torch
        >>> from demask.ops import op_name
        >>> op_name(torch.ops.aten.relu.default), op_name(operator.getitem)
        ('aten.relu.default', '_operator.getitem')
    """
    if isinstance(target, OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}".lstrip(".")
