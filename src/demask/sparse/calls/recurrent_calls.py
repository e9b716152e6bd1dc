"""Entries of the table of called ops for recurrent layers: LSTM, GRU.

An op of segments has one result, so theirs are rows: the outputs of all time steps, in the order of
time, and after them the last state, the cell state of an LSTM.

    rows = cat([outputs, last state], time)

Operands: the input [time, batch, features], or [batch, time, features]; then the initial states
[1, batch, hidden], unless they are zero. Numbers: hidden units; flags: whether there are biases,
whether the axis of batches is first, whether time runs backwards. Parameters in torch's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from demask.errors import BadInput
from demask.ops.entries.recurrent import GATES
from demask.sparse.calls.called_op import PARAMETERS, RECURRENT, CalledOp, Match, Numbers, Shape, with_size
from demask.sparse.calls.recurrent_rows import initial_states, recurrence_of

aten = torch.ops.aten
LARGEST_HIDDEN = 2**16


def _rows(op: Any, states: int, operands: Sequence[Any], params: Sequence[Any], numbers: Numbers) -> Any:
    """The rows of a layer. states: how many the op has. Operands may be tensors or proxies."""
    hidden, biases, batch_first, backwards = numbers
    x, time = operands[0], int(batch_first)
    initial = list(operands[1:]) or [_zero_state(x, time, hidden)] * states
    if backwards:
        x = aten.flip.default(x, [time])
    hx = initial if states > 1 else initial[0]
    results = op(x, hx, list(params), bool(biases), 1, 0.0, False, False, bool(batch_first))
    out, last = results[0], results[states]
    if backwards:
        out = aten.flip.default(out, [time])
    last = aten.transpose.int(last, 0, 1) if batch_first else last
    return aten.cat.default([out, last], time)


def _zero_state(x: Any, time: int, hidden: int) -> Any:
    """Zeros [1, batch, hidden], without reading sizes, which proxies do not have."""
    first = aten.slice.Tensor(aten.slice.Tensor(x, time, 0, 1), 2, 0, 1)
    first = aten.transpose.int(first, 0, 1) if time else first
    return aten.expand.default(aten.zeros_like.default(first), [1, -1, hidden])


def _match(op: Any, arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    """The rows that `prepare_recurrent` writes."""
    call = recurrence_of(node)
    if call is None or call.node.target is not op:
        return None
    states = initial_states(call.node)
    numbers = call.hidden, int(call.has_biases), call.time, int(call.backwards)
    return (call.x, *states), numbers, tuple(call.params)


def _parts(gates: int, channels: int, numbers: Numbers) -> list[tuple[int, ...]]:
    """The shapes of the parameters."""
    rows = gates * numbers[0]
    return [(rows, channels), (rows, numbers[0]), *[(rows,)] * (2 * numbers[1])]


def _shape(gates: int, states: int, shapes: Sequence[Shape], n: Numbers, count: int) -> Shape:
    x, hidden = shapes[0], n[0]
    is_valid = 1 <= hidden < LARGEST_HIDDEN and all(flag in (0, 1) for flag in n[1:])
    if len(x) != 3 or not is_valid:
        raise BadInput(f"expected a recurrent layer of three axes, got {x} and {n!r:.80}")
    rows = gates * hidden
    if count != rows * (x[2] + hidden + 2 * n[1]):
        raise BadInput(f"expected parameters of {hidden} units for {x}, got {count}")
    if len(shapes) not in (1, 1 + states):
        raise BadInput(f"expected {states} initial states or none, got {len(shapes) - 1}")
    wanted = (1, x[0] if n[2] else x[1], hidden)
    if any(tuple(shape) != wanted for shape in shapes[1:]):
        raise BadInput(f"expected initial states of the shape {wanted}, got {shapes[1:]}")
    time = n[2]
    return (*with_size(x, time, x[time] + 1)[:2], hidden)


def _recurrence(op: Any, states: int) -> CalledOp:
    """The entry of an op. states: how many it has."""
    gates = GATES[str(op)]
    return CalledOp(
        partial(_rows, op, states),
        lambda xs, n, c: (list(xs), list(c), n),
        (aten.cat.default,),
        partial(_match, op),
        partial(_shape, gates, states),
        RECURRENT,
        operands=None,
        numbers=4,
        constants=PARAMETERS,
        parts=partial(_parts, gates),
        kinds=("tokens",),
    )


#: name in the texts of programs -> the op
RECURRENCES: dict[str, CalledOp] = {"lstm": _recurrence(aten.lstm.input, 2), "gru": _recurrence(aten.gru.input, 1)}
