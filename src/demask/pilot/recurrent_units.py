"""Hidden units of recurrent layers that are computed at an index known only at run time.

A unit that is left out is 0 at every step, and is not read by the others:

    lstm(x; W_ih, W_hh, b)[units] == lstm(x; W_ih[gates of units], W_hh[gates of units, units], b[gates of units])

with the same law for GRU and RNN. The small outputs are scattered into zeros of the full size.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.ops import schema
from demask.ops.entries.recurrent import GATES
from demask.ops.schema import fake

aten = torch.ops.aten


def output_of_units(call: fx.Node) -> fx.Node | None:
    """The output of a recurrent call for its readers, [.., units]; None where nothing reads it, or units are projected,
    so that they are no units of the output."""
    weights = schema.arguments(call)["params"]
    hidden = fake(weights[1])
    if hidden.shape[0] != GATES[str(call.target)] * hidden.shape[1] or len(weights) not in (2, 4):
        return None
    return next((user for user in call.users if user.target is operator.getitem and user.args[1] == 0), None)


def index_units(
    program: Program, indices: Mapping[fx.Node, fx.Node]
) -> tuple[Program, dict[fx.Node, fx.Node], dict[fx.Node, fx.Node]]:
    """The program whose recurrent calls compute the units of an index; the scattered output of each; and the copy of
    each other node.

    indices: by `output_of_units` of a call, the index: int64 [k] of distinct units.
    """
    editor, scattered = GraphEditor(program), dict[fx.Node, fx.Node]()
    for old, index in indices.items():
        output = editor.copies[old]
        call: Any = output.args[0]
        with editor.graph.inserting_before(call):
            small = _small_call(editor, call, editor.copies[index])
        for user in list(call.users):
            number: Any = user.args[1]
            with editor.graph.inserting_before(user):
                part = editor.call(operator.getitem, small, number)
                rank = fake(user).ndim
                sizes = editor.sizes(user)
                zeros = editor.call(aten.new_zeros.default, part, sizes)
                full = editor.call(aten.index_copy.default, zeros, rank - 1, editor.copies[index], part)
            full.meta = {**user.meta, **full.meta}
            user.replace_all_uses_with(full, delete_user_cb=lambda reader, of=sizes: reader not in of)
            if user is output:
                scattered[old] = full
    return editor.finish(), scattered, editor.copies


def _small_call(editor: GraphEditor, call: fx.Node, index: fx.Node) -> fx.Node:
    """The call with the parameters and states of the units of an index."""
    arguments = dict(schema.arguments(call))
    gates, weights = GATES[str(call.target)], list(arguments["params"])
    units = fake(weights[1]).shape[1]
    offsets = editor.constant(f"{call.name}_gates", torch.arange(gates)[:, None] * units)
    rows = editor.call(aten.reshape.default, editor.call(aten.add.Tensor, index, offsets), [-1])
    small = [editor.call(aten.index_select.default, weight, 0, rows) for weight in weights]
    small[1] = editor.call(aten.index_select.default, small[1], 1, index)
    states = arguments["hx"]
    listed = states if isinstance(states, (list, tuple)) else [states]
    chosen = [editor.call(aten.index_select.default, state, fake(state).ndim - 1, index) for state in listed]
    arguments |= {"params": small, "hx": chosen if isinstance(states, (list, tuple)) else chosen[0]}
    return editor.call_named(call.target, arguments)
