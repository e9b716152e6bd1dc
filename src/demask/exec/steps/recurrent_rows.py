"""Recurrent calls of graphs as calls with one result, which segments can hold.

    out, h, c = lstm(x, [h0, c0], params)     rows = cat([out, c], time)
                                          ->  out, h, c = rows[:-1], rows[-2:-1], rows[-1:]

Calls of several layers or directions are split before. A direction backwards is a call on flipped
values; its rows are in the order of time.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from demask.graph.editor import GraphEditor, drop_unread
from demask.graph.result.recurrent_modules import is_zeros
from demask.graph.split_recurrent import split_calls
from demask.ops import schema
from demask.ops.entries.recurrent import GATES
from demask.ops.schema import fake

aten = torch.ops.aten
LAST = 2**63 - 1  # end of a slice without an end


@dataclass(frozen=True, slots=True)
class RecurrentCall:
    """A recurrent call of one layer and one direction. x: its input, in the order of time;
    backwards: whether it reads it flipped."""

    node: fx.Node
    x: fx.Node
    backwards: bool

    @property
    def params(self) -> Sequence[Any]:
        """The parameters: w_ih, w_hh, and biases if there are any."""
        return schema.arguments(self.node)["params"]

    @property
    def has_biases(self) -> bool:
        return schema.arguments(self.node)["has_biases"]

    @property
    def time(self) -> int:
        """The axis of time."""
        return int(schema.arguments(self.node)["batch_first"])

    @property
    def hidden(self) -> int:
        """The number of hidden units."""
        return fake(self.params[1]).shape[1]


def prepare_recurrent(editor: GraphEditor, dtype: torch.dtype) -> None:
    """Rewrite the recurrent calls on values of a dtype that segments can hold."""
    split_calls(editor, lambda node: is_recurrent(editor, node, dtype))
    for node in editor.calls():
        if is_recurrent(editor, node, dtype):
            with editor.graph.inserting_before(node.next):
                _read_rows(editor, node)
    drop_unread(editor.graph)


def is_recurrent(editor: GraphEditor, node: fx.Node, dtype: torch.dtype) -> bool:
    """Whether a node is a recurrent call that segments can hold: with parameters that are
    constants, without projection and dropout."""
    if not _has_gates(node):
        return False
    arguments = schema.arguments(node)
    directions = arguments["num_layers"] * (2 if arguments["bidirectional"] else 1)
    params = [editor.tensor(parameter) for parameter in arguments["params"]]
    if len(params) != directions * (4 if arguments["has_biases"] else 2) or None in params:
        return False
    if arguments["train"] and arguments["dropout"] and arguments["num_layers"] > 1:
        return False
    values = [x.meta.get("val") for x in (arguments["input"], *_initial_states(node))]
    return all(_is_dense_on_cpu(value, dtype) for value in (*values, *params))


def _has_gates(node: fx.Node) -> bool:
    return GATES.get(str(node.target), 0) > 1


def _is_dense_on_cpu(value: Any, dtype: torch.dtype) -> bool:
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided
    return is_dense and value.dtype is dtype and value.device.type == "cpu"


def _initial_states(node: fx.Node) -> list[fx.Node]:
    states = schema.arguments(node)["hx"]
    return list(states) if isinstance(states, (list, tuple)) else [states]


def initial_states(node: fx.Node) -> list[fx.Node]:
    """The initial states of a call; none if all are zero."""
    states = _initial_states(node)
    return [] if all(map(_is_zero, states)) else states


def _is_zero(state: Any) -> bool:
    while state.target is aten.slice.Tensor:
        state = state.args[0]
    return is_zeros(state)


def _read_rows(editor: GraphEditor, node: fx.Node) -> None:
    """Let readers of the results of a call read its rows, at the insertion point."""
    arguments = schema.arguments(node)
    time, count = int(arguments["batch_first"]), 1 + len(_initial_states(node))
    reads = [user for user in node.users if user.target is operator.getitem]
    flips = [user for read in reads if read.args[1] == 0 for user in read.users]
    is_flipped = _is_flip(arguments["input"], time)
    backwards = is_flipped and all(_is_flip(flip, time) for flip in flips)
    results = [editor.call(operator.getitem, node, k) for k in range(count)]
    out, last = results[0], results[-1]
    out = editor.call(aten.flip.default, out, [time]) if backwards else out
    last = editor.call(aten.transpose.int, last, 0, 1) if time else last
    rows = editor.call_for(node, aten.cat.default, [out, last], time)
    spans = [(0, -1), (0, 1) if backwards else (-2, -1), (-1, LAST)]
    if count == 2:
        spans[1] = spans[2]
    parts = [editor.call(aten.slice.Tensor, rows, time, *span) for span in spans[:count]]
    parts[1:] = [editor.call(aten.transpose.int, part, 0, 1) if time else part for part in parts[1:]]
    for user in flips if backwards else ():
        user.replace_all_uses_with(parts[0])
    for read in reads:
        number: Any = read.args[1]
        read.replace_all_uses_with(parts[number])


def _is_flip(node: Any, time: int) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.flip.default and node.args[1] == [time]


def recurrence_of(rows: fx.Node) -> RecurrentCall | None:
    """The recurrent call whose rows a concatenation is; None for another one."""
    parts = schema.arguments(rows)["tensors"]
    out, last = parts if len(parts) == 2 else (None, None)
    if not isinstance(out, fx.Node) or not isinstance(last, fx.Node):
        return None
    backwards = out.target is aten.flip.default
    out = out.args[0] if backwards else out
    last = last.args[0] if last.target is aten.transpose.int else last
    node = out.args[0] if isinstance(out, fx.Node) and out.target is operator.getitem else None
    if not isinstance(node, fx.Node) or not _has_gates(node):
        return None
    x: Any = schema.arguments(node)["input"]
    call = RecurrentCall(node, x.args[0] if backwards else x, backwards)
    return call if _are_rows(call, rows, last) else None


def _are_rows(call: RecurrentCall, rows: fx.Node, last: Any) -> bool:
    """Whether a concatenation is of all outputs of a call and its last state."""
    arguments = schema.arguments(rows)
    out, end = arguments["tensors"]
    is_last = isinstance(last, fx.Node) and last.args == (call.node, len(_initial_states(call.node)))
    is_transposed = end.target is aten.transpose.int and set(end.args[1:]) == {0, 1}
    is_flipped = not call.backwards or (
        _is_flip(out, call.time) and _is_flip(schema.arguments(call.node)["input"], call.time)
    )
    is_first = (out.args[0] if call.backwards else out).args == (call.node, 0)
    return (
        is_last
        and is_first
        and is_flipped
        and is_transposed == bool(call.time)
        and arguments["dim"] == call.time
        and schema.arguments(call.node)["num_layers"] == 1
        and not schema.arguments(call.node)["bidirectional"]
    )
