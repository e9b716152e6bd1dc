"""The one table: how each op's output axes depend on its input axes."""

from demask.ops import quantization as quantize
from demask.ops.entries import contraction as contract
from demask.ops.entries import movement as move
from demask.ops.entries import norm, pointwise, recurrent, window
from demask.ops.entry import Case, Declined, Entry, Spelled, Table, op_name
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
