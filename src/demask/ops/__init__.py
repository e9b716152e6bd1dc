"""The one table: how each op's output axes depend on its input axes."""

from demask.ops import contract, move, norm, pointwise, quantize, recurrent, window
from demask.ops.bind import Relation, bind
from demask.ops.entry import Case, Declined, Entry, Spelled, Table, op_name
from demask.ops.notation import Line, parse

TABLE = Table(
    [
        *pointwise.ENTRIES,
        *quantize.ENTRIES,
        *contract.ENTRIES,
        *norm.ENTRIES,
        *recurrent.ENTRIES,
        *window.ENTRIES,
        *move.ENTRIES,
    ]
)

__all__ = [
    "TABLE",
    "Case",
    "Declined",
    "Entry",
    "Line",
    "Relation",
    "Spelled",
    "Table",
    "bind",
    "op_name",
    "parse",
]
