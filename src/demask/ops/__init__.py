"""The table of ops: how the output axes of each op depend on its input axes.

`TABLE` is the built-in table, a `Table` with one `Entry` per op. `TABLE.extended(...)` returns a
table with more ops, which `demask.demask(..., table=...)` and the other functions use.

Example:
    >>> from demask.ops import TABLE
    >>> TABLE["aten.linear.default"].line
    '... i, o i, o -> ... o'
"""

import copyreg
import warnings
from typing import Any

from demask.ops import quantization as quantize
from demask.ops.entries import contraction as contract
from demask.ops.entries import movement as move
from demask.ops.entries import norm, pointwise, recurrent, scatter, window
from demask.ops.entry import Case, Declined, Entry, SizedLine, Table, op_name
from demask.ops.notation import Line, parse
from demask.ops.relation import Relation, bind

TABLE = Table(
    [
        *pointwise.ENTRIES,
        *quantize.ENTRIES,
        *contract.ENTRIES,
        *norm.ENTRIES,
        *recurrent.ENTRIES,
        *window.ENTRIES,
        *move.ENTRIES,
        *scatter.ENTRIES,
    ]
)


def _restored(entries: list[tuple[str, Entry | None]] | None) -> Table:
    if entries is None:
        return TABLE
    return Table((name, TABLE[name] if entry is None else entry) for name, entry in entries)


def _reduced(table: Table) -> tuple[Any, ...]:
    """How a table is pickled: entries of the built-in one, which contain functions, by their
    names."""
    rows = [(name, None if TABLE.get(name) is entry else entry) for name, entry in table.items()]
    return _restored, (None if table is TABLE else rows,)


copyreg.pickle(Table, _reduced)

__all__ = ["TABLE", "Case", "Declined", "Entry", "Line", "Relation", "SizedLine", "Table", "bind", "op_name", "parse"]


def __getattr__(name: str) -> type:
    """`Spelled`, the former name of `SizedLine`, for one version."""
    if name == "Spelled":
        warnings.warn("demask.ops.Spelled is now SizedLine", DeprecationWarning, stacklevel=2)
        return SizedLine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
